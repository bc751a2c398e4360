"""Write a snapshot of official size, with random weights; load it, and decode: what does it take?

    python extras/official_size.py ouro-1.4b /somewhere/ouro-1.4b         2.7 GiB on disk
    python extras/official_size.py ouro-2.6b /somewhere/ouro-2.6b         5.0 GiB
    python extras/official_size.py huginn-3.5b /somewhere/huginn-3.5b     6.6 GiB

Names, shapes, dtype (bfloat16), shards and index are the published ones; the tokenizer is that of the tiny model. A folder
that is there already is used as it is.
"""

import argparse
import math
import os
import re
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import demo  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from extras.train_tiny import MODEL_TYPES, save_tensors, write_json, write_settings  # noqa: E402
from load_weights import FAMILIES, load, parameters  # noqa: E402
from wfd import autoregressive, wavefront  # noqa: E402

SHARD = 2 * 2 ** 30                                    # bytes, about


def write_official_size(shape: str, folder: Path) -> None:
    model_class, config = demo.SHAPES[shape]
    family = MODEL_TYPES[model_class]
    folder.mkdir(parents=True)
    write_settings(model_class, config, Tokenizer.from_file(str(demo.TINY / shape.split("-")[0] / "tokenizer.json")), folder)
    shapes = {name: size for parts in parameters(config, FAMILIES[family][2](config)).values() for name, size in parts}
    shapes |= {"model.early_exit_gate.weight": [1, config.width], "model.early_exit_gate.bias": [1]} if family == "ouro" else {
        "freqs_cis": [1, config.context, 1, config.head_dim // 2, 2]}
    noise, shards, size = torch.randn(2 ** 24, dtype=torch.bfloat16), [[]], 0
    for name, dimensions in shapes.items():
        if size > SHARD:
            shards, size = [*shards, []], 0
        shards[-1].append(name)
        size += 2 * math.prod(dimensions)
    weight_map = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_tensors({name: demo.random_weight(noise, shapes[name]) for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum(2 * math.prod(dimensions) for dimensions in shapes.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def anonymous_memory() -> int:
    """Bytes of this process that no file stands behind: neither mapped weights nor libraries."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def measure(folder: Path, new: int) -> None:
    before, peak, loaded = anonymous_memory(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not loaded.wait(0.005):
            peak = max(peak, anonymous_memory())
    sampler = threading.Thread(target=sample)
    sampler.start()
    begin = time.perf_counter()
    model, tokenizer = load(folder)
    seconds = time.perf_counter() - begin
    loaded.set()
    sampler.join()
    weights = sum(p.nbytes for p in {p.data_ptr(): p for p in model.parameters()}.values())
    print(f"loaded in {seconds:.1f} s; weights {weights / 2 ** 30:.2f} GiB; anonymous memory {before / 2 ** 30:.2f} GiB before, at most "
          f"{peak / 2 ** 30:.2f} GiB meanwhile ({peak / weights:.3f} of the weights)", flush=True)
    prompt = tokenizer.encode(demo.PROMPT)
    for name, decode in (("plain", autoregressive), ("wavefront", wavefront)):
        times = []
        result, spent = demo.timed(decode, model, prompt, new, on_call=lambda wave: times.append((time.perf_counter(), len(wave.rows))))
        calls = [after[0] - before[0] for before, after in zip(times, times[1:])]
        print(f"{name}: {len(result.tokens)} tokens in {spent:.1f} s, {result.calls} block calls of {result.rows / result.calls:.1f} rows, "
              f"{1e3 * statistics.median(calls):.0f} ms each with its reading (median)", flush=True)
        plain = result.tokens if name == "plain" else plain
    part = demo.difference(partial(wavefront, model), partial(autoregressive, model), prompt, new, result.tokens, plain)
    print(f"identical to plain decoding: {f'no, first different at {part}' if part else 'yes'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=demo.SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--new", type=int, default=16, help="tokens to decode (default: 16)")
    options = parser.parse_args()
    if not options.folder.exists():
        begin = time.perf_counter()
        write_official_size(options.shape, options.folder)
        print(f"written in {time.perf_counter() - begin:.0f} s", flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv])                # a fresh process has a memory of its own
    print(f"{options.shape}, random weights, bfloat16 on {demo.machine('cpu')}")
    measure(options.folder, options.new)


if __name__ == "__main__":
    main()
