"""Wavefront decoding for looped language models, in one file.

A looped model applies one block of layers T times to every token, so a token costs T block calls in a row. But its
shallow states already guess the next token rather well, and the block's weights are the same at every depth: one
call can advance positions that stand at *different* depths. So the next token starts from an early guess, the one after it
from a guess of that, and all climb together, a diagonal wavefront:

    depth 4 |  #  verified          each call moves every cell in flight up by one;
    depth 3 |     #                 the oldest finishes at depth T with the true next token,
    depth 2 |        #              the youngest enters at depth 0 with a draft
    depth 1 |           #  drafts
             p  p+1 p+2 p+3

Here T = 4, and the draft comes from depth 1. A wrong guess costs some work and is replaced. The output is that of plain
decoding, token for token: shallow predictions choose what to try, and only predictions at depth T are ever emitted.

    recurrence   one application of the block; depth: recurrences done, 0 to T
    cell         a position with a guess of its token, at some depth; row: a cell's place in one call's batch
    parent       the cell at the position before, whose prediction a cell was started from; children: the reverse
    candidate    a token that a prediction ranks high enough to be tried; draft: a candidate that got a cell
    committed    a token that is certain; finished: a cell that reached depth T under finished ancestors

Everything here works on rows, without a batch axis, and knows the model only through this interface
(model.py has two such models; d is the width of the state, V the vocabulary):

    model.recurrences, model.context                 T; positions available
    model.candidates                                 the schedule to use when none is asked for
    model.kv_spec                                    prelude, core, coda (layers of each), heads (K, of keys and values;
                                                     queries may have more: H), head_dim (h), dtype, device
    model.embed(tokens, positions, kv)               [rows] -> [rows, d]; runs the prelude's layers, if it has any
    model.initial_state(e, positions)                [rows, d] -> [rows, d], the state at depth 0
    model.recur(x, e, positions, kv)                 [rows, d] -> [rows, d], one recurrence: the block call
    model.predict(x, positions, kv, select=None)     [rows, d] -> [selected, V]; runs the coda's layers, if it has any

In every layer the model calls kv.attend(layer, q, k, v), layers being numbered prelude, core, coda. None of these
functions may write into its arguments.

Not here: several prompts at a time, training, printing, timing.
"""

import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# ----------------------------------------------------------------------------------------------------------------------
# 1. From logits to tokens
#
# Plain decoding, drafting and verifying must never disagree about what a prediction says, so one function reads all
# of them. Equal scores are not rare in bfloat16; the lowest token id wins.
#
# Sampling stays exact by being deterministic. The argmax of logits + Gumbel noise is a sample from their softmax, and
# here the noise depends on the seed and the position alone. So what is sampled at a position is a function of its
# logits, as in greedy decoding, and nothing else in this file needs to know. (Coupled by shared noise, somewhat fewer
# drafts are accepted than by the optimal rejection rule; in exchange, every decoder returns the very same tokens.)


@dataclass(frozen=True)
class Sampling:
    """Sample from softmax(logits / temperature) within the top_k tokens and the top_p of probability, in that order.

    top_k 0 and top_p 1 are off; the token that crosses top_p stays; temperature 0 is greedy.
    """
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        numbers = all(isinstance(value, (int, float)) for value in (self.temperature, self.top_p))
        check(numbers and (self.temperature == 0 or 1e-9 <= self.temperature <= 1e9) and 0 < self.top_p <= 1
              and type(self.top_k) is type(self.seed) is int and self.top_k >= 0,
              f"sampling needs a temperature of 0 or from 1e-9 to 1e9, 0 < top_p <= 1, integers top_k >= 0 and seed, not {self}")

    def scores(self, logits: Tensor, positions: list[int]) -> Tensor:
        """logits [rows, V], and the position that each row predicts -> scores [rows, V], whose argmax is the sample."""
        if self.temperature == 0:
            return logits
        scores = logits.double() / self.temperature
        if self.top_k:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            probabilities, order = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
            outside = probabilities.cumsum(-1) - probabilities >= self.top_p
            scores = scores.masked_fill(outside.gather(-1, order.argsort(-1)), -torch.inf)
        noise = [gumbel_noise(self.seed, position, scores.shape[-1]) for position in positions]
        return scores + torch.stack(noise).to(scores.device)


@functools.lru_cache(maxsize=64)
def gumbel_noise(seed: int, position: int, size: int) -> Tensor:
    """The noise of a position, [size]. Hashed, since seed + position would repeat one seed's noise under the next."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return -torch.empty(size, dtype=torch.float64).exponential_(generator=generator).log()


def read_predictions(scores: Tensor, n: int) -> list[list[tuple[int, float]]]:
    """The n best tokens of every row, best first, with their probabilities. scores [rows, V]."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))     # which holds token ids below 2 ** 24 exactly
    total = scores.logsumexp(-1, keepdim=True)
    ranked = []
    for i in range(min(n, scores.shape[-1])):
        if i:
            scores = scores.scatter(-1, best, -torch.inf)
        best = scores.argmax(-1, keepdim=True)                               # [rows, 1], the first of several equals
        probability = (scores.gather(-1, best) - total).exp().clamp(max=1)
        ranked.append(torch.cat((best, probability), dim=-1))
    predictions = torch.stack(ranked, dim=1).tolist()                        # [rows, n, 2]: a step's only wait for the device
    check(all(probability == probability for row in predictions for _, probability in row),
          "the model's logits are not finite: its dtype is too narrow for it, or its weights are damaged")
    return [[(int(token), probability) for token, probability in row if probability > 0] for row in predictions]


