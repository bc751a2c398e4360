"""Train a tiny checkpoint from a text file, and write it as an official-format snapshot.

    python extras/train_tiny.py austen.txt tiny/ouro
    python extras/train_tiny.py austen.txt tiny/huginn --family huginn

Takes the better part of an hour on two CPU cores. Prints the loss as it goes and, at the end, what `tiny/README.md` records:
validation loss at every depth, and how often each depth's prediction is already that of the last.

The text of the last pages is held out, and written to tiny/held_out.txt: prompts and losses come from there.
"""

import argparse
import json
import math
import pathlib
import re
import sys
import time

import torch
import torch.nn.functional as F
from safetensors import TensorSpec, serialize_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from load_weights import FAMILIES  # noqa: E402
from model import Config, FullAttention, Huginn, LoopedLM, Ouro  # noqa: E402

OURO = Config(width=256, heads=4, kv_heads=4, head_dim=64, ffn=704, vocab=2048, core=3, recurrences=4,
              context=16384, rope_theta=1e6, norm_eps=1e-6, tied=False)
OURO_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]           # the first ids, as published
OURO_CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
LOSS_WEIGHTS = (0.15, 0.2, 0.25, 0.4)                                    # of the four recurrences

HUGINN = Config(width=256, heads=4, kv_heads=4, head_dim=64, ffn=704, vocab=2048, core=2, recurrences=32, prelude=1, coda=1,
                context=16384, rope_theta=5e4, norm_eps=1e-6, tied=True, qk_bias=True, init_std=(2 / (5 * 256)) ** 0.5)
HUGINN_SPECIAL = [f"<|{name}|>" for name in (                            # the last ids, as published
    "begin_text end_text begin_header end_header end_turn pad fim_prefix fim_middle fim_suffix fim_pad ... del c_0 c_1 c_2 "
    "c_3 c_4 c_5 c_6 c_7 c_8 c_9 ? & ! - + interrupt >>- -<< ->> <<-").split()]
HUGINN_CHAT = ("{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|begin_header|>"
               "{% if m['role'] in ['assistant', 'Huginn'] %}Huginn{% else %}{{ m['role'] }}{% endif %}<|end_header|>\n\n"
               "{{ m['content'].strip() }}<|end_turn|>{% endfor %}"
               "{% if add_generation_prompt %}<|begin_header|>Huginn<|end_header|>\n\n{% else %}<|end_text|>{% endif %}")
MODEL_TYPES = {Ouro: "ouro", Huginn: "huginn_raven"}

MEAN_RECURRENCE, BACKPROP = 8, 4                                         # drawn anew in every step; differentiated at the end

BATCH, LENGTH = 8, 256                                                   # sequences in a step, tokens in a sequence
LEARNING_RATE, WARMUP, WEIGHT_DECAY = 2e-3, 100, 0.1


