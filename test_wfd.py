"""The tests, in teaching order: the models are the published ones; a cached row is the same function as an uncached
one; the wavefront returns the tokens of plain decoding, in the number of calls that theory says; stops, limits, bad
input; snapshots in every published form; the demo.

    python -m pytest -q
    python -m pytest -m slow -s      for an hour, new random cases of everything at once
"""

import ast
import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import unicodedata
import xml.etree.ElementTree
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import demo
import wfd
from demo import held_out_prompts
from extras.bitwise import differences
from extras.train_tiny import save_shards, save_tensors
from load_weights import CheckpointError, load
from model import Config, FullAttention, Huginn, Ouro, RMSNorm
from wfd import KVShare, Sampling, autoregressive, draft_then_verify, wavefront

HERE = Path(__file__).parent
GOLDEN, TINY = HERE / "golden", HERE / "tiny" / "ouro"
FAMILIES = ("ouro", "huginn")


def tensors_in(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}


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
    shape = dict(family=family, heads=heads, kv_heads=heads, head_dim=head_dim, ffn=rng.choice((12, 24)), vocab=rng.choice((7, 24)),
                 core=rng.randint(1, 3), recurrences=rng.randint(1, 6), context=64, tied=rng.random() < 0.3,
                 seed=rng.randrange(10 ** 6))
    if family == "ouro":
        shape["kv_heads"] = rng.choice([k for k in (1, 2, 4) if heads % k == 0])
    else:
        shape |= dict(prelude=rng.randint(0, 2), coda=rng.randint(0, 2), qk_bias=rng.random() < 0.8, state_seed=rng.randrange(100))
    return shape | {"settled": rng.choice((0.1, 0.5, 1.5))}                  # the weight of what a recurrence adds


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


def published_calls(result, new: int, d: int, depth: int) -> int:
    return (new - 2) * d + depth + result.stats["rejected"] * (depth - d)


# ----------------------------------------------------------------------------------------------------------------------
# The models compute what the published code computes


GOLDEN_CASES = [(states, i) for states in ("prompt", "zeros", "rand") for i in range(5)]


def golden(states: str):
    name = "ouro-a" if states == "prompt" else "huginn-a"
    model, tokenizer = load(GOLDEN / name, init_state="noise" if states == "prompt" else "zeros")
    expected = tensors_in(GOLDEN / name / "golden.safetensors")
    if states == "rand":
        model.state_table = expected["rand.state"][0]
    return model, tokenizer, expected


@pytest.mark.parametrize("states, i", GOLDEN_CASES)
def test_logits_after_every_recurrence_are_the_published_ones(states, i):
    model, _, expected = golden(states)
    logits = model(expected[f"prompt.{i}.ids"])
    for name, ours in (("logits", logits), ("final_logits", logits[-1]), ("last_logits", logits[:, -1])):
        if (key := f"{states}.{i}.{name}") in expected:
            assert (ours - expected[key]).abs().max() < 3e-4, key


@pytest.mark.parametrize("states, i", GOLDEN_CASES)
def test_greedy_continuations_are_the_published_ones(states, i):
    model, tokenizer, expected = golden(states)
    prompt, tokens = (expected[key].tolist() for key in (f"prompt.{i}.ids", f"{states}.{i}.greedy"))
    assert recompute(model, prompt, 32) == tokens
    assert autoregressive(model, prompt, 32).tokens == tokens
    for candidates in ({1: 1}, {2: 1}, {1: 3, 2: 2, 3: 1}):
        assert wavefront(model, prompt, 32, candidates=candidates).tokens == tokens


def test_an_initial_state_can_be_given_to_forward():
    model, _, expected = golden("rand")
    state, ids = model.state_table, expected["prompt.2.ids"]
    model.state_table = torch.zeros_like(state)
    assert (model(ids, state=state[:len(ids)])[:, -1] - expected["rand.2.last_logits"]).abs().max() < 3e-4


def test_noise_is_a_truncated_normal_of_the_published_spread_and_the_same_in_every_dtype():
    table = load(GOLDEN / "huginn-a")[0].state_table
    assert table.shape == (256, 64) and abs(table.std() - 0.6242) < 0.01 and table.abs().max() <= 1.8974
    assert torch.equal(load(GOLDEN / "huginn-a", dtype=torch.bfloat16)[0].state_table, table.bfloat16())
    assert not torch.equal(load(GOLDEN / "huginn-a", seed=1)[0].state_table, table)
    model = random_model("huginn", random.Random(0))
    model.config.init_std = 0.0
    assert not model.draw_states(0).any()


def test_fewer_recurrences_are_the_first_ones():
    model, _, expected = golden("zeros")
    model.recurrences = 3
    assert (model(expected["prompt.3.ids"]) - expected["zeros.3.logits"][:3]).abs().max() < 3e-4


# ----------------------------------------------------------------------------------------------------------------------
# A row in a mixed-depth call is the same function of the same inputs as in plain decoding


def state_from_scratch(model, tokens: list[int], depth: int) -> torch.Tensor:
    """The last token's state after `depth` recurrences, without any cache."""
    tokens = torch.tensor(tokens)
    positions, kv = torch.arange(len(tokens)), FullAttention(len(tokens))
    e = model.embed(tokens, positions, kv)
    x = model.initial_state(e, positions)
    for _ in range(depth):
        x = model.recur(x, e, positions, kv)
    return x[-1]


def lineage(cell) -> list[int]:
    return (lineage(cell.parent) if cell.parent else []) + [cell.token]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_mixed_depth_call_equals_single_row_calls(family):
    rng = random.Random(1)
    widths, distinct = set(), 0
    for _ in range(60):
        model = random_model(family, rng)
        prompt = [rng.randrange(model.vocab) for _ in range(rng.randint(1, 9))]
        wave = wfd.Wavefront(model, prompt, 20, {}, max_rows=8, room=8)
        wave.prefill()
        wave.embed_started()
        for _ in range(rng.randint(0, 7)):                                   # a random tree
            parent = rng.choice(wave.cells)
            wave.start(parent, parent.position + 1, rng.randrange(model.vocab), 1.0)
            wave.embed_started()
        for cell in wave.cells:                                              # at a random staircase of depths
            highest = cell.parent.depth if cell.parent else model.recurrences - 1
            for _ in range(rng.randint(0, highest)):
                wave.advance([cell])
        together, one_by_one = copy.deepcopy(wave), copy.deepcopy(wave)
        together.advance(together.cells)
        for cell in one_by_one.cells:
            one_by_one.advance([cell])
        x, singly = (wave.x[[cell.column for cell in wave.cells]] for wave in (together, one_by_one))
        scratch = torch.stack([state_from_scratch(model, prompt + lineage(cell), cell.depth) for cell in together.cells])
        assert (x - singly).abs().max() < 1e-9 and (x - scratch).abs().max() < 1e-9
        widths.add(len(x))
        distinct += len({cell.depth for cell in together.cells}) > 1
    assert widths == set(range(1, 9)) and distinct > 20


def test_what_is_computed_in_float32_in_a_bfloat16_model():
    """Norms up to the product with the gain; Huginn's rotation. Ouro rotates in its own dtype."""
    rng = torch.Generator().manual_seed(0)
    x, gain = (torch.randn(shape, generator=rng).bfloat16() for shape in ((5, 64), (64,)))
    norm = RMSNorm(64, 1e-6).bfloat16()
    norm.weight.data = gain
    wide = x.float()
    expected = (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16() * gain
    assert torch.equal(norm(x), expected)
    heads, positions = torch.randn(5, 2, 16, generator=rng).bfloat16(), torch.tensor([0, 1, 50, 200, 255])
    huginn, ouro = (load(GOLDEN / name, dtype=torch.bfloat16)[0] for name in ("huginn-a", "ouro-a"))
    angles = positions[:, None, None] * 50000 ** (-torch.arange(0, 16, 2) / 16)
    a, b = heads[..., 0::2].float(), heads[..., 1::2].float()
    expected = torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1).flatten(-2).bfloat16()
    assert torch.equal(huginn.rotary(positions)(heads), expected)
    angles = positions[:, None, None] * 1e6 ** (-torch.arange(0, 16, 2) / 16)
    (a, b), cos, sin = heads.chunk(2, -1), angles.cos().bfloat16(), angles.sin().bfloat16()
    assert torch.equal(ouro.rotary(positions)(heads), torch.cat((a * cos - b * sin, b * cos + a * sin), -1))


