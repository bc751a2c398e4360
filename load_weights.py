"""An official snapshot folder -> (model, tokenizer).

    model, tokenizer = load("ByteDance/Ouro-2.6B")        # in the local Hugging Face cache
    model, tokenizer = load("tiny/ouro", dtype=torch.float32)

A snapshot is read as published: config.json, safetensors, tokenizer.json with the settings beside it, the
chat template. No code from it is run. Every tensor must be used or be known to be unneeded, every parameter
filled, every shape right: a model that loads by halves answers by halves.
"""

import datetime
import json
import math
import os
import re
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from model import Config, Huginn, LoopedLM, Ouro


class CheckpointError(ValueError):
    """A snapshot that can't be used: one sentence that names the file and what is wrong with it."""


# 1. Files


def find_snapshot(path: str | Path) -> Path:
    """A folder as it is, or the snapshot of ORGANISATION/NAME or of one @REVISION of it in the hub cache."""
    if os.path.isdir(folder := os.path.expanduser(str(path))):
        return Path(folder)
    parts = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", str(path))
    if not parts:
        raise CheckpointError(f"{path} is neither a folder nor of the form ORGANISATION/NAME[@REVISION]")
    name, revision = parts.groups()
    home = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    repo = cache / f"models--{name.replace('/', '--')}"
    ref = repo / "refs" / (revision or "main")         # a branch or a tag: the file holds its commit
    commit = ref.read_text().strip() if ref.is_file() else revision or ""
    held = sorted(snapshot.name for snapshot in repo.glob("snapshots/*"))
    if len(found := [one for one in held if one.startswith(commit)]) == 1:
        return repo / "snapshots" / found[0]
    advice = f"choose one of its revisions as {name}@REVISION: {', '.join(held)}" if held else (
        f"to download it there: pip install huggingface_hub && hf download {name}")
    raise CheckpointError(f"{path} is neither a folder nor one model in the hub cache {cache}; {advice}")


def is_there(file: Path) -> bool:
    if file.is_symlink() and not file.exists():        # left in a hub cache by a broken download
        raise CheckpointError(f"{file} links to {os.path.realpath(file)}, which is missing: download again")
    return file.is_file()


def not_a(kind: str, file: Path) -> CheckpointError:
    """The first bytes tell an empty file, a git-lfs pointer and a web page apart."""
    with file.open("rb") as content:
        return CheckpointError(f"{file} is not a complete {kind} file: it starts with {content.read(40)!r}")


def read_json(file: Path, required: bool = True) -> dict:
    """The object in a file, without nulls, and without a byte-order mark. {} if it need not be there."""
    if not is_there(file):
        if required:
            raise CheckpointError(f"{file} is missing")
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
        return {key: value for key, value in content.items() if value is not None}
    except (ValueError, AttributeError):
        raise not_a("JSON", file) from None


def weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if is_there(single):
        return [single]
    if not is_there(index):
        kinds = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
        found = ", ".join(sorted(file.name for file in folder.iterdir() if file.suffix in kinds))
        raise CheckpointError(f"{folder} holds {found or 'no weights'}, but model.safetensors is needed, or "
                              f"shards with {index.name}: convert other formats, merge an adapter")
    names = sorted(set(read_json(index).get("weight_map", {}).values()))
    if missing := [name for name in names if Path(name).name != name or not is_there(folder / name)]:
        raise CheckpointError(f"{index} names what the folder lacks: {', '.join(missing)}")
    return [folder / name for name in names]


def read_headers(files: list[Path]) -> dict[str, tuple[Path, str, list[int], str]]:
    """Every tensor, without the prefix that all names share: name -> (file, name there, shape, dtype)."""
    stored = {}
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():
                    header = tensors.get_slice(name)
                    stored[name] = file, name, header.get_shape(), header.get_dtype()
        except (SafetensorError, OSError, RuntimeError):
            raise not_a("safetensors", file) from None
    norms = [re.fullmatch(r"(.*)(model\.norm|transformer\.ln_f)\.weight", name) for name in stored]
    prefix = next((norm[1] for norm in norms if norm), "")         # such as module. or _orig_mod.
    shared = all(name.startswith(prefix) for name in stored)
    return {name[len(prefix) * shared:]: header for name, header in stored.items()}


# 2. config.json

# Settings that would change the computation, at whatever level they stand. No published one has others.
ONLY = {"hidden_act": "silu", "use_sliding_window": False, "injection_type": "linear", "nonlin_name": "SiLU",
        "test_time_noise": 0, "rope_type": "default", "type": "default", "partial_rotary_factor": 1,
        "rope_parameters": {}, "rope_scaling": {}}


