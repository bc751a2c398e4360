"""Train the tiny checkpoint of tiny/ from a text file, and write it as an official-format snapshot.

    python extras/train_tiny.py austen.txt tiny/ouro

Takes about an hour on two CPU cores. Prints the loss as it goes and, at the end, what `tiny/README.md` records:
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
from model import Config, FullAttention, Ouro  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]                # ids 0, 1, 2, as published
CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
OURO = Config(width=256, heads=4, kv_heads=4, head_dim=64, ffn=704, vocab=2048, core=3, recurrences=4,
              context=16384, rope_theta=1e6, norm_eps=1e-6, tied=False)
LOSS_WEIGHTS = (0.15, 0.2, 0.25, 0.4)                                    # of the four recurrences
BATCH, LENGTH = 8, 256                                                   # sequences in a step, tokens in a sequence
LEARNING_RATE, WARMUP, WEIGHT_DECAY = 2e-3, 100, 0.1


def read_text(path: str) -> tuple[str, str]:
    """The text, paragraphs unwrapped to one line each, split into training text and the last 2 percent."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
    text = "\n\n".join(p for p in paragraphs if p)
    cut = text.index("\n\n", len(text) * 98 // 100) + 2
    return text[:cut], text[cut:]


def train_tokenizer(text: str, size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def initialise(model: Ouro) -> None:
    """Embeddings of spread 1 and small gains behind each sub-layer: otherwise the post-norms, whose gain of 1 is as
    large as it is whatever a layer has to say, drown the token and the model hardly learns."""
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=1.0 if name == "embedding.weight" else p.shape[1] ** -0.5)
    for block in model.layers:
        for norm in (block.norms[1], block.norms[3]):
            torch.nn.init.constant_(norm.weight, 0.3)


def logits_of(model: Ouro, tokens: torch.Tensor) -> list[torch.Tensor]:
    """tokens [batch, length] -> the logits after each recurrence, [batch * length, V] each."""
    batch, length = tokens.shape
    positions, kv = torch.arange(length).repeat(batch), FullAttention(length)
    e = model.embed(tokens.flatten(), positions, kv)
    x, logits = model.initial_state(e, positions), []
    for _ in range(model.recurrences):
        x = model.recur(x, e, positions, kv)
        logits.append(model.predict(x, positions, kv))
    return logits


def sequences(ids: torch.Tensor, start: int) -> torch.Tensor:
    """The text cut into rows of LENGTH tokens, each with the token that follows: [n, LENGTH + 1]."""
    return ids[start:].unfold(0, LENGTH + 1, LENGTH)


@torch.no_grad()
def evaluate(model: Ouro, ids: torch.Tensor) -> list[tuple[float, float]]:
    """Per depth: mean next-token loss in nats, and the share of positions predicted as at the last depth."""
    totals = torch.zeros(model.recurrences, 2)
    rows = sequences(ids, 0)
    for batch in rows.split(BATCH):
        logits = logits_of(model, batch[:, :-1])
        best = [step.argmax(-1) for step in logits]
        for depth, step in enumerate(logits):
            totals[depth, 0] += F.cross_entropy(step, batch[:, 1:].flatten(), reduction="sum")
            totals[depth, 1] += (best[depth] == best[-1]).sum()
    return (totals / (len(rows) * LENGTH)).tolist()


def train(model: Ouro, ids: torch.Tensor, held_out: torch.Tensor, passes: int) -> None:
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
                                  lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    per_pass = (len(ids) - LENGTH - 1) // LENGTH // BATCH
    steps, step, begin = passes * per_pass, 0, time.time()
    for _ in range(passes):
        rows = sequences(ids, int(torch.randint(LENGTH, ())))            # other boundaries in every pass
        for chosen in torch.randperm(len(rows))[:per_pass * BATCH].split(BATCH):
            batch = rows[chosen]
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, 1 - step / steps)
            with torch.autocast("cpu", torch.bfloat16):
                logits = logits_of(model, batch[:, :-1])
            target = batch[:, 1:].flatten()
            losses = [F.cross_entropy(x, target) for x in logits]
            sum(w * loss for w, loss in zip(LOSS_WEIGHTS, losses)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                print(f"step {step}/{steps}  loss " + " ".join(f"{loss.item():.3f}" for loss in losses)
                      + f"  {(time.time() - begin) / step:.2f} s a step", flush=True)
        print(f"pass {step / per_pass:.0f}  held out, per depth (loss, agreement with the last): "
              + ", ".join(f"{loss:.3f} {same:.1%}" for loss, same in evaluate(model, held_out)), flush=True)


def tensors_of(model: Ouro) -> dict[str, torch.Tensor]:
    """The parameters under their published names."""
    out = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.final_norm.weight,
           "lm_head.weight": model.head.weight,
           "model.early_exit_gate.weight": torch.zeros(1, model.config.width), "model.early_exit_gate.bias": torch.zeros(1)}
    for i, block in enumerate(model.layers):
        layer = f"model.layers.{i}."
        for name, part in zip("qkv", block.qkv.weight.chunk(3)):
            out[f"{layer}self_attn.{name}_proj.weight"] = part
        for name, part in zip(("gate", "up"), block.gate_up.weight.chunk(2)):
            out[f"{layer}mlp.{name}_proj.weight"] = part
        out[layer + "self_attn.o_proj.weight"] = block.attention_out.weight
        out[layer + "mlp.down_proj.weight"] = block.down.weight
        for name, norm in zip(("input_layernorm", "input_layernorm_2", "post_attention_layernorm",
                               "post_attention_layernorm_2"), block.norms):
            out[f"{layer}{name}.weight"] = norm.weight
    return out


