"""Wavefront decoding for looped language models, in one file.

A looped model applies one block of layers T times to every token, so plain decoding pays T block calls in a
row for each token. But a shallow state already guesses the next token rather well, and the block has the same
weights at every depth: one call can advance positions that stand at *different* depths. So the next token
starts from an early guess, the one after it from a guess of that, and all climb together, as a diagonal
wavefront:

    depth 4 |  #   verified         each call moves every cell in flight up by one:
    depth 3 |     #                 the oldest reaches depth T = 4 and yields the true next token,
    depth 2 |        #              the youngest, just started from a draft, is at depth 1
    depth 1 |           #  drafts   and its prediction is the next draft
             p  p+1 p+2 p+3

A wrong draft costs some work and is replaced. The output is that of plain decoding, token for token:
predictions below depth T choose what to try, and only predictions at depth T are ever emitted.

    recurrence   one application of the looped block; depth: how many of them a cell has had, 0 to T
    cell         one position with one guess of its token; row: a cell's place in the batch of a call
    parent       the cell one position earlier, from whose prediction this cell started; children: the reverse
    candidate    a token that a prediction ranks high enough to be tried; draft: a candidate below depth T
    committed    a token that is certain; finished: a cell that reached depth T, and whose ancestors all had

The model is used through this interface only; model.py has two such models. There is no batch axis: a tensor
has one row per cell (d: width of a state; H query heads share K key/value heads of size h; V: vocabulary).

    model.recurrences, model.context              T; the number of positions available
    model.candidates                              the schedule to use when none is asked for (section 4)
    model.kv_spec                                 layers of prelude, core, coda; heads, head_dim, dtype, device
    model.embed(tokens, positions, kv)            [rows] -> e [rows, d], through the prelude if there is one
    model.initial_state(e, positions)             [rows, d] -> x [rows, d], the state at depth 0
    model.recur(x, e, positions, kv)              [rows, d] -> x [rows, d], one recurrence: the block call
    model.predict(x, positions, kv, select=None)  [rows, d] -> logits [selected rows, V], through any coda

In each layer the model calls kv.attend(layer, q, k, v), with layers numbered prelude, core, coda. None of
these functions may write into its arguments. Not here: several prompts at a time, training, printing, timing.
"""

import functools
import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN = -torch.inf                                    # added to a score, it hides a key


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# ----------------------------------------------------------------------------------------------------------
# 1. From logits to tokens
#
# Plain decoding, drafting and verifying must agree on what a prediction says, so one function reads them all.
# Equal scores are not rare in bfloat16: then the lowest token id wins.


def top_tokens(scores: Tensor, n: int) -> list[list[int]]:
    """The n best tokens of every row, best first, without those whose score is -inf. scores [rows, V]."""
    found = []
    for _ in range(min(n, scores.shape[-1])):
        value, token = scores.max(-1, keepdim=True)    # of several equals the first
        found.append(torch.cat((value.float(), token.float()), dim=-1))
        scores = scores.scatter(-1, token, -torch.inf)
    rows = torch.stack(found, dim=1).tolist()          # [rows, n, 2]: the only wait for the device in a step
    check(all(math.isfinite(row[0][0]) for row in rows),
          "the model's logits are not finite: its dtype is too narrow for it, or its weights are damaged")
    return [[int(token) for value, token in row if value > -torch.inf] for row in rows]


# ----------------------------------------------------------------------------------------------------------
# 2. Cells
#
# A guess may have several tokens worth trying, so the cells in flight form a tree. A child is never deeper
# than its parent (the staircase). That is all it takes for exactness: at recurrence k a cell needs the keys
# and values that its ancestors wrote at recurrence k. By the staircase they are there already, or they are
# written in the same layer of the same call, before attention reads. So a row computes just what it would in
# plain decoding.


@dataclass(eq=False)
class Cell:
    position: int
    token: int
    parent: "Cell | None"                              # None once the cell is finished: nobody asks any more
    depth: int = 0
    children: list["Cell"] = field(default_factory=list)
    dropped: bool = False
    column: int = -1                                   # where its keys and values are (section 3)
    sees: Tensor | None = None                         # [columns]: 0 for itself and ancestors, else HIDDEN
    e: Tensor | None = None                            # [d], what the model's embed made of the token
    x: Tensor | None = None                            # [d], its state


