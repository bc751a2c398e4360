"""The exactness net: random models, texts and options, all at once, in float64, for as long as you like.

    python extras/net.py --minutes 60        what `pytest -m slow` runs
    python extras/net.py '{"family": ...}'   one case again, as a failure prints it

In every case plain decoding, draft-then-verify and the wavefront must return the same tokens and the same reason to end,
equal to decoding by definition, without a cache. What calls report must add up. A case that fails is made smaller for
as long as it still fails, and printed as a command.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

import wfd  # noqa: E402
from demo import show_progress  # noqa: E402
from test_wfd import SharingByDefinition, Tampered, build_model, random_shape, recompute, told  # noqa: E402
from wfd import KVShare, Sampling, autoregressive, draft_then_verify, wavefront  # noqa: E402


def random_case(rng: random.Random) -> dict:
    """Everything a case depends on, as JSON has it."""
    shape = random_shape(rng.choice(("ouro", "huginn")), rng)
    depth = shape["recurrences"] = rng.choice((1, 2, 3, 4, 4, 5, 6, 8))
    shape["context"] = rng.choice((24, 40, 64))
    prompt, rows = [rng.randrange(shape["vocab"]) for _ in range(rng.choice((1, 2, 3, 5, 8, 12, 20)))], rng.choice((1, 2, 3, 5, 8, 32))
    if rng.random() < 0.3:                             # text that repeats itself
        prompt = (prompt[:3] * 20)[:len(prompt)]
    return {
        "shape": shape, "prompt": prompt, "new": rng.choice((1, 2, 3, 7, 16, 28)),
        "eos": [rng.randrange(shape["vocab"])] if rng.random() < 0.3 else [],
        "sampling": {"temperature": rng.choice((0, 0.5, 1, 2)), "top_k": rng.choice((0, 1, 3)), "top_p": rng.choice((0.6, 1)),
                     "seed": rng.randrange(99)} if rng.random() < 0.4 else None,
        "share": {"slots": rng.randint(1, depth), "window": rng.choice((1, 2, 3, 5, 8, 16, 50))} if rng.random() < 0.5 else None,
        "candidates": [rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(1, depth)],              # at depths 1, 2, ...; 0: not read there
        "rows": rows, "lookup": rng.choice((0, 0, 1, 3, 6)), "pad": rng.choice((None, None, rows, rows + 3)),
        "draft_depth": rng.randint(1, depth), "draft_len": rng.randint(0, 6), "stretch": rng.choice((512, 5)),
        "drafts": rng.choice(("model", "model", "model", "random", "wrong", "right"))}


def is_possible(case: dict) -> bool:
    """False for what a smaller case may have become."""
    shape, depth = case["shape"], case["shape"]["recurrences"]
    share, sampling = case["share"] or {"slots": 1, "window": 1}, case["sampling"] or {"top_p": 1}
    at_least_one = [*(shape[name] for name in ("heads", "kv_heads", "ffn", "vocab", "core", "recurrences")), len(case["prompt"]),
                    *share.values(), case["rows"], case["stretch"], case["draft_depth"]]
    return (min(at_least_one) >= 1 and shape["head_dim"] in (2, 4, 8) and sampling["top_p"] > 0
            and len(case["prompt"]) <= shape["context"] and all(token < shape["vocab"] for token in case["prompt"] + case["eos"])
            and shape["heads"] % shape["kv_heads"] == 0 and (shape["family"] == "ouro" or shape["heads"] == shape["kv_heads"])
            and len(case["candidates"]) < depth and share["slots"] <= depth and case["draft_depth"] <= depth
            and (case["pad"] is None or case["pad"] >= case["rows"]))


def fault(case: dict) -> str:
    """What is wrong with a case; "" if nothing is."""
    model, prompt, new = build_model(case["shape"]), case["prompt"], case["new"]
    depth, sampling, share = model.recurrences, case["sampling"] and Sampling(**case["sampling"]), case["share"] and KVShare(**case["share"])
    common = {"eos_ids": case["eos"], "sampling": sampling, "kv_share": share}
    plain = autoregressive(model, prompt, new, **common)
    length = min(new, model.context - len(prompt))
    if length:
        defined = (SharingByDefinition(model, share).decode if share else lambda *a: recompute(model, *a))(prompt, length, sampling)
        stops = [i + 1 for i, token in enumerate(defined) if token in case["eos"]]
        if plain.tokens != defined[:min(stops, default=length)]:
            return f"plain decoding returns {plain.tokens}, by definition it is {defined}"
        if plain.calls != (len(plain.tokens) - 1) * depth:
            return f"plain decoding took {plain.calls} calls for {len(plain.tokens)} tokens"
    truth = dict(enumerate(plain.tokens, start=len(prompt)))
    tamper = {"random": lambda logits, _: torch.randn_like(logits), "wrong": told(truth, lambda _: True), "right": told(truth)}
    tried = Tampered(model, tamper[case["drafts"]]) if case["drafts"] != "model" else model
    waves: list[wfd.Wave] = []
    ours = wavefront(tried, prompt, new, candidates={k: n for k, n in enumerate(case["candidates"], 1) if n}, max_rows=case["rows"], lookup=case["lookup"],
                     pad_rows=case["pad"], on_call=waves.append, **common)
    baseline = draft_then_verify(tried, prompt, new, draft_depth=case["draft_depth"], draft_len=case["draft_len"], **common)
    for name, result in (("the wavefront", ours), ("draft-then-verify", baseline)):
        if (result.tokens, result.finish) != (plain.tokens, plain.finish):
            return f"{name} returns {result.tokens} ({result.finish}), plain decoding {plain.tokens} ({plain.finish})"
        if plain.finish != "stop" and length and result.rows != (length - 1) * depth + result.stats["dropped_rows"]:
            return f"the rows of {name} do not add up: {result}"
    if ours.calls > plain.calls or len(waves) != ours.calls:
        return f"the wavefront took {ours.calls} calls, plain decoding {plain.calls}; {len(waves)} were reported"
    for wave in waves:
        depths = {row.number: row.depth for row in wave.rows}
        if len(wave.rows) > case["rows"] or wave.tokens != plain.tokens[:len(wave.tokens)]:
            return f"call {wave.call} has {len(wave.rows)} rows, and tokens {wave.tokens} of {plain.tokens}"
        if any(row.depth > depths.get(row.parent, depth) for row in wave.rows):
            return f"call {wave.call} has a row that is deeper than its parent"
        if len(wave.committed) != sum(row.event in ("verified", "corrected") and row.depth == depth for row in wave.rows):
            return f"call {wave.call} commits {wave.committed}, but not each from a row at depth T"
    return ""


def failure(case: dict) -> str:
    """The fault of a case, or what it raises."""
    threads, stretch = torch.get_num_threads(), wfd.PREFILL_ROWS
    torch.set_num_threads(1)                           # such small models gain nothing from more
    wfd.PREFILL_ROWS = case["stretch"]
    try:
        return fault(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        wfd.PREFILL_ROWS = stretch
        torch.set_num_threads(threads)


def smaller(value) -> Iterator:
    """Simpler values than this one, the simplest first."""
    if isinstance(value, dict):
        yield from ({**value, key: None} for key in ("sampling", "share", "pad") if value.get(key) is not None)
        yield from ({**value, key: less} for key, part in value.items() for less in smaller(part))
    elif isinstance(value, list):
        yield from (value[:len(value) // 2], value[len(value) // 2:])
        yield from (value[:i] + value[i + 1:] for i in range(len(value)))
        yield from (value[:i] + [less] + value[i + 1:] for i, part in enumerate(value) for less in smaller(part))
    elif value is True:
        yield False
    elif isinstance(value, int) and value > 0:
        yield from sorted({0, 1, value // 2, value - 1} - {value})
    elif isinstance(value, str) and value not in ("ouro", "model"):
        yield "ouro" if value == "huginn" else "model"


def shrink(case: dict, seconds: float = 120) -> dict:
    """A case that fails, and of which nothing can be left out or made smaller (in the time there is)."""
    end, seen, kind = time.monotonic() + seconds, set(), failure(case).split()[0]
    while True:
        for less in smaller(case):
            key = json.dumps(less)
            if key in seen or time.monotonic() > end:
                continue
            seen.add(key)
            if is_possible(less) and failure(less).split()[:1] == [kind]:
                case = less
                break
        else:
            return case


def command(case: dict) -> str:
    return f"python extras/net.py '{json.dumps(case)}'"


def search(minutes: float, seed: int) -> tuple[int, list[dict]]:
    """Cases compared, and those that failed, made small; it ends at the first of these."""
    rng, end, number = random.Random(seed), time.monotonic() + 60 * minutes, 0
    while time.monotonic() < end:
        case = random_case(rng)
        if failure(case):
            return number, [shrink(case)]
        number += 1
        if number % 1000 == 0:
            show_progress(f"{number} cases, none unequal")
    return number, []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", nargs="?", type=json.loads, help="a case that a failure has printed")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.case:
        wrong = failure(options.case)
        print(wrong or "nothing is wrong with this case")
        return 1 if wrong else 0
    number, failed = search(options.minutes, options.seed)
    print(f"{number} random cases of seed {options.seed} in {options.minutes:g} minutes, {len(failed)} unequal")
    for case in failed:
        print(failure(case), command(case), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
