"""Wavefront decoding from the command line: continue a text plainly and as a wavefront, and compare.

    python demo.py
    python demo.py --model ByteDance/Ouro-2.6B --chat --prompt "Why is the sky blue?"

Exit status: 0; 1 when the tokens differ from plain decoding; 2 for bad input; 130 when interrupted.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")      # torch says so, but nothing here needs it

import torch  # noqa: E402

from load_weights import load  # noqa: E402
from wfd import Result, autoregressive, wavefront  # noqa: E402

TINY = Path(__file__).parent / "tiny" / "ouro"
PROMPT = "The carriage drew up at last before the door, and Emma, who had been expecting it the whole morning,"


def parse_candidates(text: str) -> dict[int, int]:
    """'1:2,2:2,3:1' -> {1: 2, 2: 2, 3: 1}."""
    try:
        return {int(k): int(n) for k, n in (pair.split(":") for pair in text.split(",") if pair)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form DEPTH:NUMBER,DEPTH:NUMBER") from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--model", metavar="PATH_OR_ID", default=TINY,
                        help="a snapshot folder, or a hub id in the local Hugging Face cache (default: tiny/ouro)")
    parser.add_argument("--prompt", metavar="TEXT", default=PROMPT)
    parser.add_argument("--chat", action="store_true", default=False,
                        help="take the prompt as a user's message, rendered by the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", default=200)
    parser.add_argument("--recurrences", type=int, metavar="T", help="depth to decode at (default: the model's own)")
    parser.add_argument("--candidates", type=parse_candidates, metavar="1:2,2:2,3:1",
                        help="candidates kept open at each depth (default: the model's own)")
    parser.add_argument("--max-rows", type=int, metavar="N", help="rows in a block call, at most (default: 32)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of Huginn's initial states (default: 0)")
    parser.add_argument("--device", metavar="D", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    return parser.parse_args()


def timed(decode, *args, **options) -> tuple[Result, float]:
    """A decoder's result and the seconds it took. It ends with a transfer from the device, so the clock is right."""
    begin = time.perf_counter()
    return decode(*args, **options), time.perf_counter() - begin


def table(rows: dict[str, tuple[Result, float]]) -> str:
    lines = [f"{'':12}{'block calls':>12}{'per token':>12}{'rows':>8}{'rows per call':>15}{'tokens/s':>11}"]
    for name, (result, seconds) in rows.items():
        new = len(result.tokens)
        lines.append(f"{name:12}{result.calls:12}{result.calls / max(new - 1, 1):12.2f}{result.rows:8}"
                     f"{result.rows / max(result.calls, 1):15.2f}{new / seconds:11.1f}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    model, tokenizer = load(options.model, options.device, getattr(torch, options.dtype), seed=options.seed)
    note = ""
    if "recurrences" in options:
        if options.recurrences > model.recurrences:
            note = f" (more than the {model.recurrences} it was trained for)"
        model.recurrences = options.recurrences
    prompt = tokenizer.encode(options.prompt, chat=options.chat)
    schedule = {name: getattr(options, name) for name in ("candidates", "max_rows") if name in options}
    print(f"{options.model}, {model.recurrences} recurrences{note}, {options.dtype} on {options.device}, "
          f"{torch.get_num_threads()} threads\n")

    stream, shown = tokenizer.stream(), 0

    def show(tokens: list[int]) -> None:
        nonlocal shown
        print(stream.push([t for t in tokens[shown:] if t not in tokenizer.eos_ids]), end="", flush=True)
        shown = len(tokens)

    arguments = model, prompt, options.max_new_tokens
    wavefront(model, prompt, min(options.max_new_tokens, 8), **schedule)     # warm-up
    print(options.prompt, end="\n\n" if options.chat else "", flush=True)
    ours = timed(wavefront, *arguments, **schedule, eos_ids=tokenizer.eos_ids, on_call=lambda wave: show(wave.tokens))
    show(ours[0].tokens)
    print(stream.end() + "\n", flush=True)
    plain = timed(autoregressive, *arguments, eos_ids=tokenizer.eos_ids)
    identical = ours[0].tokens == plain[0].tokens
    print(table({"plain": plain, "wavefront": ours}))
    stats = ours[0].stats
    print(f"\n{len(ours[0].tokens)} tokens ({ours[0].finish}); drafts accepted {stats['accepted']}, rejected {stats['rejected']}; "
          f"{plain[0].calls / max(ours[0].calls, 1):.2f}x fewer calls, {plain[1] / ours[1]:.2f}x plain's speed")
    print(f"identical to plain decoding: {'yes' if identical else 'NO'}")
    if not identical and options.dtype == "bfloat16":
        print("(in bfloat16 rounding depends on the rows in a call, which can tip a near tie; float32 is exact)")
    return 0 if identical else 1


def main() -> int:
    options = parse_arguments()
    try:
        return run(options)
    except ValueError as error:
        print(f"demo.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
