"""Find the schedule that takes the fewest seconds per token, for this model on this machine.

    python -m extras.tune                               tiny/ouro
    python -m extras.tune --model ByteDance/Ouro-2.6B
    python -m extras.tune --shape ouro-2.6b             tiny/ouro's predictions, at the costs of that size

Every schedule yields the same tokens. What differs is the number of block calls, of rows in them, and of
readings (calls of predict). They are counted exactly, by decoding a few texts, and multiplied by the seconds
that each takes.
A search follows these predictions. What it finds is then timed for real, against a few simple schedules.
All take turns, so that a slow minute of the machine hurts all alike.
"""

import argparse
import sys
from collections import Counter

from demo import add_model_options, load_model, per_token, run, timed
from extras.bench import SHAPES, held_out_prompts, ladder, random_model, time_calls
from wfd import wavefront

WIDTHS = (1, 2, 4, 8, 16, 32)


class Costs:
    """Predicted seconds per token of a schedule, (candidates, max_rows)."""

    def __init__(self, model, prompts: list[list[int]], new: int, times: dict[int, tuple[float, float]]):
        self.model, self.prompts, self.new, self.known = model, prompts, new, {}
        self.times = times                             # rows -> seconds of a call, of a reading

    def __call__(self, schedule: tuple[dict[int, int], int]) -> float:
        key = str(schedule)
        if key not in self.known:
            seconds = sum(n * self.seconds(*event) for event, n in self.count(*schedule).items())
            self.known[key] = seconds / (len(self.prompts) * (self.new - 1))
        return self.known[key]

    def count(self, candidates: dict[int, int], max_rows: int) -> Counter:
        """(0, rows) -> number of calls with so many rows; (1, rows) -> number of readings."""
        counts = Counter()

        def on_call(running):
            counts[0, len(running.rows)] += 1
            if due := sum(cell.depth in running.candidates for cell in running.rows):
                counts[1, due] += 1
        for prompt in self.prompts:
            wavefront(self.model, prompt, self.new, candidates=candidates, max_rows=max_rows, on_call=on_call)
        return counts

    def seconds(self, kind: int, rows: int) -> float:
        """Of one call or reading, on the straight line between the two measured widths around it."""
        low = max(width for width in WIDTHS[:-1] if width <= rows)
        high = WIDTHS[WIDTHS.index(low) + 1]
        share = (rows - low) / (high - low)
        return (1 - share) * self.times[low][kind] + share * self.times[high][kind]


def simple_schedules(model) -> dict[str, dict[int, int]]:
    depths = ladder(model.recurrences)
    default = {k: n for k, n in model.candidates.items() if k < model.recurrences}
    return {"plain decoding": {}, "draft from depth 1": {1: 1}, "early correction": dict.fromkeys(depths, 1),
            "two candidates": dict.fromkeys(depths, 2), "the model's own": default}


def search(model, costs: Costs) -> tuple[dict[int, int], int]:
    """The cheapest simple schedule, then the best single change to it, for as long as that saves 0.5 percent."""
    best = min(((candidates, 32) for candidates in simple_schedules(model).values()), key=costs)
    while True:
        candidates, max_rows = best
        print(f"  {candidates}, at most {max_rows} rows: {1e3 * costs(best):.3f} ms", flush=True)
        others = [({k: n for k, n in sorted((candidates | {depth: number}).items()) if n}, max_rows)
                  for depth in ladder(model.recurrences) for number in range(4)]
        others += [(candidates, rows) for rows in (4, 8, 16, 32)]
        found = min(others, key=costs)
        if costs(found) > 0.995 * costs(best):
            return best
        best = found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_options(parser)
    parser.add_argument("--shape", choices=SHAPES, help="only predict, with the times of this official size")
    options = parser.parse_args()
    model, tokenizer = load_model(options)
    prompts, new = held_out_prompts(tokenizer, 3), 64
    priced = model
    if options.shape:
        priced = random_model(options.shape, options.device, SHAPES[options.shape][1].core)
    costs = Costs(model, prompts, new, time_calls(priced, WIDTHS, 300, 9))
    print("predicted, per token:")
    found, max_rows = search(model, costs)
    if options.shape:
        print(f"{costs(({}, 1)) / costs((found, max_rows)):.2f} times as fast as plain decoding")
        return

    named = simple_schedules(model) | {"found": found}
    schedules = [(name, candidates, width) for name, candidates in named.items()
                 for width in sorted({8, 32, max_rows} if candidates else {1})]
    print(f"\nmeasured on {len(prompts)} prompts, {new} new tokens each, the prompts' passes included:")
    seconds, calls = Counter(), Counter()
    for prompt in prompts:
        for name, candidates, width in schedules:
            result, spent = timed(wavefront, model, prompt, new, candidates=candidates, max_rows=width)
            seconds[name, width] += spent
            calls[name, width] += per_token(result)
    print(f"{'':20}{'max_rows':>8}{'calls/token':>13}{'ms/token':>10}{'speedup':>9}  candidates")
    for name, candidates, width in sorted(schedules, key=lambda schedule: seconds[schedule[0], schedule[2]]):
        ours, mean_calls = seconds[name, width], calls[name, width] / len(prompts)
        print(f"{name:20}{width:8}{mean_calls:13.3f}{1e3 * ours / len(prompts) / new:10.3f}"
              f"{seconds['plain decoding', 1] / ours:8.2f}x  {candidates}")


if __name__ == "__main__":
    sys.exit(run(main))