class Settings(dict):
    """config.json, with a clear word for what is missing in it."""

    def __init__(self, file: Path):
        super().__init__(read_json(file))
        self.file = file

    def __missing__(self, name: str):
        raise CheckpointError(f"{self.file} has no {name}")

    def first(self, *names: str):
        """The value under the first of these names that is there."""
        return self[next((name for name in names if name in self), names[-1])]

    def rotary_bases(self, values: dict) -> set[float]:
        """Every base that is given for what the model uses: flat, nested, or one for each type of layer."""
        bases = {values[name] for name in ("rope_theta", "rope_base") if values.get(name) is not None}
        for name, value in values.items():
            if isinstance(value, dict):
                inner = self.rotary_bases(value)
                if name == "full_attention" or "full_attention" not in values:     # there are no other layers
                    bases |= inner
            elif name in ONLY and value not in (None, ONLY[name]):
                raise CheckpointError(f"{self.file}: {name} is {value!r}, which is not supported")
        return bases


def read_config(s: Settings) -> Config:
    bases, ouro = s.rotary_bases(s), s["model_type"] == "ouro"
    if len(bases) != 1:
        raise CheckpointError(f"{s.file} has {'different' if bases else 'no'} values of rope_theta or base")
    if set(types := s.get("layer_types", ())) - {"full_attention"}:
        raise CheckpointError(f"{s.file}: layer_types is {types!r}, but only full attention is supported")
    width, heads = s.first("n_embd", "hidden_size"), s.first("n_heads", "num_attention_heads")
    return Config(
        width=width, heads=heads, kv_heads=s.get("num_key_value_heads", heads),
        head_dim=s.get("head_dim", width // heads), ffn=s["intermediate_size"],
        vocab=s.first("padded_vocab_size", "vocab_size"),
        core=s.first("n_layers_in_recurrent_block", "num_hidden_layers"),
        recurrences=s.get("total_ut_steps", 4) if ouro else s["mean_recurrence"],
        context=s.first("block_size", "max_position_embeddings"), rope_theta=float(bases.pop()),
        norm_eps=s.first("norm_eps", "rms_norm_eps"),
        tied=s.get("tie_embeddings", s.get("tie_word_embeddings", not ouro)),
        prelude=s.get("n_layers_in_prelude", 0), coda=s.get("n_layers_in_coda", 0),
        qk_bias=s.get("qk_bias", False), adapter_bias=s.get("bias", False),
        init_std=s.get("init_values", {}).get("std", (2 / (5 * width)) ** 0.5))


# 3. Tensor names
#
# A parameter of ours is one tensor of the file, or several, one above the other:
# parameter -> [(tensor, shape), ...]

HEAD = "lm_head.weight"
# Unneeded: rotary tables, which are computed, and Ouro's early-exit gate, which would only choose a depth.
UNNEEDED = re.compile(r"freqs_cis|(.+\.)?rotary_emb\.inv_freq|model\.early_exit_gate\.(weight|bias)")


def all_names(c: Config, embedding: str, norm: str, layers: list[str], layer: dict) -> dict:
    names = {"embedding.weight": [(embedding, [c.vocab, c.width])], "final_norm.weight": [(norm, [c.width])]}
    if not c.tied:
        names["head.weight"] = [(HEAD, [c.vocab, c.width])]
    for i, theirs in enumerate(layers):
        names |= {f"layers.{i}.{ours}": [(theirs + name, shape) for name, shape in parts]
                  for ours, parts in layer.items()}
    return names


def ouro_names(c: Config) -> dict[str, list[tuple[str, list[int]]]]:
    d, q, kv = c.width, c.heads * c.head_dim, c.kv_heads * c.head_dim
    norms = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
    layer = {"qkv.weight": [(f"self_attn.{x}_proj.weight", [n, d]) for x, n in zip("qkv", (q, kv, kv))],
             "attention_out.weight": [("self_attn.o_proj.weight", [d, q])],
             "gate_up.weight": [(f"mlp.{x}_proj.weight", [c.ffn, d]) for x in ("gate", "up")],
             "down.weight": [("mlp.down_proj.weight", [d, c.ffn])]}
    layer |= {f"norms.{j}.weight": [(f"{norm}.weight", [d])] for j, norm in enumerate(norms)}
    layers = [f"model.layers.{i}." for i in range(c.core)]
    return all_names(c, "model.embed_tokens.weight", "model.norm.weight", layers, layer)


def huginn_names(c: Config) -> dict[str, list[tuple[str, list[int]]]]:
    d, q, kv = c.width, c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = {"qkv.weight": [("attn.Wqkv.weight", [q + 2 * kv, d])],
             "attention_out.weight": [("attn.proj.weight", [d, q])],
             "gate_up.weight": [("mlp.fc.weight", [2 * c.ffn, d])],
             "down.weight": [("mlp.proj.weight", [d, c.ffn])]}
    layer |= {f"norms.{j}.weight": [(f"norm_{j + 1}.weight", [d])] for j in range(4)}
    if c.qk_bias:
        layer["qk_bias"] = [("attn.qk_bias", [2, 1, c.heads, c.head_dim])]
    stages = {"prelude": c.prelude, "core_block": c.core, "coda": c.coda}
    layers = [f"transformer.{stage}.{j}." for stage, number in stages.items() for j in range(number)]
    names = all_names(c, "transformer.wte.weight", "transformer.ln_f.weight", layers, layer)
    names["adapter.weight"] = [("transformer.adapter.weight", [d, 2 * d])]
    if c.adapter_bias:
        names["adapter.bias"] = [("transformer.adapter.bias", [d])]
    return names


FAMILIES = {"ouro": (Ouro, ouro_names), "huginn_raven": (Huginn, huginn_names)}


# 4. The model

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def check_device(device: str | torch.device) -> None:
    """Raises ValueError if there is no such device."""
    try:
        torch.empty(0, device=device).tolist()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"{device!r} is no device of this machine ({str(error).splitlines()[0]})") from None