def test_a_prompt_prefilled_in_stretches_equals_one_in_one_go(monkeypatch):
    rng = random.Random(2)
    for family in FAMILIES * 5:
        model = random_model(family, rng)
        prompt = [rng.randrange(model.vocab) for _ in range(20)]
        caches = []
        for rows in (512, 7):
            monkeypatch.setattr(wfd, "PREFILL_ROWS", rows)
            wave = wfd.Wavefront(model, prompt, 10, {}, max_rows=4, room=4)
            with torch.inference_mode():
                wave.prefill()
            caches.append(wave)
        assert caches[0].result.tokens == caches[1].result.tokens
        for one, other in zip(caches[0].cache.stages, caches[1].cache.stages):
            assert torch.allclose(one.far, other.far, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_dropped_cell_wrote_is_never_read(family):
    """The columns that no cell holds are filled with noise before every call. Nothing may change."""
    rng = random.Random(3)
    dropped = 0
    for _ in range(20):
        model = random_model(family, rng)
        prompt = [rng.randrange(model.vocab) for _ in range(4)]
        candidates = {k: rng.randint(1, 3) for k in range(1, model.recurrences)}
        expected = wavefront(model, prompt, 16, candidates=candidates, max_rows=8)
        wave = wfd.Wavefront(model, prompt, 16, candidates, max_rows=8, room=16)
        with torch.inference_mode():
            wave.prefill()
            while not wave.result.finish:
                free = sorted(wave.cache.free)
                for stage in wave.cache.stages:
                    stage.near[..., free, :] = 100 * torch.randn_like(stage.near[..., free, :])
                wave.step(None)
        assert wave.result.tokens == expected.tokens == autoregressive(model, prompt, 16).tokens
        assert wave.result.calls == expected.calls
        dropped += expected.stats["dropped_rows"]
    assert dropped > 100


# ----------------------------------------------------------------------------------------------------------------------
# The wavefront returns the tokens of plain decoding


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_the_definition(family):
    rng = random.Random(4)
    for _ in range(20):
        model = random_model(family, rng)
        prompt = [rng.randrange(model.vocab) for _ in range(rng.randint(1, 9))]
        result = autoregressive(model, prompt, 12)
        assert result.tokens == recompute(model, prompt, 12)
        assert result.calls == result.rows == 11 * model.recurrences


def random_sampling(rng: random.Random) -> Sampling | None:
    if rng.random() < 0.5:
        return None
    return Sampling(rng.choice((0, 0.5, 1, 2)), rng.choice((0, 1, 3)), rng.choice((0.6, 1)), rng.randrange(9))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoder_equals_plain_decoding(family):
    """500 random cases over all options together, and by the counters every part of the method took part."""
    rng = random.Random(5)
    finishes, counts = set(), dict.fromkeys(("accepted", "rejected", "corrected_early", "dropped_rows"), 0)
    for case in range(500):
        if case % 4 == 0:
            model = random_model(family, rng, rng.choice((torch.float64, torch.float64, torch.float32)))
            model.recurrences = depth = rng.randint(1, 6)
        prompt = [rng.randrange(model.vocab) for _ in range(rng.choice((1, 2, 3, 8, 50, 60)))]
        new = rng.choice((1, 2, 3, 6, 12))
        common = {"eos_ids": {rng.randrange(model.vocab)} if rng.random() < 0.3 else set(), "sampling": random_sampling(rng)}
        plain = autoregressive(model, prompt, new, **common)
        n, d = len(plain.tokens), rng.randint(1, depth)
        tried = Tampered(model, lambda logits, _: torch.randn_like(logits)) if rng.random() < 0.2 else model

        result = wavefront(tried, prompt, new, candidates={d: 1}, **common)                   # the published schedule
        assert (result.tokens, result.finish) == (plain.tokens, plain.finish)
        if n >= 2:
            assert plain.calls == (n - 1) * depth
            assert result.calls == published_calls(result, n, d, depth)
        finishes.add(result.finish)

        candidates = {k: rng.randint(1, 4) for k in range(1, depth) if rng.random() < 0.7}
        rows = rng.choice((1, 2, 3, 8, 32))
        result = wavefront(tried, prompt, new, candidates=candidates, max_rows=rows, lookup=rng.choice((0, 0, 1, 4)),
                           pad_rows=rng.choice((None, None, rows, rows + 3)), **common)
        assert (result.tokens, result.finish) == (plain.tokens, plain.finish), (candidates, prompt, new)
        for name in counts:
            counts[name] += result.stats[name]
        if n and plain.finish != "stop":               # every row belongs to a finished cell or to a dropped one
            assert result.rows == (n - 1) * depth + result.stats["dropped_rows"]

        length = rng.randint(0, 5)
        result = draft_then_verify(tried, prompt, new, draft_depth=d, draft_len=length,
                                   pad_rows=rng.choice((None, None, length + 1)), **common)
        assert (result.tokens, result.finish) == (plain.tokens, plain.finish), (d, length)
    assert finishes == {"stop", "length", "context"} and min(counts.values()) > 200, counts


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_may_be_anything(family):
    """Always right, always wrong, wrong at one place, random: the output is the same, the number of calls is known."""
    rng = random.Random(6)
    for _ in range(25):
        model = random_model(family, rng)
        model.recurrences = depth = rng.randint(2, 6)
        prompt, new, d = [rng.randrange(model.vocab) for _ in range(5)], 14, rng.randint(1, depth - 1)
        tokens = autoregressive(model, prompt, new).tokens
        truth = dict(enumerate(tokens, start=len(prompt)))
        one_place = len(prompt) + rng.randint(1, new - 2)
        for wrong, rejected in ((lambda p: False, 0), (lambda p: True, new - 2), (lambda p: p == one_place, 1)):
            result = wavefront(Tampered(model, told(truth, wrong)), prompt, new, candidates={d: 1})
            assert result.tokens == tokens and result.stats["rejected"] == rejected
            assert result.stats["accepted"] == new - 2 - rejected
            assert result.calls == published_calls(result, new, d, depth)
        tree = {k: rng.randint(1, 4) for k in range(1, depth)}
        for tamper in (lambda logits, _: torch.randn_like(logits), told(truth, lambda p: True),
                       told(truth, lambda p: p % 2 == 0)):
            for candidates in ({d: 1}, tree):
                assert wavefront(Tampered(model, tamper), prompt, new, candidates=candidates, max_rows=6).tokens == tokens


def test_a_draft_depth_of_T_is_plain_decoding():
    model = random_model("ouro", random.Random(7))
    model.recurrences = 4
    result = wavefront(model, [1, 2, 3], 20, candidates={4: 1})
    assert result.calls == result.rows == 19 * 4 and result.stats["drafted"] == 0
    assert wavefront(model, [1, 2, 3], 20, candidates={}).calls == 19 * 4


def test_a_right_draft_costs_d_and_a_wrong_one_costs_T():
    """The example of the README: T = 4, d = 1, 8 tokens, one wrong draft."""
    model = random_model("ouro", random.Random(8))
    model.recurrences = 4
    tokens = autoregressive(model, [1, 2, 3], 8).tokens
    tampered = Tampered(model, told(dict(enumerate(tokens, start=3)), lambda position: position == 3 + 4))
    result = wavefront(tampered, [1, 2, 3], 8, candidates={1: 1})
    assert result.tokens == tokens and result.calls == (8 - 2) * 1 + 4 + 1 * (4 - 1) == 13


def test_a_round_of_draft_then_verify():
    """(draft_len + 1) cells climb to d one by one and to T together; with right drafts a round commits all of them."""
    model = random_model("huginn", random.Random(8))
    model.recurrences, prompt, new, d, length = 6, [1, 2, 3], 1 + 4 * 3, 2, 3
    tokens = autoregressive(model, prompt, new).tokens
    truth, round_calls = dict(enumerate(tokens, start=3)), (length + 1) * d + (6 - d)
    for wrong, rounds in ((lambda p: False, 3), (lambda p: True, 12)):
        waves = []
        result = draft_then_verify(Tampered(model, told(truth, wrong)), prompt, new, draft_depth=d, draft_len=length,
                                   on_call=waves.append)
        # The last rounds are shorter where fewer cells are left to start before the last position.
        shorter = sum(max(0, length + 1 - left) * d for left in ([] if rounds == 3 else range(12, 0, -1)))
        assert result.tokens == tokens and result.calls == rounds * round_calls - shorter
        assert all(len({row.depth for row in wave.rows}) == 1 for wave in waves)


def test_look_ahead_commits_several_tokens_in_a_call():
    """Text that repeats itself: a chain of looked-up tokens climbs side by side and is verified in one call."""
    model = random_model("ouro", random.Random(8))
    model.recurrences = 6
    truth = dict(enumerate([1, 2, 3, 4] * 12, start=4))

    class Repeating(Tampered):                                               # at depth T too
        def predict(self, x, positions, kv, select=None):
            return told(truth)(self.model.predict(x[:, :-1], positions, kv, select), positions if select is None else positions[select])
    repeating = Repeating(model, None)
    calls = [wavefront(repeating, [1, 2, 3, 4], 40, candidates={1: 1}, lookup=n).calls for n in (0, 4)]
    assert calls[0] == 38 + 6 and calls[1] < 20
    assert wavefront(repeating, [1, 2, 3, 4], 40, candidates={1: 1}, lookup=4).tokens == [truth[p] for p in range(4, 44)]


def test_look_ahead_takes_what_followed_the_longest_match():
    wave = wfd.Wavefront(random_model("ouro", random.Random(8)), [0, 1, 2, 3, 5, 6, 1, 2, 4, 0, 1, 2], 10, {}, max_rows=4, room=4,
                         lookup=3)
    root = wfd.Cell(0, 12, 3, None, 0, 1.0, False)
    assert wave.look_up(wfd.Cell(0, 11, 2, None, 0, 1.0, False)) == [3, 5, 6]    # 0 1 2, rather than the later 1 2
    wave.text.append(3)                                                      # the oldest cell's token is certain
    assert wave.look_up(root) == [5, 6, 1] and wave.look_up(wfd.Cell(1, 13, 5, root, 0, 1.0, False)) == [6, 1, 2]
    assert wave.look_up(wfd.Cell(1, 13, 6, root, 0, 1.0, False)) == []
    wave.text = [1, 2, 7, 1, 2, 8, 1, 2]                                     # the later of two equal matches
    assert wave.look_up(wfd.Cell(0, 7, 2, None, 0, 1.0, False)) == [8, 1, 2]
    wave.text = [0, 1, 2, 3, 5, 6, 1, 2, 4, 0, 1, 2, 3]
    chain = root
    for i, token in enumerate((7, 8, 7)):                                    # a repetition among the drafts
        chain = wfd.Cell(i + 2, 13 + i, token, chain, 0, 1.0, False)
    assert wave.look_up(wfd.Cell(5, 16, 8, chain, 0, 1.0, False)) == [7, 8]


@pytest.mark.slow
def test_the_exactness_net():
    """See extras/net.py: a case that fails is made small, and printed as a command."""
    from extras import net                             # which imports this file
    number, failed = net.search(minutes=60, seed=int(time.time()))
    print(f"{number} random cases, none unequal" if not failed else "")
    assert not failed, "\n".join(f"{net.failure(case)}\n{net.command(case)}" for case in failed)


def test_the_net_catches_a_fault_and_makes_it_small(monkeypatch):
    from extras import net
    follow = wfd.Wavefront.follow

    def unverified(wave, cell, wanted):                # a second draft takes the place of the token at depth T
        if cell.depth == wave.depth and len(cell.children) > 1 and cell.position > 6:
            wanted = {cell.children[1].token: 1.0}
        follow(wave, cell, wanted)
    monkeypatch.setattr(wfd.Wavefront, "follow", unverified)
    _, [case] = net.search(minutes=1, seed=0)
    assert net.failure(case).startswith("the wavefront returns") and net.failure(json.loads(net.command(case).split("'")[1]))
    assert len(case["prompt"]) + case["new"] == 10 and case["sampling"] is case["share"] is None and case["shape"]["core"] == 1, case
    monkeypatch.undo()
    assert net.failure(case) == ""


# ----------------------------------------------------------------------------------------------------------------------
# Sharing keys and values between recurrences


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
            far = position - self.share.window if core and not self.prefill else -1           # the last position that is far
            seen = [self.kept[layer, deepest if i <= far else own, i] for i in range(position + 1)]
            keys, values = (torch.stack(t).repeat_interleave(q.shape[1] // k.shape[1], 1) for t in zip(*seen))    # [i, H, h]
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


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_is_the_definition_whatever_the_schedule(family, monkeypatch):
    rng = random.Random(20)
    changed = fewer = 0
    for case in range(250):
        model = random_model(family, rng)
        depth, prompt = model.recurrences, [rng.randrange(model.vocab) for _ in range(rng.choice((1, 2, 5, 12, 20)))]
        share = KVShare(rng.choice([slots for slots in {1, 2, depth - 1, depth} if 1 <= slots <= depth]), rng.choice((1, 2, 3, 4, 8, 16, 50)))
        monkeypatch.setattr(wfd, "PREFILL_ROWS", rng.choice((512, 5)))
        common = {"kv_share": share, "sampling": random_sampling(rng)}
        plain, full = (autoregressive(model, prompt, 14, **options) for options in (common, {"sampling": common["sampling"]}))
        assert plain.tokens == full.tokens or share.slots < depth
        changed += plain.tokens != full.tokens
        if case % 3 == 0:
            assert plain.tokens == SharingByDefinition(model, share).decode(prompt, 14, common["sampling"]), (case, share)

        candidates, rows, waves = {k: rng.randint(1, 3) for k in range(1, depth)}, rng.choice((1, 2, 4, 8, 32)), []
        result = wavefront(model, prompt, 14, candidates=candidates, max_rows=rows, lookup=rng.choice((0, 0, 3)),
                           pad_rows=rng.choice((None, None, rows)), on_call=waves.append, **common)
        assert result.tokens == plain.tokens, (case, share, candidates, rows)
        assert all(row.position < min(row.position for row in wave.rows) + share.window for wave in waves for row in wave.rows)
        fewer += result.calls < plain.calls
        d, length, waves = rng.randint(1, depth), rng.randint(0, 5), []
        result = draft_then_verify(model, prompt, 14, draft_depth=d, draft_len=length, on_call=waves.append, **common)
        assert result.tokens == plain.tokens and all(len(wave.rows) <= length + 1 for wave in waves)
    assert changed > 12 and fewer > 100, (changed, fewer)


@pytest.mark.parametrize("slots", (1, 2, 4))
def test_sharing_is_the_published_one_where_that_has_no_window(slots):
    model, _, _ = golden("zeros")
    for prompt in json.loads((GOLDEN / "huginn-a" / "golden.json").read_text())["prompts"]:
        entry = prompt["kv_sharing"][f"compress-s{4 * slots}.prefill8.decode8"]
        tokens = entry["tokens"][:entry["first_near_tie"]]
        for decode in (autoregressive, wavefront):
            assert decode(model, prompt["ids"], 32, kv_share=KVShare(slots, 1)).tokens[:len(tokens)] == tokens


def test_the_bytes_of_a_cache_are_those_of_its_formula():
    model, tokenizer = load(GOLDEN / "huginn-a")                             # 2 + 4 + 2 layers, 8 recurrences, 4 heads of 16
    def column(layers): return layers * 2 * 4 * 16 * 4
    prompt, new, far = IDS, 30, len(IDS) + 30 - 1
    assert autoregressive(model, prompt, new).stats["cache_bytes"] == column(4 * 8 + 4) * (far + 1)
    for slots, window, rows in ((1, 8, 16), (2, 4, 4), (8, 3, 5)):
        near = window - 1 + rows
        result = wavefront(model, prompt, new, max_rows=rows, kv_share=KVShare(slots, window))
        assert result.stats["cache_bytes"] == column(4 * slots) * far + column(4 * 8) * near + column(4) * (far + near)
    huge = autoregressive(model, prompt, new, kv_share=KVShare(2, 10 ** 9))  # a window beyond the text costs no more than the text
    assert huge.stats["cache_bytes"] == column(4 * 2) * far + column(4 * 8) * far + column(4) * 2 * far


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(monkeypatch):
    model, _ = load(GOLDEN / "huginn-a")
    needed = autoregressive(model, IDS, 30).stats["cache_bytes"] + 4         # and the mask of one near column
    monkeypatch.setattr(wfd, "available_memory", lambda device: needed)
    autoregressive(model, IDS, 30)
    monkeypatch.setattr(wfd, "available_memory", lambda device: needed - 1)
    monkeypatch.setattr(model, "embed", None)                                # before the prefill
    with pytest.raises(ValueError, match="35 positions take 0.0 GiB, but cpu has 0.0 GiB free"):
        autoregressive(model, IDS, 30)
    for share in (KVShare(0, 4), KVShare(9, 4), KVShare(2, 0), KVShare(2, 1.5), (2, 4), KVShare(True, True)):
        with pytest.raises(ValueError, match="1 to 8 slots"):
            autoregressive(model, IDS, 30, kv_share=share)


# ----------------------------------------------------------------------------------------------------------------------
# Sampling


def test_samples_follow_the_distribution():
    """Chi-square against the filtered softmax over 4000 seeds, at a false-alarm rate of one in a million."""
    logits = torch.tensor([[1.2, 0.3, -0.5, 2.0, 0.0, -2.0, 0.9]])
    for options, kept in (({}, 7), ({"temperature": 0.7}, 7), ({"temperature": 3.0}, 7), ({"top_k": 4}, 4), ({"top_p": 0.75}, 3)):
        p = (logits[0].double() / options.get("temperature", 1.0)).softmax(-1)
        p = torch.where(p >= p.sort(descending=True).values[kept - 1], p, 0.0)
        p /= p.sum()
        counts = torch.zeros(7)
        for seed in range(4000):
            counts[Sampling(seed=seed, **options).scores(logits, [17]).argmax()] += 1
        assert counts[p == 0].sum() == 0
        expected = 4000 * p[p > 0]
        quantile = {7: 38.3, 4: 30.7, 3: 27.6}[kept]                         # of chi-square with kept - 1 degrees of freedom
        assert ((counts[p > 0] - expected) ** 2 / expected).sum() < quantile, options


def test_samples_of_neighbouring_positions_and_seeds_are_independent():
    noise = torch.stack([wfd.gumbel_noise(seed, position, 500) for seed in range(4) for position in range(4)])
    assert (torch.corrcoef(noise) - torch.eye(16)).abs().max() < 0.25
    assert torch.equal(noise[1], wfd.gumbel_noise(0, 1, 500))


def test_what_top_p_and_top_k_keep():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for options, kept in (({"top_p": 0.39}, 1), ({"top_p": 0.41}, 2), ({"top_p": 0.71}, 3), ({"top_k": 2}, 2), ({"top_k": 9}, 4),
                          ({"top_k": 3, "top_p": 0.7}, 2), ({"top_k": 1, "temperature": 9.0}, 1)):
        scores = Sampling(**options).scores(logits, [0])[0]
        assert scores.isfinite().tolist() == [i < kept for i in range(4)], options
        assert len(wfd.read_predictions(scores[None], 4)[0]) == kept         # a filtered token is never a candidate


def test_seeds_and_temperatures():
    model = random_model("ouro", random.Random(3))
    model.recurrences = 4
    outputs = {seed: wavefront(model, [1, 2], 30, candidates={1: 2}, sampling=Sampling(seed=seed)).tokens for seed in range(3)}
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3
    assert outputs[1] == autoregressive(model, [1, 2], 30, sampling=Sampling(seed=1)).tokens
    greedy = autoregressive(model, [1, 2], 30).tokens
    assert autoregressive(model, [1, 2], 30, sampling=Sampling(temperature=0, seed=5)).tokens == greedy
    for options in ({"temperature": -1}, {"temperature": "x"}, {"temperature": 5e-324}, {"temperature": 10 ** 400}, {"top_k": -1},
                    {"top_k": 2.5}, {"top_p": 0}, {"top_p": 1.1}, {"seed": 7.0}, {"seed": [1]}):
        with pytest.raises(ValueError, match="sampling needs"):
            Sampling(**options)


# ----------------------------------------------------------------------------------------------------------------------
# What a call reports


def test_every_call_keeps_the_staircase_and_commits_only_at_depth_T():
    rng = random.Random(9)
    for family in FAMILIES * 10:
        model = random_model(family, rng)
        waves, prompt = [], [rng.randrange(model.vocab) for _ in range(3)]
        candidates = {k: rng.randint(1, 3) for k in range(1, model.recurrences)}
        result = wavefront(model, prompt, 16, candidates=candidates, max_rows=5, on_call=waves.append)
        assert len(waves) == result.calls and sum(len(wave.rows) for wave in waves) == result.rows
        for wave in waves:
            depths = {row.number: row.depth for row in wave.rows}
            assert len(wave.rows) <= 5 and all(row.depth <= depths.get(row.parent, model.recurrences) for row in wave.rows)
            finished = [row for row in wave.rows if row.event in ("verified", "corrected") and row.depth == model.recurrences]
            assert [row.position + 1 for row in finished] == list(range(
                len(prompt) + len(wave.tokens) - len(wave.committed), len(prompt) + len(wave.tokens)))
        assert result.stats["predict_calls"] == sum(
            any(row.depth in (*candidates, model.recurrences) for row in wave.rows) for wave in waves)
        assert result.tokens[:1] + [token for wave in waves for token in wave.committed] == result.tokens
        assert all(result.tokens[:len(wave.tokens)] == wave.tokens for wave in waves)


def test_the_rows_of_a_narrow_call_are_those_of_the_likeliest_paths():
    model = random_model("ouro", random.Random(11))
    wave = wfd.Wavefront(model, [1, 2], 20, {}, max_rows=3, room=8)
    with torch.inference_mode():
        wave.prefill()
        [root] = wave.started
        for parent, token, probability in ((0, 1, 0.6), (0, 2, 0.4), (1, 3, 0.5), (2, 4, 0.9), (3, 5, 0.9)):
            parent = wave.started[parent]
            wave.start(parent, parent.position + 1, token, probability)
        wave.embed_started()
    # Paths: 1, .6, .4, .6 x .5 = .3, .4 x .9 = .36, .27
    assert [cell.token for cell in wave.choose_rows()[1:]] == [1, 2]
    wave.follow(root, {1: 0.1, 2: 0.9})                                      # a deeper prediction has changed its mind
    assert [cell.token for cell in wave.choose_rows()[1:]] == [2, 4]


def test_a_draft_that_is_a_stop_token_gets_no_cell():
    """If it was wrong it counts as rejected; if a deeper prediction has forgotten it, not."""
    model = random_model("ouro", random.Random(8))
    model.recurrences, prompt = 4, [1, 2, 3]
    tokens = autoregressive(model, prompt, 12).tokens
    stop = next(token for token in range(model.vocab) if token not in tokens)
    always = Tampered(model, told(dict.fromkeys(range(100), stop)))
    waves = []
    result = wavefront(always, prompt, 12, candidates={1: 1}, eos_ids={stop}, on_call=waves.append)
    assert result.tokens == tokens and (result.stats["rejected"], result.stats["drafted"]) == (10, 0) and result.calls == 11 * 4
    assert not any(row.token == stop for wave in waves for row in wave.rows)
    wave = wfd.Wavefront(model, prompt, 12, {1: 1}, max_rows=4, room=1, eos_ids={stop})       # room for no draft
    with torch.inference_mode():
        wave.prefill()
        wave.embed_started()
        [root] = wave.cells
        wave.follow(root, {stop: 1.0})
        wave.follow(root, {tokens[1]: 1.0})
        for _ in range(4):
            wave.advance([root])
        wave.read([root])
    assert wave.result.stats["rejected"] == 0


def test_a_looked_up_draft_stays_until_its_parent_is_finished():
    model = random_model("ouro", random.Random(8))
    wave = wfd.Wavefront(model, [1, 2], 20, {}, max_rows=8, room=8)
    with torch.inference_mode():
        wave.prefill()
        [root] = wave.started
        wave.start(root, 3, 4, 1.0, looked_up=True)
        wave.embed_started()
        wave.follow(root, {5: 1.0})
        assert [child.token for child in root.children] == [4, 5] and wave.result.stats["corrected_early"] == 0
        root.depth = wave.depth
        wave.follow(root, {5: 1.0})
    assert [child.token for child in root.children] == [5]


def test_token_ids_survive_narrow_logits():
    """A model of somebody else may return logits in bfloat16, which cannot hold a large id."""
    scores = torch.zeros(1, 1000, dtype=torch.bfloat16)
    scores[0, 709] = 5
    assert wfd.read_predictions(scores, 1)[0][0][0] == 709


def test_long_chains_of_cells():
    model = random_model("ouro", random.Random(8))
    model.config.context, model.recurrences = 4096, 2
    plain = autoregressive(model, [1, 2], 40).tokens
    assert draft_then_verify(model, [1, 2], 40, draft_depth=1, draft_len=39).tokens == plain
    cell = None
    for i in range(3000):
        cell = wfd.Cell(i, i, 0, cell, 0, 1.0, False)
        if cell.parent:
            cell.parent.children.append(cell)
    assert len(cell.lineage()) == 3000


def test_equal_logits_go_to_the_lowest_id():
    model = random_model("ouro", random.Random(10))
    model.head = torch.nn.Linear(model.config.width, model.vocab, bias=False).double().requires_grad_(False)
    model.head.weight[:] = model.head.weight[0]
    for result in (autoregressive(model, [1], 8), wavefront(model, [1], 8, candidates={1: 2} if model.recurrences > 1 else {})):
        assert result.tokens == [0] * 8
    assert [t for t, _ in wfd.read_predictions(torch.tensor([[1.0, 3, 2, 3, 3]]), 4)[0]] == [1, 3, 4, 2]


# ----------------------------------------------------------------------------------------------------------------------
# Stops, limits, bad input


def test_stop_tokens():
    model = random_model("ouro", random.Random(11))
    model.recurrences = 4
    tokens = autoregressive(model, [1, 2, 3], 24).tokens
    for stop in set(tokens) | {0}:
        for decode, options in ((autoregressive, {}), (wavefront, {"candidates": {1: 2, 2: 1}})):
            result = decode(model, [1, 2, 3], 24, eos_ids=[stop], **options)
            expected = tokens[:tokens.index(stop) + 1] if stop in tokens else tokens
            assert result.tokens == expected and result.finish == ("stop" if stop in tokens else "length")
    inside = [stop for stop in range(model.vocab) if stop not in autoregressive(model, [stop, 6], 4).tokens]
    assert inside, "this model always repeats its prompt: choose another"
    for stop in inside:
        assert len(autoregressive(model, [stop, 6], 4, eos_ids={stop}).tokens) == 4


def test_a_stop_token_that_is_the_last_one_allowed_is_a_stop():
    model = random_model("ouro", random.Random(11))
    tokens = autoregressive(model, [1, 2, 3], 5).tokens
    new = tokens.index(tokens[4]) + 1
    assert wavefront(model, [1, 2, 3], new, candidates={}, eos_ids={tokens[4]}).finish == "stop"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_context_ends_the_text(family):
    model = random_model(family, random.Random(12))
    model.recurrences = 3
    for length, new, finish, expected in ((60, 10, "context", 4), (60, 4, "length", 4), (63, 9, "context", 1),
                                          (64, 9, "context", 0), (64, 0, "length", 0), (5, 0, "length", 0)):
        for decode in (autoregressive, lambda *a: wavefront(*a, candidates={1: 2})):
            result = decode(model, [1] * length, new)
            assert (len(result.tokens), result.finish) == (expected, finish)
    assert (result.calls, result.rows) == (0, 0)


def test_two_decodes_do_not_disturb_each_other():
    model = random_model("huginn", random.Random(13))
    model.recurrences = 4
    first = wavefront(model, [1, 2], 12, candidates={1: 2})

    def interrupt(wave):
        if wave.call == 3:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        wavefront(model, [3, 4], 12, candidates={1: 2}, on_call=interrupt)
    within = []
    wavefront(model, [5], 5, candidates={1: 1}, on_call=lambda wave: within.append(wavefront(model, [1, 2], 12, candidates={1: 2})))
    assert all(result == first for result in within + [wavefront(model, [1, 2], 12, candidates={1: 2})])


@pytest.mark.parametrize("arguments, options, words", [
    (([], 5), {}, "prompt is empty"), (([[1], [2]], 5), {}, "one prompt at a time"),
    ((torch.tensor([1]), 5), {}, "token ids"), (([1, -1], 5), {}, "token ids"), (([1, 999], 5), {}, "999"),
    (([1] * 65, 5), {}, "65 tokens.* 64"), (([1], -1), {}, "max_new_tokens"), (([1], 5), {"max_rows": 0}, "max_rows"),
    (([1], 5), {"candidates": {0: 1}}, "from 1 to 4"), (([1], 5), {"candidates": {5: 1}}, "from 1 to 4"),
    (([1], 5), {"candidates": {1: 0}}, "from 1"), (([1], 5), {"candidates": {4: 2}}, "depth 4"),
    (([1], 5), {"max_rows": 8, "pad_rows": 7}, "at least max_rows, the 8"), (([1], 5), {"lookup": -1}, "lookup"),
    (([1], 5.0), {}, "max_new_tokens"), (([1], 5), {"max_rows": 2.5}, "max_rows"), (([1], 5), {"max_rows": 10 ** 6}, "1024"),
    (([1], 5), {"candidates": {1.5: 1}}, "1.5"), (([1], 5), {"pad_rows": 40.0}, "pad_rows must be an integer"),
    (([1], 5), {"pad_rows": 10 ** 9}, "up to 1024"), (([1], 5), {"candidates": [1]}, "must be a dict"), (([1], 5), {"eos_ids": 5}, "eos_ids must"),
    (([1], 5), {"eos_ids": "ab"}, "eos_ids must"), (([1], 5), {"sampling": 0.7}, "sampling must"), (([1], 5), {"sampling": Sampling}, "sampling must"),
    (([1], 5), {"on_call": 5}, "on_call must"), (([True], 5), {}, "token ids")])
def test_bad_arguments(arguments, options, words):
    model = random_model("ouro", random.Random(14))
    model.recurrences = 4
    with pytest.raises(ValueError, match=words):
        wavefront(model, *arguments, **options)
    for decode, foreign in ((wavefront, "draft_depth"), (autoregressive, "lookup"), (draft_then_verify, "lookup")):
        needed = {"draft_depth": 1, "draft_len": 1} if decode is draft_then_verify else {}
        with pytest.raises(TypeError, match=foreign):                        # not an option of this decoder
            decode(model, [1], 5, **needed, **{foreign: 1})


def test_the_limits_of_what_a_model_takes():
    model = random_model("ouro", random.Random(14))
    assert autoregressive(model, [model.vocab - 1], 2).tokens
    with pytest.raises(ValueError, match=f"a token {model.vocab}, but the model knows only {model.vocab}"):
        autoregressive(model, [model.vocab], 2)
    model.candidates = {1: 2, 2: 2, 3: 2}
    for model.recurrences in (1, 2, 3, 6):                                   # fewer or more than the schedule has depths
        assert wavefront(model, [1, 2], 12).tokens == autoregressive(model, [1, 2], 12).tokens


def test_no_recurrences_and_damaged_weights():
    model = random_model("ouro", random.Random(15))
    model.recurrences = 0
    with pytest.raises(ValueError, match="recurrences"):
        autoregressive(model, [1], 5)
    model.recurrences = 2
    for value in (torch.nan, torch.inf):
        model.layers[0].down.weight[0, 0] = value
        with pytest.raises(ValueError, match="not finite"):
            autoregressive(model, [1], 5)


def test_wfd_knows_only_torch_and_the_standard_library():
    imports = [node for node in ast.walk(ast.parse((HERE / "wfd.py").read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {name for node in imports for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names) | {"torch"}


# ----------------------------------------------------------------------------------------------------------------------
# Snapshots, in every form in which they are published


def snapshot(folder: Path, name: str, config=(), tensors=lambda t: t, shards: int = 1) -> Path:
    """A copy of a golden snapshot with other settings, other tensors, or cut into shards."""
    folder.mkdir(parents=True)
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((GOLDEN / name / file).read_bytes())
    settings = json.loads((GOLDEN / name / "config.json").read_text()) | dict(config)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))
    changed = tensors(tensors_in(GOLDEN / name / "model.safetensors"))
    if shards == 1:
        save_tensors(changed, folder / "model.safetensors")
    else:
        save_shards(changed, folder, shards)
    return folder


IDS = [5, 300, 17, 42, 9, 100]
EMBEDDING = {"ouro-a": "model.embed_tokens.weight", "huginn-a": "transformer.wte.weight"}


def logits_of(path, **options) -> torch.Tensor:
    return load(path, **options)[0](IDS)


@pytest.mark.parametrize("name, config", [
    ("ouro-a", {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    ("ouro-a", {"torch_dtype": ..., "dtype": "float32", "num_key_value_heads": None, "total_ut_steps": ...}),
    ("ouro-a", {"head_dim": 16, "layer_types": ..., "early_exit_threshold": None, "tie_word_embeddings": ...}),
    ("huginn-a", {"n_embd": ..., "hidden_size": 64, "n_heads": ..., "num_attention_heads": 4}),
    ("huginn-a", {"rope_base": ..., "rope_parameters": {"rope_theta": 5e4}, "tie_embeddings": ..., "tie_word_embeddings": True}),
    ("huginn-a", {"init_values": ..., "num_key_value_heads": None, "vocab_size": 500})])
def test_settings_old_and_new(tmp_path, name, config):
    assert torch.equal(logits_of(snapshot(tmp_path / "s", name, config)), logits_of(GOLDEN / name))


@pytest.mark.parametrize("name", EMBEDDING)
def test_tensors_in_shards_and_with_buffers(tmp_path, name):
    def with_buffers(tensors):
        buffer = "freqs_cis" if name == "huginn-a" else "model.layers.0.self_attn.rotary_emb.inv_freq"
        return tensors | {buffer: torch.zeros(3)}
    expected = logits_of(GOLDEN / name)
    assert torch.equal(logits_of(snapshot(tmp_path / "shards", name, shards=3)), expected)
    assert torch.equal(logits_of(snapshot(tmp_path / "buffers", name, tensors=with_buffers)), expected)
    assert torch.equal(logits_of(snapshot(tmp_path / "no buffers", name, tensors=lambda tensors: {
        key: value for key, value in tensors.items() if key != "freqs_cis" and "early_exit" not in key})), expected)


@pytest.mark.parametrize("name, tie", [("ouro-a", "tie_word_embeddings"), ("huginn-a", "tie_embeddings")])
def test_a_tied_head_may_be_there_or_not(tmp_path, name, tie):
    def only(*names):
        return lambda tensors: {key: value for key, value in tensors.items() if key not in names} | {
            key: tensors[EMBEDDING[name]].clone() for key in (EMBEDDING[name], "lm_head.weight") if key not in names}
    both, embedding, head = (logits_of(snapshot(tmp_path / str(i), name, {tie: True}, only(*absent)))
                             for i, absent in enumerate(([], ["lm_head.weight"], [EMBEDDING[name]])))
    assert torch.equal(both, embedding) and torch.equal(both, head)
    untied = lambda tensors: tensors | {"lm_head.weight": tensors[EMBEDDING[name]] + 1}                # noqa: E731
    assert not torch.equal(logits_of(snapshot(tmp_path / "untied", name, {tie: False}, untied)), both)


def test_grouped_query_attention_is_that_of_repeated_heads(tmp_path):
    def heads(tensors, chosen):
        rows = [16 * head + i for head in chosen for i in range(16)]
        return {key: value[rows] if "k_proj" in key or "v_proj" in key else value for key, value in tensors.items()}
    grouped = snapshot(tmp_path / "grouped", "ouro-a", {"num_key_value_heads": 2}, lambda t: heads(t, [0, 1]))
    repeated = snapshot(tmp_path / "repeated", "ouro-a", {}, lambda t: heads(t, [0, 0, 1, 1]))
    assert (logits_of(grouped) - logits_of(repeated)).abs().max() < 1e-5
    model, _ = load(grouped)
    assert wavefront(model, IDS, 20, candidates={1: 2, 2: 1}).tokens == recompute(model, IDS, 20)


def test_dtypes(tmp_path):
    half = snapshot(tmp_path / "half", "ouro-a", tensors=lambda t: {key: value.bfloat16() for key, value in t.items()})
    assert load(half)[0].head.weight.dtype == torch.bfloat16
    wide, _ = load(half, dtype=torch.float32)
    assert torch.equal(wide.head.weight, load(GOLDEN / "ouro-a")[0].head.weight.bfloat16().float())
    assert load(half, dtype=torch.float64)[0](IDS).dtype == torch.float64
    with pytest.warns(UserWarning, match="float16"):
        load(half, dtype=torch.float16)
    with pytest.raises(ValueError, match="dtype"):
        load(half, dtype=torch.int8)


def edited(key, change):
    return lambda tensors: tensors | {key: change(tensors.get(key))}


@pytest.mark.parametrize("options, words", [
    ({"config": {"model_type": "llama"}}, "config.json: model_type is 'llama'"),
    ({"config": {"hidden_size": ...}}, "config.json has no hidden_size"),
    ({"config": {"hidden_size": "64"}}, "config.json: hidden_size is '64'"),
    ({"config": {"num_key_value_heads": 3}}, "4 heads of size 16 and 3 key/value heads"),
    ({"config": {"rope_theta": ...}}, "config.json has no rope_theta"),
    ({"config": {"rope_parameters": {"rope_theta": 1e4}}}, "two different values of rope_theta"),
    ({"config": {"rope_scaling": {"type": "yarn"}}}, "'yarn'"),
    ({"config": {"rope_parameters": [1]}}, "rope_parameters"), ({"config": {"rope_theta": "abc"}}, "rope_theta is 'abc'"),
    ({"config": {"rope_theta": -5}}, "rope_theta is -5"), ({"config": {"rms_norm_eps": float("nan")}}, "rms_norm_eps is nan"),
    ({"config": {"model_type": ["ouro"]}}, "model_type"), ({"config": {"tie_word_embeddings": "false"}}, "true or false"),
    ({"config": {"tie_word_embeddings": True}, "tensors": edited("lm_head.weight", lambda t: t[:5])}, "lm_head.weight"),
    ({"config": {"eos_token_id": "2"}}, "config.json: eos_token_id is '2'"), ({"config": {"eos_token_id": True}}, "eos_token_id is True"),
    ({"config": {"use_sliding_window": True}}, "use_sliding_window"),
    ({"tensors": lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}}, "lacks the tensor model.norm.weight"),
    ({"tensors": edited("foo.bar", lambda _: torch.zeros(1))}, "model.safetensors holds foo.bar"),
    ({"tensors": edited("model.layers.3.mlp.up_proj.weight", lambda _: torch.zeros(1))}, "holds model.layers.3.mlp.up_proj"),
    ({"tensors": edited("model.norm.weight", lambda t: t[:63])}, r"model.safetensors: model.norm.weight .*\[63\].*\[64\]"),
    ({"tensors": edited("lm_head.weight", lambda t: t.to(torch.int8))}, "lm_head.weight is stored as I8")])
def test_snapshots_that_cannot_be_used(tmp_path, options, words):
    with pytest.raises(CheckpointError, match=words):
        load(snapshot(tmp_path / "s", "ouro-a", **options))


def test_files_that_cannot_be_used(tmp_path):
    folder = snapshot(tmp_path / "s", "ouro-a", shards=3)
    for i in (1, 3):
        (folder / f"model-0000{i}-of-00003.safetensors").rename(tmp_path / f"{i}")
    with pytest.raises(CheckpointError, match="lacks model-00001-of-00003.safetensors, model-00003-of-00003.safetensors"):
        load(folder)
    (folder / "model-00001-of-00003.safetensors").write_bytes((tmp_path / "1").read_bytes()[:-5])
    (folder / "model-00003-of-00003.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match="model-00001-of-00003.safetensors is not a complete safetensors file"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../1"}}')
    with pytest.raises(CheckpointError, match="'../1', which is not a plain file name"):
        load(folder)
    for file, content, words in (("tokenizer.json", "{}", "tokenizer.json can't be used"), ("tokenizer.json", None, "tokenizer.json is missing"),
                                 ("config.json", "{", "config.json is not valid JSON"), ("config.json", None, "config.json is missing")):
        (folder / file).unlink()
        if content is not None:
            (folder / file).write_text(content)
        with pytest.raises(CheckpointError, match=words):
            load(folder)


@pytest.mark.parametrize("file", ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
                                  "model-00002-of-00003.safetensors", "model.safetensors.index.json"))
def test_other_things_in_the_place_of_a_file(tmp_path, file):
    folder = snapshot(tmp_path / "s", "ouro-a", shards=3)
    for content, words in ((b"", "is empty"), (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
                           (b"\n<!DOCTYPE html><html>", "is a web page"), (b"<html>", "is a web page")):
        (folder / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{file} .*{words}"):
            load(folder)


def test_an_index_that_is_wrong(tmp_path):
    folder = snapshot(tmp_path / "s", "ouro-a", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    one, two = sorted(set(index.values()))
    for changes, words in (({"foo.bar": one}, "00001-of-00002.safetensors holds foo.bar, but it does not"),
                           ({name: two for name, file in index.items() if file == one}, "but it does not"),
                           ({"model.norm.weight": "/etc/passwd"}, "plain file name"), ({"model.norm.weight": ".."}, "plain file name"),
                           ({"model.norm.weight": [1]}, "plain file name"), ({"model.norm.weight": "a" * 5000}, "plain file name"),
                           ({"model.norm.weight": "c", "lm_head.weight": "b"}, "lacks b, c: was")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index | changes}))
        with pytest.raises(CheckpointError, match=words):
            load(folder)


@pytest.mark.parametrize("name, config, words", [
    ("ouro-a", {"num_hidden_layers": 10 ** 12, "layer_types": ...}, "asks for 1000000000000 layers, but .* has only"),
    ("ouro-a", {"hidden_size": 2 ** 40}, "has the shape"), ("ouro-a", {"vocab_size": 2 ** 50}, "has the shape"),
    ("ouro-a", {"rope_theta": 10 ** 400}, "rope_theta is 1000"), ("ouro-a", {"max_position_embeddings": 2 ** 63}, "max_position"),
    ("ouro-a", {"layer_types": 7}, "layer_types is 7"), ("ouro-a", {"layer_types": ["full_attention"]}, "layer_types"),
    ("ouro-a", {"model_type": "a\n\x1b[31m" + "x" * 10 ** 6}, "model_type is '[^\n\x1b]{0,1100}$"),
    ("huginn-a", {"block_size": 2 ** 62}, "initial states take"), ("huginn-a", {"block_size": 10 ** 13}, "10000000000000 positions, whose initial states take .* GiB")])
def test_absurd_settings_take_neither_memory_nor_time(tmp_path, name, config, words):
    with pytest.raises(CheckpointError, match=words):
        load(snapshot(tmp_path / "s", name, config))


def test_weights_that_do_not_fit_are_refused_with_the_numbers(monkeypatch):
    size = sum(p.nbytes for p in load(TINY)[0].parameters())
    monkeypatch.setattr("load_weights.available_memory", lambda device: size)
    load(TINY)
    with pytest.raises(CheckpointError, match=r"take 0.0 GiB in torch.float32, but cpu has 0.0 GiB free"):
        load(TINY, dtype=torch.float32)


def test_a_vocabulary_that_the_model_does_not_have(tmp_path):
    folder = snapshot(tmp_path / "s", "ouro-a", {"vocab_size": 400}, lambda tensors: {
        key: value[:400] if key in (EMBEDDING["ouro-a"], "lm_head.weight") else value for key, value in tensors.items()})
    with pytest.raises(CheckpointError, match="tokenizer.json has a token 511, but the model knows only 400"):
        load(folder)


def test_what_load_and_a_tokenizer_refuse():
    for options, words in (({"path": None}, "path must"), ({"path": "x" * 5000}, "neither a folder"), ({"device": "abacus"}, "no device"),
                           ({"dtype": "float32"}, "dtype must"), ({"seed": "a"}, "seed must"), ({"init_state": "ones"}, "init_state must")):
        with pytest.raises(ValueError, match=words):
            load(**{"path": TINY} | options)
    _, tokenizer = load(TINY)
    for text in (None, 5, b"x", ["x"]):
        with pytest.raises(ValueError, match="prompt must be a text"):
            tokenizer.encode(text)
    assert tokenizer.decode([-1, 10 ** 20]) == ""
    for ids in (None, 5, "x", [1.5], [None]):
        for decode in (tokenizer.decode, tokenizer.stream().push):
            with pytest.raises((ValueError, TypeError), match="integers|iterable"):
                decode(ids)
    assert "\ufdd0" in tokenizer.decode(tokenizer.encode("a\ufdd0b", chat=True))
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode([{"role": "user", "content": "\ud800"}], chat=True)


def test_weights_that_are_no_numbers(tmp_path):
    """They come to light at the first logits, and not as a text of tokens 0."""
    for name, key in (("ouro-a", "model.norm.weight"), ("huginn-a", "transformer.wte.weight"), ("ouro-a", "lm_head.weight")):
        for value in (torch.nan, torch.inf):
            def broken(tensor): return torch.cat((tensor.flatten()[:-1], torch.tensor([value]))).view(tensor.shape)
            model, _ = load(snapshot(tmp_path / f"{name}{key}{value}", name, tensors=edited(key, broken)))
            with pytest.raises(ValueError, match="not finite"):
                autoregressive(model, [511], 1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_damaged_snapshots_are_refused_in_a_sentence_or_decode_exactly():
    done = subprocess.run([sys.executable, "extras/fuzz.py", "--cases", "80", "--seed", "7"], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0 and "80 cases: " in done.stdout, done.stdout + done.stderr


def test_a_hub_id_is_looked_up_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("some/model", "no/such/folder"):
        with pytest.raises(CheckpointError, match="hf download some/model" if name == "some/model" else "neither a folder nor"):
            load(name)
    repo = tmp_path / "hub" / "models--some--model"
    blobs = snapshot(repo / "blobs", "ouro-a", shards=2)
    for revision in ("new", "old"):
        (repo / "snapshots" / revision).mkdir(parents=True)
        for file in blobs.iterdir() if revision == "new" else ():
            (repo / "snapshots" / revision / file.name).symlink_to(file)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("new")
    expected = logits_of(GOLDEN / "ouro-a")
    assert torch.equal(logits_of("some/model"), expected)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert torch.equal(logits_of("some/model"), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Tokens and text


def test_prompts_of_the_golden_data_encode_and_decode():
    for states in ("prompt", "zeros"):
        _, tokenizer, _ = golden(states)
        name = "ouro-a" if states == "prompt" else "huginn-a"
        for prompt in json.loads((GOLDEN / name / "golden.json").read_text())["prompts"]:
            assert tokenizer.encode(prompt["text"]) == prompt["ids"]
            assert tokenizer.decode(prompt["ids"]) == prompt["text"]
            ids, text = (prompt[k] for k in (("greedy_ids", "greedy_text") if states == "prompt" else
                                             ("greedy_ids_zeros", "greedy_text_zeros")))
            assert tokenizer.decode(ids) == text


def test_chats_are_rendered_by_the_snapshots_own_template(tmp_path):
    ouro, huginn = load(GOLDEN / "ouro-a")[1], load(GOLDEN / "huginn-a")[1]
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": " Hello "}, {"role": "user", "content": "Bye"}]
    assert ouro.decode(ouro.encode(talk, chat=True)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n Hello <|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n")
    assert huginn.decode(ids := huginn.encode(talk, chat=True)) == (
        "<|begin_text|><|begin_header|>system<|end_header|>\n\nBe brief.<|end_turn|><|begin_header|>user<|end_header|>\n\nHi"
        "<|end_turn|><|begin_header|>Huginn<|end_header|>\n\nHello<|end_turn|><|begin_header|>user<|end_header|>\n\nBye"
        "<|end_turn|><|begin_header|>Huginn<|end_header|>\n\n")
    assert ids.count(480) == 1 and ids[0] == 480
    assert ouro.encode("Hi", chat=True) == ouro.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

    folder = snapshot(tmp_path / "s", "ouro-a")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for template in ([{"name": "tools", "template": "no"}, {"name": "default", "template": "list {{ messages[0].content }}"}],
                     "string {{ messages[0].content }}"):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        _, tokenizer = load(folder)
        assert tokenizer.decode(tokenizer.encode("x", chat=True)) == f"{'list' if isinstance(template, list) else 'string'} x"
    (folder / "chat_template.jinja").write_text("{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}file")
    _, tokenizer = load(folder)
    assert tokenizer.decode(tokenizer.encode("x", chat=True)) == "file"
    with pytest.raises(ValueError, match="too long"):
        tokenizer.encode(talk, chat=True)
    for bad in ([{"content": "x"}], ["x"], {"role": "user", "content": "x"}, [], [{"role": "user", "content": "x", "name": None}]):
        with pytest.raises(ValueError, match="role"):
            tokenizer.encode(bad, chat=True)
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("\ud800")
    for template, answer in (("{{ 1 / 0 }}", None), ("{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}fine", "fine"),
                             ("{% if tools is not none %}tools{% else %}none{% endif %}", "none"), ("{{ [1]|tojson(indent=None) }}", "[1]"),
                             ("{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}{% endfor %}", "<|im_start|>x")):
        (folder / "chat_template.jinja").write_text(template)
        _, tokenizer = load(folder)
        assert tokenizer.eos_ids == {0}                                      # none of these shows how a turn ends
        if answer is None:
            with pytest.raises(ValueError, match="refuses"):
                tokenizer.encode("x", chat=True)
        else:
            assert tokenizer.decode(tokenizer.encode("x", chat=True)) == answer
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="template"):
        load(folder)[1].encode("x", chat=True)


@pytest.mark.parametrize("template, words", [
    ("{{ 'a' * 10000000000 }}", "MemoryError"), ("{{ (1).to_bytes(20000000000, 'big')|length }}", "MemoryError"),
    ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MemoryError"),
    ("{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = [n.x, dict.fromkeys(range(99999))] %}{% endfor %}", "MemoryError|too much"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too much time or memory"),
    ("{% set n = namespace(x=()) %}{% for i in range(9) %}{% for j in range(99999) %}{% set n.x = (n.x,) %}{% endfor %}{% endfor %}"
     "{% set d = {n.x: 1} %}", "too much time or memory"),                   # the interpreter dies of it
    ("{{ 'a' * 20000000 }}", "too long a text"), ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{% include '/etc/passwd' %}", "refuses"), ("{{ cycler.__init__.__globals__.os }}", "unsafe"), ("{{ '\\ud800' }}", "surrogates"),
    ("{{ messages.append(1) }}", "unsafe"), ("{{ raise_exception('a\nb') }}", "refuses these messages: a b$"), ("{{ 1 // 0 }}", "by zero"),
    ("{{ ((((" + "(" * 500, "is not valid"), ("{% generation %}", "is not valid")])
def test_hostile_chat_templates(tmp_path, monkeypatch, template, words):
    """They may take neither memory nor time of ours, nor our process with them."""
    monkeypatch.setattr("load_weights.SECONDS", 3)
    folder = snapshot(tmp_path / "s", "ouro-a")
    (folder / "chat_template.jinja").write_text(template)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=words):
        load(folder)[1].encode("x", chat=True)
    assert time.monotonic() - begin < 20


def test_a_template_does_not_import_from_the_current_folder(tmp_path, monkeypatch):
    """Which may be that of the snapshot."""
    (tmp_path / "jinja2.py").write_text("open('it_was_run', 'w')")
    monkeypatch.chdir(tmp_path)
    assert load(GOLDEN / "ouro-a")[1].encode("x", chat=True) and not (tmp_path / "it_was_run").exists()


def test_what_chat_templates_may_use(tmp_path):
    folder = snapshot(tmp_path / "s", "ouro-a")
    (folder / "chat_template.jinja").write_text(
        "{% macro tag(x) %}[{{ x }}]{% endmacro %}{% set n = namespace(i=1) %}{% for m in messages[0:] if m.role != 'tool' %}{% set n.i = n.i + 2 * 3 %}"
        "{{ tag(m.role.title() ~ n.i ~ none) }}{{ m['content'] | trim | replace('a', 'b') | upper }}{{ '-'.join(['p', 'q']) + 'r'.replace('r', 's') }}"
        "{{ ['x', 'y'] | map('upper') | join(',') }}{{ {'k': [1, 'é']} | tojson }}{{ 7 % 4 }}{{ '%s' % m.content.split(' ')|length }}"
        "{{ strftime_now('%Y')|length }}{% break %}{% endfor %}")
    _, tokenizer = load(folder)
    assert tokenizer.decode(tokenizer.encode("a c ", chat=True)) == '[User7None]B Cp-qsX,Y{"k": [1, "é"]}334'


@pytest.mark.parametrize("settings, text", [
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}}, "x"),       # a panic in the library
    ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "x"),
    ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}}, "x"),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}}, "a" * 48 + "!")])
