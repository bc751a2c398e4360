"""Wavefront decoding from the command line: continue a text as a wavefront, then plainly, and compare.

    python demo.py
    python demo.py --model ByteDance/Ouro-2.6B --chat --prompt "Why is the sky blue?"
    python demo.py --prompt - < story.txt
    python demo.py --trace wavefront.svg    the whole generation as a picture

Exit status: 0; 1 when the tokens differ from plain decoding, and not just at a near tie; 2 for bad input;
130 when interrupted.
"""

import argparse
import functools
import os
import shutil
import signal
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)       # Ctrl-C is silent while torch is imported
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")      # nothing here needs it
# On AMD processors MKL multiplies small float32 batches much faster when this is set, to its own default.
os.environ.setdefault("MKL_CBWR", "AUTO")

import torch  # noqa: E402

from extras.near_tie import near_tie  # noqa: E402
from extras.sampling import Sampling  # noqa: E402
from extras.trace import snapshot, trace_svg  # noqa: E402
from load_weights import available_memory, check_device, load  # noqa: E402
from wfd import Cache, KVShare, Result, Wavefront, autoregressive, wavefront  # noqa: E402

TINY = Path(__file__).parent / "tiny"
PROMPT = "It was a rainy afternoon in November, and Anne"
FRAME = 0.04                                           # seconds between two drawings, at least
SLOW_CALLS = 60                                        # as many at the start are shown one by one


# 1. What is asked for