def read_text(path: str) -> tuple[str, str]:
    """The text, paragraphs unwrapped to one line each, split into training text and the last 2 percent."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
    text = "\n\n".join(p for p in paragraphs if p)
    cut = text.index("\n\n", len(text) * 98 // 100) + 2
    return text[:cut], text[cut:]


def train_tokenizer(text: str, family: str) -> Tokenizer:
    special, size = (OURO_SPECIAL, OURO.vocab) if family == "ouro" else ([], HUGINN.vocab - len(HUGINN_SPECIAL))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if family == "huginn":
        tokenizer.add_special_tokens(HUGINN_SPECIAL)
    return tokenizer


def new_model(family: str) -> LoopedLM:
    """Fresh weights. What matters for an Ouro of this size: embeddings of spread 1 and small gains behind each sub-layer.
    Otherwise the post-norms, whose gain of 1 is as large whatever a layer has to say, drown the token."""
    model = Ouro(OURO) if family == "ouro" else Huginn(HUGINN)
    for name, p in model.named_parameters():
        if name == "embedding.weight":
            torch.nn.init.normal_(p, std=1.0 if family == "ouro" else HUGINN.init_std)
        elif name.endswith("qk_bias"):
            torch.nn.init.zeros_(p)
        elif p.dim() == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    for block in model.layers if family == "ouro" else ():
        for norm in (block.norms[1], block.norms[3]):
            torch.nn.init.constant_(norm.weight, 0.3)
    return model


def begin(model: LoopedLM, tokens: torch.Tensor):
    """tokens [batch, length] -> the rows at depth 0: what embed gives, the states, the positions, their attention."""
    batch, length = tokens.shape
    positions, kv = torch.arange(length).repeat(batch), FullAttention(length)
    e = model.embed(tokens.flatten(), positions, kv)
    if isinstance(model, Huginn):                                        # other states in every step
        x, sigma = torch.empty_like(e, dtype=torch.float32), model.config.init_std
        x = torch.nn.init.trunc_normal_(x, std=sigma, a=-3 * sigma, b=3 * sigma) * model.config.width ** 0.5
    else:
        x = model.initial_state(e, positions)
    return e, x, positions, kv


def training_loss(model: LoopedLM, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Ouro: the loss after every recurrence, weighted. Huginn: the loss after a random number of them."""
    e, x, positions, kv = begin(model, tokens)
    if isinstance(model, Ouro):
        loss = 0.0
        for weight in LOSS_WEIGHTS:
            x = model.recur(x, e, positions, kv)
            loss = loss + weight * F.cross_entropy(model.predict(x, positions, kv), target)
        return loss
    spread = 0.5                                                         # log-normal Poisson, as published
    rate = torch.exp(torch.randn(()) * spread + math.log(MEAN_RECURRENCE - 1) - spread ** 2 / 2)
    steps = 1 + int(torch.poisson(rate))
    with torch.no_grad():
        for _ in range(steps - BACKPROP):
            x = model.recur(x, e, positions, kv)
    for _ in range(min(steps, BACKPROP)):
        x = model.recur(x, e, positions, kv)
    return F.cross_entropy(model.predict(x, positions, kv), target)


def sequences(ids: torch.Tensor, start: int) -> torch.Tensor:
    """The text cut into rows of LENGTH tokens, each with the token that follows: [n, LENGTH + 1]."""
    return ids[start:].unfold(0, LENGTH + 1, LENGTH)


@torch.no_grad()
def evaluate(model: LoopedLM, ids: torch.Tensor) -> str:
    """Per depth: mean next-token loss in nats, and the share of positions predicted as at the last depth."""
    depths = [k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if k <= model.recurrences]
    losses, best = {k: 0.0 for k in depths}, {k: [] for k in depths}
    rows = sequences(ids, 0)
    for batch in rows.split(BATCH):
        e, x, positions, kv = begin(model, batch[:, :-1])
        for k in range(1, model.recurrences + 1):
            x = model.recur(x, e, positions, kv)
            if k in depths:
                logits = model.predict(x, positions, kv)
                losses[k] += F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item() / (len(rows) * LENGTH)
                best[k].append(logits.argmax(-1))
    last = torch.cat(best[model.recurrences])
    return ", ".join(f"{k}: {losses[k]:.3f} {(torch.cat(best[k]) == last).float().mean():.1%}" for k in depths)


def train(model: LoopedLM, ids: torch.Tensor, held_out: torch.Tensor, passes: int) -> None:
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
                                  lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    per_pass = (len(ids) - LENGTH - 1) // LENGTH // BATCH
    steps, step, start, mean = passes * per_pass, 0, time.time(), None
    for _ in range(passes):
        rows = sequences(ids, int(torch.randint(LENGTH, ())))            # other boundaries in every pass
        for chosen in torch.randperm(len(rows))[:per_pass * BATCH].split(BATCH):
            batch = rows[chosen]
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
                print(f"step {step}/{steps}  loss {mean:.3f}  {(time.time() - start) / step:.2f} s a step", flush=True)
        print(f"pass {step / per_pass:.0f}  held out, depth: loss, agreement with the last:  {evaluate(model, held_out)}", flush=True)


def published_tensors(model: LoopedLM) -> dict[str, torch.Tensor]:
    """The parameters under their published names, in their published pieces."""
    names, out = FAMILIES[MODEL_TYPES[type(model)]][2](model.config), {}
    for ours, parameter in model.named_parameters():
        sizes = [math.prod(shape) for _, shape in names[ours]]
        for (theirs, shape), piece in zip(names[ours], parameter.detach().flatten().split(sizes)):
            out[theirs] = piece.view(shape)
    if isinstance(model, Ouro):                                          # published, never used: full depth is full depth
        out["model.early_exit_gate.weight"], out["model.early_exit_gate.bias"] = torch.zeros(1, model.config.width), torch.zeros(1)
    return out


