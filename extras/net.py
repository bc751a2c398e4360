"""The exactness net: random models, texts and options, all at once, in float64, for as long as you like.

    python -m extras.net --minutes 60        what `pytest -m slow` runs
    python -m extras.net '{"shape": ...}'    one case again, as a failure prints it

In every case plain decoding, draft-then-verify, the wavefront, look-ahead and bitwise mode must return the
same tokens, for the same reason to end. The reference is decoding by definition, without a cache. A case that
fails is made smaller for as long as it still fails, and printed as a command.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator

import torch

from extras import bitwise, look_ahead
from extras.sampling import Sampling
from model import Config, Huginn, Ouro
from wfd import KVShare, autoregressive, draft_then_verify, wavefront

# ----------------------------------------------------------------------------------------------------------
# 1. Random models, and what is right by definition


def choice(logits: torch.Tensor, position: int, sampling: Sampling | None) -> int:
    """The token that logits [V] put at a position."""
    return int((sampling.scores(logits[None], [position])[0] if sampling else logits).argmax())


def recompute(model, prompt: list[int], new: int, sampling: Sampling | None = None) -> list[int]:
    """Decoding from the definition: the whole text through `forward`, for every token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            tokens.append(choice(model(tokens)[-1, -1], len(tokens), sampling))
    return tokens[len(prompt):]


def random_shape(family: str, rng: random.Random) -> dict:
    """What a random model is built from. How soon its predictions settle is random too."""
    heads, head_dim = rng.choice((1, 2, 4)), rng.choice((4, 8))
    shape = dict(family=family, heads=heads, kv_heads=heads, head_dim=head_dim, ffn=rng.choice((12, 24)),
                 vocab=rng.choice((7, 24)), core=rng.randint(1, 3), recurrences=rng.randint(1, 6), context=64,
                 tied=rng.random() < 0.3, seed=rng.randrange(10 ** 6))
    if family == "ouro":
        shape["kv_heads"] = rng.choice([k for k in (1, 2, 4) if heads % k == 0])
    else:
        shape |= dict(prelude=rng.randint(0, 2), coda=rng.randint(0, 2), qk_bias=rng.random() < 0.8,
                      state_seed=rng.randrange(100))
    return shape | {"settled": rng.choice((0.1, 0.5, 1.5))}  # the weight of what a recurrence adds


def build_model(shape: dict, dtype=torch.float64):
    """The model of a random_shape."""
    shape = dict(shape)
    family, seed, state_seed, settled = (shape.pop(name, None) for name in ("family", "seed", "state_seed", "settled"))
    config = Config(width=shape["heads"] * shape["head_dim"], rope_theta=1e4, norm_eps=1e-6, init_std=0.1, **shape)
    torch.manual_seed(seed)
    if family == "ouro":
        model = Ouro(config)
    else:
        model = Huginn(config)
        model.state_table = model.draw_states(state_seed).to(dtype)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=settled * p.shape[-1] ** -0.5 if name.startswith("layers") else 1.0)
        if "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.0)
    return model.to(dtype).requires_grad_(False)


def random_model(family: str, rng: random.Random, dtype=torch.float64):
    return build_model(random_shape(family, rng), dtype)


class Tampered:
    """A model whose predictions below depth T are whatever `tamper(logits, positions)` makes of them.

    To know the depth of a row it carries one more number along with its state.
    """

    def __init__(self, model, tamper):
        self.model, self.tamper = model, tamper

    def __getattr__(self, name):
        return getattr(self.model, name)

    def initial_state(self, e, positions):
        return torch.cat((self.model.initial_state(e, positions), e.new_zeros(len(e), 1)), dim=-1)

    def recur(self, x, e, positions, kv):
        return torch.cat((self.model.recur(x[:, :-1], e, positions, kv), x[:, -1:] + 1), dim=-1)

    def predict(self, x, positions, kv, select=None):
        logits = self.model.predict(x[:, :-1], positions, kv, select)
        rows = torch.arange(len(x)) if select is None else select
        shallow = x[rows, -1] < self.model.recurrences
        logits[shallow] = self.tamper(logits[shallow], positions[rows][shallow])
        return logits


def told(truth: dict[int, int], wrong=lambda position: False):
    """A tamper function that knows the text: it predicts every token rightly, but for the positions that are `wrong`."""
    def tamper(logits, positions):
        for row, position in zip(logits, positions.tolist()):
            if position + 1 in truth:
                row[truth[position + 1]] = -1e9 if wrong(position + 1) else 1e9
        return logits
    return tamper