def available_memory(device: str | torch.device) -> float:
    """Bytes that can still be allocated there; infinite where nobody says."""
    device, told = torch.device(device), Path("/proc/meminfo")         # the latter on Linux
    if device.type == "cuda":                          # what torch has reserved and does not use counts too
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu" or not told.exists():
        return math.inf
    return int(re.search(r"MemAvailable:\s+(\d+)", told.read_text())[1]) * 1024


def check_tensors(folder: Path, config: Config, wanted: dict, stored: dict) -> None:
    """Raises CheckpointError unless what is stored is what the model needs. A tied head may be there."""
    name, shape = wanted["embedding.weight"][0]
    if config.tied and name not in stored:
        wanted["embedding.weight"] = [(HEAD, shape)]
    expected = {name: shape for parts in wanted.values() for name, shape in parts}
    if config.tied and HEAD in stored:
        expected[HEAD] = shape
    if missing := [name for name in expected if name not in stored]:
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors, the first of them {missing[0]}")
    if surplus := sorted(name for name in stored if name not in expected and not UNNEEDED.fullmatch(name)):
        raise CheckpointError(f"{folder} has {len(surplus)} tensors too many, such as {surplus[0]}")
    for name, shape in expected.items():
        file, _, found, dtype = stored[name]
        if found != shape or dtype not in STORED:
            raise CheckpointError(f"{file}: {name} is {found} in {dtype}, not {shape} in {', '.join(STORED)}")


def load_model(folder: Path, family: str, config: Config, stored: dict, device, dtype) -> LoopedLM:
    model_class, names = FAMILIES[family]
    check_tensors(folder, config, wanted := names(config), stored)
    dtype = dtype or STORED[stored[wanted["embedding.weight"][0][0]][3]]
    size = dtype.itemsize * sum(math.prod(shape) for parts in wanted.values() for _, shape in parts)
    if model_class is Huginn:                          # its initial states, drawn in float32, then converted
        size += (4 + dtype.itemsize) * config.context * config.width
    if size > (free := available_memory(device)):
        raise CheckpointError(f"the weights of {folder}, with any initial states, take "
                              f"{size / 2 ** 30:.1f} GiB in {dtype}, but {device} has {free / 2 ** 30:.1f}")
    with torch.device("meta"):                         # nothing is allocated before
        model = model_class(config)
    for ours, parts in wanted.items():
        parameter = torch.empty(model.get_parameter(ours).shape, dtype=dtype, device=device)
        pieces = parameter.view(-1).split([math.prod(shape) for _, shape in parts])
        for (name, _), piece in zip(parts, pieces):
            with safe_open(stored[name][0], "pt") as tensors:      # opened anew, to let go what was mapped
                piece.copy_(tensors.get_tensor(stored[name][1]).view(-1))
        model.assign(ours, parameter)
    return model.eval()


# 5. The tokenizer