def save_tensors(tensors: dict[str, torch.Tensor], file: pathlib.Path) -> None:
    """safetensors.torch.save_file without numpy, which that function imports."""
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    specs = {name: TensorSpec(dtype=str(t.dtype).removeprefix("torch."), shape=list(t.shape), data_ptr=t.data_ptr(),
                              data_len=t.nbytes) for name, t in tensors.items()}
    serialize_file(specs, str(file), {"format": "pt"})


def save_shards(tensors: dict[str, torch.Tensor], folder: pathlib.Path, number: int) -> None:
    """The tensors in so many files, taking turns, with their index."""
    weight_map = {name: f"model-{i % number + 1:05}-of-{number:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_tensors({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_settings(model_class: type[LoopedLM], c: Config, tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """config.json, generation_config.json, tokenizer.json, tokenizer_config.json."""
    id_of = tokenizer.token_to_id
    if model_class is Ouro:
        special, chat, roles = OURO_SPECIAL, OURO_CHAT, dict.fromkeys(("bos", "eos", "pad", "unk"), 0)
        config = {
            "architectures": ["OuroForCausalLM"], "model_type": "ouro", "bos_token_id": 0, "eos_token_id": 0,
            "head_dim": c.head_dim, "hidden_act": "silu", "hidden_size": c.width, "intermediate_size": c.ffn,
            "max_position_embeddings": c.context, "num_attention_heads": c.heads, "num_hidden_layers": c.core,
            "num_key_value_heads": c.kv_heads, "rms_norm_eps": c.norm_eps, "rope_scaling": None, "rope_theta": c.rope_theta,
            "tie_word_embeddings": c.tied, "torch_dtype": "bfloat16", "total_ut_steps": c.recurrences,
            "early_exit_threshold": 1.0, "use_sliding_window": False, "vocab_size": c.vocab}
        generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    else:
        special, chat, roles = HUGINN_SPECIAL, HUGINN_CHAT, {"bos": 0, "eos": 1, "pad": 5}
        config = {
            "architectures": ["RavenForCausalLM"], "model_type": "huginn_raven", "bias": False, "block_size": c.context,
            "head_dim": c.head_dim, "init_values": {"std": c.init_std}, "injection_type": "linear",
            "intermediate_size": c.ffn, "mean_recurrence": c.recurrences, "n_embd": c.width, "n_heads": c.heads,
            "n_layers": c.prelude + c.core + c.coda, "n_layers_in_coda": c.coda, "n_layers_in_prelude": c.prelude,
            "n_layers_in_recurrent_block": c.core, "nonlin_name": "SiLU", "norm_eps": c.norm_eps,
            "num_key_value_heads": c.kv_heads, "padded_vocab_size": c.vocab, "qk_bias": True, "rope_base": c.rope_theta,
            "test_time_noise": 0, "tie_embeddings": c.tied, "torch_dtype": "bfloat16", "vocab_size": c.vocab}
        generation = {"bos_token_id": id_of(special[0]), "eos_token_id": [id_of(special[1]), id_of(special[4])],
                      "pad_token_id": id_of(special[5])}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    write_json(folder / "tokenizer_config.json", {
        "added_tokens_decoder": {str(id_of(word)): {"content": word, **flags} for word in special},
        **{f"{role}_token": special[i] for role, i in roles.items()}, "chat_template": chat,
        "clean_up_tokenization_spaces": False, "model_max_length": c.context, "tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", help="a UTF-8 text file of a few megabytes")
    parser.add_argument("folder", help="where the snapshot goes")
    parser.add_argument("--family", choices=("ouro", "huginn"), default="ouro")
    parser.add_argument("--passes", type=int, default=8, help="times the text is read")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    text, held_out = read_text(options.text)
    tokenizer = train_tokenizer(text, options.family)
    ids, held_out_ids = (torch.tensor(tokenizer.encode(t).ids) for t in (text, held_out))
    model = new_model(options.family)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters; {len(ids)} tokens to train on, "
          f"{len(held_out_ids)} held out; before training, a loss of {math.log(model.vocab):.2f} is chance", flush=True)
    train(model, ids, held_out_ids, options.passes)

    folder = pathlib.Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "held_out.txt").write_text(held_out, encoding="utf-8")
    write_settings(type(model), model.config, tokenizer, folder)
    save_tensors({name: t.to(torch.bfloat16) for name, t in published_tensors(model).items()}, folder / "model.safetensors")


if __name__ == "__main__":
    main()