class SharingByDefinition:
    """Plain decoding with sharing, from the definition: everything is kept, and every row picks what it may read."""

    def __init__(self, model, share):
        self.model, self.share, self.kept = model, share, {}

    def attend(self, layer, q, k, v):
        spec, depth = self.model.kv_spec, self.model.recurrences
        core = spec.prelude <= layer < spec.prelude + spec.core
        own, out = self.recurrence if core else 0, []
        deepest = max(r for r in range(depth) if r % self.share.slots == own % self.share.slots)
        for row, position in enumerate(range(self.first, self.first + len(q))):
            self.kept[layer, own, position] = k[row], v[row]
            far = position - self.share.window if core and not self.prefill else -1  # the last position that is far
            seen = [self.kept[layer, deepest if i <= far else own, i] for i in range(position + 1)]
            keys, values = (torch.stack(kept).repeat_interleave(q.shape[1] // k.shape[1], 1) for kept in zip(*seen))
            weights = (torch.einsum("hd,ihd->hi", q[row], keys) * q.shape[-1] ** -0.5).softmax(-1)
            out.append(torch.einsum("hi,ihd->hd", weights, values))
        return torch.stack(out)

    def logits(self, tokens: list[int], first: int, prefill: bool) -> torch.Tensor:
        self.first, self.prefill, positions = first, prefill, torch.arange(first, first + len(tokens))
        e = self.model.embed(torch.tensor(tokens), positions, self)
        x = self.model.initial_state(e, positions)
        for self.recurrence in range(self.model.recurrences):
            x = self.model.recur(x, e, positions, self)
        return self.model.predict(x, positions, self)[-1]

    @torch.inference_mode()
    def decode(self, prompt: list[int], new: int, sampling: Sampling | None = None) -> list[int]:
        tokens = [choice(self.logits(prompt, 0, True), len(prompt), sampling)]
        while len(tokens) < new:
            position = len(prompt) + len(tokens)
            tokens.append(choice(self.logits(tokens[-1:], position - 1, False), position, sampling))
        return tokens


# ----------------------------------------------------------------------------------------------------------
# 2. Random cases


def random_case(rng: random.Random) -> dict:
    """Everything a case depends on, as JSON has it."""
    shape = random_shape(rng.choice(("ouro", "huginn")), rng)
    T = shape["recurrences"] = rng.choice((1, 2, 3, 4, 4, 5, 6, 8))
    shape["context"] = rng.choice((24, 40, 64))
    prompt = [rng.randrange(shape["vocab"]) for _ in range(rng.choice((1, 2, 3, 5, 8, 12, 20)))]
    if rng.random() < 0.3:                             # text that repeats itself
        prompt = (prompt[:3] * 20)[:len(prompt)]
    sampling = {"temperature": rng.choice((0, 0.5, 1, 2)), "top_k": rng.choice((0, 1, 3)),
                "top_p": rng.choice((0.6, 1)), "seed": rng.randrange(99)}
    share = {"slots": rng.randint(1, T), "window": rng.choice((1, 2, 3, 5, 8, 16, 50))}
    return {
        "shape": shape, "prompt": prompt, "new": rng.choice((1, 2, 3, 7, 16, 28)),
        "eos": [rng.randrange(shape["vocab"])] if rng.random() < 0.3 else [],
        "sampling": sampling if rng.random() < 0.4 else None, "share": share if rng.random() < 0.5 else None,
        "candidates": [rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(1, T)],  # at depths 1, 2, ...; 0: not read
        "rows": rng.choice((1, 2, 3, 5, 8, 32)), "lookup": rng.choice((0, 1, 3, 6)), "pad": rng.choice((0, 3)),
        "draft_depth": rng.randint(1, T), "draft_len": rng.randint(0, 6),
        "drafts": rng.choice(("model", "model", "model", "random", "wrong", "right"))}


def fault(case: dict) -> str:
    """What is wrong with a case; "" if nothing is."""
    model, prompt, new = build_model(case["shape"]), case["prompt"], case["new"]
    T, length = model.recurrences, min(case["new"], model.context - len(case["prompt"]))
    sampling = case["sampling"] and Sampling(**case["sampling"])
    share = case["share"] and KVShare(**case["share"])
    common = {"eos_ids": case["eos"], "sampling": sampling, "kv_share": share}

    plain = autoregressive(model, prompt, new, **common)
    if length:
        by_definition = SharingByDefinition(model, share).decode if share else lambda *a: recompute(model, *a)
        defined = by_definition(prompt, length, sampling)
        stops = [i + 1 for i, token in enumerate(defined) if token in case["eos"]]
        if plain.tokens != defined[:min(stops, default=length)]:
            return f"plain decoding returns {plain.tokens}, by definition it is {defined}"
        if plain.calls != (len(plain.tokens) - 1) * T:
            return f"plain decoding took {plain.calls} calls for {len(plain.tokens)} tokens"

    truth = dict(enumerate(plain.tokens, start=len(prompt)))
    tamper = {"random": lambda logits, _: torch.randn_like(logits), "wrong": told(truth, lambda _: True),
              "right": told(truth)}
    tried = Tampered(model, tamper[case["drafts"]]) if case["drafts"] != "model" else model
    complaints = []

    def look(wave):
        rows, tokens = wave.rows, wave.result.tokens
        if len(rows) > case["rows"] or tokens != plain.tokens[:len(tokens)]:
            complaints.append(f"call {wave.result.calls} has {len(rows)} rows, and tokens {tokens}")
        if any(cell.parent and cell.depth > cell.parent.depth for cell in rows):
            complaints.append(f"call {wave.result.calls} has a row that is deeper than its parent")
        finished = [cell.position for cell in rows if cell.depth == T and not cell.dropped]
        if finished and finished[-1] != len(prompt) + len(tokens) - 2:
            complaints.append(f"call {wave.result.calls} commits tokens other than from rows at depth T")

    options = {"candidates": {k: n for k, n in enumerate(case["candidates"], 1) if n}, "max_rows": case["rows"]}
    options |= {"on_call": look, **common}
    results = {
        "the wavefront": wavefront(tried, prompt, new, **options),
        "look-ahead": look_ahead.wavefront(tried, prompt, new, lookup=case["lookup"], **options),
        "bitwise mode": bitwise.wavefront(tried, prompt, new, pad_rows=case["rows"] + case["pad"], **options),
        "draft-then-verify": draft_then_verify(tried, prompt, new, draft_depth=case["draft_depth"],
                                               draft_len=case["draft_len"], **common)}
    for name, result in results.items():
        if (result.tokens, result.finish) != (plain.tokens, plain.finish):
            complaints.append(f"{name} returns {result.tokens} ({result.finish}), "
                              f"plain decoding {plain.tokens} ({plain.finish})")
        if name != "draft-then-verify" and result.calls > plain.calls:
            complaints.append(f"{name} took {result.calls} calls, plain decoding {plain.calls}")
    return complaints[0] if complaints else ""


def failure(case: dict) -> str:
    """The fault of a case, or what it raises."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                           # such small models gain nothing from more
    try:
        return fault(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(threads)


def smaller(case: dict) -> Iterator[dict]:
    """The case with one thing simpler in it."""
    for key in ("sampling", "share"):
        if case[key]:
            yield case | {key: None}
    for key in ("lookup", "pad", "draft_len", "eos"):
        if case[key]:
            yield case | {key: [] if key == "eos" else 0}
    for key, least in (("new", 1), ("rows", 1), ("draft_depth", 1)):
        for less in sorted({least, case[key] // 2, case[key] - 1} - {0, case[key]}):
            yield case | {key: less}
    for i in range(len(case["prompt"]) if len(case["prompt"]) > 1 else 0):
        yield case | {"prompt": case["prompt"][:i] + case["prompt"][i + 1:]}
    for i, n in enumerate(case["candidates"]):
        for less in range(n):
            yield case | {"candidates": case["candidates"][:i] + [less] + case["candidates"][i + 1:]}


def shrink(case: dict, seconds: float = 60) -> dict:
    """A case that fails, and of which nothing can be made simpler (in the time there is)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        less = next((less for less in smaller(case) if time.monotonic() < end and failure(less)), None)
        if less is None:
            break
        case = less
    return case


def search(minutes: float, seed: int) -> tuple[int, list[dict]]:
    """Cases compared, and those that failed, made small; it ends at the first of these."""
    rng, end, number = random.Random(seed), time.monotonic() + 60 * minutes, 0
    while time.monotonic() < end:
        case = random_case(rng)
        if failure(case):
            return number, [shrink(case)]
        number += 1
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
        print(failure(case), f"python -m extras.net '{json.dumps(case)}'", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
