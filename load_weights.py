"""An official snapshot folder -> (model, tokenizer).

    model, tokenizer = load("ByteDance/Ouro-2.6B")        # in the local Hugging Face cache
    model, tokenizer = load("tiny/ouro", dtype=torch.float32)

A snapshot is read as published: config.json, safetensors (one file, or shards with an index), tokenizer.json,
generation_config.json, the chat template. Every tensor in it must be used or be one of a few that are known to be
unneeded, every parameter must be filled, and every shape must be right: a model that loads by halves answers by
halves. A snapshot is not trusted: no code from it is run, it names no file outside itself, what it asks for is bounded,
and its chat template is rendered in a sandbox, in a process of its own.
"""

import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from model import Config, Huginn, LoopedLM, Ouro
from wfd import available_memory


def one_line(text: object, length: int = 400) -> str:
    """Fit to be printed, whatever a snapshot has put into it."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(str(text).split()))
    return line if len(line) <= length else f"{line[:length // 2]} ... {line[-length // 2:]}"


class CheckpointError(ValueError):
    """A snapshot that can't be used: one sentence that names the file and what is wrong with it."""

    def __init__(self, message: str):
        super().__init__(one_line(message, 1000))


# ----------------------------------------------------------------------------------------------------------------------
# 1. Files


