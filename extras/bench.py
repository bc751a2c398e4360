"""Compare the methods of decoding on a model, or measure what a model of official size takes on this machine.

    python -m extras.bench                          every method side by side, on tiny/ouro
    python -m extras.bench --model tiny/huginn --dtype bfloat16
    python -m extras.bench --shape ouro-2.6b        an official size with random weights

The methods take turns on each prompt, so that what else the machine does meets all alike.
Exit status: 0; 1 when tokens differ from those of plain decoding, and not just at a near tie.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from demo import PROMPT, TINY, add_model_options, load_model, machine, parse_count, per_token, run, timed

import torch

from extras import look_ahead
from extras.near_tie import near_tie
from load_weights import available_memory, load
from model import Config, Huginn, LoopedLM, Ouro
from wfd import Cell, KVShare, Result, Wavefront, autoregressive, draft_then_verify, top_tokens, wavefront

# ----------------------------------------------------------------------------------------------------------
# 1. Methods


class Method(NamedTuple):
    """A decoder to compare: what it is, and the name of the method that its tokens are compared with."""
    label: str
    decode: Callable[..., Result]                      # of a prompt and a number of new tokens
    reference: str = "plain"

    def near_tie(self, model: LoopedLM, prompt: list[int], plain: list[int], ours: list[int]) -> str:
        """The sentence of extras.near_tie about these tokens; "" where they are equal."""
        settings = self.decode.keywords
        max_rows = settings["draft_len"] + 1 if "draft_len" in settings else settings.get("max_rows", 32)
        return near_tie(model, prompt, plain, ours, max_rows, kv_share=settings.get("kv_share"))


SHARING = KVShare(slots=1, window=32)
NAMES = ("plain", "draft-then-verify", "published", "early", "wavefront", "wide", "look-ahead",
         "plain-shared", "wavefront-shared")


def ladder(recurrences: int) -> list[int]:
    """The depths worth a reading: all of them at first, then ever fewer. 1 2 3 4 6 8 12 16 24 ..."""
    if recurrences < 2:
        raise ValueError("with fewer than 2 recurrences there is nothing to draft from or to compare")
    return [k for k in (1, 2, *(m * 2 ** i for i in range(20) for m in (3, 4))) if k < recurrences]


def methods(model: LoopedLM, drafting: dict[str, int], draft_depth: int) -> dict[str, Method]:
    """All methods by name; draft-then-verify and the published schedule have these settings."""
    depths = ladder(model.recurrences)
    if model.recurrences > 8:                          # every row of a wrong branch is one of very many
        wide, rows = {**dict.fromkeys(depths, 1), **dict.fromkeys(depths[:2], 2)}, 48
    else:
        wide, rows = {**dict.fromkeys(depths, 2), 1: 4}, 16
    drafts = f"draft-then-verify, {drafting['draft_len']} at depth {drafting['draft_depth']}"
    shared = f"sharing ({SHARING.slots} slot, window {SHARING.window})"
    plain, ours = partial(autoregressive, model), partial(wavefront, model)
    return dict(zip(NAMES, (
        Method("plain", plain),
        Method(drafts, partial(draft_then_verify, model, **drafting)),
        Method(f"published, draft depth {draft_depth}", partial(ours, candidates={draft_depth: 1})),
        Method("early correction", partial(ours, candidates=dict.fromkeys(depths, 1))),
        Method("wavefront (default)", ours),
        Method(f"wide tree, {rows} rows", partial(ours, candidates=wide, max_rows=rows)),
        Method("default + look-ahead 4", partial(look_ahead.wavefront, model, lookup=4)),
        Method(f"plain, {shared}", partial(plain, kv_share=SHARING), "plain-shared"),
        Method("default, sharing", partial(ours, kv_share=SHARING), "plain-shared"))))


def published_depth(model: LoopedLM) -> int:
    """The draft depth of the paper, for the family."""
    return min(1 if isinstance(model, Ouro) else 4, model.recurrences - 1)


def best_baselines(model: LoopedLM, prompts: list[list[int]], new: int) -> tuple[dict[str, int], int]:
    """The settings of draft-then-verify and of the published schedule that need the fewest calls here."""
    def fewest(decode, settings):
        def calls(setting):
            return sum(decode(model, prompt, new, **setting).calls for prompt in prompts)
        return min(settings, key=calls)

    depths = ladder(model.recurrences)
    drafting = [{"draft_depth": d, "draft_len": n} for d in depths[:5] for n in (1, 2, 3, 4, 6, 8, 12)]
    [depth] = fewest(wavefront, [{"candidates": {d: 1}} for d in depths])["candidates"]
    return fewest(draft_then_verify, drafting), depth


def held_out_prompts(tokenizer, number: int, length: int = 48) -> list[list[int]]:
    """Stretches of the text that the tiny models were not trained on."""
    text = tokenizer.encode((TINY / "held_out.txt").read_text(encoding="utf-8"))
    step = (len(text) - length) // number
    if step < 1:
        raise ValueError(f"tiny/held_out.txt has only {len(text)} tokens for {number} prompts of {length}")
    return [text[i * step:i * step + length] for i in range(number)]


def show_progress(text: str) -> None:
    """On a terminal; gone when the results come."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def verdict(differences: list[str]) -> int:
    """The last line of a comparison, from the sentences about all differences; the exit status."""
    fault = not all(sentence.startswith("near tie: ") for sentence in differences)
    words = "NO" if fault else "NO, but different only at near ties" if differences else "yes"
    print(f"identical to plain decoding: {words}")
    return int(fault)