def parse_candidates(text: str) -> dict[int, int]:
    """'1:2,2:2,3:1' -> {1: 2, 2: 2, 3: 1}."""
    try:
        pairs = [(int(depth), int(n)) for depth, n in (pair.split(":") for pair in text.split(",") if pair)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form DEPTH:N,DEPTH:N, as 1:2,2:1") from None
    depths = [depth for depth, _ in pairs]
    if twice := [depth for depth in depths if depths.count(depth) > 1]:
        raise argparse.ArgumentTypeError(f"{text!r} gives depth {twice[0]} twice")
    return dict(pairs)


def parse_sharing(text: str) -> KVShare:
    """'1:32' -> KVShare(slots=1, window=32)."""
    try:
        return KVShare(*map(int, text.split(":")))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form SLOTS:WINDOW, as 1:32") from None


def parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def read_prompt(text: str) -> str:
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 text: see byte {error.start + 1}") from None
    if not text:
        raise ValueError("the prompt is empty")
    return text


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What every command that loads a model takes; load_model reads it."""
    add, device = parser.add_argument, "cuda" if torch.cuda.is_available() else "cpu"
    add("--model", metavar="PATH_OR_ID", default=TINY / "ouro",
        help="a snapshot folder, or a hub id in the Hugging Face cache (default: tiny/ouro)")
    add("--recurrences", type=parse_count, metavar="T", help="(default: the model's own)")
    add("--seed", type=int, metavar="N", default=0, help="of all that is random (default: 0)")
    add("--device", metavar="D", default=device, help=f"(default: {device})")
    add("--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="(default: float32)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add_model_options(parser)
    add("--prompt", metavar="TEXT", default=PROMPT, help="the text to continue; - reads standard input")
    add("--chat", action="store_true", help="the prompt is a user's message, for the model's chat template")
    add("--max-new-tokens", type=parse_count, metavar="N", default=120, help="(default: 120)")
    add("--candidates", type=parse_candidates, metavar="DEPTH:N,...",
        help="candidates kept open at each depth, as 1:2,2:1 (default: the model's own)")
    add("--max-rows", type=parse_count, metavar="N", default=32, help="in a block call, at most (default: 32)")
    add("--kv-share", type=parse_sharing, metavar="SLOTS:WINDOW",
        help="of positions WINDOW or more back, keep keys and values of only SLOTS recurrences, as 1:32")
    add("--temperature", type=float, metavar="X", default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, metavar="K", default=0, help="sample from the K best tokens (default: all)")
    add("--top-p", type=float, metavar="P", default=1.0, help="sample from this share of probability")
    add("--trace", type=Path, metavar="FILE.svg", help="write a picture of the generation")
    options = parser.parse_args()
    if options.temperature == 0 and (options.top_k or options.top_p != 1):
        parser.error("--top-k and --top-p need a --temperature above 0")
    options.sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    check_device(options.device)
    options.prompt = read_prompt(options.prompt)
    if options.trace:
        options.trace.touch()                          # fails now, not after the run, if it can't be written
    return options


def load_model(options: argparse.Namespace):
    """(model, tokenizer), and a line that says what the figures below it were measured with."""
    model, tokenizer = load(options.model, options.device, getattr(torch, options.dtype), seed=options.seed)
    model.recurrences = options.recurrences or model.recurrences
    name = "/".join(Path(options.model).parts[-2:])
    print(f"{name}, {model.recurrences} recurrences, {options.dtype} on {machine(options.device)}\n", flush=True)
    return model, tokenizer


def machine(device: str) -> str:
    """The device, the threads and the version of torch: without them no figure means anything."""
    name = f"{device}, {torch.get_num_threads()} threads"
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"


# 2. Generate and compare

def timed(decode: Callable[..., Result], *args, **options) -> tuple[Result, float]:
    """A decoder's result and its seconds. It ends with a transfer from the device, so the clock is right."""
    begin = time.perf_counter()
    return decode(*args, **options), time.perf_counter() - begin


def per_token(result: Result) -> float:
    """Block calls per token; the first token comes from the prompt's pass and needs none."""
    return result.calls / max(len(result.tokens) - 1, 1)


class Clock:
    """An on_call that takes the time of the prompt's pass, and leaves out the time that showing takes.

    Nobody is told when the pass ends, so it counts until the first block call has ended: one of very many.
    """

    def __init__(self, *watchers: Callable[[Wavefront], None]):
        self.watchers, self.away, self.prefill, self.first = watchers, 0.0, 0.0, 0

    def run(self, decode: Callable[..., Result], *args, **options) -> Result:
        self.begin = time.perf_counter()
        result = decode(*args, on_call=self, **options)
        self.rest = self.seconds() - self.prefill
        self.speed = (len(result.tokens) - self.first) / self.rest           # tokens per second after the prompt's pass
        return result

    def seconds(self) -> float:
        return time.perf_counter() - self.begin - self.away

    def __call__(self, wave: Wavefront) -> None:
        if not self.prefill:
            self.prefill, self.first = self.seconds(), len(wave.result.tokens)
        if self.watchers:
            wave.rows[0].x[0].item()                   # waits until the device has done what it was given
            before = self.seconds()
            for watch in self.watchers:
                watch(wave)
            self.away += self.seconds() - before


def check_room(model, prompt: list[int], options: argparse.Namespace) -> None:
    """Raises ValueError if keys and values won't fit: better now than in the middle of the text."""
    asked = Wavefront(model, prompt, options.max_new_tokens, {}, options.max_rows, kv_share=options.kv_share)
    on_paper = replace(model.kv_spec, device="meta")   # tensors with a shape and no content
    cache = Cache(on_paper, model.recurrences, asked.last + 1, options.max_rows, options.kv_share)
    needed = sum(layer.nbytes for layer in cache.near + cache.far)
    if needed > available_memory(options.device):
        raise ValueError(f"keys and values for {asked.last + 1} tokens take {needed / 2 ** 30:.1f} GiB, more than is "
                         f"free on {options.device}: lower --max-new-tokens, or use --kv-share")


def main() -> int:
    options = parse_arguments()
    model, tokenizer = load_model(options)
    prompt = tokenizer.encode(options.prompt, chat=options.chat)
    check_room(model, prompt, options)
    common = {"sampling": options.sampling, "kv_share": options.kv_share}
    decode = functools.partial(wavefront, candidates=options.candidates, max_rows=options.max_rows)
    for warm_up in (decode, autoregressive):           # the first calls of a process are slow
        warm_up(model, prompt[:8], 4, **common)
    task = model, prompt, options.max_new_tokens
    common["eos_ids"] = tokenizer.eos_ids

    size = shutil.get_terminal_size()
    drawn = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and size.columns >= 40 and size.lines >= 14
    text = options.prompt + "\n\n" * options.chat
    view = (Picture if drawn else Text)(text, tokenizer, len(prompt), model.recurrences)
    calls = []                                         # only --trace keeps something of each
    tracing = [lambda wave: calls.append(snapshot(wave))] if options.trace else []
    clock, plain_clock = Clock(view.show, *tracing), Clock()
    try:
        ours = clock.run(decode, *task, **common)
        view.tokens = ours.tokens                      # without a call it was shown none
    finally:                                           # also when interrupted
        view.end()
    if options.trace:
        svg = trace_svg(calls, ours.tokens, tokenizer, len(prompt), model.recurrences)
        options.trace.write_text(svg, encoding="utf-8")
        print(f"picture: {options.trace}")
    print("and plainly, to compare ...\n", flush=True)
    plain = plain_clock.run(autoregressive, *task, **common)

    print(f"{'':10}{'prefill':>10}{'block calls':>13}{'per token':>11}{'rows':>7}{'per call':>10}{'tokens/s':>10}")
    for name, result, spent in (("plain", plain, plain_clock), ("wavefront", ours, clock)):
        print(f"{name:10}{spent.prefill or spent.rest:8.3f} s{result.calls:13}{per_token(result):11.2f}"
              f"{result.rows:7}{result.rows / max(result.calls, 1):10.2f}{spent.speed:10.1f}")
    print(f"\n{len(prompt)} prompt tokens, {len(ours.tokens)} new ones ({ours.finish})", end="")
    if ours.calls:
        print(f", {ours.accepted} of them under way before they were certain; {plain.calls / ours.calls:.2f}x fewer "
              f"calls, {clock.speed / plain_clock.speed:.2f}x plain's speed", end="")
    print(f"\nkeys and values: {ours.cache_bytes / 2 ** 20:.1f} MiB" + ", shared" * bool(options.kv_share))
    difference = near_tie(model, prompt, plain.tokens, ours.tokens, options.max_rows,
                          sampling=options.sampling, kv_share=options.kv_share)
    print("identical to plain decoding: " + (f"NO, {difference}" if difference else "yes"))
    return 1 if difference.startswith("no near tie") else 0


def run(main: Callable[[], int | None]) -> int:
    """The exit status of a command: bad input is one line, and an interruption no traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(errors="replace")           # a console may not know all characters
    try:
        return main() or 0
    except BrokenPipeError:                            # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


# 3. What is seen of a generation: its text; in a terminal the wavefront as well

class Text:
    """The text, as its tokens become certain."""

    def __init__(self, text: str, tokenizer, prompt_length: int, recurrences: int):
        self.tokenizer, self.prompt_length, self.recurrences = tokenizer, prompt_length, recurrences
        self.text, self.stream, self.tokens, self.printed = text, tokenizer.stream(), [], 0
        self.open()

    def open(self) -> None:
        print(self.text, end="", flush=True)

    def show(self, wave: Wavefront) -> None:
        self.tokens = wave.result.tokens               # the list itself, which grows
        self.print_new()

    def print_new(self) -> None:
        new = [token for token in self.tokens[self.printed:] if token not in self.tokenizer.eos_ids]
        print(self.stream.push(new), end="", flush=True)
        self.printed = len(self.tokens)

    def end(self) -> None:
        self.print_new()
        print(self.stream.end() + "\n", flush=True)


class Picture(Text):
    """The wavefront, redrawn in place: positions across, depth upwards, beneath it the text with drafts."""

    COLOURS = {"x": 31, "o": 34, "+": 36, "!": 33, "*": 32, "=": 32, " ": 0}

    def open(self) -> None:
        self.height = min(self.recurrences, 16, shutil.get_terminal_size().lines - 9)
        self.lines, self.next_drawing = 0, 0.0

    def show(self, wave: Wavefront) -> None:
        """Draws as often as can be seen. The first calls are slowed down, so that each of them can be."""
        self.tokens = wave.result.tokens
        if wave.result.calls <= SLOW_CALLS:
            time.sleep(max(0.0, self.next_drawing - time.perf_counter()))
        elif time.perf_counter() < self.next_drawing:
            return
        lines = self.frame(wave, shutil.get_terminal_size().columns)
        self.erase()
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
        self.lines = len(lines)
        self.next_drawing = time.perf_counter() + FRAME

    def erase(self) -> None:
        if self.lines:
            print(f"\x1b[{self.lines}F\x1b[J", end="")

    def end(self) -> None:
        """The picture goes, the text stays."""
        self.erase()
        super().open()
        super().end()

    def frame(self, wave: Wavefront, columns: int) -> list[str]:
        done, width = len(wave.result.tokens), (columns - 10) // 2
        finished = self.prompt_length + done - 1
        left = max(self.prompt_length, finished - width // 2)
        marks = {(self.height, position): "=" for position in range(left, finished)}
        corrected = [cell.parent for cell in wave.rows if cell.dropped]
        for cell in sorted(wave.rows, key=lambda cell: not cell.dropped):    # where two meet, the last is seen
            started = any(child.e is None for child in cell.children)
            mark = "!" if cell in corrected else "+" if started else "o"
            mark = "x" if cell.dropped else "*" if cell.depth == self.recurrences else mark
            marks[-(-cell.depth * self.height // self.recurrences), cell.position] = mark
        lines = []
        for level in range(self.height, 0, -1):
            line = [marks.get((level, position), " ") for position in range(left, left + width)]
            coloured = "".join(f"\x1b[{self.COLOURS[mark]}m{mark} \x1b[m" for mark in line)
            lines.append(f"{level * self.recurrences // self.height:6} |  {coloured}")
        status = f" call {wave.result.calls}, {done} certain; plain decoding: call {(done - 1) * self.recurrences}"
        legend = " + starts a draft  o advances  * verified  ! corrects  x dropped  = finished"
        return [*lines, "", self.text_line(wave, columns - 10), "", status[:columns - 1], legend[:columns - 1]]

    def text_line(self, wave: Wavefront, width: int) -> str:
        """The end of the text, and in grey what the oldest drafts would append."""
        drafts, cell = [], wave.cells[0] if wave.cells else None
        while cell and cell.children:
            cell = cell.children[0]
            drafts.append(cell.token)
        guessed = screen_places(self.tokenizer.decode(drafts))[:width // 2]
        certain = screen_places(self.text[-width:] + self.tokenizer.decode(wave.result.tokens[-width:]))
        return "        " + "".join(certain[len(guessed) - width:]) + "\x1b[90m" + "".join(guessed) + "\x1b[m"


def screen_places(text: str) -> list[str]:
    """What stands in each place of the screen. A wide character takes two, the second with nothing in it."""
    text = "".join(c for c in text.replace("\n", " ") if c.isprintable())
    return [place for c in text for place in ((c, "") if unicodedata.east_asian_width(c) in "WF" else (c,))]


if __name__ == "__main__":
    sys.exit(run(main))
