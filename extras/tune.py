"""Find the schedule that costs the least seconds per token, for a model and for a machine.

    python extras/tune.py                                       tiny/ouro, as it runs here
    python extras/tune.py --shape ouro-2.6b                     the same predictions, at the costs of the official size

Every schedule returns the same tokens; what differs is the number of block calls and of rows in them. Both are counted
exactly, by decoding a few texts. Multiplied by the time of a call of so many rows, and of a reading, they predict the
seconds per token. The search starts from the best of a few plain schedules, and changes one number of candidates, or
max_rows, at a time for as long as that helps.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import demo  # noqa: E402
import torch  # noqa: E402

from load_weights import load  # noqa: E402
from wfd import autoregressive, wavefront  # noqa: E402


class Counted:
    """Exact counts of a schedule over some prompts: how many calls had so many rows, how many readings."""

    def __init__(self, model, prompts: list[list[int]], new: int):
        self.model, self.prompts, self.new, self.known = model, prompts, new, {}

    def __call__(self, candidates: dict[int, int], max_rows: int) -> dict[tuple[str, int], int]:
        key = (*sorted(candidates.items()), max_rows)
        if key not in self.known:
            counts = self.known[key] = {}
            read_at = {*candidates, self.model.recurrences}

            def count(wave):
                for what, rows in (("call", len(wave.rows)), ("reading", sum(row.depth in read_at for row in wave.rows))):
                    if rows:
                        counts[what, rows] = counts.get((what, rows), 0) + 1
            for prompt in self.prompts:
                wavefront(self.model, prompt, self.new, candidates=candidates, max_rows=max_rows, on_call=count)
        return self.known[key]


def seconds(counts: dict[tuple[str, int], int], times: dict[int, tuple[float, float]]) -> float:
    """The cost of these counts. Times between measured numbers of rows are interpolated, those beyond extended."""
    widths = sorted(times)

    def cost(what: str, rows: int) -> float:
        i = ("call", "reading").index(what)
        low = max((w for w in widths[:-1] if w <= rows), default=widths[0])
        high = widths[widths.index(low) + 1]
        return times[low][i] + (times[high][i] - times[low][i]) * (rows - low) / (high - low)
    return sum(number * cost(what, rows) for (what, rows), number in counts.items())


def search(counted: Counted, times: dict[int, tuple[float, float]]) -> tuple[dict[int, int], int]:
    """The cheapest (candidates, max_rows) that single changes lead to."""
    depths = demo.ladder(counted.model.recurrences)

    def cost(schedule):
        return seconds(counted(*schedule), times)
    starts = [{d: 1} for d in depths] + [dict.fromkeys(depths, n) for n in (1, 2)] + [
        {**dict.fromkeys(depths, 1), 1: 2, 2: 2}, {k: 2 if k == 1 else 1 for k in depths if k in (1, 2, 4, 8)}]
    best = min(((candidates, rows) for candidates in starts for rows in (8, 32)), key=cost)
    while True:
        candidates, max_rows = best
        others = [({k: n for k, n in (candidates | {d: number}).items() if n}, max_rows)
                  for d in depths for number in range(5) if number != candidates.get(d, 0)]
        others += [(candidates, rows) for rows in (4, 6, 8, 12, 16, 24, 32) if rows != max_rows]
        found = min(others, key=cost)
        if cost(found) > 0.995 * cost(best):
            return best
        best = found
        print(f"  {best[0]}, max_rows {best[1]}: {1e3 * cost(best) / (len(counted.prompts) * (counted.new - 1)):.3f} ms per token",
              flush=True)


@torch.inference_mode()
def settling(model, prompts: list[list[int]], new: int) -> list[str]:
    """For the best 1, 2 and 4 candidates: from which depth on a token stays among them, as shares of the tokens."""
    depths = {n: [] for n in (1, 2, 4)}
    for prompt in prompts:
        text = prompt + autoregressive(model, prompt, new).tokens
        logits = model(text[:-1])[:, len(prompt):]                           # [T, new - 1, V]
        token = torch.tensor(text[len(prompt) + 1:])[None, :, None].expand(len(logits), -1, -1)
        rank = (logits > logits.gather(-1, token)).sum(-1)                   # [T, new - 1]
        for n, found in depths.items():
            outside = [[k for k, inside in enumerate(column) if not inside] for column in (rank < n).T.tolist()]
            found += [max(column, default=-1) + 2 for column in outside]
    return [f"  best {n}: " + ", ".join(f"{k}: {found.count(k) / len(found):.1%}" for k in sorted(set(found)))
            + f"; mean {sum(found) / len(found):.3f}" for n, found in depths.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=demo.TINY / "ouro", help="the model whose predictions are counted (default: tiny/ouro)")
    parser.add_argument("--shape", choices=demo.SHAPES, help="take the times of this official size instead of the model's own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    model, tokenizer = load(options.model, dtype=getattr(torch, options.dtype))
    prompts, new = (demo.held_out_prompts(tokenizer, 6), 100) if model.recurrences <= 8 else (demo.held_out_prompts(tokenizer, 3), 64)
    print(f"{os.path.relpath(options.model)}, {options.dtype}, {len(prompts)} prompts, {new} new tokens each; {demo.machine('cpu')}\n"
          "depth from which a token stays among the best:")
    print("\n".join(settling(model, prompts, new)))

    widths = (1, 2, 4, 8, 16, 32)
    times = demo.time_calls(demo.random_model(options.shape, "cpu", demo.SHAPES[options.shape][1].core) if options.shape else model, widths)
    print("\nrows: ms of a call, of a reading\n" + "\n".join(f"  {w}: {a * 1e3:.3f}, {b * 1e3:.3f}" for w, (a, b) in times.items()))
    print("\nsearch, predicted:")
    counted = Counted(model, prompts, new)
    candidates, max_rows = search(counted, times)
    tokens = len(prompts) * (new - 1)
    predicted, plain = (seconds(counted(*schedule), times) / tokens for schedule in ((candidates, max_rows), ({}, 1)))
    calls = sum(number for (what, _), number in counted(candidates, max_rows).items() if what == "call") / tokens
    print(f"\ncandidates {candidates}, max_rows {max_rows}: {calls:.3f} calls per token; "
          f"predicted {1e3 * predicted:.3f} ms per token, {plain / predicted:.2f}x plain decoding")
    if not options.shape:
        spent = [[demo.timed(decode, model, prompt, new, **settings)[1] for prompt in prompts]
                 for decode, settings in ((wavefront, {"candidates": candidates, "max_rows": max_rows}), (autoregressive, {}))]
        print(f"measured {1e3 * sum(spent[0]) / tokens:.3f} ms per token, {sum(spent[1]) / sum(spent[0]):.2f}x plain decoding "
              "(prefill included)")


if __name__ == "__main__":
    main()