# ----------------------------------------------------------------------------------------------------------------------
# 2. Cells
#
# Cells in flight form a tree: a guess may have several tokens worth trying. A child is never deeper than its parent
# (the staircase). That is all it takes for exactness: at recurrence k a cell needs the keys and values that its
# ancestors wrote at recurrence k, and by the staircase they are there, or are written in the same layer of the same
# call, before attention reads. So a row computes what it would compute in plain decoding. The staircase stands because
# a cell starts at depth 0, and no call advances a cell without its parent unless the parent is deeper (choose_rows).


@dataclass(eq=False)
class Cell:
    number: int                # 0, 1, ... in the order in which cells are started
    position: int
    token: int
    parent: "Cell | None"      # None once the parent is finished
    column: int                # where its keys, values and states are; see Cache
    probability: float         # of its token, as its parent last predicted it (in sampling: softmax of the noisy scores)
    looked_up: bool            # a draft copied from earlier text, not predicted by its parent
    depth: int = 0
    children: list["Cell"] = field(default_factory=list)
    tried_stop: bool = False   # a stop token is among its candidates; such a draft gets no cell
    in_flight: bool = True     # neither finished nor dropped
    event: str = ""            # what the last call did with it, see Row
    logits: Tensor | None = None                       # and what was read of it

    def lineage(self) -> list["Cell"]:
        """The cell and its ancestors in flight, youngest first."""
        found = [self]
        while found[-1].parent:
            found.append(found[-1].parent)
        return found


# ----------------------------------------------------------------------------------------------------------------------
# 3. The cache
#
# Keys and values differ from recurrence to recurrence, so every layer of the looped block has T planes of them, one
# for each. A plane is a row of columns:
#
#     |  near: cells in flight, in any order  |  far: finished positions 0, 1, 2, ...        |
#
# A cell writes to its near column, one plane per recurrence, and attends to the far columns and to its ancestors'
# near ones; a mask hides the other branches of the tree. When it is finished, its column is copied, once, to its place
# among the far ones. (Keys are rotated by position before they are stored, so it doesn't matter where they are.)
# Dropping a cell therefore leaves no trace: its column is free, and whoever takes it over writes every plane before
# reading it. Nothing is ever cleared, but all begins as zeros, since a masked NaN would still poison a weighted sum.
#
# Layers before and behind the loop (prelude, coda) have a single plane. A draft's entries in a coda are provisional,
# from whatever depth its prediction was last read at. That can mislead drafts, but no token: at depth T a cell's
# ancestors have been read at depth T before it, or are read in the same call, and have overwritten theirs.
#
# T planes are a lot of memory. With sharing, far positions keep only `slots` planes of the looped block: the last `slots`
# recurrences, p in plane p mod slots, and recurrence r reads plane r mod slots. That is another function than the model's
# own, so all decoders must agree on it whatever their schedule; hence the window. Behind the prompt, within which
# everything is near, position q at recurrence r attends to
#
#     far   i <= q - window    what i left in plane r mod slots when it was finished
#     near  i >  q - window    what i wrote at recurrence r itself, be it finished or in flight
#
# No cell may start further than `window` behind the last finished position, so what is far is always finished. The
# last finished positions keep their near columns, with all T recurrences, for as long as a cell may come that needs them.


class KVShare(NamedTuple):
    """Cross-recurrence sharing of keys and values, see above."""
    slots: int
    window: int


class Stage:
    """The keys and values of layers through which every cell passes `passes` times, kept in `slots` planes when far."""

    def __init__(self, spec, layers: int, passes: int, slots: int, near: int, far: int):
        def zeros(planes: int, columns: int) -> Tensor:                      # [layers, keys and values, planes, K, columns, h]
            return torch.zeros(layers, 2, planes, spec.heads, columns, spec.head_dim, dtype=spec.dtype, device=spec.device)
        self.passes, self.slots = passes, slots
        if slots == passes:
            self.whole = zeros(passes, near + far)                           # near and far side by side are read as one
            self.near, self.far = self.whole.split((near, far), dim=-2)
        else:
            self.whole, self.near, self.far = None, zeros(passes, near), zeros(slots, far)

    def finish(self, column: int, position: int) -> None:
        """Copy the last `slots` passes of a near column to the far column of a position."""
        self.far[..., position, :] = self.near[:, :, -self.slots:, :, column].roll(self.passes, 2)   # pass p goes to plane p mod slots