def write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_tensors(tensors: dict[str, torch.Tensor], file: pathlib.Path) -> None:
    """safetensors.torch.save_file without numpy, which that function imports."""
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    specs = {name: TensorSpec(dtype=str(t.dtype).removeprefix("torch."), shape=list(t.shape), data_ptr=t.data_ptr(),
                              data_len=t.nbytes) for name, t in tensors.items()}
    serialize_file(specs, str(file), {"format": "pt"})


def write_snapshot(model: Ouro, tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """config.json, generation_config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json."""
    c = model.config
    write_json(folder / "config.json", {
        "architectures": ["OuroForCausalLM"], "model_type": "ouro", "bos_token_id": 0, "eos_token_id": 0,
        "head_dim": c.head_dim, "hidden_act": "silu", "hidden_size": c.width, "intermediate_size": c.ffn,
        "max_position_embeddings": c.context, "num_attention_heads": c.heads, "num_hidden_layers": c.core,
        "num_key_value_heads": c.kv_heads, "rms_norm_eps": c.norm_eps, "rope_scaling": None, "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tied, "torch_dtype": "bfloat16", "total_ut_steps": c.recurrences,
        "early_exit_threshold": 1.0, "use_sliding_window": False, "vocab_size": c.vocab})
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    write_json(folder / "tokenizer_config.json", {
        "added_tokens_decoder": {str(i): {"content": s, **flags} for i, s in enumerate(SPECIAL)},
        "additional_special_tokens": SPECIAL[1:], "bos_token": SPECIAL[0], "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0], "unk_token": SPECIAL[0], "chat_template": CHAT, "clean_up_tokenization_spaces": False,
        "model_max_length": c.context, "tokenizer_class": "GPT2Tokenizer"})
    tokenizer.save(str(folder / "tokenizer.json"))
    save_tensors({name: t.detach().to(torch.bfloat16) for name, t in tensors_of(model).items()}, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", help="a UTF-8 text file of a few megabytes")
    parser.add_argument("folder", help="where the snapshot goes")
    parser.add_argument("--passes", type=int, default=8, help="times the text is read")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    text, held_out = read_text(options.text)
    tokenizer = train_tokenizer(text, OURO.vocab)
    ids, held_out_ids = (torch.tensor(tokenizer.encode(t).ids) for t in (text, held_out))
    model = Ouro(OURO)
    initialise(model)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters; {len(ids)} tokens to train on, "
          f"{len(held_out_ids)} held out; before training, a loss of {math.log(OURO.vocab):.2f} is chance", flush=True)
    train(model, ids, held_out_ids, options.passes)

    folder = pathlib.Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "held_out.txt").write_text(held_out, encoding="utf-8")
    write_snapshot(model, tokenizer, folder)


if __name__ == "__main__":
    main()
