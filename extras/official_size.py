"""Write a snapshot of official size, with random weights; load it, and decode: what does it take?

    python -m extras.official_size ouro-1.4b FOLDER         2.7 GiB on disk
    python -m extras.official_size ouro-2.6b FOLDER         5.0 GiB
    python -m extras.official_size huginn-3.5b FOLDER       6.6 GiB

Names, shapes, dtype (bfloat16) and index are the published ones, in shards of about 2 GiB. Tokenizer and settings
are those of the tiny model. A folder that is there already is used as it is.
"""

import argparse
import json
import math
import re
import statistics
import sys
import threading
import time
from pathlib import Path

import torch

from demo import PROMPT, TINY, machine, run, timed
from extras.bench import SHAPES, random_weight
from extras.near_tie import near_tie
from extras.train_tiny import save_shards, write_json
from load_weights import FAMILIES, load
from wfd import autoregressive, wavefront

SHARD = 2 * 2 ** 30                                    # bytes, about


class RandomTensors(dict):
    """name -> tensor, drawn when it is looked up: made of name -> shape."""
    noise = torch.randn(2 ** 24, dtype=torch.bfloat16)

    def __getitem__(self, name: str) -> torch.Tensor:
        return random_weight(self.noise, super().__getitem__(name))


def write_official_size(shape: str, folder: Path) -> None:
    (_, c), tiny = SHAPES[shape], TINY / shape.split("-")[0]
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / file).write_bytes((tiny / file).read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    names = FAMILIES[config["model_type"]][1](c)
    shapes = {name: size for parts in names.values() for name, size in parts}
    config |= {"head_dim": c.head_dim, "intermediate_size": c.ffn, "num_key_value_heads": c.kv_heads, "vocab_size": c.vocab}
    if config["model_type"] == "ouro":
        config |= {"hidden_size": c.width, "num_attention_heads": c.heads, "num_hidden_layers": c.core,
                   "total_ut_steps": c.recurrences, "max_position_embeddings": c.context}
    else:
        config |= {"n_embd": c.width, "n_heads": c.heads, "n_layers": c.prelude + c.core + c.coda,
                   "n_layers_in_prelude": c.prelude, "n_layers_in_recurrent_block": c.core, "n_layers_in_coda": c.coda,
                   "mean_recurrence": c.recurrences, "block_size": c.context, "padded_vocab_size": c.vocab,
                   "init_values": {"std": c.init_std}}
    write_json(folder / "config.json", config)
    size = sum(2 * math.prod(shape) for shape in shapes.values())
    save_shards(RandomTensors(shapes), folder, -(-size // SHARD))


def anonymous_memory() -> int:
    """Bytes of this process that don't come from a file, as mapped weights and libraries do."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def measure(folder: Path, new: int) -> None:
    samples, loaded = [anonymous_memory()], threading.Event()

    def watch() -> None:
        while not loaded.wait(0.005):
            samples.append(anonymous_memory())
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        (model, tokenizer), seconds = timed(load, folder)
    finally:
        loaded.set()
        watcher.join()
    weights, peak = sum(p.nbytes for p in model.parameters()), max(samples) - samples[0]
    print(f"loaded in {seconds:.1f} s; weights {weights / 2 ** 30:.2f} GiB; anonymous memory meanwhile at most "
          f"{peak / weights:.2f} times that", flush=True)

    prompt, tokens = tokenizer.encode(PROMPT), []
    for name, decode in (("plain", autoregressive), ("wavefront", wavefront)):
        times = []
        result, seconds = timed(decode, model, prompt, new, on_call=lambda _: times.append(time.perf_counter()))
        call = statistics.median(after - before for before, after in zip(times, times[1:]))
        print(f"{name}: {len(result.tokens)} tokens in {seconds:.1f} s; {result.calls} block calls of "
              f"{result.rows / result.calls:.1f} rows, {1e3 * call:.0f} ms each with its reading (median)", flush=True)
        tokens.append(result.tokens)
    print(f"identical to plain decoding: {near_tie(model, prompt, *tokens, max_rows=32) or 'yes'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path, help="where the snapshot goes, or is")
    parser.add_argument("--new", type=int, default=16, help="tokens to decode, 2 or more (default: 16)")
    options = parser.parse_args()
    if not options.folder.exists():
        _, seconds = timed(write_official_size, options.shape, options.folder)
        print(f"written in {seconds:.0f} s", flush=True)
    print(f"{options.shape}, random weights, bfloat16 on {machine('cpu')}")
    measure(options.folder, options.new)


if __name__ == "__main__":
    sys.exit(run(main))