# ----------------------------------------------------------------------------------------------------------
# 3. The cache
#
# Keys and values differ from recurrence to recurrence, so each layer of the looped block has T planes of
# them, one per recurrence. (A layer of the prelude or the coda has one.) A plane is a pool of columns. A cell
# takes the lowest free column, writes to it in every plane, and keeps it when it is finished. Keys are
# rotated by their position before they are stored, so any column will do, as long as a cell's mask shows it
# its ancestors:
#
#     column   0   1   2   3   4   5      p and q are finished. r is in flight, with two candidates for the
#     holds    p   q   r   s'  s   -      next position. The mask of s shows columns 0, 1, 2 and 4.
#
# To drop a cell is to give its column back. Whoever takes it next writes each plane before reading it, so
# nothing is cleared. But all begins as zeros, since even a masked NaN would poison a weighted sum.
#
# What a draft leaves in the coda is provisional: it comes from whatever depth was last read. It may mislead
# other drafts, but no emitted token, for a cell's ancestors are read at depth T before it is, or in the same
# call.
#
# Sharing. T planes per token are a lot of memory. With KVShare(slots, window), positions far back keep only
# the last `slots` recurrences of the looped block, recurrence p in plane p mod slots. After the prompt,
# position q at recurrence r attends to
#
#     far    i <= q - window    what i left in plane r mod slots when it was finished
#     near   i >  q - window    what i wrote at recurrence r itself
#
# That is another function than the model's own, but the same under any schedule, as long as all that is far
# is finished. So no cell starts more than `window` after the last finished position. A finished cell is
# copied to the far planes; its column is free once no later cell is near to it.


class KVShare(NamedTuple):
    """Far positions, `window` and more back, keep keys and values of only `slots` recurrences."""
    slots: int
    window: int


class Cache:
    """Keys and values of all layers, the pool of columns, and who has which.

    Near, a layer is [2 (keys, values), planes, K, columns, h]: T planes, or one in prelude and coda.
    Far it is [2, slots, K, positions, h], or empty without sharing: then the window is the whole text.
    """

    def __init__(self, spec, recurrences: int, positions: int, max_rows: int, share: KVShare | None):
        self.slots, self.window = share or (0, positions + 1)
        columns, far = min(self.window - 1, positions) + max_rows, positions if share else 0
        planes = [1] * spec.prelude + [recurrences] * spec.core + [1] * spec.coda      # of each layer
        zeros = functools.partial(torch.zeros, dtype=spec.dtype, device=spec.device)
        self.near = [zeros(2, n, spec.heads, columns, spec.head_dim) for n in planes]
        self.far = [zeros(2, min(n, self.slots), spec.heads, far, spec.head_dim) for n in planes]
        self.free = list(range(columns))               # a heap
        self.used = 0                                  # columns from here on were never taken
        self.finished = 0                              # finished positions
        self.held: dict[int, int] = {}                 # finished position, near to what comes -> its column
        self.nothing = torch.full((columns,), HIDDEN, dtype=spec.dtype, device=spec.device)

    def take(self) -> int:
        column = heapq.heappop(self.free)
        self.used = max(self.used, column + 1)
        return column

    def open_prompt(self, root: Cell) -> None:
        """Columns for the prompt's last position, `root`, and for the positions that are near to it."""
        self.finished = root.position
        for position in range(max(0, root.position + 1 - self.window), root.position):
            self.held[position] = self.take()
        root.column, root.sees = self.take(), self.nothing.clone()
        root.sees[[*self.held.values(), root.column]] = 0

    def open(self, cell: Cell) -> None:
        """A new cell sees itself and what its parent sees, but not the position that is far from it now."""
        cell.column, cell.sees = self.take(), cell.parent.sees.clone()
        if cell.position - self.window in self.held:
            cell.sees[self.held[cell.position - self.window]] = HIDDEN
        cell.sees[cell.column] = 0

    def finish(self, cell: Cell) -> None:
        """The cell keeps its column. With sharing, it is copied to the far planes and a column becomes free."""
        if self.slots:
            for near, far in zip(self.near, self.far):           # recurrence p goes to plane p mod slots
                kept = near[:, -far.shape[1]:, :, cell.column]
                far[:, :, :, cell.position] = kept.roll(near.shape[1], dims=1)
        self.held[cell.position], self.finished = cell.column, cell.position + 1
        released = self.held.pop(self.finished - self.window, None)          # far from all that is to come
        if released is not None:
            cell.sees[released] = HIDDEN               # its children so far don't see it
            heapq.heappush(self.free, released)