def bench(options: argparse.Namespace, length: int = 48) -> int:
    model, tokenizer = load_model(options)
    number, new = options.prompts or (20 if model.recurrences <= 8 else 6), options.new
    if new < 2 or length + new > model.context:
        raise ValueError(f"--new must be from 2 to {model.context - length}, which is what the model has room for")
    prompts = held_out_prompts(tokenizer, number, length)
    show_progress("looking for the best settings of draft-then-verify and of the published schedule")
    compared = methods(model, *best_baselines(model, prompts[::max(1, number // 2)], min(new, 60)))

    print(f"{number} prompts of {length} tokens, {new} new tokens each\n")
    runs: dict[str, list[tuple[Result, float]]] = {name: [] for name in compared}
    for i, prompt in enumerate(prompts):
        for name, method in compared.items():
            show_progress(f"prompt {i + 1} of {number}: {method.label}")
            runs[name].append(timed(method.decode, prompt, new))
    show_progress("")

    print(f"{'':36}{'calls/token':>12}{'rows/call':>11}{'tokens/s':>10}{'speed':>8}{'identical':>11}")
    for name, method in compared.items():
        results, seconds = zip(*runs[name])
        calls, rows = sum(result.calls for result in results), sum(result.rows for result in results)
        tokens = sum(len(result.tokens) for result in results)
        speed = statistics.median(plain / ours for (_, plain), ours in zip(runs["plain"], seconds))
        identical = sum(ours.tokens == run[0].tokens for ours, run in zip(results, runs[method.reference]))
        print(f"{method.label:36}{calls / (tokens - number):12.3f}{rows / calls:11.2f}"
              f"{tokens / sum(seconds):10.1f}{speed:7.2f}x{identical:6} of {number}", flush=True)
    print("\nspeed: plain's seconds over the method's, median of the prompts, the prompt's pass included.\n"
          "With sharing, tokens are compared with those of plain decoding with sharing.")

    differences = []
    for name, method in compared.items():
        for i, prompt in enumerate(prompts):
            plain, ours = (runs[which][i][0].tokens for which in (method.reference, name))
            if sentence := method.near_tie(model, prompt, plain, ours):
                differences.append(sentence)
                print(f"prompt {i + 1}, {method.label}: {sentence}", flush=True)
    return verdict(differences)


# ----------------------------------------------------------------------------------------------------------
# 2. Official sizes with random weights
#
# What a call costs does not depend on what the weights are. What a schedule gains does. So the costs are measured
# with random weights, and the predictions are a recording of the tiny model of the same family.

OURO = {"width": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn": 5632, "vocab": 49152,
        "recurrences": 4, "context": 65536, "rope_theta": 1e6, "norm_eps": 1e-6, "tied": False}
HUGINN = {"width": 5280, "heads": 55, "kv_heads": 55, "head_dim": 96, "ffn": 17920, "vocab": 65536,
          "recurrences": 32, "context": 4096, "rope_theta": 5e4, "norm_eps": 1e-6, "tied": True,
          "prelude": 2, "coda": 2, "qk_bias": True, "init_std": (2 / (5 * 5280)) ** 0.5}
SHAPES = {"ouro-1.4b": (Ouro, Config(**OURO, core=24)),
          "ouro-2.6b": (Ouro, Config(**OURO, core=48)),
          "huginn-3.5b": (Huginn, Config(**HUGINN, core=4))}


def random_weight(noise: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The noise, as often as it takes, at the scale of a matrix; around 1 if it is the gain of a norm."""
    number = math.prod(shape)
    weight = noise.repeat(-(-number // len(noise)))[:number].view(shape)
    return weight.mul_(shape[-1] ** -0.5).add_(1.0 if len(shape) == 1 else 0.0)


def random_model(shape: str, device: str, layers: int) -> LoopedLM:
    """A model of official shape, but for the number of its core layers, with random weights, in bfloat16."""
    model_class, config = SHAPES[shape]
    with torch.device("meta"):
        model = model_class(Config(**vars(config) | {"core": layers}))
    noise = torch.randn(2 ** 24, dtype=torch.bfloat16, device=device)
    for name, parameter in list(model.named_parameters()):
        model.assign(name, random_weight(noise, list(parameter.shape)))
    if isinstance(model, Huginn):
        model.state_table = torch.zeros(config.context, config.width, dtype=torch.bfloat16, device=device)
    return model


@torch.inference_mode()
def time_calls(model: LoopedLM, widths=(1, 2, 4, 8, 16), columns: int = 300, repeats: int = 9
               ) -> dict[int, tuple[float, float]]:
    """Rows -> seconds of a block call and of a reading of their predictions, with so many positions finished.

    The rows are a chain with depths spread over all recurrences. Medians; widths take turns.
    """
    T, most = model.recurrences, max(widths)
    decoder = Wavefront(model, [1] * columns, most + 2, dict.fromkeys(range(1, T), 1), most)
    decoder.prefill()                                  # its prediction starts the first cell
    while len(decoder.cells) < most:
        decoder.start(decoder.cells[-1], 1)
    decoder.embed(decoder.cells)

    def advance(cells: list[Cell]) -> None:
        decoder.advance(cells)
        cells[0].x.sum().item()                        # waits for the device

    seconds = {rows: [] for rows in widths}
    for _ in range(repeats + 1):
        for rows in widths:
            cells = decoder.cells[:rows]
            for i, cell in enumerate(cells):
                cell.depth = T - 1 - i * T // rows
            seconds[rows].append((timed(advance, cells)[1], timed(decoder.read, cells)[1]))
    # The first round was the warm-up.
    return {rows: tuple(map(statistics.median, zip(*spent[1:]))) for rows, spent in seconds.items()}


class Replay(Wavefront):
    """Computes everything, then believes a recorded prediction instead: random weights, realistic drafts."""
    record: list[list[list[int]]]                      # depth - 1 -> position -> its best tokens

    def best(self, cells, logits):
        numbers = map(len, super().best(cells, logits))
        return [self.record[cell.depth - 1][cell.position][:n] for cell, n in zip(cells, numbers)]


@torch.inference_mode()
def replay(model: LoopedLM, tiny: LoopedLM, prompt: list[int], new: int, rows: int
           ) -> dict[str, tuple[Result, float]]:
    """Decode as the tiny model would, at the cost of `model`: results, and seconds per token after the first.

    Plain decoding stops after 10 tokens: each costs the same.
    """
    text = prompt + autoregressive(tiny, prompt, new).tokens
    record = [top_tokens(logits, 8) for logits in tiny(text)]
    d, results = published_depth(tiny), {}
    for label, candidates, most in (("plain", {}, 1), (f"published, draft depth {d}", {d: 1}, rows),
                                    (f"default, {rows} rows", tiny.candidates, rows)):
        length = min(new, 10) if label == "plain" else new
        decoder = Replay(model, prompt, length, candidates, most)
        decoder.record = record
        decoder.prefill()
        begin = time.perf_counter()
        while not decoder.result.finish:
            decoder.step()
        results[label] = decoder.result, (time.perf_counter() - begin) / (length - 1)
    return results


def bench_shape(shape: str, device: str) -> int:
    model_class, config = SHAPES[shape]
    with torch.device("meta"):
        model = model_class(config)
    size, layer = (2 * sum(p.numel() for p in part.parameters()) for part in (model, model.layers[0]))
    cache = 2 * 2 * config.recurrences * config.kv_heads * config.head_dim * 400  # of a layer, 400 positions
    needed, free = size + cache * config.core + 2 ** 30, available_memory(device)
    layers = config.core - max(0, math.ceil((needed - free) / (layer + cache)))
    print(f"{shape}, random weights, bfloat16 on {machine(device)}\n"
          f"needs {needed / 2 ** 30:.1f} GiB of memory, {free / 2 ** 30:.1f} GiB are free")
    if layers < 1:
        raise ValueError(f"not even one layer of {shape} fits into memory")
    if layers < config.core:
        print(f"so {layers} of {config.core} layers are measured, and the block calls scaled")
    model, scale = random_model(shape, device, layers), config.core / layers

    times = time_calls(model, (1, 2, 4, 8, 16) if model_class is Ouro else (1, 2, 4, 8, 16, 32))
    print(f"\n{'rows':>6}{'block call':>13}{'of one row':>12}{'reading':>12}     (300 positions finished)")
    for rows, (call, reading) in times.items():
        print(f"{rows:6}{call * scale * 1e3:10.1f} ms{call / times[1][0]:11.2f}x{reading * 1e3:9.1f} ms")

    name, rows = ("ouro", 8) if model_class is Ouro else ("huginn", 32)
    tiny, tokenizer = load(TINY / name, dtype=torch.float32)
    print(f"\nreplaying 60 tokens as tiny/{name} predicts them:")
    runs = replay(model, tiny, tokenizer.encode(PROMPT), 60, rows)
    for label, (result, seconds) in runs.items():
        fewer, speed = per_token(runs["plain"][0]) / per_token(result), runs["plain"][1] / seconds
        print(f"{label:26}{per_token(result):8.2f} calls per token, {fewer:.2f}x fewer; "
              f"{1 / seconds / scale:.2f} tokens/s, {speed:.2f}x plain's speed", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m extras.bench", description=__doc__.split("\n")[0])
    add_model_options(parser)
    parser.add_argument("--prompts", type=parse_count, metavar="N", help="(default: 20; 6 above 8 recurrences)")
    parser.add_argument("--new", type=parse_count, metavar="N", default=200, help="new tokens each (default: 200)")
    parser.add_argument("--shape", choices=SHAPES, help="measure an official size: bfloat16, random weights")
    options = parser.parse_args()
    if not options.shape:
        return bench(options)
    given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    if unused := [name for name in given if name not in ("shape", "device")]:
        parser.error(f"--{unused[0]} has no effect with --shape")
    return bench_shape(options.shape, options.device)


if __name__ == "__main__":
    sys.exit(run(main))