class Grid:
    """Rows that read different planes, laid out with one line for each plane: so one attention call serves all of them,
    each line a batch element with its own plane. Rows that read planes 2, 1, 1 make two lines of two places: row 1 and
    row 2; row 0 and a place left over.
    """

    def __init__(self, planes: list[int], device: torch.device, least: int):
        low, high = min(planes), max(planes)
        apart = math.gcd(*(plane - low for plane in planes)) or 1            # a plain slice takes every so many planes
        self.planes, self.lines = slice(low, high + 1, apart), (high - low) // apart + 1
        self.length = max(least, *Counter(planes).values())
        places = {plane: itertools.count((plane - low) // apart * self.length) for plane in planes}
        home = [next(places[plane]) for plane in planes]                     # the place of each row in the grid
        row_in = {place: row for row, place in enumerate(home)}
        grid = [row_in.get(place, 0) for place in range(self.lines * self.length)]            # what is left repeats row 0
        self.home = self.grid = None
        if home != list(range(len(grid))):             # otherwise the rows are the grid
            self.home, self.grid = torch.tensor(home + grid, device=device).split([len(home), len(grid)])

    def spread(self, x: Tensor) -> Tensor:
        """[rows, heads, n] -> [lines, heads, length, n]."""
        return (x if self.grid is None else x[self.grid]).unflatten(0, (self.lines, self.length)).transpose(1, 2)

    def collect(self, x: Tensor) -> Tensor:
        """[lines, heads, length, n] -> [rows, heads, n]."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.home is None else x[self.home]


class Cache:
    """Keys and values of everything before and in the wavefront: `near` cells at a time, `far` positions.

    Takes 2 x K x h x (bytes of a number) for each of these, a column in a plane of a layer:
        core x (slots x far + T x near)  +  (prelude + coda) x (far + near)
    where slots = T without sharing.
    """

    def __init__(self, spec, recurrences: int, near: int, far: int, share: KVShare | None):
        slots, self.window = share or (recurrences, 1)
        layers = ((spec.prelude, 1, 1), (spec.core, recurrences, slots), (spec.coda, 1, 1))
        self.bytes = 2 * spec.heads * spec.head_dim * spec.dtype.itemsize * sum(
            n * (passes * near + planes * far) for n, passes, planes in layers)
        needed, free = self.bytes + near * near * spec.dtype.itemsize, available_memory(spec.device)        # and `seen`, below
        check(needed <= free, f"the keys and values of {far} positions take {needed / 2 ** 30:.1f} GiB, but {spec.device} has "
              f"{free / 2 ** 30:.1f} GiB free: shorten the text, or share them between recurrences (kv_share)")
        self.stages = self.prelude, self.core, self.coda = [Stage(spec, *stage, near, far) for stage in layers]
        self.layers = [(stage, i) for stage, (n, _, _) in zip(self.stages, layers) for i in range(n)]
        self.near, self.device = near, spec.device
        self.least = 2 if spec.dtype.itemsize == 2 else 1                    # CPUs take longer for one query than for two in half precision
        self.free = set(range(near))
        self.finished = 0                                                    # far columns filled
        self.held: dict[int, int] = {}                                       # finished position -> the near column it still has
        self.latest = 0                                                      # near column of the last finished position
        # The attention mask among near columns: seen[column of a cell, column it may attend to] = 0, elsewhere -inf.
        self.seen = torch.full((near, near), -torch.inf, dtype=spec.dtype, device=spec.device)

    def take(self) -> int:
        """A free column: the one next to the far columns, so that few unused ones in between are read."""
        column = max(self.free)
        self.free.remove(column)
        return column

    def open(self, cell: Cell) -> None:
        """A new cell sees what its parent sees, and itself, without what leaves the window."""
        self.seen[cell.column] = self.seen[cell.parent.column if cell.parent else self.latest]
        if cell.position - self.window in self.held:
            self.seen[cell.column, self.held[cell.position - self.window]] = -torch.inf
        self.seen[cell.column, cell.column] = 0

    def finish(self, cell: Cell) -> None:
        """Copy a cell's column to its place among the finished positions, and release the one that no row reads any more."""
        for stage in self.stages:
            stage.finish(cell.column, cell.position)
        self.finished, self.latest = cell.position + 1, cell.column
        self.held[cell.position] = cell.column
        if (column := self.held.pop(self.finished - self.window, None)) is not None:
            self.seen[:, column] = -torch.inf
            self.free.add(column)

    def open_prompt(self, length: int) -> None:
        """Give near columns to the last positions of the prompt, those within a window of what follows."""
        for position in range(max(0, length + 1 - self.window), length):
            self.held[position] = self.latest = self.take()
        self.seen[self.latest, list(self.held.values())] = 0

    def over_prompt(self, stage: Stage, depth: int, stretches: tuple[Tensor, ...]):
        """For each stretch of the prompt, all its rows at one depth, aim the next attend calls at it, and give its number and
        positions. Within the prompt everything is near; at the end it is copied to the near columns too."""
        plane = depth % stage.slots
        for i, positions in enumerate(stretches):
            self.finished = int(positions[-1]) + 1
            future = torch.arange(self.finished, device=self.device) > positions[:, None]     # [rows, positions]
            mask = torch.zeros_like(future, dtype=self.seen.dtype).masked_fill_(future, -torch.inf)
            self.grid = Grid([plane] * len(positions), self.device, self.least)
            self.mask = self.grid.spread(mask[:, None])                      # [1, 1, rows, columns read]
            self.writes = stage.far, torch.full_like(positions, plane), positions
            self.attention = functools.partial(self.attend_together, stage.far, slice(self.finished))
            yield i, positions
        stage.near[:, :, depth, :, list(self.held.values())] = stage.far[:, :, plane, :, list(self.held)]

    def aim_at_cells(self, stage: Stage, columns: Tensor, depths: list[int], positions: Tensor) -> None:
        """The next attend calls are for cells in flight."""
        near, far = self.near - min(set(range(self.near)) - self.free), self.finished         # columns to be read
        if stage.whole is None:                        # some more, masked, as CPUs compile a kernel for every new shape of a bfloat16 product
            near, far = min(-(-near // 16) * 16, self.near), min(-(-far // 64) * 64, stage.far.shape[-2])
        mask = self.seen.new_full((len(depths), 1, near + far), -torch.inf)  # [rows, 1, columns read]
        mask[:, 0, :near] = self.seen[columns, -near:]
        mask[:, 0, near:near + self.finished] = 0
        if self.window > 1:                            # otherwise all that is finished is far
            mask[:, :, near:].masked_fill_(torch.arange(far, device=self.device) > positions[:, None, None] - self.window, -torch.inf)
        self.grid = Grid(depths, self.device, self.least)
        self.writes = stage.near, torch.tensor(depths, device=self.device), columns
        if stage.whole is not None:
            self.mask = self.grid.spread(mask)                               # [lines, 1, length, columns read]
            self.attention = functools.partial(self.attend_together, stage.whole, slice(self.near - near, self.near + far))
        else:
            self.mask, self.far_grid = mask, Grid([depth % stage.slots for depth in depths], self.device, self.least)
            self.attention = functools.partial(self.attend_apart, stage, near, far)

    def aim_in_order(self, stage: Stage, cells: list[Cell], columns: Tensor, depths: list[int], positions: Tensor) -> None:
        """The next attend calls are for cells in flight, in bitwise mode: see section 5. Behind the first len(cells) rows
        there are rows that only fill up."""
        length = -(-max(self.finished, *(cell.position + 1 for cell in cells)) // 64) * 64
        place, planes = torch.arange(length, device=self.device), torch.tensor(depths, device=self.device)
        own = []                                       # (row, position, depth, near column)
        for row, cell in enumerate(cells):
            own += [(row, ancestor.position, depths[row], ancestor.column) for ancestor in cell.lineage()]
            own += [(row, position, depths[row], column) for position, column in self.held.items()
                     if position > cell.position - self.window]
        self.writes = stage.near, planes, columns
        self.mask = torch.where(place <= positions[:, None], 0.0, -torch.inf).to(self.seen.dtype)[:, None, None]
        self.attention = functools.partial(self.attend_in_order, stage, planes[:, None] % stage.slots,
                                           place.clamp(max=stage.far.shape[-2] - 1), torch.tensor(own, device=self.device).T)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend. q [rows, H, h], k and v [rows, K, h] -> [rows, H, h]."""
        (stage, i), (part, planes, columns) = self.layers[layer], self.writes
        for kept, new in zip(part[i], (k, v)):                               # [planes, K, columns, h]
            kept[planes, :, columns] = new
        return self.attention(i, q)

    def attend_together(self, part: Tensor, columns: slice, i: int, q: Tensor) -> Tensor:
        """Near and far columns at once."""
        keys, values = part[i][:, self.grid.planes, :, columns]              # [lines, K, columns read, h]
        return self.grid.collect(softmax_attention(self.grid.spread(q), keys, values, self.mask))

    def attend_apart(self, stage: Stage, near: int, far: int, i: int, q: Tensor) -> Tensor:
        """Near and far columns in different planes, with one softmax over both. All rows of a class share one read of a far plane."""
        parts = ((self.grid, stage.near[i][:, self.grid.planes, :, -near:]),
                 (self.far_grid, stage.far[i][:, self.far_grid.planes, :, :far]))
        q = q * q.shape[-1] ** -0.5
        scores = torch.cat([grid.collect(by_heads(grid.spread(q), keys.mT)) for grid, (keys, _) in parts], dim=-1)
        weights = (scores + self.mask).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        weights = weights.split((near, far), dim=-1)   # [rows, H, columns] each
        return sum(grid.collect(by_heads(grid.spread(part), values)) for part, (grid, (_, values)) in zip(weights, parts))

    def attend_in_order(self, stage: Stage, planes: Tensor, positions: Tensor, own: Tensor, i: int, q: Tensor) -> Tensor:
        """Every row as a batch element with one query, the keys of its own text gathered in position order."""
        row, position, depth, column = own
        kept = stage.far[i][:, planes, :, positions]                         # [rows, positions, 2, K, h]
        kept[row, position] = stage.near[i][:, depth, :, column]
        keys, values = kept.permute(2, 0, 3, 1, 4)                           # [rows, K, positions, h] each
        return softmax_attention(q[:, :, None], keys, values, self.mask).squeeze(2)


def softmax_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [n, H, length, h], keys and values [n, K, columns, h] -> [n, H, length, h]; H / K query heads share a key head."""
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != keys.shape[1])


def by_heads(x: Tensor, y: Tensor) -> Tensor:
    """x [n, H, length, a] @ y [n, K, a, b] -> [n, H, length, b]; H / K heads of x share one of y."""
    return (x.reshape(len(x), y.shape[1], -1, x.shape[-1]) @ y).view(*x.shape[:-1], y.shape[-1])


def available_memory(device: torch.device) -> float:
    """Bytes that can still be allocated; infinite where nobody says."""
    if device.type == "cuda":                          # what torch has reserved and does not use counts too
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = Path("/proc/meminfo").read_text().splitlines() if device.type == "cpu" and Path("/proc/meminfo").exists() else ()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), math.inf)


# ----------------------------------------------------------------------------------------------------------------------
# 4. The wavefront
#
# One rule makes every schedule: when a cell's prediction is read at depth k, its children become its n(k) likeliest
# tokens. Children whose token is no longer among them are dropped with all their descendants; tokens not yet tried
# start new children at depth 0. At depth T, n = 1, and that token is committed. The map k -> n(k) is `candidates`:
#
#     {}                       plain decoding: nothing starts before its parent is finished
#     {1: 1}                   the schedule of the paper ("published"): one draft, corrected only at depth T
#     {1: 1, 2: 1, 3: 1}       early correction: a deeper prediction that differs replaces the draft at once
#     {1: 2, 2: 2, 3: 1}       two candidates kept open until depth 3 settles it
#
# A token costs as many calls as its parent was deep when its cell started, if no later reading dropped it: it stays that
# far behind.


class Row(NamedTuple):
    """One row of a block call, as `on_call` sees it."""
    number: int                # of the cell
    parent: int | None         # the number of its parent; None when that is finished
    position: int
    token: int
    depth: int                 # after the call
    event: str                 # "advanced", "drafted", "verified", "corrected" or "dropped"
    logits: Tensor | None = None                       # [V], its prediction; None if that was not read


@dataclass
class Wave:
    """One block call, as `on_call` sees it."""
    call: int                  # 1, 2, ...
    rows: list[Row]
    committed: list[int]       # the tokens that this call made certain
    tokens: list[int]          # all new tokens so far; the first comes from the prefill, before any call


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)    # the new tokens, with the stop token if there was one
    finish: str = ""                                   # "stop", "length" or "context"
    calls: int = 0                                     # block calls after the prefill
    rows: int = 0                                      # rows, summed over those calls
    stats: dict[str, int] = field(default_factory=lambda: {
        "drafted": 0,          # cells started before their parent was finished
        "accepted": 0,         # tokens committed while their cell was already under way
        "rejected": 0,         # tokens whose drafts were all wrong when the parent finished, and which started anew
        "corrected_early": 0,  # predictions below depth T that dropped an earlier draft
        "dropped_rows": 0,     # rows spent on cells that were dropped
        "predict_calls": 0,    # calls of model.predict after the prefill
        "cache_bytes": 0})     # keys and values, allocated


PREFILL_ROWS = 512             # rows of a prefill call: bounds the memory for masks and activations
LOOKED_UP = 0.1                # how probable a looked-up token is held, where rows are scarce


@dataclass
class Wavefront:
    """One generation: what it is asked for, and the cells in flight. The decoders below explain the settings."""
    model: object
    prompt: list[int]
    max_new_tokens: int
    candidates: dict[int, int]
    max_rows: int              # of a call
    room: int                  # cells in flight at most, those that wait for a row included
    draft_depth: int = 0       # of draft-then-verify; 0: everything advances
    lookup: int = 0
    eos_ids: Collection[int] = ()
    sampling: Sampling | None = None
    kv_share: KVShare | None = None
    pad_rows: int | None = None

    def __post_init__(self):
        model, prompt, new = self.model, self.prompt, self.max_new_tokens
        self.depth, self.spec, context, share = model.recurrences, model.kv_spec, model.context, self.kv_share
        check(prompt != [], "the prompt is empty: one or more token ids are needed")
        check(isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt),
              "the prompt must be one list of token ids (one prompt at a time)")
        vocab = getattr(model, "vocab", max(prompt) + 1)                     # a model may say how many tokens it knows
        check(max(prompt) < vocab, f"the prompt has a token {max(prompt)}, but the model knows only {vocab}")
        check(len(prompt) <= context, f"the prompt has {len(prompt)} tokens, but the model has room for {context}: shorten it")
        for name, value, least in (("max_new_tokens", new, 0), ("model.recurrences", self.depth, 1), ("lookup", self.lookup, 0),
                                   ("draft_depth", self.draft_depth, 0)):
            check(isinstance(value, int) and value >= least, f"{name} must be an integer of {least} or more, not {value!r}")
        check(self.pad_rows is None or (isinstance(self.pad_rows, int) and self.max_rows <= self.pad_rows <= 1024),
              f"pad_rows must be an integer up to 1024, at least max_rows, the {self.max_rows} rows that a call may have, not {self.pad_rows!r}")
        check(isinstance(self.eos_ids, Collection) and all(isinstance(token, int) for token in self.eos_ids),
              f"eos_ids must be a set or list of token ids, not {self.eos_ids!r}")
        check(self.sampling is None or hasattr(self.sampling, "scores") and not isinstance(self.sampling, type),
              f"sampling must be a Sampling or None, not {self.sampling!r}")
        check(share is None or (isinstance(share, KVShare) and type(share.slots) is type(share.window) is int
                                and 1 <= share.slots <= self.depth and share.window >= 1),
              f"kv_share must be a KVShare with 1 to {self.depth} slots (the model's recurrences) and a window of 1 or more, not {share}")
        check(isinstance(self.candidates, dict), f"candidates must be a dict, depth: number, not {self.candidates!r}")
        for k, n in self.candidates.items():
            check(isinstance(k, int) and isinstance(n, int) and 1 <= k <= self.depth and n >= 1 and (k < self.depth or n == 1),
                  f"candidates {{{k}: {n}}} is not possible: depths go from 1 to {self.depth}, numbers from 1 up, and depth "
                  f"{self.depth} has one candidate")
        self.candidates, self.eos_ids = {**self.candidates, self.depth: 1}, set(self.eos_ids)
        self.limit = min(new, context - len(prompt))
        self.limit_is = "length" if self.limit == new else "context"
        # The last new token is emitted and never fed. Prompt of 5, limit 3: tokens at 5, 6, 7, cells at 5 and 6 only.
        self.last = len(prompt) + self.limit - 2
        if share:                                      # a wider window than the text is the text
            self.kv_share = KVShare(share.slots, min(share.window, max(1, self.last + 1)))
        self.result = Result(finish="" if self.limit else self.limit_is)
        self.cells: list[Cell] = []                    # in flight, parents before children
        self.started: list[Cell] = []                  # to be embedded before the next call
        self.numbers = itertools.count()
        self.tensor = functools.partial(torch.tensor, device=self.spec.device)
        self.text = list(prompt)                       # and committed tokens

    def run(self, on_call: Callable[[Wave], None] | None = None) -> Result:
        check(on_call is None or callable(on_call), f"on_call must be a function, not {on_call!r}")
        if not self.result.finish:
            self.prefill()
        while not self.result.finish:
            self.step(on_call)
        return self.result

    def prefill(self) -> None:
        """The whole prompt through all T recurrences. The prediction behind it is the first token.

        Recurrences are the outer loop, stretches of the prompt the inner one: at each recurrence a stretch attends to
        what the stretches before it stored at that recurrence. A coda needs every position's keys and values.
        """
        spare = 1 if self.pad_rows else 0              # column 0, for the rows that only fill up
        held = self.kv_share.window - 1 if self.kv_share else 0
        self.cache = cache = Cache(self.spec, self.depth, near=held + self.room + spare, far=self.last + 1, share=self.kv_share)
        cache.free -= set(range(spare))
        cache.open_prompt(len(self.text))
        self.result.stats["cache_bytes"] = cache.bytes
        model, tokens = self.model, self.tensor(self.text)
        stretches = torch.arange(len(tokens), device=tokens.device).split(PREFILL_ROWS)
        e, x = [], []
        for _, positions in cache.over_prompt(cache.prelude, 0, stretches):
            e.append(model.embed(tokens[positions], positions, cache))                        # [rows, d]
            x.append(model.initial_state(e[-1], positions))
        for k in range(self.depth):
            for i, positions in cache.over_prompt(cache.core, k, stretches):
                x[i] = model.recur(x[i], e[i], positions, cache)
        for i, positions in cache.over_prompt(cache.coda, 0, stretches):
            logits = model.predict(x[i], positions, cache, select=self.tensor([len(positions) - 1]))
        self.x, self.e = (t[0].new_zeros(cache.near, t[0].shape[-1]) for t in (x, e))         # of the cells in flight
        self.x[0], self.e[0] = x[0][0], e[0][0]                              # something finite for rows that only fill up
        token = self.interpret(logits, [len(tokens)], [self.depth], 1)[0][0][0]
        if self.commit(token):
            self.start(None, len(tokens), token, 1.0)

    def step(self, on_call: Callable[[Wave], None] | None) -> None:
        """One block call, and what follows from it."""
        self.embed_started()
        rows, before = self.choose_rows(), len(self.result.tokens)
        self.advance(rows)
        due = [cell for cell in rows if cell.depth in self.candidates]
        if due:
            self.read(due)
        self.cells = [cell for cell in self.cells if cell.in_flight]
        if on_call:
            tokens = list(self.result.tokens)
            on_call(Wave(self.result.calls, [
                Row(cell.number, cell.parent.number if cell.parent else None, cell.position, cell.token, cell.depth, cell.event,
                    cell.logits) for cell in rows], tokens[before:], tokens))

    def embed_started(self) -> None:
        """Bring the new cells to depth 0."""
        at_once = self.pad_rows or len(self.started)
        while self.started:
            cells, self.started = self.started[:at_once], self.started[at_once:]
            self.cells += cells
            columns, positions = self.place(self.cache.prelude, cells, [0] * len(cells))
            tokens = self.tensor([cell.token for cell in cells] + self.text[:1] * (len(columns) - len(cells)))
            e = self.model.embed(tokens, positions, self.cache)                               # [rows, d]
            x = self.model.initial_state(e, positions)
            self.e[columns[:len(cells)]], self.x[columns[:len(cells)]] = e[:len(cells)], x[:len(cells)]

    def choose_rows(self) -> list[Cell]:
        """The cells of the next call: all, or the max_rows on the likeliest paths. The others wait where they are.

        A path is never likelier than its beginning, so parents come before children and the staircase stays.
        Draft-then-verify advances its youngest cell alone until it has drafted, and all together once none is young.
        """
        if self.cells[-1].depth < self.draft_depth:
            return self.cells[-1:]
        if len(self.cells) <= self.max_rows:
            return self.cells
        path = {}
        for cell in self.cells:
            path[cell] = cell.probability * (path[cell.parent] if cell.parent else 1)
        chosen = set(sorted(self.cells, key=path.get, reverse=True)[:self.max_rows])
        return [cell for cell in self.cells if cell in chosen]

    def place(self, stage: Stage, cells: list[Cell], depths: list[int]) -> tuple[Tensor, Tensor]:
        """Point the cache at these cells for the model call that follows, if it has layers. Their columns and positions."""
        filling = [0] * ((self.pad_rows or 0) - len(cells))
        columns, positions = self.tensor([[cell.column for cell in cells] + filling, [cell.position for cell in cells] + filling])
        if len(stage.near) and self.pad_rows:
            self.cache.aim_in_order(stage, cells, columns, depths + filling, positions)
        elif len(stage.near):
            self.cache.aim_at_cells(stage, columns, depths, positions)
        return columns, positions

    def advance(self, rows: list[Cell]) -> None:
        """The block call: every row does one recurrence, each at its own depth."""
        columns, positions = self.place(self.cache.core, rows, [cell.depth for cell in rows])
        x = self.model.recur(self.x[columns], self.e[columns], positions, self.cache)         # [rows, d]
        self.x[columns[:len(rows)]] = x[:len(rows)]
        self.result.calls += 1
        self.result.rows += len(rows)
        for cell in rows:
            cell.depth, cell.event, cell.logits = cell.depth + 1, "advanced", None

    def read(self, cells: list[Cell]) -> None:
        """Read the predictions of these cells, parents first, and let the tree follow them."""
        columns, positions = self.place(self.cache.coda, cells, [0] * len(cells))
        logits = self.model.predict(self.x[columns], positions, self.cache)[:len(cells)]      # [rows, V]
        self.result.stats["predict_calls"] += 1
        depths = [cell.depth for cell in cells]
        predictions = self.interpret(logits, [cell.position + 1 for cell in cells], depths, max(map(self.candidates.get, depths)))
        for cell, row, ranked in zip(cells, logits, predictions):
            cell.logits = row
            if cell.in_flight:                         # an ancestor may just have dropped it
                self.follow(cell, dict(ranked[:self.candidates[cell.depth]]))

    def interpret(self, logits: Tensor, positions: list[int], depths: list[int], n: int) -> list[list[tuple[int, float]]]:
        """The n best tokens for each of the predicted positions, with their probabilities. Depths: for subclasses to know."""
        return read_predictions(self.sampling.scores(logits, positions) if self.sampling else logits, n)

    def follow(self, cell: Cell, wanted: dict[int, float]) -> None:
        """The rule above, for one prediction {token: probability}. At depth T it is the only place where a token is committed.

        Say the prediction is "lazy". If the cell's child was started from "tired", the child is dropped with all that was
        built on it, and "lazy" starts at depth 0. If it was started from "lazy", it climbs on, at depth T as the oldest.
        """
        final, stats, tried = cell.depth == self.depth, self.result.stats, {child.token for child in cell.children}
        drafts = len(tried) + cell.tried_stop
        for child in cell.children:
            child.probability = wanted.get(child.token, child.probability)
        # What was looked up stays until depth T decides about it.
        dropped = [child for child in cell.children if child.token not in wanted and (final or not child.looked_up)]
        for lost in dropped:
            dropped += lost.children                   # and on to their children
            lost.in_flight, lost.event = False, "dropped"
            self.cache.free.add(lost.column)
            stats["dropped_rows"] += lost.depth
        cell.children = [child for child in cell.children if child.in_flight]
        if final:
            self.cache.finish(cell)
            cell.in_flight, cell.event = False, "verified"
            if not self.commit(*wanted):
                return
            for child in cell.children:
                child.parent = None
            stats["accepted"] += len(cell.children)
            if drafts and not cell.children:
                cell.event = "corrected"
                stats["rejected"] += 1
        elif len(cell.children) < len(tried):
            cell.event = "corrected"
            stats["corrected_early"] += 1
        cell.tried_stop = not self.eos_ids.isdisjoint(wanted)
        for token, probability in wanted.items():
            if token not in tried and self.start(None if final else cell, cell.position + 1, token, probability):
                cell.event = "drafted" if cell.event == "advanced" else cell.event

    def commit(self, token: int) -> bool:
        """Emit a token. True if the text goes on behind it."""
        self.text.append(token)
        self.result.tokens.append(token)
        if token in self.eos_ids:
            self.result.finish = "stop"
        elif len(self.result.tokens) == self.limit:
            self.result.finish = self.limit_is
        return not self.result.finish

    def start(self, parent: Cell | None, position: int, token: int, probability: float, looked_up: bool = False) -> bool:
        """Start a cell, if there is room for it and the window allows it; otherwise the parent's next prediction tries again.

        With look-ahead, what followed the latest earlier occurrence of the text's last tokens starts with it.
        """
        in_flight = self.cache.near - len(self.cache.free) - len(self.cache.held) - bool(self.pad_rows)
        if in_flight >= self.room or position > self.last or token in self.eos_ids:
            return False
        if self.kv_share and position >= self.cache.finished + self.kv_share.window:
            return False
        cell = Cell(next(self.numbers), position, token, parent, self.cache.take(), probability, looked_up)
        self.cache.open(cell)
        self.started.append(cell)
        if parent:
            parent.children.append(cell)
            self.result.stats["drafted"] += 1
        if self.lookup and not looked_up:
            for token in self.look_up(cell):
                if not self.start(cell, cell.position + 1, token, LOOKED_UP, looked_up=True):
                    break
                cell = cell.children[-1]
        return True

    def look_up(self, cell: Cell) -> list[int]:
        """What followed the last tokens before, up to `lookup` tokens: of the last four, else three, else two."""
        text = self.text + [draft.token for draft in reversed(cell.lineage()[:-1])]           # the oldest is in the text already
        characters = "".join(map(chr, text))           # one for each token: strings have a fast search
        for n in (4, 3, 2):
            if (place := characters.rfind(characters[-n:], 0, -1)) >= 0:
                return text[place + n:place + n + self.lookup]
        return []