class PromptView:
    """The cache for the prompt's pass, all rows at one depth: each attends to itself and to earlier ones."""

    def __init__(self, cache: Cache, root: Cell, plane: int):
        near = cache.held | {root.position: root.column}
        self.cache, self.plane, self.positions, self.columns = cache, plane, list(near), list(near.values())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v. q [rows, H, h], k and v [rows, K, h] -> [rows, H, h]."""
        near, far, kv = self.cache.near[layer], self.cache.far[layer], torch.stack((k, v)).transpose(1, 2)
        near[:, self.plane, :, self.columns] = kv[:, :, self.positions]      # [2, K, held, h]
        if self.cache.slots:                           # the deepest recurrence is the last to write here
            far[:, self.plane % far.shape[1], :, :len(q)] = kv
        return softmax_attention(q.transpose(0, 1), *kv, is_causal=True).transpose(0, 1)


class RowsView:
    """The cache for cells in flight: each writes to its own plane and column, and attends to what it sees."""

    def __init__(self, cache: Cache, cells: list[Cell], planes: list[int]):
        tensor = functools.partial(torch.tensor, device=cache.nothing.device)
        self.cache, self.used, self.grid = cache, cache.used, Grid(planes, tensor)
        self.planes, self.columns = tensor([planes, [cell.column for cell in cells]])   # [rows] each
        self.mask = torch.stack([cell.sees[:self.used] for cell in cells])[:, None]    # [rows, 1, columns]
        if not cache.slots:
            self.mask = self.grid.spread(self.mask)    # [lines, 1, length, columns]
            return
        self.far_grid = Grid([plane % cache.slots for plane in planes], tensor)
        # Rounded up, since CPUs compile a kernel for every new shape of a bfloat16 product.
        self.positions = min(-(-cache.finished // 64) * 64, cache.far[-1].shape[-2])
        last = tensor([[[cell.position - cache.window]] for cell in cells])  # of what is far from each row
        hidden = torch.arange(self.positions, device=last.device) > last     # [rows, 1, positions]
        far_mask = self.mask.new_zeros(hidden.shape).masked_fill_(hidden, HIDDEN)
        self.mask = torch.cat((self.mask, far_mask), dim=-1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend. q [rows, H, h], k and v [rows, K, h] -> [rows, H, h]."""
        near, far = self.cache.near[layer], self.cache.far[layer]
        near[:, self.planes, :, self.columns] = torch.stack((k, v), dim=1)   # [rows, 2, K, h]
        near = near[:, self.grid.planes, :, :self.used]                      # [2, lines, K, columns, h]
        if not self.cache.slots:
            return self.grid.collect(softmax_attention(self.grid.spread(q), *near, attn_mask=self.mask))

        # Near and far are in different planes, and one softmax is over both.
        far = far[:, self.far_grid.planes, :, :self.positions]               # [2, lines, K, positions, h]
        parts = (self.grid, *near), (self.far_grid, *far)
        q = q * q.shape[-1] ** -0.5
        scores = [grid.collect(by_heads(grid.spread(q), keys.mT)) for grid, keys, _ in parts]
        scores = torch.cat(scores, dim=-1) + self.mask                       # [rows, H, columns + positions]
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        weights = weights.split([self.used, self.positions], dim=-1)
        return sum(grid.collect(by_heads(grid.spread(part), values))
                   for part, (grid, _, values) in zip(weights, parts))


