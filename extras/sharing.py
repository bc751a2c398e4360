"""What sharing keys and values between recurrences costs in quality, or saves in time and memory.

    python -m extras.sharing loss          both tiny models: loss on held-out text
    python -m extras.sharing speed         tiny/huginn: time per token against the length of the text
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F

from demo import TINY, machine, run
from extras.bench import held_out_prompts
from load_weights import load
from wfd import KVShare, Wavefront, autoregressive, wavefront

SLOTS = (4, 2, 1)


class Dictation(Wavefront):
    """Writes a given text, whatever the model predicts, and keeps the losses of its predictions at depth T.

    The right token is the draft at depth 1, so the wavefront has as many rows as the window allows.
    """

    def best(self, cells, logits):
        right = [self.text[cell.position + 1] for cell in cells]
        losses = F.cross_entropy(logits, torch.tensor(right), reduction="none").tolist()
        self.losses += [loss for cell, loss in zip(cells, losses) if cell.depth == self.model.recurrences]
        return [[token] for token in right]


class FirstRecurrence(Dictation):
    """Far positions keep the first recurrence of each plane, not the last."""

    def commit(self, cell, token):
        super().commit(cell, token)
        if cell.column >= 0:                           # the prompt has none
            for near, far in zip(self.cache.near, self.cache.far):
                far[:, :, :, cell.position] = near[:, :far.shape[1], :, cell.column]


@torch.inference_mode()
def loss(decoder: type[Dictation], model, texts: list[list[int]], share: KVShare | None) -> float:
    """Mean next-token loss in nats of texts decoded one token at a time. The first token is the prompt."""
    losses = []
    for text in texts:
        dictation = decoder(model, text[:1], len(text) - 1, {1: 1}, 32, kv_share=share)
        dictation.text, dictation.losses = text, []
        dictation.run()
        losses += dictation.losses[1:]                 # the first is that of the prompt's own pass
    return statistics.mean(losses)


def show_loss(options: argparse.Namespace) -> None:
    print(f"next-token loss in nats; {options.texts} held-out texts of {options.length} tokens, "
          f"decoded one token at a time; float32, window {options.window}\n")
    print(f"{'':12}{'kept':>8}" + f"{'full':>10}" + "".join(f"{f'{slots} of T':>10}" for slots in SLOTS))
    for name in ("ouro", "huginn"):
        model, tokenizer = load(TINY / name, dtype=torch.float32)
        texts = held_out_prompts(tokenizer, options.texts, options.length)
        for kept, decoder in (("last", Dictation), ("first", FirstRecurrence)):
            print(f"{f'tiny/{name}':12}{kept:>8}", end="")
            for share in (None, *(KVShare(slots, options.window) for slots in SLOTS)):
                print(f"{loss(decoder, model, texts, share):10.4f}", end="", flush=True)
            print()


def measure(decode, *args, **options) -> tuple[float, float, int]:
    """Seconds per token after the prompt, seconds of a block call with nearly the most rows, bytes of cache."""
    times, rows, tokens = [], [], []                   # at the end of each call

    def on_call(running):
        times.append(time.perf_counter())
        rows.append(len(running.rows))
        tokens.append(len(running.result.tokens))
    result = decode(*args, **options, on_call=on_call)
    full = [times[i] - times[i - 1] for i in range(1, len(times)) if rows[i] >= 0.8 * max(rows)]
    return (times[-1] - times[0]) / (tokens[-1] - tokens[0]), statistics.median(full), result.cache_bytes


def show_speed(options: argparse.Namespace) -> None:
    model, tokenizer = load(TINY / "huginn", dtype=torch.float32)
    text = tokenizer.encode((TINY / "held_out.txt").read_text(encoding="utf-8"))
    print(f"tiny/huginn, float32 on {machine('cpu')}; sharing: 1 slot, window {options.window}\n")
    print(f"{'context':8}{'cache':8}{'MiB':>8}{'plain: ms/token':>18}{'wavefront: ms/token':>22}{'ms/full call':>15}")
    new = 64
    for length in options.context:
        prompt = text[:length - new]
        for name, share in (("full", None), ("shared", KVShare(1, options.window))):
            plain, _, _ = measure(autoregressive, model, prompt, new // 8, kv_share=share)
            token, call, size = measure(wavefront, model, prompt, new, kv_share=share)
            print(f"{length:<8}{name:8}{size / 2 ** 20:8.1f}{1e3 * plain:18.2f}{1e3 * token:22.2f}{1e3 * call:15.2f}",
                  flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("loss", "speed"))
    parser.add_argument("--window", type=int, default=32, help="positions with all recurrences (default: 32)")
    parser.add_argument("--texts", type=int, default=8, help="for loss (default: 8)")
    parser.add_argument("--length", type=int, default=256, help="for loss: tokens in a text (default: 256)")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192],
                        help="for speed: lengths of the text, more than 64 (default: 512 1024 2048 4096 8192)")
    options = parser.parse_args()
    (show_loss if options.what == "loss" else show_speed)(options)


if __name__ == "__main__":
    sys.exit(run(main))