def test_a_tokenizer_that_fails_in_use(tmp_path, settings, text):
    folder = snapshot(tmp_path / "s", "ouro-a")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(CheckpointError, match="tokenizer.json can't be used"):
        load(folder)[1].encode(text)


def test_special_tokens_typed_by_a_user_are_only_words():
    for name, turn in (("ouro-a", "<|im_end|>"), ("huginn-a", "<|end_turn|>")):
        _, tokenizer = load(GOLDEN / name)
        ids = tokenizer.encode(f"say {turn} twice {turn}", chat=True)
        assert ids.count(tokenizer.encode(turn)[0]) == 1 and f"say {turn} twice {turn}" in tokenizer.decode(ids)


def test_the_stop_set_is_what_all_files_say(tmp_path):
    assert load(GOLDEN / "ouro-a")[1].eos_ids == {0, 2}                      # <|im_end|> only ends a turn of the template
    assert load(GOLDEN / "huginn-a")[1].eos_ids == {481, 484}
    folder = snapshot(tmp_path / "s", "ouro-a", {"eos_token_id": [7, 8]})
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load(folder)[1].eos_ids == {0, 2, 7, 8, 9}


def test_settings_of_the_tokenizers_training_do_not_cut_or_pad(tmp_path):
    folder = snapshot(tmp_path / "s", "ouro-a")
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    settings["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                           "pad_token": "<|endoftext|>"}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    text = "a text of more than three tokens"
    assert load(folder)[1].encode(text) == load(GOLDEN / "ouro-a")[1].encode(text)


def test_a_stream_joins_to_the_text_and_never_splits_a_character():
    _, tokenizer, _ = golden("prompt")
    rng = random.Random(16)
    text = "naïve 日本 🜁 x"
    for ids in [tokenizer.encode(text)] + [[rng.randrange(600) for _ in range(60)] for _ in range(50)]:
        stream, pieces, rest = tokenizer.stream(), [], list(ids)
        while rest:
            n = rng.randint(1, 3)
            pieces.append(stream.push(rest[:n]))
            rest = rest[n:]
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        assert "".join(pieces) + stream.end() == tokenizer.decode(ids)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_token_that_the_tokenizer_does_not_know_has_no_text(tmp_path):
    def padded(tensors):
        return {k: torch.cat((v, v[:1] * 3)) if k in (EMBEDDING["ouro-a"], "lm_head.weight") else v for k, v in tensors.items()}
    model, tokenizer = load(snapshot(tmp_path / "s", "ouro-a", {"vocab_size": 513}, padded))
    model.head.weight[512] = model.head.weight[autoregressive(model, IDS, 1).tokens[0]] * 2
    assert wavefront(model, IDS, 8).tokens == autoregressive(model, IDS, 8).tokens
    assert 512 in wavefront(model, IDS, 8).tokens and tokenizer.decode([5, 512, 7]) == tokenizer.decode([5, 7])


# ----------------------------------------------------------------------------------------------------------------------
# The trained model and the demo


def test_the_trained_model_in_float32_at_every_draft_depth():
    model, tokenizer = load(TINY, dtype=torch.float32)
    accepted, rejected = [0] * 4, [0] * 4
    for prompt in held_out_prompts(tokenizer, 20):
        plain = autoregressive(model, prompt, 128)
        for d in (1, 2, 3):
            result = wavefront(model, prompt, 128, candidates={d: 1})
            assert result.tokens == plain.tokens
            assert result.calls == published_calls(result, 128, d, 4)
            accepted[d] += result.stats["accepted"]
            rejected[d] += result.stats["rejected"]
    assert accepted[1] < accepted[2] < accepted[3] and rejected[1] > rejected[2] > rejected[3] > 20, (accepted, rejected)


def test_the_trained_huginn_in_float32():
    """32 recurrences: plain decoding takes 32 calls for a token. Counts, on texts of 128 tokens."""
    model, tokenizer = load(HERE / "tiny" / "huginn", dtype=torch.float32)
    calls = dict.fromkeys(("default", "published", "shared"), 0)
    for prompt in held_out_prompts(tokenizer, 2):
        plain, plain_shared = (autoregressive(model, prompt, 128, kv_share=share) for share in (None, demo.SHARING))
        assert plain.calls == 127 * 32
        for name, reference, options in (("default", plain, {}), ("published", plain, {"candidates": {4: 1}}),
                                         ("shared", plain_shared, {"kv_share": demo.SHARING})):
            result = wavefront(model, prompt, 128, **options)
            assert result.tokens == reference.tokens
            calls[name] += result.calls
    assert calls["default"] <= 1.7 * 2 * 127 and calls["default"] <= 0.5 * calls["published"], calls
    assert calls["shared"] <= 1.05 * calls["default"], calls                 # the window is hardly ever in the way


def test_bitwise_mode_in_bfloat16():
    """With pad_rows, the logits at depth T are those of plain decoding bit for bit, in chains and in trees."""
    model, tokenizer = load(TINY, dtype=torch.bfloat16)
    for prompt in held_out_prompts(tokenizer, 3):
        assert differences(model, prompt, 48, 8) == (4 * 47, 0)


def test_bfloat16_differs_from_plain_decoding_only_at_near_ties():
    """A first difference is legitimate where plain decoding's two best logits are within twice the rounding there."""
    model, tokenizer = load(TINY, dtype=torch.bfloat16)
    settings, compared, near = {"max_rows": 8, "candidates": {1: 2, 2: 2, 3: 1}}, 0, 0
    for prompt in held_out_prompts(tokenizer, 8):
        plain, ours = autoregressive(model, prompt, 64).tokens, wavefront(model, prompt, 64, **settings).tokens
        part = demo.difference(partial(wavefront, model, **settings), partial(autoregressive, model), prompt, 64, ours, plain)
        compared += part.token - 1 if part else 64
        near += bool(part)
        assert not part or part.near_tie and plain[:part.token - 1] == ours[:part.token - 1] and part.gap_here <= 4 * part.rounding, part
    assert compared > 100 and near > 1


def test_a_difference_that_is_no_near_tie(monkeypatch, capsys):
    """Of both texts it is known how far apart the two best tokens were. A planted fault is none of rounding."""
    model, tokenizer = load(TINY, dtype=torch.float32)
    prompt = tokenizer.encode(demo.PROMPT)
    plain, logits = autoregressive(model, prompt, 12).tokens, {}
    autoregressive(model, prompt, 12, on_call=lambda wave: logits.update((row.position + 1, row.logits) for row in wave.rows))

    def faulty(wave, logits, positions, depths, n, interpret=wfd.Wavefront.interpret):
        if wave.max_rows > 1:                          # in the wavefront one token gets more than its due
            for row, position in zip(logits, positions):
                row[17] += 50 * (position == len(prompt) + 7)
        return interpret(wave, logits, positions, depths, n)
    monkeypatch.setattr(wfd.Wavefront, "interpret", faulty)
    ours = wavefront(model, prompt, 12).tokens
    part = demo.difference(partial(wavefront, model), partial(autoregressive, model), prompt, 12, ours, plain)
    assert part.token == 8 and ours[7] == 17 and part.apart > 5 and not part.near_tie and part.rounding < 1e-4
    best, second = logits[len(prompt) + 7].topk(2).values
    assert abs(part.gap - (best - second)) < 1e-4 and abs(part.gap_here - (logits[len(prompt) + 7][17] + 50 - best)) < 1e-3
    for seed in range(4):                              # in sampling too, though filters differ from pass to pass at their edges
        sampling, share = Sampling(1.0, top_k=20, top_p=0.9, seed=seed), KVShare(1, 8)
        plain = autoregressive(model, prompt, 12, sampling=sampling, kv_share=share).tokens
        wrong = plain[:5] + [(plain[5] + 777) % model.vocab]
        part = demo.difference(partial(wavefront, model), partial(autoregressive, model), prompt, 6, wrong, plain[:6], sampling, kv_share=share)
        assert part.token == 6 and not part.near_tie and part.apart > 0.1 and part.rounding < 1e-3, part
    assert run_demo(monkeypatch, "--max-new-tokens", 12) == 1
    out = capsys.readouterr().out
    assert "first difference" in out and "token 8, where the two best" in out and "decoding: NO\n" in out


def run_demo(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
    try:
        return demo.main()
    except SystemExit as end:                                                # argparse
        return end.code


def test_the_demo(monkeypatch, capsys):
    assert run_demo(monkeypatch, "--max-new-tokens", 24, "--candidates", "1:1") == 0
    out, err = capsys.readouterr()
    assert err == "" and "identical to plain decoding: yes" in out and demo.PROMPT in out
    assert " 92 " in out                                                     # (24 - 1) * 4 block calls of plain decoding
    for pad in ([], ["--pad-rows", 32]):
        code = run_demo(monkeypatch, "--max-new-tokens", 8, "--recurrences", 2, "--chat", "--prompt", "Who is Emma?", *pad,
                        "--dtype", "bfloat16", "--temperature", 0.7, "--lookup", 2)
        out, err = capsys.readouterr()
        assert code == 0 and "2 recurrences" in out and err == ""            # if tokens differ, then at a near tie


@pytest.mark.parametrize("arguments, words", [
    (["--model", "no/such"], "hf download no/such"), (["--candidates", "9:1"], "depths go from 1 to 4"),
    (["--candidates", "1"], "DEPTH:NUMBER"), (["--prompt", ""], "prompt is empty"), (["--recurrences", "0"], "recurrences"),
    (["--temperature", "1", "--top-p", "2"], "top_p"), (["--top-k", "2"], "need a --temperature"), (["--bench", "--kv-share", "1:4"], "no effect"), (["--kv-share", "1"], "SLOTS:WINDOW"), (["--kv-share", "9:4"], "1 to 4 slots"),
    (["--trace", "no/such/a.svg"], "folder that exists"), (["--trace", "a.png"], ".svg"), (["--limit", "3"], "--spec-bench"),
    (["--spec-bench", "q", "--limit", "0"], "1 or more"), (["--device", "abacus"], "abacus"), (["--bench", "gpt"], "invalid choice")])
def test_the_demo_refuses_bad_input_in_one_line(monkeypatch, capsys, arguments, words):
    assert run_demo(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("error: ") == 1


def test_the_demo_ends_when_interrupted(monkeypatch, capsys):
    monkeypatch.setattr(demo, "generate", lambda options: exec("raise KeyboardInterrupt"))
    assert run_demo(monkeypatch) == 130 and "interrupted" in capsys.readouterr().err


def test_what_was_printed_before_an_interruption_stays():
    """Ctrl-C in the middle of the text: it ends with a whole line, and no traceback; and so it does while torch is being imported."""
    command = [sys.executable, "demo.py", "--max-new-tokens", "15000"]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        seen = b""
        while demo.PROMPT.encode() not in seen or len(seen) < 400:
            seen += os.read(run.stdout.fileno(), 1000)
        run.send_signal(signal.SIGINT)
        rest, err = run.communicate(timeout=60)
    assert run.returncode == 130 and err == b"\ninterrupted\n" and (seen + rest).endswith(b"\n")
    model, tokenizer = load(TINY, dtype=torch.float32)
    text = (seen + rest).decode().split("\n\n", 1)[1].rstrip("\n")
    ids = autoregressive(model, tokenizer.encode(demo.PROMPT), len(tokenizer.encode(text))).tokens
    assert (demo.PROMPT + tokenizer.decode(ids)).startswith(text) and len(text) > len(demo.PROMPT) + 100
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        time.sleep(0.3)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert out == err == b"" and run.returncode == -signal.SIGINT            # for a shell: 130


def test_the_picture_in_a_terminal(monkeypatch, capsys):
    """Every mark at its place; the text, without the picture, is what stays."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(demo.time, "sleep", lambda seconds: None)
    assert run_demo(monkeypatch, "--max-new-tokens", 24) == 0
    frames = capsys.readouterr().out.split("F")
    assert len(frames) > 20
    model, tokenizer = load(TINY, dtype=torch.float32)
    options = type("Options", (), {"prompt": demo.PROMPT, "chat": False})
    picture = demo.Picture(options, tokenizer, 3, 4)
    rows = [wfd.Row(0, None, 5, 7, 4, "verified"), wfd.Row(1, 0, 6, 8, 3, "corrected"), wfd.Row(2, 1, 7, 9, 2, "dropped"),
            wfd.Row(3, 1, 7, 10, 1, "drafted"), wfd.Row(4, 1, 7, 10, 1, "advanced")]
    lines = [re.sub("\x1b[^m]*m", "", line) for line in picture.frame(wfd.Wave(9, rows, [8], [5, 6, 7, 8]), 80)]
    assert [line.split("|")[1].rstrip() for line in lines[:4]] == ["  = = *", "        !", "          x", "          +"]
    assert "4 certain" in "".join(lines) and "plain decoding: call 12" in "".join(lines)
    assert all(len(line) < 81 for line in lines)
    picture.prompt = "日本語の文章です" * 30
    lines = picture.text_lines(wfd.Wave(9, rows, [8], [5, 6, 7, 8]), 69)
    assert all(sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in re.sub("\x1b[^m]*m", "", line)) <= 79 for line in lines)


def test_a_trace_is_an_svg_of_every_call(monkeypatch, capsys, tmp_path):
    file = tmp_path / "t.svg"
    assert run_demo(monkeypatch, "--max-new-tokens", 24, "--trace", file) == 0
    svg = xml.etree.ElementTree.parse(file).getroot()
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "24 tokens in" in texts[-1] and "plain decoding needs 92" in texts[-1] and "certain" in "".join(texts)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}rect"))) > 92 and "href" not in file.read_text()
    assert run_demo(monkeypatch, "--max-new-tokens", 1, "--trace", file) == 0
    assert "1 tokens in 0 block calls; plain decoding needs 0" in file.read_text()
    wave = wfd.Wave(1, [wfd.Row(0, None, 1, 200, 4, "verified")], [195], [194, 195])
    svg = demo.trace_svg([wave], [194, 195], load(TINY)[1], 1, 4)            # tokens that are control characters
    assert xml.etree.ElementTree.fromstring(svg) is not None and "\N{REPLACEMENT CHARACTER}" in svg


def test_spec_bench_resumes_where_it_was_interrupted(monkeypatch, capsys, tmp_path):
    questions = [{"question_id": i, "category": category, "turns": turns} for i, (category, turns) in enumerate(
        [("writing", ["Write.", "Again."]), ("qa", ["Who?"]), ("roleplay", ["Be."]), ("qa", ["Where?"]), ("rag", ["Read."])])]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    arguments = ["--spec-bench", tmp_path / "q.jsonl", "--limit", 1, "--max-new-tokens", 6, "--methods", "plain,published,wavefront"]

    def run(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        code, out = run_demo(monkeypatch, *arguments), capsys.readouterr().out
        file = Path("spec-bench-ouro-float32.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return code, out, file, [{**line, "turns": [{**turn, "seconds": 0} for turn in line["turns"]]} for line in lines[1:]]
    code, out, _, whole = run("whole")
    assert code == 0 and len(whole) == 3 * 3 and [len(record["turns"]) for record in whole[:4]] == [2, 2, 2, 1]
    assert "| published, draft depth 1 | overall |" in out and "| 3 of 3 |" in out and "*2.42x Ouro-2.6B" in out and " 0 answers" in out

    answer, asked = demo.answer, []
    monkeypatch.setattr(demo, "answer", lambda *a: asked.append(a) or (answer(*a) if len(asked) < 5 else exec("raise KeyboardInterrupt")))
    code, _, file, part = run("part")
    assert code == 130 and part == whole[:4]
    file.write_text(file.read_text()[:-20])                                  # a crash in the middle of a line
    monkeypatch.setattr(demo, "answer", answer)
    code, out, _, resumed = run("part")
    assert code == 0 and resumed == whole and " 3 answers" in out
    arguments[-1] = "published"
    assert "not compared" in run("lonely")[1]
    arguments[-3] = 7
    monkeypatch.chdir(tmp_path / "part")
    assert run_demo(monkeypatch, *arguments) == 2 and "other settings" in capsys.readouterr().err
    Path("empty.jsonl").write_text("")
    Path("turns.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": "Who?"}')
    for argument, words in ((["--methods", "magic"], "does not know magic"), (["--spec-bench", "nowhere"], "nowhere is missing"),
                            (["--spec-bench", HERE / "README.md"], "line 1 of"), (["--spec-bench", "empty.jsonl"], "no questions"),
                            (["--spec-bench", "turns.jsonl"], "line 1 of"), (["--max-new-tokens", 0], "1 or more"),
                            (["--recurrences", 1], "fewer than 2 recurrences")):
        assert run_demo(monkeypatch, *arguments, *argument) == 2 and words in capsys.readouterr().err
    records = file.read_text()
    for line in ("{}", '{"id": 1, "method": "wavefront"}', '{"id": 1, "method": "wavefront", "turns": [{"tokens": [1, 2]}]}', "[" * 10 ** 5):
        file.write_text(records + line + "\n")
        assert run_demo(monkeypatch, *arguments[:-3], 6) == 2 and "is damaged" in capsys.readouterr().err
    first, *lines = records.splitlines()
    lines = [json.loads(line) for line in lines]
    changed = next(line for line in lines if line["method"] == "wavefront")
    changed["turns"][0]["tokens"][3] = 17              # no decoder wrote this: the verdict is about the tokens
    file.write_text("\n".join([first, *map(json.dumps, lines)]) + "\n")
    for _ in range(2):
        assert run_demo(monkeypatch, *arguments[:-3], 6, "--methods", "plain,wavefront") == 1
        out = capsys.readouterr().out
        assert "2 of 3" in out and "first different at token 4" in out and "decoding: NO\n" in out
    questions[1]["turns"] = ["word " * 20000]                                # more than the context; it has the category for itself
    (tmp_path / "q.jsonl").write_text("\ufeff" + "".join(json.dumps(question) + "\n" for question in questions[:3]), encoding="utf-8")
    monkeypatch.setattr(demo, "SPEC_BENCH_METHODS", ("plain", "published"))
    arguments[-3:] = [6]
    code, out, _, records = run("long")
    assert code == 0 and "left out" in out and "questions 1\n" in out and [len(record["turns"]) for record in records] == [2, 2, 0, 0]


def test_bench_of_a_shape(monkeypatch, capsys):
    """With shapes small enough for a test: the tables, and the replay of a tiny model's predictions."""
    for name in ("ouro-1.4b", "huginn-3.5b"):
        model_class, config = demo.SHAPES[name]
        small = Config(**vars(config) | {"width": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn": 48, "vocab": 2048, "core": 2})
        monkeypatch.setitem(demo.SHAPES, name, (model_class, small))
        assert run_demo(monkeypatch, "--bench", name) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [int(line.split()[0]) for line in lines if " ms" in line] == [1, 2, 4, 8, 16, *[32] * (model_class is Huginn)]
        replayed = [line for line in lines if "x fewer" in line]
        calls = [float(line.split(" calls per token")[0].split()[-1]) for line in replayed]
        assert calls[0] == config.recurrences and calls[0] > calls[1] > calls[2]
    monkeypatch.setattr(demo, "available_memory", lambda device: 2 ** 20)
    assert run_demo(monkeypatch, "--bench", "ouro-1.4b") == 2 and "not even one layer" in capsys.readouterr().err


def test_a_snapshot_of_official_size_but_small(monkeypatch, capsys, tmp_path):
    from extras import official_size
    monkeypatch.setattr(official_size, "SHARD", 40000)
    for shape in ("ouro-1.4b", "huginn-3.5b"):
        model_class, config = demo.SHAPES[shape]
        small = Config(**vars(config) | {"width": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn": 48, "vocab": 2048, "recurrences": 5})
        monkeypatch.setitem(demo.SHAPES, shape, (model_class, small))
        official_size.write_official_size(shape, tmp_path / shape)
        assert len(list((tmp_path / shape).glob("*.safetensors"))) > 2
        official_size.measure(tmp_path / shape, 6)
        out = capsys.readouterr().out
        assert "loaded in" in out and "plain: 6 tokens" in out and "25 block calls of 1.0 rows" in out and "wavefront: 6 tokens" in out


def test_the_list_of_mutants_fits_wfd():
    from extras.mutants import MUTANTS
    source = (HERE / "wfd.py").read_text(encoding="utf-8")
    assert len(MUTANTS) >= 30 and all(source.count(old) == 1 and old != new for _, old, new in MUTANTS)


def snippets() -> list[str]:
    return [part.split("```")[0] for part in (HERE / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]]


def test_the_snippets_of_the_readme(monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    program, toy = snippets()
    exec(program, {})
    text, finish, calls = capsys.readouterr().out.rstrip().rsplit(" ", 2)
    assert len(text) > 80 and finish == "length" and 39 <= int(calls) < 4 * 39
    exec(toy, {})
    identical, plain, ours = capsys.readouterr().out.split()
    assert identical == "True" and int(ours) < int(plain) == 6 * 39


def test_nothing_but_the_four_packages_is_imported():
    code = ("import sys, warnings; warnings.simplefilter('ignore'); sys.argv = ['demo.py', '--max-new-tokens', '4']\n"
            "import demo; assert demo.main() == 0\n"
            "print(sorted({'transformers', 'huggingface_hub', 'accelerate', 'numpy'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