class Grid:
    """Rows arranged by the plane they read, one line for each: the batch of one attention call for them all.

    Rows that read planes 2, 1, 1 make two lines of two: rows 1 and 2; row 0 and a filler, thrown away later.
    """

    def __init__(self, planes: list[int], tensor: Callable):
        low, high = min(planes), max(planes)
        step = math.gcd(*(plane - low for plane in planes)) or 1
        self.planes, self.rows = slice(low, high + 1, step), None            # a slice is read without a copy
        lines = [[row for row, p in enumerate(planes) if p == plane] for plane in range(low, high + 1, step)]
        if len(lines) > 1:                             # otherwise the rows are the grid
            length = max(map(len, lines))
            lines = [line + [-1] * (length - len(line)) for line in lines]
            places = sum(lines, [])
            self.rows = tensor(lines)                                        # [lines, length]
            self.home = tensor([places.index(row) for row in range(len(planes))])                 # [rows]

    def spread(self, x: Tensor) -> Tensor:
        """[rows, heads, n] -> [lines, heads, length, n]."""
        return (x[None] if self.rows is None else x[self.rows]).transpose(1, 2)

    def collect(self, x: Tensor) -> Tensor:
        """[lines, heads, length, n] -> [rows, heads, n]."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.rows is None else x[self.home]


def softmax_attention(q: Tensor, keys: Tensor, values: Tensor, **mask) -> Tensor:
    """q [..., H, length, h], keys and values [..., K, columns, h] -> [..., H, length, h]."""
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[-3] != keys.shape[-3], **mask)


def by_heads(x: Tensor, y: Tensor) -> Tensor:
    """x [n, H, length, a] @ y [n, K, a, b] -> [n, H, length, b]; H / K heads of x share one of y."""
    return (x.reshape(len(x), y.shape[1], -1, x.shape[-1]) @ y).view(*x.shape[:-1], y.shape[-1])


# ----------------------------------------------------------------------------------------------------------
# 4. The wavefront
#
# One rule makes every schedule. When the prediction of a cell is read at depth k, its n(k) likeliest tokens
# become its candidates. Children started from other tokens are dropped, with all that was built on them.
# Candidates without a child start one, at depth 0. At depth T there is one candidate, and it is committed.
# The map k -> n(k) is the one knob, `candidates`:
#
#     {}                       plain decoding: nothing starts before its parent is finished
#     {1: 1}                   the published schedule: one draft, corrected only at depth T
#     {1: 1, 2: 1, 3: 1}       early correction: a deeper prediction that differs replaces the draft at once
#     {1: 2, 2: 2, 3: 1}       two candidates kept open, until depth 3 settles it
#
# Say a cell predicts "lazy" and its only child was started from "tired". The child is dropped, and a new one
# starts from "lazy". Had the child been "lazy", it would climb on. At depth T, "lazy" is committed. A token
# costs as many calls as its parent was deep when its cell was started: with right drafts from depth 1, one.


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)    # the new ones, with the stop token if there was one
    finish: str = ""                                   # "stop", "length" or "context"
    calls: int = 0                                     # block calls after the prompt's pass
    rows: int = 0                                      # summed over those calls
    accepted: int = 0                                  # tokens with a cell under way when committed
    cache_bytes: int = 0                               # of keys and values


class Wavefront:
    """One generation: what was asked for, the cells in flight, their cache; `rows` of the last call."""

    def __init__(self, model, prompt: list[int], max_new_tokens: int, candidates: dict[int, int],
                 max_rows: int, *, eos_ids: Collection[int] = (), sampling=None,
                 kv_share: KVShare | None = None, on_call: "Callable[[Wavefront], None] | None" = None):
        T, context = model.recurrences, model.context
        check(isinstance(prompt, list) and prompt != [] and all(type(token) is int for token in prompt),
              "the prompt must be a list of one or more token ids")
        check(len(prompt) <= context, f"the prompt has {len(prompt)} tokens, the model room for {context}")
        check(T >= 1 and max_new_tokens >= 0 and max_rows >= 1,
              "model.recurrences and max_rows must be 1 or more, max_new_tokens 0 or more")
        check(all(1 <= k < T and n >= 1 or (k, n) == (T, 1) for k, n in candidates.items()),
              f"candidates maps depths from 1 to {T - 1} to numbers from 1 up, not {candidates}")
        check(kv_share is None or 1 <= kv_share.slots <= T and kv_share.window >= 1,
              f"kv_share needs 1 to {T} slots and a window of 1 or more, not {kv_share}")
        self.model, self.prompt, self.max_rows = model, prompt, max_rows
        self.candidates = {**candidates, T: 1}
        self.eos_ids, self.sampling, self.kv_share, self.on_call = set(eos_ids), sampling, kv_share, on_call
        self.limit = min(max_new_tokens, context - len(prompt))
        self.limit_is = "length" if self.limit == max_new_tokens else "context"
        self.last = len(prompt) + self.limit - 2       # the last token is never fed: it has no cell
        self.result = Result(finish="" if self.limit else self.limit_is)
        self.cells: list[Cell] = []                    # in flight, parents before children
        self.rows: list[Cell] = []

    def run(self) -> Result:
        if not self.result.finish:
            self.prefill()
        while not self.result.finish:
            self.step()
        return self.result

    def prefill(self) -> None:
        """The prompt through all T recurrences. What its last position predicts is the first new token."""
        model, T, n = self.model, self.model.recurrences, len(self.prompt)
        self.cache = Cache(model.kv_spec, T, self.last + 1, self.max_rows, self.kv_share)
        self.result.cache_bytes = sum(layer.nbytes for layer in self.cache.near + self.cache.far)
        root = Cell(n - 1, self.prompt[-1], None, depth=T)
        self.cells.append(root)
        self.cache.open_prompt(root)

        positions, once = self.tensor(range(n)), PromptView(self.cache, root, 0)
        e = model.embed(self.tensor(self.prompt), positions, once)           # [n, d]
        x = model.initial_state(e, positions)
        for k in range(T):
            x = model.recur(x, e, positions, PromptView(self.cache, root, k))
        logits = model.predict(x, positions, once, select=self.tensor([n - 1]))
        self.follow(root, self.best([root], logits)[0])

    def step(self) -> None:
        """One block call, and what follows from it."""
        if new := [cell for cell in self.cells if cell.e is None]:
            self.embed(new)
        self.rows = self.choose_rows()
        self.advance(self.rows)
        self.result.calls += 1
        self.result.rows += len(self.rows)
        due = [cell for cell in self.rows if cell.depth in self.candidates]
        for cell, tokens in zip(due, self.read(due) if due else ()):
            if not cell.dropped:                       # by what an ancestor has just read
                self.follow(cell, tokens)
        if self.on_call:
            self.on_call(self)

    def choose_rows(self) -> list[Cell]:
        """The cells that the next call advances. A cell may wait only if its children wait too."""
        return list(self.cells)

    def embed(self, cells: list[Cell]) -> None:
        """Bring new cells to depth 0."""
        tokens, positions = self.tensor(cell.token for cell in cells), self.positions(cells)
        e = self.model.embed(tokens, positions, self.view(cells, [0] * len(cells)))               # [rows, d]
        x = self.model.initial_state(e, positions)
        for row, cell in enumerate(cells):
            cell.e, cell.x = e[row], x[row]

    def advance(self, cells: list[Cell]) -> None:
        """The block call: every cell does one recurrence, each at its own depth."""
        x, e = torch.stack([cell.x for cell in cells]), torch.stack([cell.e for cell in cells])   # [rows, d]
        x = self.model.recur(x, e, self.positions(cells), self.view(cells, [cell.depth for cell in cells]))
        for row, cell in enumerate(cells):
            cell.x = x[row]
            cell.depth += 1

    def read(self, cells: list[Cell]) -> list[list[int]]:
        """What the cells predict at their depths: the candidates of each, best first."""
        x = torch.stack([cell.x for cell in cells])                          # [rows, d]
        logits = self.model.predict(x, self.positions(cells), self.view(cells, [0] * len(cells)))
        return self.best(cells, logits)

    def view(self, cells: list[Cell], planes: list[int]) -> RowsView:
        return RowsView(self.cache, cells, planes)

    def follow(self, cell: Cell, tokens: list[int]) -> None:
        """The rule. `tokens` are the cell's candidates now. At depth T, and only there, one is committed."""
        for child in cell.children:
            if child.token not in tokens:
                self.drop(child)
        cell.children = [child for child in cell.children if not child.dropped]
        if cell.depth == self.model.recurrences:
            self.commit(cell, tokens[0])
        tried = {child.token for child in cell.children}
        for token in tokens:
            if token not in tried:
                self.start(cell, token)

    def commit(self, cell: Cell, token: int) -> None:
        """The cell is finished: `token` comes after it, for certain."""
        self.cells.remove(cell)
        self.cache.finish(cell)
        cell.parent, result = None, self.result
        result.tokens.append(token)
        result.accepted += len(cell.children)          # 1 or 0
        if token in self.eos_ids:
            result.finish = "stop"
        elif len(result.tokens) == self.limit:
            result.finish = self.limit_is

    def start(self, parent: Cell, token: int) -> None:
        """A new child, if anything may follow the token. Without room, the next reading tries again."""
        position = parent.position + 1
        ends = self.result.finish or token in self.eos_ids or position > self.last
        has_room = len(self.cells) < self.max_rows and position < self.cache.finished + self.cache.window
        if has_room and not ends:
            cell = Cell(position, token, parent)
            self.cache.open(cell)
            parent.children.append(cell)
            self.cells.append(cell)

    def drop(self, cell: Cell) -> None:
        """A wrong draft, and all that was built on it."""
        cell.dropped = True
        self.cells.remove(cell)
        heapq.heappush(self.cache.free, cell.column)
        for child in cell.children:
            self.drop(child)

    def best(self, cells: list[Cell], logits: Tensor) -> list[list[int]]:
        """The candidates of each cell. logits [rows, V]."""
        predicted = [cell.position + 1 for cell in cells]
        scores = self.sampling.scores(logits, predicted) if self.sampling else logits
        numbers = [self.candidates[cell.depth] for cell in cells]
        return [tokens[:n] for tokens, n in zip(top_tokens(scores, max(numbers)), numbers)]

    def positions(self, cells: list[Cell]) -> Tensor:
        return self.tensor(cell.position for cell in cells)

    def tensor(self, numbers) -> Tensor:
        return torch.tensor(list(numbers), device=self.model.kv_spec.device)