def find_snapshot(path: str | Path) -> Path:
    """A folder as it is, or the snapshot that refs/main names of a hub id in the local Hugging Face cache."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path must be a folder or a hub id, not {path!r}")
    if os.path.isdir(path):
        return Path(path)
    name = str(path)
    if not re.fullmatch(r"[\w.-]{1,100}/[\w.-]{1,100}", name):
        raise CheckpointError(f"{name} is neither a folder nor of the form ORGANISATION/NAME, a model in the Hugging Face cache")
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"))
    repo = cache / f"models--{name.replace('/', '--')}"
    main = repo / "refs" / "main"
    snapshots = [repo / "snapshots" / main.read_text(errors="replace").strip()] if main.is_file() else list(repo.glob("snapshots/*"))
    if len(snapshots) != 1 or not snapshots[0].is_dir():
        raise CheckpointError(f"{name} is neither a folder nor a model in the local Hugging Face cache ({cache}); "
                              f"to download it there: pip install huggingface_hub && hf download {name}")
    return snapshots[0]


def read(file: Path) -> bytes:
    """The content of a file. Raises CheckpointError if there is none, or something else in its place."""
    check_file(file)
    return file.read_bytes()


def check_file(file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        with file.open("rb") as content:
            start = content.read(64).lstrip().lower()
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
    if not start:
        raise CheckpointError(f"{file} is empty: download it again")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is only a git-lfs pointer to the file: run git lfs pull, or download it again")
    if start.startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{file} is a web page in place of the file: download it again")


def read_json(file: Path, required: bool = True) -> dict:
    if not file.is_file() and not required:
        return {}
    data = read(file)
    try:
        content = json.loads(data.decode("utf-8"))
        json.dumps(content, ensure_ascii=False).encode("utf-8")              # which half characters, written as \ud800, are not
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return content


def tensor_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a snapshot, and what its index says: tensor -> file. It may name files of its folder only."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        files, weight_map = [single], {}
    else:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        if strange := [name for name in weight_map.values() if not re.fullmatch(r"\w[\w .-]{0,200}", str(name))]:
            raise CheckpointError(f"{index} names {strange[0]!r}, which is not a plain file name")
        files = [folder / name for name in sorted(set(map(str, weight_map.values())))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}: was the download complete?")
    return files, weight_map


def read_headers(folder: Path) -> dict[str, tuple[Path, list[int], str]]:
    """Every tensor of a snapshot: tensor -> (file, shape, dtype). Nothing is read but the headers."""
    stored = {}
    files, weight_map = tensor_files(folder)
    for file in files:
        check_file(file)
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():
                    if name in stored:
                        raise CheckpointError(f"{file} holds {name}, and so does {stored[name][0]}")
                    header = tensors.get_slice(name)
                    stored[name] = file, header.get_shape(), header.get_dtype()
        except (SafetensorError, OSError, RuntimeError) as error:            # the last where it can't be mapped
            raise CheckpointError(f"{file} is not a complete safetensors file ({error}): download it again") from None
    for name, file in weight_map.items():
        if name not in stored or stored[name][0].name != file:
            raise CheckpointError(f"{folder}: according to model.safetensors.index.json {file} holds {name}, but it does not")
    return stored


# ----------------------------------------------------------------------------------------------------------------------
# 2. config.json


class Settings:
    """config.json, with a clear word for whatever is missing or strange in it."""

    def __init__(self, file: Path, values: dict):
        self.file, self.values = file, values

    def get(self, *names: str, default=None):
        """The value under the first of these names that is there and not null."""
        found = [self.values[name] for name in names if self.values.get(name) is not None]
        if not found and default is None:
            raise CheckpointError(f"{self.file} has no {' or '.join(names)}")
        return found[0] if found else default

    def number(self, *names: str, default=None, least=1, kind: type = int):
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not least <= value < 2 ** 63:
            raise CheckpointError(f"{self.file}: {names[0]} is {value!r}, but must be a number of {least} or more")
        return kind(value)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        if not isinstance(value := self.get(*names, default=default), bool):
            raise CheckpointError(f"{self.file}: {names[0]} is {value!r}, but must be true or false")
        return value

    def only(self, name: str, *allowed) -> None:
        """Settings that would change the computation, and that no published checkpoint uses, are refused."""
        if self.values.get(name) not in (None, *allowed):
            raise CheckpointError(f"{self.file}: {name} is {self.values[name]!r}, which is not supported")

    def rope_theta(self, flat: str) -> float:
        """The rotary base, from its own key or from rope_parameters, where newer files keep it."""
        found = [] if self.values.get(flat) is None else [self.number(flat, kind=float)]
        for name in ("rope_parameters", "rope_scaling"):
            rope = self.values.get(name) or {}
            kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else rope
            if kind != "default":
                raise CheckpointError(f"{self.file}: {name} asks for rotary embeddings of type {kind!r}, which are not supported")
            if rope.get("rope_theta") is not None:
                found.append(Settings(self.file, rope).number("rope_theta", kind=float))
        if len(set(found)) != 1:
            raise CheckpointError(f"{self.file} has {'two different values of' if found else 'no'} {flat}, flat or in rope_parameters")
        return found[0]


def ouro_config(s: Settings) -> Config:
    s.only("hidden_act", "silu")
    s.only("use_sliding_window", False)
    s.only("partial_rotary_factor", 1)
    types = s.values.get("layer_types")
    if types and (not isinstance(types, list) or len(types) != s.number("num_hidden_layers") or any(t != "full_attention" for t in types)):
        raise CheckpointError(f"{s.file}: layer_types is {types!r}, but only full attention in every layer is supported")
    width, heads = s.number("hidden_size"), s.number("num_attention_heads")
    return Config(
        width=width, heads=heads, kv_heads=s.number("num_key_value_heads", default=heads),
        head_dim=s.number("head_dim", default=width // heads), ffn=s.number("intermediate_size"),
        vocab=s.number("vocab_size"), core=s.number("num_hidden_layers"), recurrences=s.number("total_ut_steps", default=4),
        context=s.number("max_position_embeddings"), rope_theta=s.rope_theta("rope_theta"),
        norm_eps=s.number("rms_norm_eps", least=0, kind=float), tied=s.flag("tie_word_embeddings", default=False))


def huginn_config(s: Settings) -> Config:
    s.only("injection_type", "linear")
    s.only("nonlin_name", "SiLU")
    s.only("test_time_noise", 0)
    init = s.values.get("init_values")
    width, heads = s.number("n_embd", "hidden_size"), s.number("n_heads", "num_attention_heads")
    return Config(
        width=width, heads=heads, kv_heads=s.number("num_key_value_heads", default=heads), head_dim=width // heads,
        ffn=s.number("intermediate_size"), vocab=s.number("padded_vocab_size", "vocab_size"),
        core=s.number("n_layers_in_recurrent_block"), recurrences=s.number("mean_recurrence"),
        context=s.number("block_size", "max_position_embeddings"), rope_theta=s.rope_theta("rope_base"),
        norm_eps=s.number("norm_eps", "rms_norm_eps", least=0, kind=float),
        tied=s.flag("tie_embeddings", "tie_word_embeddings", default=True),
        prelude=s.number("n_layers_in_prelude", least=0), coda=s.number("n_layers_in_coda", least=0),
        qk_bias=s.flag("qk_bias"), adapter_bias=s.flag("bias", default=False),
        init_std=Settings(s.file, init if isinstance(init, dict) else {}).number("std", default=(2 / (5 * width)) ** 0.5, least=0, kind=float))


# ----------------------------------------------------------------------------------------------------------------------
# 3. Tensor names
#
# A parameter of ours is one tensor of the file, or several, one above the other: parameter -> [(tensor, shape), ...].

# Unneeded: rotary tables, which are computed, and Ouro's early-exit gate, which would only choose a shallower prediction.
UNNEEDED = re.compile(r"freqs_cis|(.+\.)?rotary_emb\.inv_freq|model\.early_exit_gate\.(weight|bias)")


def ouro_names(c: Config) -> dict[str, list[tuple[str, list[int]]]]:
    d, q, kv = c.width, c.heads * c.head_dim, c.kv_heads * c.head_dim
    names = {"embedding.weight": [("model.embed_tokens.weight", [c.vocab, d])],
             "final_norm.weight": [("model.norm.weight", [d])],
             "head.weight": [("lm_head.weight", [c.vocab, d])]}
    for i in range(c.core):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        names |= {
            ours + "qkv.weight": [(theirs + "self_attn.q_proj.weight", [q, d]), (theirs + "self_attn.k_proj.weight", [kv, d]),
                                  (theirs + "self_attn.v_proj.weight", [kv, d])],
            ours + "attention_out.weight": [(theirs + "self_attn.o_proj.weight", [d, q])],
            ours + "gate_up.weight": [(theirs + "mlp.gate_proj.weight", [c.ffn, d]), (theirs + "mlp.up_proj.weight", [c.ffn, d])],
            ours + "down.weight": [(theirs + "mlp.down_proj.weight", [d, c.ffn])]}
        norms = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
        names |= {f"{ours}norms.{j}.weight": [(f"{theirs}{norm}.weight", [d])] for j, norm in enumerate(norms)}
    return names


def huginn_names(c: Config) -> dict[str, list[tuple[str, list[int]]]]:
    d, q, kv = c.width, c.heads * c.head_dim, c.kv_heads * c.head_dim
    names = {"embedding.weight": [("transformer.wte.weight", [c.vocab, d])],
             "final_norm.weight": [("transformer.ln_f.weight", [d])],
             "head.weight": [("lm_head.weight", [c.vocab, d])],
             "adapter.weight": [("transformer.adapter.weight", [d, 2 * d])],
             "adapter.bias": [("transformer.adapter.bias", [d])]}
    stages = [("prelude", c.prelude), ("core_block", c.core), ("coda", c.coda)]
    for i, theirs in enumerate(f"transformer.{stage}.{j}." for stage, layers in stages for j in range(layers)):
        ours = f"layers.{i}."
        names |= {
            ours + "qkv.weight": [(theirs + "attn.Wqkv.weight", [q + 2 * kv, d])],
            ours + "qk_bias": [(theirs + "attn.qk_bias", [2, 1, c.heads, c.head_dim])],
            ours + "attention_out.weight": [(theirs + "attn.proj.weight", [d, q])],
            ours + "gate_up.weight": [(theirs + "mlp.fc.weight", [2 * c.ffn, d])],
            ours + "down.weight": [(theirs + "mlp.proj.weight", [d, c.ffn])]}
        names |= {f"{ours}norms.{j}.weight": [(f"{theirs}norm_{j + 1}.weight", [d])] for j in range(4)}
    return names


FAMILIES = {"ouro": (Ouro, ouro_config, ouro_names), "huginn_raven": (Huginn, huginn_config, huginn_names)}


# ----------------------------------------------------------------------------------------------------------------------
# 4. The model

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_model(folder: Path, settings: Settings, device: str, dtype: torch.dtype | None) -> LoopedLM:
    family = str(settings.get("model_type"))
    if family not in FAMILIES:
        raise CheckpointError(f"{settings.file}: model_type is {family!r}, but only {', '.join(FAMILIES)} can be loaded")
    model_class, read_config, read_names = FAMILIES[family]
    config, stored = read_config(settings), read_headers(folder)
    if config.heads % config.kv_heads or config.head_dim % 2 or (config.qk_bias and config.heads != config.kv_heads):
        raise CheckpointError(f"{settings.file}: {config.heads} heads of size {config.head_dim} and {config.kv_heads} "
                              f"key/value heads do not go together")
    if (layers := config.prelude + config.core + config.coda) > len(stored):
        raise CheckpointError(f"{settings.file} asks for {layers} layers, but {folder} has only {len(stored)} tensors")
    sources = match(config, read_names(config), stored, folder)
    if model_class is Huginn and (size := 8 * config.context * config.width) > available_memory(torch.device("cpu")):
        raise CheckpointError(f"{settings.file} asks for {config.context} positions, whose initial states take {size / 2 ** 30:.1f} GiB")
    with torch.device("meta"):                         # nothing is allocated before all that is stored is known to fit
        model = model_class(config)
    dtype = dtype or STORED[stored[sources["embedding.weight"][0]][2]]
    size, free = dtype.itemsize * sum(p.numel() for p in model.parameters()), available_memory(torch.device(device))
    if size > free:
        raise CheckpointError(f"the weights of {folder} take {size / 2 ** 30:.1f} GiB in {dtype}, but {device} has {free / 2 ** 30:.1f} GiB free")
    for ours, names in sources.items():
        parameter = torch.empty(model.get_parameter(ours).shape, dtype=dtype, device=device)
        parts = [math.prod(stored[name][1]) for name in names]
        for name, part in zip(names, parameter.view(-1).split(parts)):
            with safe_open(stored[name][0], "pt") as tensors:                # opened anew: what was mapped before is let go
                part.copy_(tensors.get_tensor(name).view(-1))
        model.assign(ours, parameter)
    return model.eval()


def parameters(config: Config, names: dict) -> dict:
    """Those of the names that this model has as parameters of its own."""
    absent = [name for name, there in (("head.weight", not config.tied), ("adapter.bias", config.adapter_bias)) if not there]
    return {ours: parts for ours, parts in names.items() if ours not in absent and (config.qk_bias or not ours.endswith("qk_bias"))}


def match(config: Config, names: dict, stored: dict, folder: Path) -> dict[str, list[str]]:
    """Which tensors of the files make up each parameter. Raises CheckpointError if anything is left over or amiss."""
    wanted = parameters(config, names)
    surplus = set(stored) - {name for parts in wanted.values() for name, _ in parts}
    if config.tied:
        [(head, shape)] = names["head.weight"]
        surplus.discard(head)                                                # a second copy of the embedding,
        if wanted["embedding.weight"][0][0] not in stored and head in stored:
            wanted["embedding.weight"] = [(head, shape)]                     # or the only one
    expected = {name: shape for parts in wanted.values() for name, shape in parts}
    if config.tied and head in stored:
        expected[head] = shape
    if missing := [name for name in expected if name not in stored]:
        raise CheckpointError(f"{folder} lacks the tensor {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    if unknown := sorted(name for name in surplus if not UNNEEDED.fullmatch(name)):
        raise CheckpointError(f"{stored[unknown[0]][0]} holds {unknown[0]}, which has no place in this model"
                              + (f", and {len(unknown) - 1} more such tensors" if unknown[1:] else ""))
    for name, shape in expected.items():
        file, found, dtype = stored[name]
        if found != shape:
            raise CheckpointError(f"{file}: {name} has the shape {found}, but config.json asks for {shape}")
        if dtype not in STORED:
            raise CheckpointError(f"{file}: {name} is stored as {dtype}, but only {', '.join(STORED)} can be read")
    return {ours: [name for name, _ in parts] for ours, parts in wanted.items()}


# ----------------------------------------------------------------------------------------------------------------------
# 5. Chat templates
#
# A template is a program, and not ours. jinja2's sandbox keeps it from files and from Python's objects. It bounds neither time
# nor memory, so the template is rendered in a process of its own, which is stopped when it takes too much of either.


SECONDS, MEMORY, LENGTH = 10, 2 ** 30, 2 ** 24         # for one rendering; of its text, in characters. Memory is bounded on Linux

RENDER = f"""
import sys
sys.path = [path for path in sys.path if path]         # not the current folder, which may be the snapshot
import datetime, json
if sys.platform == "linux":
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
import jinja2.sandbox