# ----------------------------------------------------------------------------------------------------------------------
# 5. The decoders
#
# All are one scheduler with other settings. In bfloat16 their outputs may differ at near ties, since a matrix product
# rounds differently for another number of rows. Bitwise mode (pad_rows) removes that: every matrix product has the
# same number of rows, and attention treats each row alone, its keys in position order, their number rounded up to
# a multiple of 64.


@torch.inference_mode()
def decode(model, prompt: list[int], max_new_tokens: int, settings: dict, *, eos_ids: Collection[int] = (),
           sampling: Sampling | None = None, kv_share: KVShare | None = None, pad_rows: int | None = None,
           on_call: Callable[[Wave], None] | None = None) -> Result:
    """What all decoders do, with their own settings and the options that all of them take.

    eos_ids    token ids behind one of which generation ends ("stop"). It also ends with max_new_tokens ("length") and where
               the model's context ends ("context"). A stop token in the prompt stops nothing.
    sampling   a Sampling; None is greedy
    kv_share   a KVShare: less memory, and another function than the model's own (section 3), the same for all decoders
    pad_rows   bitwise mode, with this number of rows in every call
    on_call    a function that receives a Wave after every block call

    Raises ValueError for arguments that make no sense, and for logits that are not finite.
    """
    return Wavefront(model, prompt, max_new_tokens, eos_ids=eos_ids, sampling=sampling, kv_share=kv_share, pad_rows=pad_rows,
                     **settings).run(on_call)


