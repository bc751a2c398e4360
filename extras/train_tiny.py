"""Train a checkpoint like those in tiny/ from a text file, and write it as an official-format snapshot.

    python -m extras.train_tiny austen.txt tiny/ouro
    python -m extras.train_tiny austen.txt tiny/huginn --family huginn --passes 6

Takes the better part of an hour on two CPU cores. Prints the loss as it goes. After every pass it prints what
tiny/README.md records: the loss on held-out text at every depth, and how often a depth predicts what the last does.
The last two percent of the text are held out, and written to held_out.txt beside the snapshot.

Sizes, special tokens and chat template are those of tiny/ouro or tiny/huginn.
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

from demo import TINY, run
from load_weights import FAMILIES, Settings, read_config
from model import Config, FullAttention, Huginn, LoopedLM, Ouro

BATCH, LENGTH = 8, 256                                 # sequences in a step, tokens in each
LEARNING_RATE, WARMUP, WEIGHT_DECAY = 2e-3, 100, 0.1
LOSS_WEIGHTS = (0.15, 0.2, 0.25, 0.4)                  # Ouro: of its four recurrences
MEAN_RECURRENCE, SPREAD = 8, 0.5                       # Huginn: the number is drawn anew in every step,
BACKPROP = 4                                           # and the gradient flows through the last ones


# 1. Text, tokenizer, model


def read_text(path: str) -> tuple[str, str]:
    """The text, paragraphs unwrapped to one line each, split into training text and the last two percent."""
    paragraphs = re.split(r"\n\s*\n", Path(path).read_text(encoding="utf-8"))
    text = "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())
    cut = text.find("\n\n", len(text) * 98 // 100) + 2
    if len(text) < 10 ** 6 or cut < 2:
        raise ValueError(f"{path} is too short: a few megabytes are needed, with blank lines between paragraphs")
    return text[:cut], text[cut:]


def train_tokenizer(text: str, config: Config, settings: dict) -> Tokenizer:
    """Special tokens have the first ids or the last ones, as in tokenizer_config.json, `settings`."""
    listed = settings["added_tokens_decoder"]
    special = [token["content"] for token in listed.values()]
    first, last = (special, []) if "0" in listed else ([], special)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=config.vocab - len(last), special_tokens=first,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens(last)
    return tokenizer


def initialise(model: LoopedLM) -> None:
    """Fresh weights. An Ouro of this size needs embeddings of spread 1, and small gains after each sub-layer.

    Otherwise the post-norms, whose gain of 1 is as large whatever a layer has to say, drown the token.
    """
    ouro = isinstance(model, Ouro)
    for name, p in model.named_parameters():
        if name == "embedding.weight":
            torch.nn.init.normal_(p, std=1.0 if ouro else model.config.init_std)
        elif p.dim() == 2 and not name.endswith("qk_bias"):
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
        elif ouro and name.endswith(("norms.1.weight", "norms.3.weight")):
            torch.nn.init.constant_(p, 0.3)


# 2. Training


def begin(model: LoopedLM, tokens: torch.Tensor):
    """tokens [batch, length] -> states at depth 0, what embed gives, positions, attention, of all tokens as rows."""
    batch, length = tokens.shape
    positions, kv = torch.arange(length).repeat(batch), FullAttention(length)
    e = model.embed(tokens.flatten(), positions, kv)
    if isinstance(model, Ouro):
        return model.initial_state(e, positions), e, positions, kv
    x, sigma = torch.empty_like(e, dtype=torch.float32), model.config.init_std           # other states in every step
    x = torch.nn.init.trunc_normal_(x, std=sigma, a=-3 * sigma, b=3 * sigma) * model.config.width ** 0.5
    return x, e, positions, kv


def training_loss(model: LoopedLM, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Ouro: the loss after every recurrence, weighted. Huginn: the loss after a random number of them."""
    x, e, positions, kv = begin(model, tokens)
    if isinstance(model, Ouro):
        loss = 0.0
        for weight in LOSS_WEIGHTS:
            x = model.recur(x, e, positions, kv)
            loss = loss + weight * F.cross_entropy(model.predict(x, positions, kv), target)
        return loss
    rate = torch.exp(torch.randn(()) * SPREAD + math.log(MEAN_RECURRENCE - 1) - SPREAD ** 2 / 2)
    for left in range(1 + int(torch.poisson(rate)), 0, -1):                  # log-normal Poisson, as published
        with torch.set_grad_enabled(left <= BACKPROP):
            x = model.recur(x, e, positions, kv)
    return F.cross_entropy(model.predict(x, positions, kv), target)


