"""Show bitwise mode: with pad_rows, the logits behind every token are those of plain decoding, bit for bit.

    python extras/bitwise.py                                 tiny/ouro in bfloat16, chains and trees
    python extras/bitwise.py --shape ouro-2.6b --layers 4    layers of official size, random weights
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import demo  # noqa: E402
import torch  # noqa: E402

from load_weights import load  # noqa: E402
from wfd import autoregressive, wavefront  # noqa: E402

SCHEDULES = ({1: 1}, {1: 1, 2: 1, 3: 1}, {1: 2, 2: 2, 3: 2}, {1: 3, 2: 2, 3: 2})


def final_logits(decode, model, prompt: list[int], new: int, **options) -> dict[int, torch.Tensor]:
    """The logits [V] behind every position that tokens were committed from, the prefill's left out."""
    logits = {}
    result = decode(model, prompt, new, **options, on_call=lambda wave: logits.update(
        (row.position, row.logits) for row in wave.rows if row.event in ("verified", "corrected") and row.depth == model.recurrences))
    assert len(logits) == len(result.tokens) - 1
    return logits


def differences(model, prompt: list[int], new: int, rows: int, schedules=SCHEDULES) -> tuple[int, int]:
    """(logit vectors compared, logit vectors that differ in some bit)."""
    plain = final_logits(autoregressive, model, prompt, new, pad_rows=rows)
    compared = different = 0
    for candidates in schedules:
        ours = final_logits(wavefront, model, prompt, new, candidates=candidates, max_rows=rows, pad_rows=rows)
        assert ours.keys() == plain.keys()
        compared += len(plain)
        different += sum(not torch.equal(plain[position], ours[position]) for position in plain)
    return compared, different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=demo.SHAPES, help="layers of this official size instead of tiny/ouro")
    parser.add_argument("--layers", type=int, default=4, help="how many of them (default: 4)")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="rows of every call (default: 8)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    tiny, tokenizer = load(demo.TINY / "ouro", dtype=getattr(torch, options.dtype))
    model = demo.random_model(options.shape, "cpu", options.layers).to(getattr(torch, options.dtype)) if options.shape else tiny
    totals = [0, 0]
    for prompt in demo.held_out_prompts(tokenizer, options.prompts):
        found = differences(model, prompt, options.new, options.rows)
        totals = [a + b for a, b in zip(totals, found)]
    print(f"{options.shape or 'tiny/ouro'}, {options.dtype}, {demo.machine('cpu')}: {options.prompts} prompts, {options.new} new tokens, "
          f"{len(SCHEDULES)} schedules of up to {options.rows} rows: {totals[0]} logit vectors compared, {totals[1]} differ")
    sys.exit(1 if totals[1] else 0)


if __name__ == "__main__":
    main()