def autoregressive(model, prompt: list[int], max_new_tokens: int, **options) -> Result:
    """Plain decoding: T block calls for a token. This is what the other decoders must reproduce. Options: see decode."""
    return decode(model, prompt, max_new_tokens, {"candidates": {}, "max_rows": 1, "room": 1}, **options)


def draft_then_verify(model, prompt: list[int], max_new_tokens: int, *, draft_depth: int, draft_len: int, **options) -> Result:
    """Self-speculation in two phases, the baseline of the paper: the tokens of `autoregressive`.

    A round drafts draft_len tokens one after the other, each from draft_depth recurrences, then brings all its cells to
    depth T together: (draft_len + 1) * draft_depth + T - draft_depth calls commit 1 to draft_len + 1 tokens.
    """
    check(isinstance(draft_len, int) and draft_len >= 0, f"draft_len must be an integer of 0 or more, not {draft_len!r}")
    check(isinstance(draft_depth, int), f"draft_depth must be an integer, not {draft_depth!r}")
    settings = {"candidates": {draft_depth: 1}, "draft_depth": draft_depth, "max_rows": draft_len + 1, "room": draft_len + 1}
    return decode(model, prompt, max_new_tokens, settings, **options)


def wavefront(model, prompt: list[int], max_new_tokens: int, *, candidates: dict[int, int] | None = None,
              max_rows: int | None = None, lookup: int = 0, **options) -> Result:
    """Wavefront decoding: the tokens of `autoregressive`, in fewer block calls.

    candidates maps a depth to the number of candidates that a prediction at that depth keeps open (section 4); None
    takes model.candidates. max_rows (None: 32) bounds the rows of a call (as many cells more may wait for one). lookup: how many
    tokens may be copied ahead from earlier text when its last two tokens have occurred before.
    """
    max_rows = 32 if max_rows is None else max_rows
    check(isinstance(max_rows, int) and 1 <= max_rows <= 1024, f"max_rows must be an integer from 1 to 1024, not {max_rows!r}")
    if candidates is None:                             # model.recurrences may have been set below some of its depths
        candidates = {k: n for k, n in model.candidates.items() if k < model.recurrences}
    room = max_rows if options.get("kv_share") else 2 * max_rows             # with sharing, near columns are what costs memory
    settings = {"candidates": candidates, "max_rows": max_rows, "room": room, "lookup": lookup}
    return decode(model, prompt, max_new_tokens, settings, **options)
