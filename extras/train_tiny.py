"""Train a tiny checkpoint from a text file, and write it as an official-format snapshot.

    python -m extras.train_tiny austen.txt tiny/ouro
    python -m extras.train_tiny austen.txt tiny/huginn --family huginn --passes 6

Takes the better part of an hour on two CPU cores. Prints the loss as it goes and, after every pass, what `tiny/README.md`
records: the loss on held-out text at every depth, and how often each depth's prediction is already that of the last.
The last two percent of the text are held out, and written to held_out.txt beside the snapshot.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import TensorSpec, serialize_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo import run
from load_weights import FAMILIES
from model import Config, FullAttention, Huginn, LoopedLM, Ouro

OURO = Config(width=256, heads=4, kv_heads=4, head_dim=64, ffn=704, vocab=2048, core=3, recurrences=4,
              context=16384, rope_theta=1e6, norm_eps=1e-6, tied=False)
OURO_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]               # the first ids, as published
OURO_CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
LOSS_WEIGHTS = (0.15, 0.2, 0.25, 0.4)                                        # of Ouro's four recurrences

HUGINN = Config(width=256, heads=4, kv_heads=4, head_dim=64, ffn=704, vocab=2048, core=2, recurrences=32,
                context=16384, rope_theta=5e4, norm_eps=1e-6, tied=True, prelude=1, coda=1, qk_bias=True,
                init_std=(2 / (5 * 256)) ** 0.5)
HUGINN_SPECIAL = [f"<|{name}|>" for name in (                                # the last ids, as published
    "begin_text end_text begin_header end_header end_turn pad fim_prefix fim_middle fim_suffix fim_pad ... del "
    "c_0 c_1 c_2 c_3 c_4 c_5 c_6 c_7 c_8 c_9 ? & ! - + interrupt >>- -<< ->> <<-").split()]
HUGINN_CHAT = ("{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|begin_header|>"
               "{% if m['role'] in ['assistant', 'Huginn'] %}Huginn{% else %}{{ m['role'] }}{% endif %}"
               "<|end_header|>\n\n{{ m['content'].strip() }}<|end_turn|>{% endfor %}{% if add_generation_prompt %}"
               "<|begin_header|>Huginn<|end_header|>\n\n{% else %}<|end_text|>{% endif %}")
MEAN_RECURRENCE, SPREAD, BACKPROP = 8, 0.5, 4          # drawn anew in every step; only the last ones are differentiated

BATCH, LENGTH = 8, 256                                                       # sequences in a step, tokens in each
LEARNING_RATE, WARMUP, WEIGHT_DECAY = 2e-3, 100, 0.1


# 1. Text, tokenizer, model


def read_text(path: str) -> tuple[str, str]:
    """The text, paragraphs unwrapped to one line each, split into training text and the last 2 percent."""
    paragraphs = re.split(r"\n\s*\n", Path(path).read_text(encoding="utf-8"))
    text = "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())
    cut = text.find("\n\n", len(text) * 98 // 100) + 2
    if cut < 2:
        raise ValueError(f"{path} is too short, or has no blank lines between its paragraphs")
    return text[:cut], text[cut:]


def train_tokenizer(text: str, family: str) -> Tokenizer:
    first, size = (OURO_SPECIAL, OURO.vocab) if family == "ouro" else ([], HUGINN.vocab - len(HUGINN_SPECIAL))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=size, special_tokens=first, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if family == "huginn":
        tokenizer.add_special_tokens(HUGINN_SPECIAL)
    return tokenizer


def new_model(family: str) -> LoopedLM:
    """Fresh weights. An Ouro of this size needs embeddings of spread 1, and small gains after each sub-layer.

    Otherwise the post-norms, whose gain of 1 is as large whatever a layer has to say, drown the token.
    """
    model = Ouro(OURO) if family == "ouro" else Huginn(HUGINN)
    for name, p in model.named_parameters():
        if name == "embedding.weight":
            torch.nn.init.normal_(p, std=1.0 if family == "ouro" else HUGINN.init_std)
        elif p.dim() == 2 and not name.endswith("qk_bias"):
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
        elif family == "ouro" and name.endswith(("norms.1.weight", "norms.3.weight")):
            torch.nn.init.constant_(p, 0.3)
    return model


# 2. Training


def begin(model: LoopedLM, tokens: torch.Tensor):
    """tokens [batch, length] -> at depth 0, for batch * length rows: states, what embed gives, positions, attention."""
    batch, length = tokens.shape
    positions, kv = torch.arange(length).repeat(batch), FullAttention(length)
    e = model.embed(tokens.flatten(), positions, kv)
    if isinstance(model, Ouro):
        return model.initial_state(e, positions), e, positions, kv
    sigma = model.config.init_std                      # Huginn: other states in every step
    x = torch.nn.init.trunc_normal_(torch.empty_like(e, dtype=torch.float32), std=sigma, a=-3 * sigma, b=3 * sigma)
    return x * model.config.width ** 0.5, e, positions, kv


def training_loss(model: LoopedLM, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Ouro: the loss after every recurrence, weighted. Huginn: the loss after a random number of them."""
    x, *rest = begin(model, tokens)
    if isinstance(model, Ouro):
        loss = 0.0
        for weight in LOSS_WEIGHTS:
            x = model.recur(x, *rest)
            loss = loss + weight * F.cross_entropy(model.predict(x, *rest[1:]), target)
        return loss
    rate = torch.exp(torch.randn(()) * SPREAD + math.log(MEAN_RECURRENCE - 1) - SPREAD ** 2 / 2)
    steps = 1 + int(torch.poisson(rate))               # log-normal Poisson, as published
    for left in range(steps, 0, -1):
        with torch.set_grad_enabled(left <= BACKPROP):
            x = model.recur(x, *rest)
    return F.cross_entropy(model.predict(x, *rest[1:]), target)


