"""Wavefront decoding from the command line: continue a text plainly and as a wavefront, and compare.

    python demo.py
    python demo.py --model ByteDance/Ouro-2.6B --chat --prompt "Why is the sky blue?"
    python demo.py --trace wavefront.svg    the whole generation as a picture
    python demo.py --bench                  every method side by side
    python demo.py --bench ouro-2.6b        what this machine would give, before the checkpoint is downloaded
    python demo.py --spec-bench question.jsonl    the six categories of Spec-Bench

Exit status: 0; 1 when the tokens differ from plain decoding, and not just at a near tie; 2 for bad input; 130 when interrupted.
"""

import argparse
import codecs
import hashlib
import html
import json
import math
import os
import platform
import shutil
import signal
import statistics
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)       # while torch is being imported, Ctrl-C ends this without a word
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")      # torch says so, but nothing here needs it
# On AMD processors MKL multiplies small float32 batches almost twice as fast when this is set, to its own default.
os.environ.setdefault("MKL_CBWR", "AUTO")

import torch  # noqa: E402

from load_weights import check_device, load  # noqa: E402
from model import Config, Huginn, LoopedLM, Ouro  # noqa: E402
from wfd import KVShare, Result, Sampling, Wave, Wavefront, autoregressive, available_memory, draft_then_verify, wavefront  # noqa: E402

TINY = Path(__file__).parent / "tiny"
PROMPT = "It was a rainy afternoon in November, and Anne"

# ----------------------------------------------------------------------------------------------------------------------
# 1. Arguments


