"""What sharing keys and values between recurrences costs in quality, and what it saves in time and memory.

    python extras/sharing.py loss                               both tiny models: loss on held-out text
    python extras/sharing.py speed                              tiny/huginn: time per token against the length of the text
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import demo  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from load_weights import load  # noqa: E402
from wfd import Cache, KVShare, Wavefront, autoregressive, wavefront  # noqa: E402


class Dictation(Wavefront):
    """Writes the text of a demo.Dictated.

    The right token is the draft at depth 1, so the wavefront has as many rows as the window allows.
    """
    keep_first: bool

    def prefill(self):
        super().prefill()
        if self.keep_first:
            replace_by_first(self.cache)


def replace_by_first(cache: Cache) -> None:
    """From now on, finished positions leave the first recurrence of each class in the shared planes, not the deepest."""
    finish, core = cache.finish, cache.core

    def finish_with_first(cell):
        finish(cell)
        core.far[..., cell.position, :] = core.near[:, :, :core.slots, :, cell.column]
    cache.finish = finish_with_first


@torch.inference_mode()
def loss(model, texts: list[list[int]], share: KVShare | None, keep_first: bool = False) -> float:
    """Mean next-token loss in nats of texts decoded one token at a time, but for the first, which is the prompt."""
    total = 0.0
    for text in texts:
        wave = Dictation(model, text[:1], len(text) - 1, {1: 1}, max_rows=32, room=32, kv_share=share, sampling=demo.Dictated(text))
        wave.keep_first = keep_first
        losses = []                                    # behind the prefill
        wave.run(lambda wave: losses.extend(F.cross_entropy(row.logits, torch.tensor(text[row.position + 1])).item()
                                            for row in wave.rows if row.depth == model.recurrences))
        total += statistics.mean(losses)
    return total / len(texts)


def show_loss(options: argparse.Namespace) -> None:
    print(f"next-token loss in nats, {options.texts} held-out texts of {options.length} tokens, decoded one token at a time, float32; "
          f"window {options.window}\n")
    print(f"{'':14}{'full':>8}" + "".join(f"{f'{slots} of T':>9}" for slots in (4, 2, 1)) + "   first-step folding: "
          + "".join(f"{f'{slots} of T':>9}" for slots in (4, 2, 1)))
    for name in ("ouro", "huginn"):
        model, tokenizer = load(demo.TINY / name, dtype=torch.float32)
        texts = demo.held_out_prompts(tokenizer, options.texts, options.length)
        print(f"{f'tiny/{name}':14}{loss(model, texts, None):8.4f}", end="", flush=True)
        for keep_first in (False, True):
            print(" " * 23 * keep_first + "".join(
                f"{loss(model, texts, KVShare(slots, options.window), keep_first):9.4f}" for slots in (4, 2, 1)), end="", flush=True)
        print()


def time_decoding(decode, *args, **options) -> tuple[float, float, int]:
    """Seconds per token after the prefill, seconds of a block call with nearly the most rows, and cache bytes."""
    calls = []                                         # (time, rows, tokens)
    result = decode(*args, **options, on_call=lambda wave: calls.append((time.perf_counter(), len(wave.rows), len(wave.tokens))))
    (begin, _, first), (end, _, last) = calls[0], calls[-1]
    widest = max(rows for _, rows, _ in calls)
    full = [after[0] - before[0] for before, after in zip(calls, calls[1:]) if after[1] >= 0.8 * widest]
    return (end - begin) / (last - first), statistics.median(full), result.stats["cache_bytes"]


def show_speed(options: argparse.Namespace) -> None:
    model, tokenizer = load(options.model, dtype=getattr(torch, options.dtype))
    text = tokenizer.encode((demo.TINY / "held_out.txt").read_text(encoding="utf-8"))
    share = KVShare(1, options.window)
    print(f"{os.path.relpath(options.model)}, {model.recurrences} recurrences, {options.dtype} on {demo.machine('cpu')}; sharing: 1 slot, window {share.window}\n")
    print(f"{'':9}{'plain, ms per token':>22}{'wavefront, ms per token':>28}{'full wavefront, ms per call':>34}{'cache, MiB':>20}")
    print(f"{'context':9}" + f"{'full':>12}{'shared':>10}" + f"{'full':>14}{'shared':>14}" + f"{'full':>14}{'shared':>10}{'':>10}" + f"{'full':>10}{'shared':>10}")
    for length in options.context:
        prompt, cells = text[:length - options.new], []
        for kv_share in (None, share):
            cells.append(time_decoding(autoregressive, model, prompt, max(2, options.new // 8), kv_share=kv_share)[:1]
                         + time_decoding(wavefront, model, prompt, options.new, kv_share=kv_share))
        (plain, per_token, call, size), (plain2, per_token2, call2, size2) = cells
        print(f"{length:<9}{plain * 1e3:12.2f}{plain2 * 1e3:10.2f}{per_token * 1e3:14.2f}{per_token2 * 1e3:7.2f}"
              f"{f'{per_token / per_token2:.2f}x':>7}{call * 1e3:14.2f}{call2 * 1e3:10.2f}{f'{call / call2:.2f}x':>10}"
              f"{size / 2 ** 20:10.1f}{size2 / 2 ** 20:10.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("loss", "speed"))
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--texts", type=int, default=8, help="for loss (default: 8)")
    parser.add_argument("--length", type=int, default=256, help="for loss: tokens in a text (default: 256)")
    parser.add_argument("--model", default=demo.TINY / "huginn", help="for speed (default: tiny/huginn)")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="for speed")
    parser.add_argument("--new", type=int, default=64, help="for speed: tokens decoded, the last ones of the context (default: 64)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="for speed")
    options = parser.parse_args()
    (show_loss if options.what == "loss" else show_speed)(options)


if __name__ == "__main__":
    main()