def sequences(ids: torch.Tensor, start: int) -> torch.Tensor:
    """The text cut into rows of LENGTH tokens, each with the token that follows: [n, LENGTH + 1]."""
    return ids[start:].unfold(0, LENGTH + 1, LENGTH)


@torch.no_grad()
def evaluate(model: LoopedLM, ids: torch.Tensor) -> str:
    """Per depth: mean next-token loss in nats, and the share of positions predicted as at the last depth."""
    depths = [k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if k <= model.recurrences]
    losses, best = {k: [] for k in depths}, {k: [] for k in depths}
    for batch in sequences(ids, 0).split(BATCH):
        x, *rest = begin(model, batch[:, :-1])
        for k in range(1, model.recurrences + 1):
            x = model.recur(x, *rest)
            if k in depths:
                logits = model.predict(x, *rest[1:])
                losses[k].append(F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none"))
                best[k].append(logits.argmax(-1))
    loss, best = ({k: torch.cat(parts) for k, parts in found.items()} for found in (losses, best))
    agreement = {k: (best[k] == best[model.recurrences]).float().mean() for k in depths}
    return ", ".join(f"{k}: {loss[k].mean():.3f} {agreement[k]:.1%}" for k in depths)


def train(model: LoopedLM, ids: torch.Tensor, held_out: torch.Tensor, passes: int) -> None:
    groups = [{"params": [p for p in model.parameters() if (p.dim() == 2) == decayed],
               "weight_decay": WEIGHT_DECAY * decayed} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    per_pass = (len(ids) - LENGTH - 1) // LENGTH // BATCH
    steps, step, start, mean = passes * per_pass, 0, time.time(), None
    for number in range(1, passes + 1):
        rows = sequences(ids, int(torch.randint(LENGTH, ())))                # other boundaries in every pass
        for batch in rows[torch.randperm(len(rows))[:per_pass * BATCH]].split(BATCH):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, 1 - step / steps)
            with torch.autocast("cpu", torch.bfloat16):
                loss = training_loss(model, batch[:, :-1], batch[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
            if step % 50 == 0:
                print(f"step {step}/{steps}, loss {mean:.3f}, {(time.time() - start) / step:.2f} s a step", flush=True)
        print(f"pass {number}; depth: loss, agreement with the last: {evaluate(model, held_out)}", flush=True)


# 3. The snapshot


def family_of(model_class: type[LoopedLM]) -> str:
    """The model_type of its config.json."""
    return next(name for name, (known, _) in FAMILIES.items() if known is model_class)


def unneeded_shapes(model_class: type[LoopedLM], c: Config) -> dict[str, list[int]]:
    """Tensors that are published and never used."""
    if model_class is Huginn:
        return {"freqs_cis": [1, c.context, 1, c.head_dim // 2, 2]}
    return {"model.early_exit_gate.weight": [1, c.width], "model.early_exit_gate.bias": [1]}


def published_tensors(model: LoopedLM) -> dict[str, torch.Tensor]:
    """The parameters under their published names, in their published pieces."""
    names, out = FAMILIES[family_of(type(model))][1](model.config), {}
    for ours, parameter in model.named_parameters():
        pieces = parameter.detach().flatten().split([math.prod(shape) for _, shape in names[ours]])
        out |= {theirs: piece.view(shape) for (theirs, shape), piece in zip(names[ours], pieces)}
    if isinstance(model, Ouro):
        out |= {name: torch.zeros(shape) for name, shape in unneeded_shapes(Ouro, model.config).items()}
    return out


def save_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """safetensors.torch.save_file without numpy, which that function imports."""
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    specs = {name: TensorSpec(dtype=str(t.dtype).removeprefix("torch."), shape=list(t.shape),
                              data_ptr=t.data_ptr(), data_len=t.nbytes) for name, t in tensors.items()}
    serialize_file(specs, str(file), {"format": "pt"})


def save_shards(tensors: Mapping[str, torch.Tensor], folder: Path, number: int) -> None:
    """The tensors, in their order, in so many files, with the index."""
    names = list(tensors)
    files = {name: f"model-{i * number // len(names) + 1:05}-of-{number:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_tensors({name: tensors[name] for name in names if files[name] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_settings(model_class: type[LoopedLM], c: Config, tokenizer: Tokenizer, folder: Path) -> None:
    """config.json, generation_config.json, tokenizer.json, tokenizer_config.json."""
    common = {"head_dim": c.head_dim, "intermediate_size": c.ffn, "model_type": family_of(model_class),
              "num_key_value_heads": c.kv_heads, "torch_dtype": "bfloat16", "vocab_size": c.vocab}
    if model_class is Ouro:
        special, chat, roles, stops = OURO_SPECIAL, OURO_CHAT, {"bos": 0, "eos": 0, "pad": 0, "unk": 0}, [0]
        config = {"architectures": ["OuroForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
                  "hidden_size": c.width, "max_position_embeddings": c.context, "num_attention_heads": c.heads,
                  "num_hidden_layers": c.core, "rms_norm_eps": c.norm_eps, "rope_scaling": None,
                  "rope_theta": c.rope_theta, "tie_word_embeddings": c.tied, "total_ut_steps": c.recurrences,
                  "early_exit_threshold": 1.0, "use_sliding_window": False}
    else:
        special, chat, roles, stops = HUGINN_SPECIAL, HUGINN_CHAT, {"bos": 0, "eos": 1, "pad": 5}, [1, 4]
        config = {"architectures": ["RavenForCausalLM"], "bias": False, "block_size": c.context,
                  "init_values": {"std": c.init_std}, "injection_type": "linear", "mean_recurrence": c.recurrences,
                  "n_embd": c.width, "n_heads": c.heads, "n_layers": c.prelude + c.core + c.coda,
                  "n_layers_in_coda": c.coda, "n_layers_in_prelude": c.prelude,
                  "n_layers_in_recurrent_block": c.core, "nonlin_name": "SiLU", "norm_eps": c.norm_eps,
                  "padded_vocab_size": c.vocab, "qk_bias": c.qk_bias, "rope_base": c.rope_theta,
                  "test_time_noise": 0, "tie_embeddings": c.tied}
    ids = [tokenizer.token_to_id(word) for word in special]
    generation = {"bos_token_id": ids[0], "eos_token_id": [ids[i] for i in stops], "pad_token_id": ids[roles["pad"]]}
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    write_json(folder / "config.json", common | config)
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer_config.json", {
        "added_tokens_decoder": {str(id): {"content": word, **flags} for id, word in zip(ids, special)},
        **{f"{role}_token": special[i] for role, i in roles.items()}, "chat_template": chat,
        "clean_up_tokenization_spaces": False, "model_max_length": c.context,
        "tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", help="a UTF-8 text file of a few megabytes")
    parser.add_argument("folder", type=Path, help="where the snapshot goes")
    parser.add_argument("--family", choices=("ouro", "huginn"), default="ouro", help="(default: ouro)")
    parser.add_argument("--passes", type=int, default=8, help="times the text is read (default: 8)")
    options = parser.parse_args()
    torch.manual_seed(0)
    text, held_out = read_text(options.text)
    tokenizer = train_tokenizer(text, options.family)
    ids, held_out_ids = (torch.tensor(tokenizer.encode(part).ids) for part in (text, held_out))
    if min(len(held_out_ids), len(ids) // BATCH) <= 2 * LENGTH:
        raise ValueError(f"{options.text} is too short: a few megabytes are needed")
    model = new_model(options.family)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters; {len(ids)} tokens to train on, "
          f"{len(held_out_ids)} held out; a loss of {math.log(model.vocab):.2f} is chance", flush=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder.parent / "held_out.txt").write_text(held_out, encoding="utf-8")
    write_settings(type(model), model.config, tokenizer, options.folder)
    train(model, ids, held_out_ids, options.passes)
    tensors = {name: t.to(torch.bfloat16) for name, t in published_tensors(model).items()}
    save_tensors(tensors, options.folder / "model.safetensors")


if __name__ == "__main__":
    sys.exit(run(main))