def parse_candidates(text: str) -> dict[int, int]:
    """'1:2,2:2,3:1' -> {1: 2, 2: 2, 3: 1}."""
    try:
        return {int(k): int(n) for k, n in (pair.split(":") for pair in text.split(",") if pair)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form DEPTH:NUMBER,DEPTH:NUMBER, as 1:2,2:2,3:1") from None


def parse_sharing(text: str) -> KVShare:
    """'1:32' -> KVShare(slots=1, window=32)."""
    try:
        return KVShare(*map(int, text.split(":")))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form SLOTS:WINDOW, as 1:32") from None


def parse_trace(text: str) -> Path:
    file = Path(text)
    if file.suffix != ".svg" or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a .svg file in a folder that exists")
    return file


def parse_limit(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def parse_device(text: str) -> str:
    try:
        check_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from None
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--model", metavar="PATH_OR_ID", default=TINY / "ouro",
                        help="a snapshot folder, or a hub id in the local Hugging Face cache (default: tiny/ouro)")
    parser.add_argument("--prompt", metavar="TEXT", default=PROMPT)
    parser.add_argument("--chat", action="store_true", default=False,
                        help="take the prompt as a user's message, rendered by the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="(default: 120; with --spec-bench 1024)")
    parser.add_argument("--recurrences", type=int, metavar="T", help="depth to decode at (default: the model's own)")
    parser.add_argument("--candidates", type=parse_candidates, metavar="DEPTH:N,...",
                        help="candidates kept open at each depth, as 1:2,2:2,3:1; '' is plain (default: the model's own)")
    parser.add_argument("--max-rows", type=int, metavar="N", help="rows in a block call, at most (default: 32)")
    parser.add_argument("--lookup", type=int, metavar="N", help="tokens copied ahead where the text repeats (default: 0)")
    parser.add_argument("--kv-share", type=parse_sharing, metavar="SLOTS:WINDOW",
                        help="keep the keys and values of only SLOTS recurrences behind the last WINDOW positions, as 1:32")
    parser.add_argument("--pad-rows", type=int, metavar="N", help="bitwise mode: so many rows in every call")
    parser.add_argument("--temperature", type=float, metavar="X", default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, metavar="K", default=0, help="sample from the K best tokens (default: all)")
    parser.add_argument("--top-p", type=float, metavar="P", default=1.0, help="sample from this share of probability")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of sampling and of Huginn's initial states")
    parser.add_argument("--device", type=parse_device, metavar="D", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--trace", type=parse_trace, metavar="FILE.svg", help="write a picture of the generation")
    parser.add_argument("--bench", nargs="?", const="loaded", choices=("loaded", *SHAPES), metavar="SHAPE",
                        help="compare all methods, greedy, on texts of its own; or tell what to expect of "
                        f"{', '.join(SHAPES)}")
    parser.add_argument("--spec-bench", type=Path, metavar="FILE", help="compare on Spec-Bench's question.jsonl, and resume where "
                        "an earlier run was interrupted")
    parser.add_argument("--limit", type=parse_limit, metavar="N", help="with --spec-bench: questions of each category (default: all)")
    parser.add_argument("--methods", metavar="NAME,...", help="with --spec-bench: " + ", ".join(METHODS) + " (default: "
                        + ",".join(SPEC_BENCH_METHODS) + ")")
    options = parser.parse_args()
    if "spec_bench" not in options and ("limit" in options or "methods" in options):
        parser.error("--limit and --methods belong to --spec-bench")
    foreign = [name for name in ("candidates", "max_rows", "lookup", "kv_share", "pad_rows", "trace") if name in options]
    if foreign and ("bench" in options or "spec_bench" in options):
        parser.error(f"--{foreign[0].replace('_', '-')} has no effect with --bench and --spec-bench, which compare methods of their own")
    if options.temperature == 0 and (options.top_k or options.top_p != 1):
        parser.error("--top-k and --top-p need a --temperature above 0")
    return options


def load_model(options: argparse.Namespace):
    model, tokenizer = load(options.model, options.device, getattr(torch, options.dtype), seed=options.seed)
    note = ""
    if "recurrences" in options:
        if options.recurrences > model.recurrences:
            note = f" (more than the {model.recurrences} it was trained for)"
        model.recurrences = options.recurrences
    name, folder = options.model, Path(options.model).absolute()
    if folder.is_dir() and folder.is_relative_to(Path.cwd()):
        name = folder.relative_to(Path.cwd())
    print(f"{name}, {model.recurrences} recurrences{note}, {options.dtype} on {machine(options.device)}\n")
    return model, tokenizer


def machine(device: str) -> str:
    """The device, the threads and the version of torch: without them no figure means anything."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{device}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


# ----------------------------------------------------------------------------------------------------------------------
# 2. Generate and compare


def timed(decode, *args, **options) -> tuple[Result, float]:
    """A decoder's result and the seconds it took. It ends with a transfer from the device, so the clock is right."""
    begin = time.perf_counter()
    return decode(*args, **options), time.perf_counter() - begin


def per_token(result: Result) -> float:
    """Block calls per token; the first token comes from the prefill and needs none."""
    return result.calls / max(len(result.tokens) - 1, 1)


def generate(options: argparse.Namespace) -> int:
    model, tokenizer = load_model(options)
    prompt, new = tokenizer.encode(options.prompt, chat=options.chat), getattr(options, "max_new_tokens", 120)
    common = {"sampling": Sampling(options.temperature, options.top_k, options.top_p, options.seed),
              "kv_share": getattr(options, "kv_share", None)}
    schedule = {name: getattr(options, name) for name in ("candidates", "max_rows", "lookup", "pad_rows") if name in options}
    for decode, settings in ((wavefront, schedule), (autoregressive, {})):   # warm-up
        decode(model, prompt, min(new, 8), **settings, **common)
    common["eos_ids"] = tokenizer.eos_ids
    size = shutil.get_terminal_size()
    in_terminal = (sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
                   and size.columns >= 40 and size.lines >= 14)
    view = (Picture if in_terminal else Text)(options, tokenizer, len(prompt), model.recurrences)
    try:
        ours, seconds = timed(wavefront, model, prompt, new, **schedule, **common, on_call=view.show)
        view.finish(ours.tokens, seconds)
    finally:                                           # also when interrupted
        view.end()
    plain, plain_seconds = timed(autoregressive, model, prompt, new, **common)
    if "pad_rows" in options:                          # equal to the bit means: to plain decoding in the same mode
        reference = autoregressive(model, prompt, new, pad_rows=options.pad_rows, **common).tokens
    else:
        reference = plain.tokens

    print(f"{'':12}{'block calls':>12}{'per token':>12}{'rows':>8}{'rows per call':>15}{'tokens/s':>11}")
    for name, result, spent in (("plain", plain, plain_seconds), ("wavefront", ours, seconds)):
        print(f"{name:12}{result.calls:12}{per_token(result):12.2f}{result.rows:8}"
              f"{result.rows / max(result.calls, 1):15.2f}{len(result.tokens) / spent:11.1f}")
    accepted, rejected = ours.stats["accepted"], ours.stats["rejected"]
    print(f"\n{len(ours.tokens)} tokens ({ours.finish})", end="")
    if ours.calls:
        print(f"; {accepted} of {accepted + rejected} were under way when they became certain; "
              f"{plain.calls / ours.calls:.2f}x fewer calls, {plain_seconds / seconds:.2f}x plain's speed", end="")
    print()
    if common["kv_share"]:
        print(f"keys and values, shared by both: {ours.stats['cache_bytes'] / 2 ** 20:.1f} MiB")
    if "trace" in options:
        options.trace.write_text(trace_svg(view.waves, ours.tokens, tokenizer, len(prompt), model.recurrences), encoding="utf-8")
        print(f"picture: {options.trace}")
    part = difference(partial(wavefront, model, **schedule), partial(autoregressive, model), prompt, new, ours.tokens, reference, **common)
    if part:
        i = part.token - 1
        print(f"first difference: {tokenizer.decode(reference[i:i + 1])!r} in plain decoding, {tokenizer.decode(ours.tokens[i:i + 1])!r} here; {part}")
    return report_identity([part] if part else [], options)


class Difference(NamedTuple):
    """Where a text departs from that of plain decoding, and how narrow the choice was there."""
    token: int                 # the first that differs: 1, 2, ...
    gap: float                 # between the two best scores for it, in plain decoding
    gap_here: float            # and here
    apart: float               # in plain decoding, the score of its own token less that of the token here
    rounding: float            # by how much plain decoding's scores differ with the number of rows in its calls

    @property
    def near_tie(self) -> bool:
        return self.apart <= 2 * self.rounding

    def __str__(self) -> str:
        return (f"token {self.token}, where the two best scores are {self.gap:.3g} apart in plain decoding, {self.gap_here:.3g} here; the two "
                f"tokens are {self.apart:.3g} apart, and rounding alone makes " + ("" if self.near_tie else "no more than ")
                + f"{self.rounding:.3g}")


class Dictated:
    """In place of a Sampling: a given text. Keeps the last logits that it overruled."""

    def __init__(self, text: list[int]):
        self.text = text

    def scores(self, logits: torch.Tensor, positions: list[int]) -> torch.Tensor:
        self.last = logits[-1]
        return torch.nn.functional.one_hot(torch.tensor([self.text[p] for p in positions], device=logits.device), logits.shape[-1]).float().log()


def difference(decode: partial, plain: partial, prompt: list[int], new: int, ours: list[int], reference: list[int],
               sampling: Sampling | None = None, **common) -> Difference | None:
    """The first difference between what decode(prompt, new, ...) and plain(prompt, new, ...) have returned, if there is one.

    It is a near tie if plain decoding's scores for the two tokens are within twice its rounding: the largest difference among plain passes
    over the same text, as they are and in bitwise mode with 1 to max_rows rows. The search for that ends when it is enough. In sampling,
    scores are those with the noise; where one of the tokens is in some passes within top_k or top_p and in others not, that is a tie too.
    """
    if ours == reference:
        return None
    token = next((i for i, (one, other) in enumerate(zip(ours, reference)) if one != other), min(len(ours), len(reference)))
    position, tokens = len(prompt) + token, [*reference[token:token + 1], *ours[token:token + 1]]
    read = []                                          # the logits for that position, here; the last were read at depth T

    def keep(wave: Wave) -> None:
        read.extend(row.logits for row in wave.rows if row.position + 1 == position and row.logits is not None and row.event != "dropped")

    def plain_logits(pad_rows: int | None) -> torch.Tensor:
        dictated = Dictated(prompt + reference[:token] + [0])
        plain(prompt, token + 1, pad_rows=pad_rows, sampling=dictated, **common)
        return dictated.last

    def noisy(logits: torch.Tensor) -> torch.Tensor:   # without top_k and top_p
        return replace(sampling, top_k=0, top_p=1.0).scores(logits[None], [position])[0] if sampling else logits

    def gap(scores: torch.Tensor) -> float:
        best, second = scores.topk(2).values.tolist()
        return best - second

    def kept(logits: torch.Tensor) -> list[bool]:
        return sampling.scores(logits[None], [position])[0, tokens].isfinite().tolist() if sampling else []
    decode(prompt, new, sampling=sampling, on_call=keep, **common)
    first = plain_logits(None)
    low = high = scores = noisy(first)                 # of all passes, for every token of the vocabulary
    apart, rounding = (scores[tokens[0]] - scores[tokens[1]]).item() if len(tokens) == 2 else math.inf, 0.0
    for number in range(1, decode.keywords.get("max_rows", 32) + 1):
        logits = plain_logits(number)
        low, high = low.minimum(noisy(logits)), high.maximum(noisy(logits))
        rounding = (high - low).max().item()
        if kept(logits) != kept(first):
            apart = 0.0
        if apart <= 2 * rounding:
            break
    here = noisy(read[-1]) if read else scores
    return Difference(token + 1, gap(scores), gap(here), apart, rounding)


def report_identity(differences: list[Difference], options: argparse.Namespace) -> int:
    faults = sum(not part.near_tie for part in differences) if "pad_rows" not in options else len(differences)
    print(f"identical to plain decoding: {'NO' if differences else 'yes'}" + (", but different only at near ties" if differences and not faults else ""))
    if differences and options.dtype == "bfloat16":
        print("(in bfloat16, rounding depends on the rows in a call and tips near ties, which are common; float32 is exact, "
              "and so is bfloat16 with --pad-rows)")
    return 1 if faults else 0


# ----------------------------------------------------------------------------------------------------------------------
# 3. What is seen of a generation: its text; in a terminal the wavefront as well; and the whole of it as an SVG


class Text:
    """The text, as its tokens become certain."""

    def __init__(self, options: argparse.Namespace, tokenizer, prompt_length: int, depth: int):
        self.tokenizer, self.prompt_length, self.depth = tokenizer, prompt_length, depth
        self.prompt = options.prompt + ("\n\n" if options.chat else "")
        self.stream, self.printed, self.waves = tokenizer.stream(), 0, []

    def print(self, tokens: list[int]) -> None:
        piece = self.stream.push([token for token in tokens[self.printed:] if token not in self.tokenizer.eos_ids])
        print("" if self.printed else self.prompt, piece, sep="", end="", flush=True)
        self.printed = len(tokens)

    def show(self, wave: Wave) -> None:
        self.waves.append(wave)
        self.print(wave.tokens)

    def finish(self, tokens: list[int], seconds: float) -> None:
        self.print(tokens)

    def end(self) -> None:
        print(self.stream.end() + "\n", flush=True)


class Picture(Text):
    """The wavefront, redrawn in place: positions across, depth as height, the text with its drafts beneath."""

    MARKS = {"dropped": "x", "advanced": "o", "drafted": "+", "corrected": "!", "verified": "*"}    # where two cells meet, the last wins
    COLOURS = {"x": 31, "o": 34, "+": 36, "!": 33, "*": 32, "=": 32}
    FRAME = 0.04                                       # seconds between two drawings, at least

    def __init__(self, *args):
        super().__init__(*args)
        self.height = min(self.depth, 16, shutil.get_terminal_size().lines - 9)
        self.lines, self.next_drawing, self.tokens = 0, 0.0, []

    def show(self, wave: Wave) -> None:
        self.waves.append(wave)
        self.tokens = wave.tokens
        if time.perf_counter() >= self.next_drawing:
            self.draw(wave)
            self.next_drawing = time.perf_counter() + self.FRAME

    def finish(self, tokens: list[int], seconds: float) -> None:
        """What went by too fast to be seen is shown again, in slow motion."""
        if seconds < len(self.waves) * self.FRAME:
            for wave in self.waves:
                self.draw(wave)
                time.sleep(self.FRAME)
        self.tokens = tokens

    def end(self) -> None:
        """The picture goes, the text stays."""
        if self.lines:
            print(f"\x1b[{self.lines}F\x1b[J", end="")
        self.print(self.tokens)
        super().end()

    def draw(self, wave: Wave) -> None:
        lines = self.frame(wave, shutil.get_terminal_size().columns)
        print((f"\x1b[{self.lines}F" if self.lines else "") + "".join(f"{line}\x1b[K\n" for line in lines), end="", flush=True)
        self.lines = len(lines)

    def frame(self, wave: Wave, columns: int) -> list[str]:
        finished, width = self.prompt_length + len(wave.tokens) - 1, max(1, (columns - 10) // 2)
        left = max(self.prompt_length, finished - width // 2)
        marks = {(self.height, position): "=" for position in range(left, finished)}
        for event, mark in self.MARKS.items():
            for row in wave.rows:
                if row.event == event:
                    marks[-(-row.depth * self.height // self.depth), row.position] = mark
        lines = []
        for level in range(self.height, 0, -1):
            line = (marks.get((level, position), " ") for position in range(left, left + width))
            lines.append(f"{level * self.depth // self.height:6} |  " + "".join(
                f"\x1b[{self.COLOURS[mark]}m{mark} \x1b[m" if mark != " " else "  " for mark in line))
        status = (f" call {wave.call}: {len(wave.tokens)} certain (the first came with the prompt); "
                  f"plain decoding: call {(len(wave.tokens) - 1) * self.depth}")
        legend = " + starts a draft  o advances  * verified  ! corrected  x dropped  = finished"
        return [*lines, "", *self.text_lines(wave, columns - 11), "", status[:columns - 1], legend[:columns - 1]]

    def text_lines(self, wave: Wave, width: int, height: int = 3) -> list[str]:
        """The end of the text, and in grey what the oldest drafts would append."""
        drafts, children = [], {row.parent: row for row in reversed(wave.rows) if row.event != "dropped"}
        row = children.get(None)
        while row and (row := children.get(row.number)):
            drafts.append(row.token)
        parts = [self.prompt + self.tokenizer.decode(wave.tokens), self.tokenizer.decode(drafts)[:2 * width]]
        # A list of what stands in each place of the screen; a wide character takes two, the second with nothing in it.
        certain, guessed = ([place for c in part if c.isprintable() or c == "\n" for place in (
            (c, "") if unicodedata.east_asian_width(c) in "WF" else (" " if c == "\n" else c,))] for part in parts)
        text = certain[len(guessed) - width * height:] + guessed
        split = len(text) - len(guessed)
        lines = []
        for start in range(0, width * height, width):
            line, cut = text[start:start + width], min(max(split - start, 0), width)
            lines.append("        " + "".join(line[:cut]) + "\x1b[90m" + "".join(line[cut:]) + "\x1b[m")
        return lines


def trace_svg(waves: list[Wave], tokens: list[int], tokenizer, prompt_length: int, depth: int) -> str:
    """A whole generation: block calls down, positions across, the depth in every cell; beside the diagonal, the text."""
    size, left, top = 18, 120, 20
    fed = max(0, len(tokens) - 1)                      # the last token is emitted and never fed
    width, bottom = left + max(fed + 4, 45) * size, top + len(waves) * size
    blue, green, red, orange, grey = "#3b82f6", "#16a34a", "#ef4444", "#f59e0b", "#848d97"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 70}" width="{width}" height="{bottom + 70}" '
           'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11">']

    def write(x: float, y: float, text: str, colour: str = grey, anchor: str = "start", size: float = 11) -> None:
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)      # XML knows no control characters
        out.append(f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>')

    def square(x: float, y: float, fill: str, edge: str, opacity: float) -> None:
        out.append(f'<rect x="{x + 1}" y="{y + 1}" width="{size - 2}" height="{size - 2}" rx="4" fill="{fill}" '
                   f'fill-opacity="{opacity:.2f}" stroke="{edge}" stroke-width="1.5"/>')
    finished = {row.number for wave in waves for row in wave.rows if row.depth == depth and row.event != "dropped"}
    for wave in waves:
        y = top + (wave.call - 1) * size
        if wave.call % 5 == 0 or wave.call == 1:
            write(28, y + 13, str(wave.call), anchor="end")
        done = [row.position for row in wave.rows if row.number in finished and row.depth == depth]
        if words := " ".join(tokenizer.decode([token]).replace("\n", "\\n").strip() for token in wave.committed):
            write(left + (min(done, default=prompt_length) - prompt_length) * size - 5, y + 13, words[-24:], anchor="end")
        for position in sorted({row.position for row in wave.rows}):
            rows = sorted((row for row in wave.rows if row.position == position), key=lambda row: (row.number in finished, row.depth))
            row, others, x = rows[-1], len(rows) - 1, left + (position - prompt_length) * size
            right, last = row.number in finished, row.depth == depth
            square(x, y, green if right and last else blue if right else red, orange if row.event == "corrected" else "none",
                   (1.0 if last else 0.5 + 0.45 * row.depth / depth) if right else 0.2)
            ink = "#fff" if right else red
            write(x + size / 2 - (2 if others else 0), y + 13, "x" if row.event == "dropped" else str(row.depth), ink, "middle", 10)
            if others:
                write(x + size - 4.5, y + 8.5, str(others), ink, "middle", 6.5)
    x, y = 12, bottom + 14
    for fill, edge, opacity, meaning in ((blue, "none", 0.75, "advances: the number is its depth"), (green, "none", 1.0, "finished: a token is certain"),
                                         (blue, orange, 0.75, "drops earlier drafts"), (red, "none", 0.2, "a wrong draft (x: now dropped)")):
        square(x, y, fill, edge, opacity)
        write(x + size + 5, y + 13, meaning)
        x += size + 16 + 6.7 * len(meaning)
    write(14, y + 38, f"{len(tokens)} tokens in {len(waves)} block calls; plain decoding needs {fed * depth}. "
          "Calls go down, positions across. Small numbers: other drafts there.")
    return "\n".join(out) + "\n</svg>\n"


# ----------------------------------------------------------------------------------------------------------------------
# 4. --bench: every method on the loaded model


def ladder(depth: int) -> list[int]:
    """The depths worth a reading: all of them at first, then ever fewer. 1 2 3 4 6 8 12 16 24 ..."""
    if depth < 2:
        raise ValueError("with fewer than 2 recurrences there is nothing to draft from, and nothing to compare")
    return [k for k in (1, 2, *(m * 2 ** i for i in range(20) for m in (3, 4))) if k < depth]


class Method(NamedTuple):
    """A decoder to compare: what it is, and what its tokens are compared with."""
    label: str
    decode: Callable[..., Result]
    reference: str = "plain"


METHODS = ("plain", "draft-then-verify", "published", "early", "wavefront", "wide", "look-ahead", "plain-shared", "wavefront-shared")
SHARING = KVShare(slots=1, window=32)


def methods(model: LoopedLM, drafting: dict[str, int], draft_depth: int) -> dict[str, Method]:
    """All methods, draft-then-verify and the published schedule with these settings."""
    depths = ladder(model.recurrences)
    deep = model.recurrences > 8                       # then every row of a wrong branch is one of very many
    wide, rows = ({**dict.fromkeys(depths, 1), **dict.fromkeys(depths[:2], 2)}, 48) if deep else ({**dict.fromkeys(depths, 2), 1: 4}, 16)
    shared = f"{SHARING.slots} slot, window {SHARING.window}"
    return dict(zip(METHODS, (
        Method("plain", partial(autoregressive, model)),
        Method(f"draft-then-verify, {drafting['draft_len']} at depth {drafting['draft_depth']}", partial(draft_then_verify, model, **drafting)),
        Method(f"published, draft depth {draft_depth}", partial(wavefront, model, candidates={draft_depth: 1})),
        Method("early correction", partial(wavefront, model, candidates=dict.fromkeys(depths, 1))),
        Method("wavefront (default)", partial(wavefront, model)),
        Method(f"wide tree, {rows} rows", partial(wavefront, model, candidates=wide, max_rows=rows)),
        Method("default + look-ahead 4", partial(wavefront, model, lookup=4)),
        Method(f"plain, sharing ({shared})", partial(autoregressive, model, kv_share=SHARING), "plain-shared"),
        Method("default, sharing", partial(wavefront, model, kv_share=SHARING), "plain-shared"))))


def best_baselines(model: LoopedLM, prompts: list[list[int]]) -> tuple[dict[str, int], int]:
    """For draft-then-verify and for the published schedule the settings that need the fewest calls on these prompts."""
    def fewest(decode, settings):
        return min(settings, key=lambda setting: sum(decode(model, prompt, 60, **setting).calls for prompt in prompts))
    depths = ladder(model.recurrences)
    drafting = fewest(draft_then_verify, [{"draft_depth": d, "draft_len": n} for d in depths[:5] for n in (1, 2, 3, 4, 6, 8, 12)])
    [d] = fewest(wavefront, [{"candidates": {d: 1}} for d in depths])["candidates"]
    return drafting, d


def held_out_prompts(tokenizer, number: int, length: int = 48) -> list[list[int]]:
    """Stretches of the text that the tiny models were not trained on."""
    text = tokenizer.encode((TINY / "held_out.txt").read_text(encoding="utf-8"))
    return [text[start:start + length] for start in range(0, len(text) - length, len(text) // number)][:number]


def show_progress(text: str) -> None:
    """On a terminal; gone when the results come."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def bench(options: argparse.Namespace, new: int = 200, length: int = 48) -> int:
    model, tokenizer = load_model(options)
    if model.context < length + 60:
        raise ValueError(f"the model has room for {model.context} tokens, but --bench takes prompts of {length} and goes on from them")
    number = 20 if model.recurrences <= 8 else 6
    prompts = held_out_prompts(tokenizer, number, length)
    show_progress("looking for the baselines' best settings")
    compared = methods(model, *best_baselines(model, prompts[::number // 2]))
    results = {name: [] for name in compared}
    print(f"{len(prompts)} prompts of {length} tokens, {new} new tokens each; the methods take turns on every prompt\n")
    for i, prompt in enumerate(prompts):
        for name, method in compared.items():
            show_progress(f"prompt {i + 1} of {len(prompts)}: {method.label}")
            results[name].append(timed(method.decode, prompt, new))
    show_progress("")
    print(f"{'':36}{'calls/token':>12}{'rows/call':>11}{'tokens/s':>10}{'speed':>8}{'identical':>11}")
    differences = []
    for name, runs in results.items():
        calls, rows = (sum(getattr(result, what) for result, _ in runs) for what in ("calls", "rows"))
        tokens = sum(len(result.tokens) for result, _ in runs)
        speed = statistics.median(one[1] / other[1] for one, other in zip(results["plain"], runs))
        identical = sum(one[0].tokens == other[0].tokens for one, other in zip(results[compared[name].reference], runs))
        print(f"{compared[name].label:36}{calls / (tokens - len(runs)):12.3f}{rows / calls:11.2f}"
              f"{tokens / sum(spent for _, spent in runs):10.1f}{speed:7.2f}x{identical:6} of {len(runs)}", flush=True)
    print("\nspeed: plain's seconds over the method's, median of the prompts; prefill included. With sharing, tokens are compared\n"
          "with those of plain decoding with sharing.")
    for name, method in compared.items():
        for i, (prompt, (ours, _), (reference, _)) in enumerate(zip(prompts, results[name], results[method.reference])):
            if part := difference(method.decode, compared[method.reference].decode, prompt, new, ours.tokens, reference.tokens):
                differences.append(part)
                print(f"prompt {i + 1}, {method.label}: first different at {part}", flush=True)
    return report_identity(differences, options)


# ----------------------------------------------------------------------------------------------------------------------
# 5. --bench SHAPE: official sizes with random weights

SHAPES = {
    "ouro-1.4b": (Ouro, Config(width=2048, heads=16, kv_heads=16, head_dim=128, ffn=5632, vocab=49152, core=24, recurrences=4,
                               context=65536, rope_theta=1e6, norm_eps=1e-6, tied=False)),
    "ouro-2.6b": (Ouro, Config(width=2048, heads=16, kv_heads=16, head_dim=128, ffn=5632, vocab=49152, core=48, recurrences=4,
                               context=65536, rope_theta=1e6, norm_eps=1e-6, tied=False)),
    "huginn-3.5b": (Huginn, Config(width=5280, heads=55, kv_heads=55, head_dim=96, ffn=17920, vocab=65536, core=4, recurrences=32,
                                   context=4096, rope_theta=5e4, norm_eps=1e-6, tied=True, prelude=2, coda=2, qk_bias=True,
                                   init_std=(2 / (5 * 5280)) ** 0.5))}


def random_weight(noise: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The noise, as often as it takes, at the scale of a matrix; around 1 if it is the gain of a norm."""
    number = math.prod(shape)
    return noise.repeat(-(-number // len(noise)))[:number].view(shape).mul_(shape[-1] ** -0.5).add_(1.0 if len(shape) == 1 else 0.0)


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
def time_calls(model: LoopedLM, widths=(1, 2, 4, 8, 16), columns: int = 300, repeats: int = 9) -> dict[int, tuple[float, float]]:
    """Rows -> seconds of a block call and of a reading of their predictions, with so many positions finished.

    The rows are a chain with depths spread over all recurrences. Medians; widths take turns.
    """
    wave = Wavefront(model, [1] * columns, 64, {}, max_rows=max(widths), room=max(widths))
    wave.prefill()
    while len(wave.started) < max(widths):
        parent = wave.started[-1]
        wave.start(parent, parent.position + 1, 1, 1.0)
    wave.embed_started()
    seconds = {rows: ([], []) for rows in widths}
    for repeat in range(repeats + 1):
        for rows in widths:
            cells = wave.cells[:rows]
            for i, cell in enumerate(cells):
                cell.depth = model.recurrences - 1 - i * model.recurrences // rows
            _, call = timed(lambda: (wave.advance(cells), wave.x.sum().item()))
            columns, positions = wave.place(wave.cache.coda, cells, [0] * rows)
            _, reading = timed(lambda: model.predict(wave.x[columns], positions, wave.cache).argmax(-1).tolist())
            if repeat:                                 # the first round is the warm-up
                seconds[rows][0].append(call)
                seconds[rows][1].append(reading)
    return {rows: (statistics.median(calls), statistics.median(readings)) for rows, (calls, readings) in seconds.items()}


class Replay(Wavefront):
    """Computes everything, then believes a recorded prediction instead: random weights, realistic drafts."""
    record: list[dict[int, list[tuple[int, float]]]]   # depth - 1 -> predicted position -> best tokens with probabilities

    def prefill(self):
        super().prefill()
        self.begin = time.perf_counter()

    def interpret(self, logits, positions, depths, n):
        super().interpret(logits, positions, depths, n)
        return [self.record[depth - 1][position][:n] for depth, position in zip(depths, positions)]


@torch.inference_mode()
def replay(model: LoopedLM, tiny: LoopedLM, prompt: list[int], new: int, rows: int) -> dict[str, tuple[Result, float]]:
    """Decode as the tiny model would, with the cost of `model`: results, and seconds per token behind the first."""
    text = prompt + autoregressive(tiny, prompt, new).tokens
    probabilities, tokens = tiny(text).softmax(-1).topk(8)                   # [T, n, 8] each
    Replay.record = [{position + 1: list(zip(*best)) for position, best in enumerate(zip(*depth))}
                     for depth in zip(tokens.tolist(), probabilities.tolist())]
    d, results = published_depth(model), {}
    for name, candidates, most in (("plain", {}, 1), (f"published, draft depth {d}", {d: 1}, rows), ("wavefront (default)", tiny.candidates, rows)):
        length = min(new, 10) if name == "plain" else new                    # a token of plain decoding costs what every other does
        wave = Replay(model, prompt, length, candidates, max_rows=most, room=2 * most)
        results[name] = wave.run(), (time.perf_counter() - wave.begin) / (length - 1)
        assert wave.result.tokens == text[len(prompt):len(prompt) + length], "the replay went astray"
    return results


def bench_shape(options: argparse.Namespace) -> int:
    model_class, config = SHAPES[options.bench]
    with torch.device("meta"):
        model = model_class(config)
    size, layer = (2 * sum(p.numel() for p in part.parameters()) for part in (model, model.layers[0]))
    cache = 2 * 2 * config.core * config.recurrences * config.kv_heads * config.head_dim * 400
    needed, there = size + cache + 2 ** 30, available_memory(torch.device(options.device))
    layers = config.core - max(0, -(-(needed - there) // (layer + cache // config.core)))
    print(f"{options.bench}, random weights, bfloat16 on {machine(options.device)}\n"
          f"needs {needed / 2 ** 30:.1f} GiB of memory, {there / 2 ** 30:.1f} GiB are there")
    if layers < 1:
        raise ValueError(f"not even one layer of {options.bench} fits into memory: {needed / 2 ** 30:.1f} GiB are needed")
    if layers < config.core:
        print(f"so {layers} of {config.core} layers are measured, and the block calls scaled")
    model = random_model(options.bench, options.device, layers)
    scale, widths = config.core / layers, (1, 2, 4, 8, 16) if model_class is Ouro else (1, 2, 4, 8, 16, 32)
    times = {rows: (call * scale, reading) for rows, (call, reading) in time_calls(model, widths).items()}
    weights = layer * config.core + (2 * model.adapter.weight.numel() if model_class is Huginn else 0)
    print(f"\n{'rows':>6}{'block call':>13}{'of one row':>12}{'GB/s':>8}{'reading':>12}     (300 positions finished)")
    for rows, (call, reading) in times.items():
        print(f"{rows:6}{call * 1e3:10.1f} ms{call / times[1][0]:11.2f}x{weights / call / 1e9:8.1f}{reading * 1e3:9.1f} ms")
    expect(model, times, scale)
    return 0


def expect(model: LoopedLM, times: dict[int, tuple[float, float]], scale: float) -> None:
    """Speedups over plain decoding, from the call times above and the habits of the tiny model of the same family."""
    name = "ouro" if isinstance(model, Ouro) else "huginn"
    tiny, tokenizer = load(TINY / name, dtype=torch.float32)
    prompt, new, rows = tokenizer.encode(PROMPT), 60, 8 if name == "ouro" else 32
    runs, first = replay(tiny, tiny, prompt, new, rows), min(tiny.candidates)
    labels, results = list(runs), [result for result, _ in runs.values()]
    kept = wavefront(tiny, prompt, new, candidates={first: 1}).stats["accepted"] / (new - 2)
    missed = (per_token(results[2]) - kept * first) / (1 - kept)             # calls for a token whose first draft was wrong
    d, plain = published_depth(model), model.recurrences * times[1][0] + times[1][1]
    print("\nspeedup over plain decoding to expect, if the first draft is right for a share of"
          f"\n{'':26}{'0.80':>8}{'0.90':>8}{'0.95':>8}")
    for label, result, right, wrong in ((labels[1], results[1], d, model.recurrences), (labels[2], results[2], first, missed)):
        width = min(w for w in times if w >= min(result.rows / result.calls, max(times)))
        print(f"{label:26}" + "".join(f"{plain / ((share * right + (1 - share) * wrong) * sum(times[width])):7.2f}x" for share in (0.8, 0.9, 0.95))
              + f"   in calls of {width} rows, read each time; a wrong first draft costs {wrong:.2f} calls")
    print(f"\nreplaying {new} tokens as tiny/{name} predicts them, where the draft from depth {first} is right for {kept:.2f}:")
    for label, (result, seconds) in (runs := replay(model, tiny, prompt, new, rows)).items():
        calls, speed = model.recurrences / per_token(result), runs["plain"][1] / seconds
        print(f"{label:26}{per_token(result):8.2f} calls per token, {calls:.2f}x fewer; {1 / seconds / scale:.2f} tokens/s, "
              f"{speed:.2f}x plain's speed ({speed / calls:.2f} of the ratio of calls)", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# 6. --spec-bench: six categories of prompts (Spec-Bench, 2024)

CATEGORIES = {"MT-bench": ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
              "translation": ("translation",), "summarization": ("summarization",), "QA": ("qa",),
              "math": ("math_reasoning",), "RAG": ("rag",)}
SPEC_BENCH_METHODS = ("plain", "draft-then-verify", "published", "early", "wavefront", "plain-shared", "wavefront-shared")
PUBLISHED = (                                          # overall speedups, as their authors report them
    ("WFD paper: draft-then-verify", "1.90x Ouro-2.6B, 2.79x Huginn-3.5B; RTX A6000"),
    ("WFD paper: wavefront", "2.42x Ouro-2.6B, 3.54x Huginn-3.5B; RTX A6000"),
    ("WFD paper: wavefront, sharing", "4.81x Huginn-3.5B; RTX A6000"),
    ("LoopSpec", "2.9x to 3.4x Ouro-2.6B; RTX PRO 6000, SGLang"))


def published_depth(model: LoopedLM) -> int:
    """The draft depth of the paper, for the family."""
    return min(1 if isinstance(model, Ouro) else 4, model.recurrences)


def read_questions(file: Path, limit: int | None) -> list[tuple[str, dict]]:
    """(category, question) in turns from every category, so that an interrupted run has something of each."""
    if not file.is_file():
        raise ValueError(f"{file} is missing: it is data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench")
    found = {category: [] for category in CATEGORIES}
    for number, line in enumerate(file.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        try:
            if line.strip():
                question = json.loads(line)
                [category] = [name for name, parts in CATEGORIES.items() if question["category"] in parts]
                if not (type(question["question_id"]) is int and type(question["turns"]) is list and question["turns"]
                        and all(type(turn) is str and isinstance(turn.encode(), bytes) for turn in question["turns"])):
                    raise ValueError
                found[category].append({"id": question["question_id"], "turns": question["turns"]})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"line {number} of {file} is no question of Spec-Bench") from None
    if not any(found.values()):
        raise ValueError(f"{file} has no questions")
    kept = [(i, category, question) for category, questions in found.items() for i, question in enumerate(questions[:limit])]
    return [(category, question) for _, category, question in sorted(kept, key=lambda entry: entry[0])]


def answer(method: Method, model: LoopedLM, tokenizer, turns: list[str], new: int) -> list[dict]:
    """One method's answers to a question, a record for each turn. Its own answers are the history of later turns. A turn
    whose prompt does not fit into the context, and those after it, are left out."""
    talk, records = [], []
    for turn in turns:
        talk.append({"role": "user", "content": turn})
        prompt = tokenizer.encode(talk, chat=True)
        if len(prompt) >= model.context:
            break
        result, seconds = timed(method.decode, prompt, new, eos_ids=tokenizer.eos_ids)
        talk.append(said(tokenizer, result.tokens))
        records.append({"tokens": result.tokens, "seconds": round(seconds, 6), "calls": result.calls,
                        "accepted": result.stats["accepted"], "rejected": result.stats["rejected"]})
    return records


def said(tokenizer, tokens: list[int]) -> dict[str, str]:
    return {"role": "assistant", "content": tokenizer.decode([t for t in tokens if t not in tokenizer.eos_ids])}


def explain(record: dict, reference: dict, method: Method, plain: Method, tokenizer, turns: list[str], new: int) -> bool:
    """Note in a record where its tokens first differ from the reference's, and how. True if that was not noted yet."""
    talk = []
    for turn, ours, theirs in zip(turns, record["turns"], reference["turns"]):
        talk.append({"role": "user", "content": turn})
        if ours["tokens"] != theirs["tokens"]:
            if "difference" in ours:
                return False
            ours["difference"] = difference(method.decode, plain.decode, tokenizer.encode(talk, chat=True), new, ours["tokens"],
                                            theirs["tokens"], eos_ids=tokenizer.eos_ids)
            return True
        talk.append(said(tokenizer, ours["tokens"]))
    return False


def spec_bench(options: argparse.Namespace) -> int:
    names = list(dict.fromkeys(map(str.strip, options.methods.split(",")))) if "methods" in options else list(SPEC_BENCH_METHODS)
    if unknown := [name for name in names if name not in METHODS]:
        raise ValueError(f"--methods does not know {', '.join(unknown)}: there are {', '.join(METHODS)}")
    questions = read_questions(options.spec_bench, getattr(options, "limit", None))
    model, tokenizer = load_model(options)
    d, new = published_depth(model), getattr(options, "max_new_tokens", 1024)
    if new < 1:
        raise ValueError(f"--max-new-tokens must be 1 or more, not {new}")
    compared = methods(model, {"draft_depth": d, "draft_len": 4}, d)
    settings = {"model": str(options.model), "recurrences": model.recurrences, "dtype": options.dtype, "machine": machine(options.device),
                "python": platform.python_version(), "max_new_tokens": new, "seed": options.seed,
                "questions": hashlib.sha256(options.spec_bench.read_bytes()).hexdigest()[:12]}
    file = Path(f"spec-bench-{Path(options.model).name}-{options.dtype}.jsonl")
    done = resume(file, settings)
    todo = [(category, question, name) for category, question in questions for name in names if (question["id"], name) not in done]
    print(f"{len(questions)} questions, {len(names)} methods; {len(questions) * len(names) - len(todo)} answers are in {file} already, "
          f"{len(todo)} to go\n", flush=True)
    for name in {name for _, _, name in todo}:                               # warm-up
        compared[name].decode(tokenizer.encode("Hello", chat=True), min(new, 8))
    begin = time.perf_counter()
    with file.open("a", encoding="utf-8") as results:
        def keep(record: dict) -> None:
            done[record["id"], record["method"]] = record
            results.write(json.dumps(record) + "\n")
            results.flush()
        for i, (category, question, name) in enumerate(todo):
            record = {"id": question["id"], "category": category, "method": name,
                      "turns": answer(compared[name], model, tokenizer, question["turns"], new)}
            keep(record)
            left = (time.perf_counter() - begin) / (i + 1) * (len(todo) - i - 1)
            print(f"{i + 1} of {len(todo)}: {category}, question {question['id']}, {compared[name].label}; about "
                  + (f"{left / 60:.0f} min left" if left > 120 else f"{left:.0f} s left"), flush=True)
        for category, question in questions:
            for name in names:
                plain = compared[name].reference
                pair = [done.get((question["id"], method)) for method in (name, plain)]
                if all(pair) and explain(*pair, compared[name], compared[plain], tokenizer, question["turns"], new):
                    show_progress(f"question {question['id']}, {compared[name].label} differs: by how much?")
                    keep(pair[0])
    show_progress("")
    wanted = {question["id"] for _, question in questions}
    return spec_bench_table({key: record for key, record in done.items() if key[0] in wanted and key[1] in names}, compared, settings, options)


def resume(file: Path, settings: dict) -> dict[tuple[int, str], dict]:
    """The records of an earlier run with the same settings. A line cut off by a crash goes."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    whole = text[:text.rfind("\n") + 1] or json.dumps(settings) + "\n"
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    first, *lines = whole.split("\n")[:-1]
    if first != json.dumps(settings):
        raise ValueError(f"{file} has results of other settings ({first}): move it away, or run with those")
    try:
        records = list(map(json.loads, lines))
        for record in records:
            for turn in record["turns"]:
                part = Difference(*turn.get("difference", range(5)))
                numbers = [*part, *turn["tokens"], *(turn[name] for name in ("seconds", "calls", "accepted", "rejected"))]
                if not all(isinstance(number, (int, float)) for number in numbers) or not turn["tokens"] or turn["seconds"] <= 0:
                    raise ValueError
        return {(record["id"], record["method"]): record for record in records}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{file} is damaged: a line of it is no result. Move it away, or delete that line") from None


def spec_bench_table(done: dict[tuple[int, str], dict], compared: dict[str, Method], settings: dict, options: argparse.Namespace) -> int:
    def speed(records):                                # as Spec-Bench has it: the mean of the answers' tokens per second
        return statistics.mean(sum(len(turn["tokens"]) for turn in record["turns"]) / sum(turn["seconds"] for turn in record["turns"])
                               for record in records)
    columns = (*CATEGORIES, "overall")
    left_out = {number for (number, _), record in done.items() if not record["turns"]}
    done = {key: record for key, record in done.items() if record["turns"]}
    found = {(name, column): [record for (_, method), record in done.items() if method == name and column in (record["category"], "overall")]
             for name in compared for column in columns}
    names = [name for name in compared if found[name, "overall"]]
    columns = [column for column in columns if any(found[name, column] for name in names)]
    print("\n" + ", ".join(f"{key} {value}" for key, value in settings.items()) + "\n")
    print("Speed over plain decoding, the ratio of mean tokens/s:\n")
    print("| method | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for name in names:
        print(f"| {compared[name].label} | " + " | ".join(
            f"{speed(found[name, column]) / speed(found['plain', column]):.2f}x" if found[name, column] and found["plain", column] else "-"
            for column in columns) + " |")
    for label, value in PUBLISHED:
        print(f"| *{label}* | " + " | ".join([""] * (len(columns) - 1) + [f"*{value}*"]) + " |")
    print("\nRows in italics: published figures, of other machines and of the official checkpoints.\n")
    print("| method | category | tokens/s | calls per token | drafts accepted | mean settling depth | identical |\n|---|---|---|---|---|---|---|")
    differences, number = [], 0
    for name in names:
        for column in columns:
            records = found[name, column]
            pairs = [(record, done[record["id"], compared[name].reference]) for record in records
                     if (record["id"], compared[name].reference) in done]
            identical = sum([turn["tokens"] for turn in one["turns"]] == [turn["tokens"] for turn in other["turns"]] for one, other in pairs)
            number += len(pairs) * (compared[name].reference != name)
            turns = [turn for record in records for turn in record["turns"]]
            calls, accepted, rejected = (sum(turn[key] for turn in turns) for key in ("calls", "accepted", "rejected"))
            later = [turn for turn in turns if len(turn["tokens"]) > 2]      # behind the first two tokens every call is a settling one
            settling = (sum(turn["calls"] - settings["recurrences"] for turn in later) / sum(len(turn["tokens"]) - 2 for turn in later)
                        if later else float("nan"))
            print(f"| {compared[name].label} | {column} | {speed(records):.1f} | {calls / max(1, sum(len(turn['tokens']) - 1 for turn in turns)):.3f} | "
                  f"{accepted / max(1, accepted + rejected):.1%} | {settling:.3f} | {f'{identical} of {len(pairs)}' if pairs else '-'} |")
    print("\nDrafts accepted: tokens whose cell was under way when they became certain. Mean settling depth: calls from one token to the\n"
          "next, behind the first two; with one candidate at every depth (early correction) the depth from which a prediction no longer changes.")
    if left_out:
        print(f"left out, because their prompts are longer than the model's context: questions {', '.join(map(str, sorted(left_out)))}")
    if not number:
        print("identical to plain decoding: not compared (--methods lacks plain, or has nothing else)")
        return 0
    for (number, name), record in done.items():
        for turn in record["turns"]:
            if "difference" in turn and (number, compared[name].reference) in done:
                differences.append(part := Difference(*turn["difference"]))
                print(f"question {number}, {compared[name].label}: first different at {part}")
    return report_identity(differences, options)


def main() -> int:
    sys.stdout = sys.stdout or open(os.devnull, "w")   # it may have been closed
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        options = parse_arguments()
        if "spec_bench" in options:
            return spec_bench(options)
        return generate(options) if "bench" not in options else bench(options) if options.bench == "loaded" else bench_shape(options)
    except BrokenPipeError:                            # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"demo.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
