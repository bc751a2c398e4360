"""Break wfd.py in many small ways, one at a time, and list the first test that notices each.

    python extras/mutants.py                 all of them, about half an hour on two cores
    python extras/mutants.py --only window   those whose description has this word

A mutant that no test notices needs a test, or an argument why it computes the same.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent.parent
LATER = ("every_decoder", "trained", "demo", "bench", "official", "damaged", "interruption", "hostile", "net")  # tests that take long

MUTANTS = [  # (what is broken, a piece of wfd.py, what takes its place)
    ("of equal logits the last wins", "best = scores.argmax(-1, keepdim=True)",
     "best = scores.shape[-1] - 1 - scores.flip(-1).argmax(-1, keepdim=True)"),
    ("the second candidate is the first again", "scores = scores.scatter(-1, best, -torch.inf)", "pass"),
    ("top_k keeps one more", "scores.topk(min(self.top_k, scores.shape[-1]))", "scores.topk(min(self.top_k + 1, scores.shape[-1]))"),
    ("top_p loses the token that crosses it", "probabilities.cumsum(-1) - probabilities >=", "probabilities.cumsum(-1) >="),
    ("noise of seed + position", 'f"{seed} {position}"', 'f"{seed + position}"'),
    ("noise of the position before", "self.interpret(logits, [cell.position + 1 for", "self.interpret(logits, [cell.position for"),
    ("sampling is ignored", "self.sampling.scores(logits, positions) if self.sampling else logits", "logits"),
    ("not-a-number is no error", "all(probability == probability for", "all(True for"),
    ("the first recurrences are kept for sharing", "self.near[:, :, -self.slots:, :, column]", "self.near[:, :, :self.slots, :, column]"),
    ("shared planes are not in their classes' places", ".roll(self.passes, 2)", ".roll(0, 2)"),
    ("the deepest plane is not read", "slice(low, high + 1, apart)", "slice(low, high, apart)"),
    ("rows of a plane share a place", "self.length = max(least, *Counter(planes).values())", "self.length = max(least, 1)"),
    ("a cell sees all finished, not its parent's branch", "self.seen[cell.parent.column if cell.parent else self.latest]", "self.seen[self.latest]"),
    ("a cell does not see itself", "self.seen[cell.column, cell.column] = 0", "pass"),
    ("what leaves the window is still seen near", "self.held[cell.position - self.window]] = -torch.inf", "self.held[cell.position - self.window]] = 0"),
    ("the window ends a position early for cells", "if cell.position - self.window in self.held:\n            self.seen[cell.column, self.held[cell.position - self.window]]",
     "if cell.position - self.window + 1 in self.held:\n            self.seen[cell.column, self.held[cell.position - self.window + 1]]"),
    ("a finished position is not counted", "self.finished, self.latest = cell.position + 1", "self.finished, self.latest = cell.position"),
    ("near columns are released too early", "self.held.pop(self.finished - self.window, None)", "self.held.pop(self.finished - self.window + 1, None)"),
    ("a released column stays visible", "self.seen[:, column] = -torch.inf\n", "pass\n"),
    ("one prompt position too few within the window", "range(max(0, length + 1 - self.window), length)", "range(max(0, length + 2 - self.window), length)"),
    ("prompt rows do not see themselves", "device=self.device) > positions[:, None]     #", "device=self.device) >= positions[:, None]     #"),
    ("the prompt overwrites the first shared plane only", "plane = depth % stage.slots", "plane = 0"),
    ("the prompt's near columns are from the wrong recurrence", "stage.near[:, :, depth, :, list(", "stage.near[:, :, plane, :, list("),
    ("the far part ends a position early for cells", "> positions[:, None, None] - self.window, -torch.inf)", ">= positions[:, None, None] - self.window, -torch.inf)"),
    ("columns that are not finished are read", "mask[:, 0, near:near + self.finished] = 0", "mask[:, 0, near:] = 0"),
    ("rows read another class's shared plane", "Grid([depth % stage.slots for depth in depths]", "Grid([0 for depth in depths]"),
    ("bitwise mode: a row does not see itself", "torch.where(place <= positions[:, None]", "torch.where(place < positions[:, None]"),
    ("bitwise mode: the window is a position wider", "if position > cell.position - self.window]", "if position >= cell.position - self.window]"),
    ("bitwise mode: columns are not rounded up", "length = -(-max(self.finished, *(cell.position + 1 for cell in cells)) // 64) * 64",
     "length = max(self.finished, *(cell.position + 1 for cell in cells))"),
    ("attention apart is scaled otherwise", "q = q * q.shape[-1] ** -0.5", "q = q * q.shape[-1] ** -0.4"),
    ("the unlikeliest rows advance", "sorted(self.cells, key=path.get, reverse=True)", "sorted(self.cells, key=path.get)"),
    ("a path is as likely as its end", "cell.probability * (path[cell.parent] if cell.parent else 1)", "cell.probability"),
    ("probabilities are never renewed", "child.probability = wanted.get(child.token, child.probability)", "pass"),
    ("draft-then-verify drafts one recurrence more", "if self.cells[-1].depth < self.draft_depth:", "if self.cells[-1].depth <= self.draft_depth:"),
    ("the last token is fed", "self.last = len(prompt) + self.limit - 2", "self.last = len(prompt) + self.limit - 1"),
    ("one cell too few", "self.last = len(prompt) + self.limit - 2", "self.last = len(prompt) + self.limit - 3"),
    ("the context is a position shorter", "self.limit = min(new, context - len(prompt))", "self.limit = min(new, context - len(prompt) - 1)"),
    ("the context never ends a text", 'self.limit_is = "length" if self.limit == new else "context"', 'self.limit_is = "length"'),
    ("length goes before stop", 'if token in self.eos_ids:\n            self.result.finish = "stop"\n        elif len(self.result.tokens) == self.limit:\n            self.result.finish = self.limit_is',
     'if len(self.result.tokens) == self.limit:\n            self.result.finish = self.limit_is\n        elif token in self.eos_ids:\n            self.result.finish = "stop"'),
    ("depths are read one too late", "due = [cell for cell in rows if cell.depth in self.candidates]", "due = [cell for cell in rows if cell.depth - 1 in self.candidates or cell.depth == self.depth]"),
    ("the prediction of a dropped cell counts", "if cell.in_flight:                         #", "if True:                         #"),
    ("looked-up drafts survive depth T", "and (final or not child.looked_up)]", "and not child.looked_up]"),
    ("looked-up drafts are dropped at once", "and (final or not child.looked_up)]", "]"),
    ("descendants of dropped cells stay", "dropped += lost.children", "pass"),
    ("columns of dropped cells are lost", "self.cache.free.add(lost.column)", "pass"),
    ("children stay under a finished parent", "child.parent = None", "pass"),
    ("a wrong draft that was a stop token is not counted", "drafts = len(tried) + cell.tried_stop", "drafts = len(tried)"),
    ("a stop token gets a cell", "position > self.last or token in self.eos_ids:", "position > self.last:"),
    ("a cell starts beyond the window", "position >= self.cache.finished + self.kv_share.window", "position > self.cache.finished + self.kv_share.window"),
    ("look-ahead copies a token too early", "return text[place + n:place + n + self.lookup]", "return text[place + n - 1:place + n - 1 + self.lookup]"),
    ("look-ahead takes the first match", "characters.rfind(characters[-n:], 0, -1)", "characters.find(characters[-n:], 0, -1)"),
    ("the memory check is too strict by a byte", "check(needed <= free,", "check(needed < free,"),
    ("a token that no model knows passes", "check(max(prompt) < vocab,", "check(max(prompt) <= vocab,"),
    ("a schedule deeper than the model is kept", "for k, n in model.candidates.items() if k < model.recurrences}", "for k, n in model.candidates.items()}"),
]


def noticed_by(source: str, old: str, new: str) -> str:
    """The first test that fails with this mutant."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "project"
        shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".pytest_cache"))
        (copy / "wfd.py").write_text(source.replace(old, new), encoding="utf-8")
        later = f"({' or '.join(LATER)})"              # without the test that finds every mutant's piece in wfd.py
        for tests in (f"not mutants and not {later}", f"not mutants and {later}"):
            try:
                done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", tests],
                                      cwd=copy, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})
            except subprocess.TimeoutExpired:
                return "(it does not end)"
            if done.returncode:
                return "".join(re.findall(r"^(?:FAILED|ERROR) \S+?::(\w+)", done.stdout, re.MULTILINE)[:1]) or "(it does not start)"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    source = (HERE / "wfd.py").read_text(encoding="utf-8")
    chosen = [mutant for mutant in MUTANTS if options.only in mutant[0]]
    if not chosen:
        parser.error(f"no mutant's description has {options.only!r}")
    for what, old, _ in chosen:
        assert source.count(old) == 1, f"{what}: {old!r} is {source.count(old)} times in wfd.py"
    if test := noticed_by(source, "", ""):
        parser.error(f"{test} fails without any mutant")
    survivors = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for (what, _, _), test in zip(chosen, pool.map(lambda mutant: noticed_by(source, *mutant[1:]), chosen)):
            print(f"{what}: {test or 'SURVIVES'}", flush=True)
            survivors += [what] * (not test)
    print(f"{len(chosen)} mutants, {len(chosen) - len(survivors)} noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