def sequences(ids: torch.Tensor, start: int) -> torch.Tensor:
    """The text cut into rows of LENGTH tokens, each with the token that follows: [n, LENGTH + 1]."""
    return ids[start:].unfold(0, LENGTH + 1, LENGTH)


@torch.no_grad()
def evaluate(model: LoopedLM, ids: torch.Tensor) -> str:
    """Per depth: mean next-token loss in nats, and the share of positions predicted as at the last depth."""
    depths = [k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if k <= model.recurrences]
    losses, best = {k: [] for k in depths}, {k: [] for k in depths}
    for batch in sequences(ids, 0).split(BATCH):
        x, e, positions, kv = begin(model, batch[:, :-1])
        for k in range(1, model.recurrences + 1):
            x = model.recur(x, e, positions, kv)
            if k in depths:
                logits = model.predict(x, positions, kv)
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
                pace = (time.time() - start) / step
                print(f"step {step}/{steps}, loss {mean:.3f}, {pace:.2f} s a step", flush=True)
        print(f"pass {number}; depth: loss, agreement with the last: {evaluate(model, held_out)}", flush=True)


# 3. The snapshot


def unneeded_shapes(c: Config, family: str) -> dict[str, list[int]]:
    """Tensors that are published and never used."""
    if family == "ouro":
        return {"model.early_exit_gate.weight": [1, c.width], "model.early_exit_gate.bias": [1]}
    return {"freqs_cis": [1, c.context, 1, c.head_dim // 2, 2]}


def published_tensors(model: LoopedLM) -> dict[str, torch.Tensor]:
    """The parameters under their published names, in their published pieces."""
    [names] = [names for model_class, names in FAMILIES.values() if model_class is type(model)]
    wanted, out = names(model.config), {}
    for ours, parameter in model.named_parameters():
        pieces = parameter.detach().flatten().split([math.prod(shape) for _, shape in wanted[ours]])
        out |= {theirs: piece.view(shape) for (theirs, shape), piece in zip(wanted[ours], pieces)}
    return out


def save_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """safetensors.torch.save_file without numpy, which that function imports."""
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    specs = {name: TensorSpec(dtype=str(t.dtype).removeprefix("torch."), shape=list(t.shape),
                              data_ptr=t.data_ptr(), data_len=t.nbytes) for name, t in tensors.items()}
    serialize_file(specs, str(file), {"format": "pt"})


def save_shards(tensors: Mapping[str, torch.Tensor], folder: Path, number: int) -> None:
    """The tensors, in their order, in so many files, with the index."""
    weight_map = {name: f"model-{i * number // len(tensors) + 1:05}-of-{number:05}.safetensors"
                  for i, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_tensors({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", help="a UTF-8 text file of a few megabytes")
    parser.add_argument("folder", type=Path, help="where the snapshot goes")
    parser.add_argument("--family", choices=("ouro", "huginn"), default="ouro", help="(default: ouro)")
    parser.add_argument("--passes", type=int, default=8, help="times the text is read (default: 8)")
    options = parser.parse_args()
    torch.manual_seed(0)
    text, held_out = read_text(options.text)
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    settings = {name: json.loads((TINY / options.family / name).read_text()) for name in names}
    config = read_config(Settings(TINY / options.family / "config.json"))
    tokenizer = train_tokenizer(text, config, settings["tokenizer_config.json"])
    ids, held_out_ids = (torch.tensor(tokenizer.encode(part).ids) for part in (text, held_out))
    model = Ouro(config) if options.family == "ouro" else Huginn(config)
    initialise(model)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters; {len(ids)} tokens to train on, "
          f"{len(held_out_ids)} held out; a loss of {math.log(model.vocab):.2f} is chance", flush=True)
    train(model, ids, held_out_ids, options.passes)

    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder.parent / "held_out.txt").write_text(held_out, encoding="utf-8")
    tokenizer.save(str(options.folder / "tokenizer.json"))
    for name in names:
        write_json(options.folder / name, settings[name])
    tensors = published_tensors(model)
    tensors |= {name: torch.zeros(shape) for name, shape in unneeded_shapes(config, "ouro").items()
                if options.family == "ouro"}
    tensors = {name: t.to(torch.bfloat16) for name, t in tensors.items()}
    save_tensors(tensors, options.folder / "model.safetensors")


if __name__ == "__main__":
    sys.exit(run(main))