def render(template: str, variables: dict) -> str:
    """What a chat template makes of the variables, in a sandbox, with what transformers offers them."""
    import jinja2.ext                                  # here, since plain prompts must work without
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):            # marks what training learns: only its body counts
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return jinja2.nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True))

    def refuse(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False} | options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template).render(variables)


def word_of(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token


class ChatTokenizer:
    """Text to token ids and back, as tokenizer.json and the settings and chat template beside it say."""

    def __init__(self, folder: Path, vocab: int):
        self.folder = folder
        settings = read_json(folder / "tokenizer_config.json", required=False)
        older = read_json(folder / "special_tokens_map.json", required=False)
        settings = older | settings if "added_tokens_decoder" in settings else settings | older
        self.tokenizer = self.read_tokens(settings.get("added_tokens_decoder", {}))
        self.names = {key: word_of(value) for key, value in settings.items()
                      if key.endswith("_token") and isinstance(value, (str, dict))}
        words = {*self.names.values()}
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = settings.get(key, ())
            words |= {word_of(token) for token in (more.values() if isinstance(more, dict) else more)}
        self.add_special(words, vocab)
        self.template = self.read_template(settings)
        self.eos_ids = self.stops() | self.end_of_turn()
        largest = max(self.tokenizer.get_vocab().values(), default=0)
        if largest >= vocab:
            raise CheckpointError(f"{folder}: tokenizer.json has a token {largest}, the model only {vocab}")

    def read_tokens(self, listed: dict) -> Tokenizer:
        """tokenizer.json, with the tokens that only tokenizer_config.json lists."""
        file, content = self.folder / "tokenizer.json", read_json(self.folder / "tokenizer.json")
        fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        tokens = {token["content"]: token for token in content.get("added_tokens", ())}
        tokens |= {token["content"]: {"id": int(id)} | {field: token.get(field, False) for field in fields}
                   for id, token in listed.items()}
        content["added_tokens"] = sorted(tokens.values(), key=lambda token: token["id"])
        try:
            tokenizer = Tokenizer.from_str(json.dumps(content))
        except Exception as error:                     # the library raises no narrower one
            raise CheckpointError(f"{file} can't be used: {error}") from None
        for word, token in tokens.items():
            if tokenizer.token_to_id(word) != token["id"]:
                raise CheckpointError(f"{file}: token {token['id']} should be {word!r}, but is another")
        tokenizer.no_truncation()                      # some files carry settings of their training
        tokenizer.no_padding()
        return tokenizer

    def add_special(self, words: set[str], vocab: int) -> None:
        """Make tokens of the words that are only named, and note all special tokens."""
        known = {token.content for token in self.tokenizer.get_added_tokens_decoder().values()}
        for word in sorted(words - known):
            if missing := self.tokenizer.token_to_id(word) is None:
                warnings.warn(f"{self.folder} names the special token {word!r}, which tokenizer.json lacks")
            if not missing or self.tokenizer.get_vocab_size() < vocab:
                self.tokenizer.add_special_tokens([word])
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {id for id, token in added.items() if token.special or token.content in words}

    def read_template(self, settings: dict) -> str | None:
        """From where transformers takes it: a file first, then settings, a text or named texts."""
        file, source = self.folder / "chat_template.jinja", settings.get("chat_template")
        if is_there(file):
            return file.read_text(encoding="utf-8-sig", errors="replace")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}
        return source.get("default") if isinstance(source, dict) else source

    def stops(self) -> set[int]:
        found = {self.tokenizer.token_to_id(self.names.get("eos_token", ""))} - {None}
        for name in ("config.json", "generation_config.json"):
            stops = read_json(self.folder / name, required=False).get("eos_token_id", [])
            found.update(stops if isinstance(stops, list) else [stops])
        for stop in found:
            if type(stop) is not int:
                raise CheckpointError(f"{self.folder}: eos_token_id is {stop!r}, but must be a token id")
            if self.tokenizer.id_to_token(stop) is None:
                warnings.warn(f"{self.folder}: eos_token_id {stop} is no token of tokenizer.json")
        return found

    def end_of_turn(self) -> set[int]:
        """The special token that follows an assistant message in the template, if there is one."""
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "THE ANSWER"}]
        try:
            text = self.render(messages, "THE ANSWER", add_generation_prompt=False)
        except ValueError:                             # no template, or one for other conversations than this
            return set()
        ids = self.tokenizer.encode(text.rpartition("THE ANSWER")[2], add_special_tokens=False).ids
        return set([id for id in ids if id in self.special][:1])

    def render(self, messages: list[dict], words: str, add_generation_prompt: bool) -> str:
        """The conversation as its template writes it, which must show the words.

        A template that knows only contents made of parts drops texts: it gets them as parts.
        """
        if not self.template:
            raise ValueError(f"{self.folder} has no chat template: use plain text")
        parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages
                 if isinstance(message["content"], str)]
        more = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        for form in (messages, parts) if len(parts) == len(messages) else (messages,):
            try:
                text = render(self.template, self.names | more | {"messages": form})
            except Exception as error:                 # a template is a program: it may raise anything
                raise ValueError(f"the chat template of {self.folder} fails: {error}") from None
            if "".join(words.split()) in "".join(text.split()):
                return text
        raise ValueError(f"the chat template of {self.folder} leaves out {words!r}")

    def encode(self, text: str | list[dict], chat: bool = False) -> list[int]:
        """Token ids of a text; with chat, of a conversation that asks for an answer, as the template has it.

        chat: text is one user message, or a list of {"role": ..., "content": ...}, a content being a text or
        a list of {"type": "text", "text": ...}. Special tokens in a message are special, as in transformers.
        Raises ValueError if the template can't be rendered or leaves out the last user message.
        """
        if chat:
            messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
            if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
                raise ValueError('a conversation is a list of {"role": ..., "content": ...}')
            words = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
            if not isinstance(words, str):
                words = "".join(part.get("text", "") for part in words)
            text = self.render(messages, words, add_generation_prompt=True)
        elif not isinstance(text, str):
            raise ValueError(f"the prompt must be a text, not {type(text).__name__}: or use chat=True")
        if re.search("[\ud800-\udfff]", text):
            raise ValueError("the text holds half a character (a lone surrogate): it was not valid Unicode")
        return self.tokenizer.encode(text, add_special_tokens=not chat).ids

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens, special ones included. Ids that no token has are left out."""
        return self.tokenizer.decode([id for id in ids if 0 <= id < 2 ** 32], skip_special_tokens=False)

    def stream(self) -> "Stream":
        return Stream(self)


class Stream:
    """Text as its tokens come. A character whose bytes are not complete yet is held back."""

    def __init__(self, tokenizer: ChatTokenizer):
        self.tokenizer = tokenizer
        self.shown, self.held = [], []                 # tokens of the piece before, tokens without one yet

    def push(self, ids: list[int]) -> str:
        """The text that these tokens complete. All pieces and that of end() join to the whole text."""
        text = self.tokenizer.decode([*self.shown, *self.held, *ids])
        self.held += ids
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self.end()

    def end(self) -> str:
        """What is left, with a replacement character for bytes that never made one."""
        if not self.held:
            return ""
        # Decoded after the tokens before, since a decoder may treat the first token of a text apart.
        piece = self.tokenizer.decode(self.shown + self.held)[len(self.tokenizer.decode(self.shown)):]
        self.shown, self.held = self.held, []
        return piece


# 6. Both


def load(path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None, *, seed: int = 0,
         init_state: str = "noise") -> tuple[LoopedLM, ChatTokenizer]:
    """Load an Ouro or Huginn snapshot.

    path: a snapshot folder, or a hub id that is in the local Hugging Face cache already. dtype: what the
    model is held and computed in; None: as stored. seed, init_state ("noise" or "zeros"): Huginn's initial states.
    Raises CheckpointError if the snapshot can't be used, ValueError for other arguments that make no sense.
    """
    if dtype not in (None, *STORED.values(), torch.float64):
        raise ValueError(f"dtype must be None or a torch float dtype of 16, 32 or 64 bits, not {dtype!r}")
    if init_state not in ("noise", "zeros"):
        raise ValueError(f"init_state must be 'noise' or 'zeros', not {init_state!r}")
    check_device(device)
    folder = find_snapshot(path)
    stored = read_headers(weight_files(folder))        # first: other formats often have no config.json
    settings = Settings(folder / "config.json")
    if (family := settings["model_type"]) not in FAMILIES:
        raise CheckpointError(f"{settings.file}: model_type is {family!r}, not {' or '.join(FAMILIES)}")
    config = read_config(settings)
    tokenizer = ChatTokenizer(folder, config.vocab)
    model = load_model(folder, family, config, stored, device, dtype)
    if model.embedding.weight.dtype == torch.float16:
        warnings.warn("looped models overflow in float16: load with dtype=torch.bfloat16", stacklevel=2)
    if isinstance(model, Huginn):
        table = model.draw_states(seed)
        model.state_table = (table if init_state == "noise" else table * 0).to(model.embedding.weight)
    return model, tokenizer