def refuse(message):
    raise jinja2.TemplateError(message)

def tojson(value, indent=None, ensure_ascii=False, separators=None, sort_keys=False):
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)

job, answer = json.load(sys.stdin), dict(valid=False)
try:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals |= dict(raise_exception=refuse, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    template = environment.from_string(job["template"])
    answer["valid"] = True
    text = template.render(**job["variables"])
    text.encode("utf-8")                               # half characters are none
    answer |= dict(text=text) if len(text) <= {LENGTH} else dict(error="it makes too long a text")
except Exception as error:
    answer["error"] = (str(error) or type(error).__name__)[:1000]
json.dump(answer, sys.stdout)
"""


def render_template(template: str, variables: dict) -> dict:
    """{"text": what it makes}, or {"error": why not, "valid": whether it is a template at all}."""
    job = json.dumps({"template": template, "variables": variables})
    try:
        done = subprocess.run([sys.executable, "-c", RENDER], input=job.encode(), capture_output=True, timeout=SECONDS)
        return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):    # stopped, or died without an answer
        return {"error": "it takes too much time or memory", "valid": True}


# ----------------------------------------------------------------------------------------------------------------------
# 6. The tokenizer


NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]                # reserved by Unicode: no text has them


class ChatTokenizer:
    """Text to token ids and back, as the snapshot's own tokenizer.json and chat template say."""

    def __init__(self, folder: Path):
        file = folder / "tokenizer.json"
        check_file(file)
        self.folder = folder
        self.tokenizer = self.library(Tokenizer.from_file, str(file))
        self.tokenizer.no_truncation()                                       # some files carry settings of their training
        self.tokenizer.no_padding()
        self.special = {token.content: id for id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        settings = read_json(folder / "tokenizer_config.json", required=False)
        self.names = {}                                                      # bos_token, eos_token, ...: their texts
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if not isinstance(value, (str, type(None))):
                raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {key} is {value!r}, but must be a text")
            if value:
                self.names[key] = value
        self.template = self.read_template(folder, settings)
        self.eos_ids = self.end_of_turn() | {self.tokenizer.token_to_id(self.names.get("eos_token", ""))}
        for name in ("config.json", "generation_config.json"):
            stops = read_json(folder / name, required=False).get("eos_token_id")
            for stop in stops if isinstance(stops, list) else [stops]:
                if type(stop) not in (int, type(None)):
                    raise CheckpointError(f"{folder / name}: eos_token_id is {stops!r}, but must be a token id or a list of them")
                self.eos_ids.add(stop)
        self.eos_ids -= {None}

    def read_template(self, folder: Path, settings: dict) -> str | None:
        file, source = folder / "chat_template.jinja", settings.get("chat_template")
        if file.is_file():
            source = read(file).decode("utf-8", errors="replace")
        elif isinstance(source, list):                                       # [{"name": ..., "template": ...}, ...]
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
        if not isinstance(source, (str, type(None))):
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named texts")
        return source

    def render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        if self.template is None:
            raise ValueError("this snapshot has no chat template: use plain text")
        answer = render_template(self.template, {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None,
                                                 "documents": None, **self.names})
        if not answer["valid"]:
            raise CheckpointError(f"the chat template of {self.folder} is not valid: {answer['error']}")
        if "error" in answer:
            raise ValueError(f"the chat template of {self.folder} refuses these messages: {one_line(answer['error'])}")
        return answer["text"]

    def library(self, function, *args, **options):
        """Call the tokenizers library, which is not choosy about what it raises."""
        try:
            return function(*args, **options)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:                 # a panic is no Exception
            raise CheckpointError(f"{self.folder / 'tokenizer.json'} can't be used: {error}") from None

    def encode(self, text: str | list[dict], chat: bool = False) -> list[int]:
        """Token ids of a text, or of a conversation that asks for an answer.

        chat: text is one user message, or a list of {"role": ..., "content": ...}. The template writes its special
        tokens; the same words inside a message are only words.
        """
        if not isinstance(text, str) and not chat:
            raise ValueError(f"the prompt must be a text, not {type(text).__name__}")
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        if not isinstance(messages, list) or not messages or not all(
                isinstance(m, dict) and m.keys() == {"role", "content"} and all(isinstance(v, str) for v in m.values())
                for m in messages):
            raise ValueError('a conversation is a list of {"role": ..., "content": ...} with two texts each')
        words = "".join(value for message in messages for value in message.values())
        if re.search("[\ud800-\udfff]", words):
            raise ValueError("the text holds half a character (a lone surrogate): it was not valid Unicode where it came from")
        if not chat:
            return self.library(self.tokenizer.encode, text).ids
        # A mark inside every special token of a message keeps it from being one. The text is then encoded in pieces.
        mark = next((c for c in NONCHARACTERS if c not in words), "")
        if not mark or any(len(word) == 1 and word in words for word in self.special):
            raise ValueError("the messages hold a special token of one character, or all the characters that Unicode reserves: leave them out")
        messages = [{key: self.split_special(value, mark) for key, value in message.items()} for message in messages]
        pieces = self.render(messages, add_generation_prompt=True).split(mark)
        return [id for piece in pieces for id in self.library(self.tokenizer.encode, piece, add_special_tokens=False).ids]

    def split_special(self, text: str, mark: str) -> str:
        for word in filter(None, self.special):
            text = text.replace(word, word[0] + mark + word[1:])
        return text

    def end_of_turn(self) -> set[int]:
        """The special token that follows an assistant message in the template, if there is one."""
        if self.template is None:
            return set()
        answer = NONCHARACTERS[0]
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        try:
            _, found, behind = self.render(messages, add_generation_prompt=False).rpartition(answer)
        except CheckpointError:
            raise
        except ValueError:                                                   # a template for other conversations than this
            return set()
        if not found:
            return set()
        ids = self.library(self.tokenizer.encode, behind, add_special_tokens=False).ids
        return set([id for id in ids if id in self.special.values()][:1])

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens, special ones included. Ids that no token has are left out."""
        if not isinstance(ids, (list, tuple)) or not all(isinstance(id, int) for id in ids):
            raise ValueError(f"token ids are a list of integers, not {one_line(ids)}")
        return self.library(self.tokenizer.decode, [id for id in ids if 0 <= id < 2 ** 32], skip_special_tokens=False)

    def stream(self) -> "Stream":
        return Stream(self)


class Stream:
    """Text as its tokens come. A character whose bytes are not complete yet is held back."""

    def __init__(self, tokenizer: ChatTokenizer):
        self.tokenizer = tokenizer
        self.shown, self.held = [], []                 # tokens of the piece before, tokens without a piece so far

    def push(self, ids: list[int]) -> str:
        """The text that these tokens complete. All pieces and that of end() join to the text of all tokens."""
        text = self.tokenizer.decode([*self.shown, *self.held, *ids])
        self.held += ids
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self.end()

    def end(self) -> str:
        """What is left, with a replacement character for bytes that never made one."""
        if not self.held:
            return ""
        # Decoded behind the tokens before, since a decoder may treat the first token of a text apart.
        piece = self.tokenizer.decode(self.shown + self.held)[len(self.tokenizer.decode(self.shown)):]
        self.shown, self.held = self.held, []
        return piece


# ----------------------------------------------------------------------------------------------------------------------
# 7. Both


def check_device(device: str) -> None:
    """Raises ValueError if there is no such device."""
    try:
        torch.empty(0, device=device).tolist()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"{device!r} is no device of this machine ({one_line(error)})") from None


def load(path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None, *, seed: int = 0,
         init_state: str = "noise") -> tuple[LoopedLM, ChatTokenizer]:
    """Load an Ouro or Huginn snapshot.

    path: a snapshot folder, or a hub id that is already in the local Hugging Face cache. dtype: what the model is held
    and computed in; None: as stored. seed and init_state ("noise" or "zeros"): Huginn's table of initial states.
    Raises CheckpointError if the snapshot can't be used, ValueError for other arguments that make no sense.
    """
    if dtype not in (None, *STORED.values(), torch.float64):
        raise ValueError(f"dtype must be None or a torch float dtype of 16, 32 or 64 bits, not {dtype!r}")
    if not isinstance(seed, int) or not 0 <= seed < 2 ** 63:
        raise ValueError(f"seed must be an integer from 0 to 2 ** 63 - 1, not {seed!r}")
    if init_state not in ("noise", "zeros"):
        raise ValueError(f"init_state must be 'noise' or 'zeros', not {init_state!r}")
    check_device(device)
    folder = find_snapshot(path)
    settings = Settings(folder / "config.json", read_json(folder / "config.json"))
    tokenizer = ChatTokenizer(folder)
    model = load_model(folder, settings, device, dtype)
    if model.embedding.weight.dtype == torch.float16:
        warnings.warn("looped models overflow in float16; load with dtype=torch.bfloat16 or torch.float32", stacklevel=2)
    if not (vocabulary := tokenizer.tokenizer.get_vocab()):
        raise CheckpointError(f"{folder}: tokenizer.json has no tokens")
    if (largest := max(vocabulary.values())) >= model.vocab:
        raise CheckpointError(f"{folder}: tokenizer.json has a token {largest}, but the model knows only {model.vocab}")
    if isinstance(model, Huginn):
        table = model.draw_states(seed) if init_state == "noise" else torch.zeros(model.config.context, model.config.width)
        model.state_table = table.to(model.embedding.weight)
    return model, tokenizer