class DraftThenVerify(Wavefront):
    """The cells of a round are drafted one after the other, then verified together."""

    def choose_rows(self) -> list[Cell]:
        youngest = self.cells[-1:]
        return youngest if youngest[0].depth < min(self.candidates) else list(self.cells)


# ----------------------------------------------------------------------------------------------------------
# 5. Three decoders
#
# All are the scheduler above with other settings, and return the same tokens. Options of all three:
#
#     eos_ids     tokens that end the text; the one that did is the last of Result.tokens
#     sampling    an object whose scores(logits [rows, V], positions) [rows, V] are ranked; None: greedy
#     kv_share    a KVShare; None: the model's own keys and values
#     on_call     called with the Wavefront after every block call, for pictures and debugging
#
# They raise ValueError for arguments that make no sense, and for logits that are not finite.


@torch.inference_mode()
def autoregressive(model, prompt: list[int], max_new_tokens: int, **options) -> Result:
    """Plain decoding: T block calls of one row for every token."""
    return Wavefront(model, prompt, max_new_tokens, {}, 1, **options).run()


@torch.inference_mode()
def draft_then_verify(model, prompt: list[int], max_new_tokens: int, *, draft_depth: int, draft_len: int,
                      **options) -> Result:
    """Draft draft_len tokens at draft_depth, one after the other; bring them to depth T together; repeat.

    A round takes (draft_len + 1) * draft_depth + T - draft_depth calls, and commits 1 to draft_len + 1
    tokens.
    """
    return DraftThenVerify(model, prompt, max_new_tokens, {draft_depth: 1}, draft_len + 1, **options).run()


@torch.inference_mode()
def wavefront(model, prompt: list[int], max_new_tokens: int, *, candidates: dict[int, int] | None = None,
              max_rows: int = 32, **options) -> Result:
    """Wavefront decoding: the tokens of `autoregressive` in fewer block calls, of at most max_rows rows each.

    candidates: how many candidates a prediction keeps open at each depth (section 4); None: model.candidates.
    """
    if candidates is None:                             # model.recurrences may be below some of its depths
        candidates = {k: n for k, n in model.candidates.items() if k < model.recurrences}
    return Wavefront(model, prompt, max_new_tokens, candidates, max_rows, **options).run()
