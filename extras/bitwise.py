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
from wfd import Wavefront  # noqa: E402

SCHEDULES = ({1: 1}, {1: 1, 2: 1, 3: 1}, {1: 2, 2: 2, 3: 2}, {1: 3, 2: 2, 3: 2})


class Recording(Wavefront):
    """Keeps the logits that tokens were committed from: position -> [V]."""

    def read(self, cells):
        self.reading = cells
        super().read(cells)

    def interpret(self, logits, positions, n):
        for row, position, cell in zip(logits, positions, getattr(self, "reading", ())):
            if cell.depth == self.depth:
                self.__dict__.setdefault("logits", {})[position] = row
        return super().interpret(logits, positions, n)


@torch.inference_mode()
def final_logits(model, prompt: list[int], new: int, candidates: dict[int, int], rows: int, pad_rows: int) -> dict[int, torch.Tensor]:
    wave = Recording(model, prompt, new, candidates, max_rows=rows, room=2 * rows, pad_rows=pad_rows)
    wave.run()
    return wave.logits


def differences(model, prompt: list[int], new: int, rows: int, schedules=SCHEDULES) -> tuple[int, int]:
    """(logit vectors compared, logit vectors that differ in some bit)."""
    plain = final_logits(model, prompt, new, {}, 1, rows)
    compared = different = 0
    for candidates in schedules:
        ours = final_logits(model, prompt, new, candidates, rows, rows)
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
