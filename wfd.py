"""Wavefront decoding for looped language models, in one file.

A looped model applies one block of layers T times to every token, so a token costs T block calls in a row. But its
shallow states already guess the next token rather well, and the block's weights are the same at every depth: one
call can advance rows that sit at *different* depths. So the next token starts from an early guess, the one after it
from a guess of that, and all climb together, a diagonal wavefront:

    depth 4 |  #  verified          each call moves every cell in flight up by one;
    depth 3 |     #                 the oldest finishes at depth T with the true next token,
    depth 2 |        #              the youngest enters at depth 0 with a draft
    depth 1 |           #  drafts
             p  p+1  p+2  p+3

A wrong guess costs some work and is replaced. The output is that of plain decoding, token for token: shallow
predictions choose what to try, only predictions at depth T are ever emitted.

    recurrence   one application of the block; depth: recurrences done, 0 to T
    cell         a position with a guess of its token, at some depth; row: a cell's place in one call's batch
    parent       the cell at the position before, whose prediction a cell was started from; children: the reverse
    candidate    a token that a prediction ranks high enough to be tried; draft: a candidate that got a cell
    committed    a token that is certain; finished: a cell that reached depth T under finished ancestors

Everything here works on rows, without a batch axis, and knows the model only through this interface
(model.py has two such models; T, d, V: recurrences, width of the state, vocabulary):

    model.recurrences, model.context                 T; positions available
    model.candidates                                 the schedule to use when none is asked for
    model.kv_spec                                    prelude, core, coda (layers of each), heads, head_dim, dtype, device
    model.embed(tokens, positions, kv)               [rows] -> [rows, d]; the prelude's layers, if any, come here
    model.initial_state(e, positions)                [rows, d] -> [rows, d], the state at depth 0
    model.recur(x, e, positions, kv)                 [rows, d] -> [rows, d], one recurrence: the block call
    model.predict(x, positions, kv, select=None)     [rows, d] -> [selected, V]; the coda's layers, if any, come here

In every layer the model calls kv.attend(layer, q, k, v), layers being numbered prelude, core, coda.

Not here: several prompts at a time, training, printing, timing.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

# ----------------------------------------------------------------------------------------------------------------------
# 1. What comes out


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


@dataclass
class Row:
    """One row of a block call, as `on_call` sees it."""
    cell: int                  # a number of its own for every cell
    parent: int | None         # the parent's number; None when the parent is finished
    position: int
    token: int
    depth: int                 # after the call
    event: str                 # "advanced", "drafted", "verified", "corrected" or "dropped"


@dataclass
class Wave:
    """One block call, as `on_call` sees it."""
    call: int                  # 1, 2, ...
    rows: list[Row]
    committed: list[int]       # the tokens that this call made certain
    tokens: list[int]          # all new tokens so far; the first comes from the prefill, before any call


# ----------------------------------------------------------------------------------------------------------------------
# 2. From logits to tokens
#
# Plain decoding, drafting and verifying must never disagree about what a prediction says, so one function reads all
# of them. Equal logits are not rare in bfloat16; the lowest token id wins.


def read_predictions(logits: Tensor, n: int) -> list[list[tuple[int, float]]]:
    """The n most likely tokens of every row, best first, with their probabilities. logits [rows, V]."""
    total = logits.logsumexp(-1, keepdim=True)
    ranked = []
    for _ in range(min(n, logits.shape[-1])):
        best = logits.argmax(-1, keepdim=True)                               # [rows, 1], the first of several equals
        probability = (logits.gather(-1, best) - total).exp().clamp(max=1)
        ranked.append(torch.cat((best, probability), dim=-1))                # float32 holds ids below 2 ** 24 exactly
        logits = logits.scatter(-1, best, -torch.inf)
    predictions = torch.stack(ranked, dim=1).tolist()                        # [rows, n, 2]: a step's only wait for the device
    if any(probability != probability for row in predictions for _, probability in row):
        raise ValueError("the model's logits are not finite: its dtype is too narrow for it, or its weights are damaged")
    return [[(int(token), probability) for token, probability in row] for row in predictions]


# ----------------------------------------------------------------------------------------------------------------------
# 3. Cells
#
# Cells in flight form a tree: a guess may have several tokens worth trying. A child is never deeper than its parent
# (the staircase). That is all it takes for exactness: at recurrence k a cell needs the keys and values that its
# ancestors wrote at recurrence k, and by the staircase they are there, or are written in the same layer of the same
# call, before attention reads. So a row computes what it would compute in plain decoding.


@dataclass(eq=False)
class Cell:
    number: int
    position: int
    token: int
    parent: "Cell | None"      # None once the parent is finished
    column: int                # where it keeps its keys, values and state; see Cache
    probability: float         # of its token, as its parent last predicted it
    depth: int = 0
    children: list["Cell"] = field(default_factory=list)
    tried_stop: bool = False   # a stop token is among its candidates; such a draft gets no cell
    in_flight: bool = True     # neither finished nor dropped
    event: str = ""            # what the last call did with it; see Row

    def family(self):
        """The cell and all its descendants."""
        yield self
        for child in self.children:
            yield from child.family()


# ----------------------------------------------------------------------------------------------------------------------
# 4. The cache
#
# Keys and values differ from recurrence to recurrence, so every layer of the looped block has T planes of them, one
# for each. A plane is a row of columns:
#
#     |  near: cells in flight, in any order  |  far: finished positions 0, 1, 2, ...        |
#
# A cell writes to its near column, one plane per recurrence, and attends to the far columns and to its ancestors'
# near ones; a mask hides the other branches of the tree. When it is finished its column is copied, once, to its place
# among the far ones. (Keys are rotated by position before they are stored, so it doesn't matter where they are.)
# Dropping a cell therefore leaves no trace: its column is free, and whoever takes it over writes every plane before
# reading it. Nothing is ever cleared, but all begins as zeros, since a masked NaN would still poison a weighted sum.
#
# A call's rows stand at different depths, so they read different planes. They are laid out as a grid with one line
# for each depth, and a single attention call serves all lines, each as a batch element with its own plane.


class Cache:
    def __init__(self, spec, recurrences: int, near: int, far: int):
        plane = (near + far, spec.heads, spec.head_dim)
        new = {"dtype": spec.dtype, "device": spec.device}
        self.stages = [torch.zeros(layers, 2, planes, *plane, **new)        # [layers, keys and values, planes, columns, K, h]
                       for layers, planes in ((spec.prelude, 1), (spec.core, recurrences), (spec.coda, 1))]
        self.layers = [layer for stage in self.stages for layer in stage]
        self.near, self.columns = near, near + far
        self.free = set(range(near))
        self.finished = 0                                                    # far columns filled
        self.seen = torch.full((near, near), -torch.inf, **new)              # row: a near column; 0 at those it attends to
        self.bytes = sum(stage.nbytes for stage in self.stages)

    def open(self, cell: Cell) -> None:
        """A new cell sees what its parent sees, and itself."""
        if cell.parent is None:
            self.seen[cell.column] = -torch.inf
        else:
            self.seen[cell.column] = self.seen[cell.parent.column]
        self.seen[cell.column, cell.column] = 0

    def finish(self, cell: Cell) -> None:
        """Copy a cell's column to its place among the finished positions; descendants read it there from now on."""
        for stage in self.stages:
            stage[:, :, :, self.near + cell.position] = stage[:, :, :, cell.column]
        self.seen[:, cell.column] = -torch.inf
        self.free.add(cell.column)
        self.finished = cell.position + 1

    def aim_at_prompt(self, positions: Tensor, depth: int) -> None:
        """The next attend calls are for a stretch of the prompt, all its rows at one depth."""
        self.finished = int(positions[-1]) + 1
        future = torch.arange(self.finished, device=positions.device) > positions[:, None]    # [rows, positions]
        mask = torch.zeros_like(future, dtype=self.seen.dtype).masked_fill_(future, -torch.inf)
        self.aim([depth] * len(positions), self.near + positions, self.near, mask)

    def aim_at_cells(self, columns: Tensor, depths: list[int], first: int) -> None:
        """The next attend calls are for cells in flight. `first` is the lowest column that any cell holds."""
        mask = self.seen.new_zeros(len(depths), self.near - first + self.finished)            # [rows, columns read]
        mask[:, :self.near - first] = self.seen[columns, first:]
        self.aim(depths, columns, first, mask)

    def aim(self, depths: list[int], columns: Tensor, first: int, mask: Tensor) -> None:
        """Row i writes column columns[i] of plane depths[i], and reads columns `first` and up through its mask."""
        low, lines = min(depths), [[] for _ in range(min(depths), max(depths) + 1)]
        for row, depth in enumerate(depths):
            lines[depth - low].append(row)
        length = max(map(len, lines))
        self.planes = slice(low, low + len(lines))
        self.reads = slice(first, self.near + self.finished)
        self.grid = self.home = None
        if len(lines) > 1:                             # short lines are filled up with row 0, whose result nobody reads
            grid = [row for line in lines for row in line + [0] * (length - len(line))]
            home = [0] * len(depths)                                         # where in the grid a row sits
            for place, row in enumerate(grid):
                if depths[row] - low == place // length:
                    home[row] = place
            self.grid, self.home, planes = torch.tensor(grid + home + depths, device=mask.device).split(
                [len(grid), len(home), len(depths)])
            mask = mask[self.grid]
        else:
            planes = low
        self.writes = columns + planes * self.columns
        self.mask = mask.view(len(lines), 1, length, -1)                     # [lines, 1, length, columns read]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend. q [rows, H, h], k and v [rows, K, h] -> [rows, H, h]."""
        stored = self.layers[layer]
        for plane, new in zip(stored.flatten(1, 2), (k, v)):                 # [planes * columns, K, h]
            plane[self.writes] = new
        keys, values = stored[:, self.planes, self.reads].transpose(2, 3)    # [lines, K, columns read, h] each
        if self.grid is not None:
            q = q[self.grid]
        q = q.unflatten(0, (len(keys), -1)).transpose(1, 2)                  # [lines, H, length, h]
        gqa = q.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask, enable_gqa=gqa)
        out = out.transpose(1, 2).flatten(0, 1)                              # [lines * length, H, h]
        return out if self.home is None else out[self.home]


# ----------------------------------------------------------------------------------------------------------------------
# 5. The wavefront
#
# One rule makes every schedule: when a cell's prediction is read at depth k, its children become its n(k) likeliest
# tokens. Children whose token is no longer among them are dropped with all their descendants; tokens not yet tried
# start new children at depth 0. At depth T, n = 1, and that token is committed. The map k -> n(k) is `candidates`:
#
#     {}                       plain decoding: nothing starts before its parent is finished
#     {1: 1}                   the published schedule: one draft, corrected only at depth T
#     {1: 1, 2: 1, 3: 1}       early correction: a deeper prediction that differs replaces the draft at once
#     {1: 2, 2: 2, 3: 1}       two candidates kept open until depth 3 settles it


PREFILL_ROWS = 512             # rows of a prefill call: bounds the memory for masks and activations


class Wavefront:
    def __init__(self, model, prompt: list[int], limit: int, eos_ids: set[int], candidates: dict[int, int], max_rows: int):
        self.model, self.prompt, self.limit, self.eos_ids, self.max_rows = model, prompt, limit, eos_ids, max_rows
        self.depth = model.recurrences
        self.candidates = {**candidates, self.depth: 1}
        self.last = len(prompt) + limit - 2            # the last token is emitted, never fed: no cell stands behind this
        self.spec = model.kv_spec
        self.cache = Cache(self.spec, self.depth, near=2 * max_rows, far=self.last + 1)       # rows, and as many waiting
        self.cells: list[Cell] = []                    # in flight, parents before children
        self.started: list[Cell] = []                  # to be embedded before the next call
        self.numbers = 0
        self.result = Result()
        self.result.stats["cache_bytes"] = self.cache.bytes

    def tensor(self, values: list) -> Tensor:
        return torch.tensor(values, device=self.spec.device)

    def prefill(self) -> None:
        """The whole prompt through all T recurrences. The prediction behind it is the first token.

        Recurrences are the outer loop, stretches of the prompt the inner one: at each recurrence a stretch attends to
        what the stretches before it stored at that recurrence. A coda needs every position's keys and values.
        """
        model, cache, tokens = self.model, self.cache, self.tensor(self.prompt)
        stretches = torch.arange(len(tokens), device=tokens.device).split(PREFILL_ROWS)
        e, x = [], []
        for positions in stretches:
            cache.aim_at_prompt(positions, 0)
            e.append(model.embed(tokens[positions], positions, cache))                        # [rows, d]
            x.append(model.initial_state(e[-1], positions))
        for k in range(self.depth):
            for i, positions in enumerate(stretches):
                cache.aim_at_prompt(positions, k)
                x[i] = model.recur(x[i], e[i], positions, cache)
        for i, positions in enumerate(stretches):
            cache.aim_at_prompt(positions, 0)
            logits = model.predict(x[i], positions, cache, select=self.tensor([len(positions) - 1]))
        self.x, self.e = (t[0].new_zeros(cache.near, t[0].shape[-1]) for t in (x, e))         # of the cells in flight
        [[(token, _)]] = read_predictions(logits, 1)
        if self.commit(token):
            self.start(None, len(self.prompt), token, 1.0)

    def commit(self, token: int) -> bool:
        """Emit a token. True if the text goes on behind it."""
        self.result.tokens.append(token)
        if token in self.eos_ids:
            self.result.finish = "stop"
        elif len(self.result.tokens) == self.limit:
            self.result.finish = "length"
        return not self.result.finish

    def step(self, on_call: Callable[[Wave], None] | None) -> None:
        """One block call, and what follows from it."""
        self.embed_started()
        rows, before = self.choose_rows(), len(self.result.tokens)
        x = self.advance(rows)
        due = [row for row, cell in enumerate(rows) if cell.depth in self.candidates]
        if due:
            self.read([rows[row] for row in due], x[due])
        self.cells = [cell for cell in self.cells if cell.in_flight]
        if on_call:
            on_call(Wave(self.result.calls, [
                Row(cell.number, cell.parent and cell.parent.number, cell.position, cell.token, cell.depth, cell.event)
                for cell in rows], self.result.tokens[before:], list(self.result.tokens)))

    def advance(self, rows: list[Cell]) -> Tensor:
        """The block call: every row does one recurrence, each at its own depth. Their new states, [rows, d]."""
        columns, positions = self.aim(rows, [cell.depth for cell in rows], self.spec.core)
        x = self.model.recur(self.x[columns], self.e[columns], positions, self.cache)
        self.x[columns] = x
        self.result.calls += 1
        self.result.rows += len(rows)
        for cell in rows:
            cell.depth, cell.event = cell.depth + 1, "advanced"
        return x

    def embed_started(self) -> None:
        """Bring the new cells to depth 0."""
        cells, self.started = self.started, []
        self.cells += cells
        if cells:
            columns, positions = self.aim(cells, [0] * len(cells), self.spec.prelude)
            e = self.model.embed(self.tensor([cell.token for cell in cells]), positions, self.cache)
            self.e[columns], self.x[columns] = e, self.model.initial_state(e, positions)      # [rows, d]

    def choose_rows(self) -> list[Cell]:
        """The cells of the next call: all, or the max_rows on the likeliest paths. The others wait where they are.

        A path is never likelier than its beginning, so parents come before children and the staircase stays.
        """
        if len(self.cells) <= self.max_rows:
            return self.cells
        path = {}
        for cell in self.cells:
            path[cell] = cell.probability * (path[cell.parent] if cell.parent else 1)
        chosen = set(sorted(self.cells, key=path.get, reverse=True)[:self.max_rows])
        return [cell for cell in self.cells if cell in chosen]

    def aim(self, cells: list[Cell], depths: list[int], layers: int) -> tuple[Tensor, Tensor]:
        """Point the cache at these cells, if the model call that follows has layers. Their columns and positions."""
        columns, positions = self.tensor([[cell.column for cell in cells], [cell.position for cell in cells]])
        if layers:
            self.cache.aim_at_cells(columns, depths, first=min(cell.column for cell in self.cells))
        return columns, positions

    def read(self, cells: list[Cell], x: Tensor) -> None:
        """Read the predictions of these cells, parents first, and let the tree follow them. x [rows, d]."""
        _, positions = self.aim(cells, [0] * len(cells), self.spec.coda)
        logits = self.model.predict(x, positions, self.cache)                                 # [rows, V]
        self.result.stats["predict_calls"] += 1
        predictions = read_predictions(logits, max(self.candidates[cell.depth] for cell in cells))
        for cell, ranked in zip(cells, predictions):
            if cell.in_flight and not self.result.finish:                    # a parent may just have dropped it
                if cell.depth < self.depth:
                    self.draft(cell, dict(ranked[:self.candidates[cell.depth]]))
                else:
                    self.verify(cell, ranked[0][0])

    def draft(self, cell: Cell, candidates: dict[int, float]) -> None:
        """A prediction below depth T: the cell's children become its candidates, {token: probability}."""
        dropped = self.keep_children(cell, candidates)
        if dropped:
            cell.event = "corrected"
            self.result.stats["corrected_early"] += 1
        if cell.position == self.last:
            return
        cell.tried_stop = not self.eos_ids.isdisjoint(candidates)
        tried = {child.token for child in cell.children}
        for token, probability in candidates.items():
            if token not in tried | self.eos_ids and self.start(cell, cell.position + 1, token, probability):
                self.result.stats["drafted"] += 1
                cell.event = cell.event if dropped else "drafted"

    def verify(self, cell: Cell, token: int) -> None:
        """A prediction at depth T, under finished ancestors: the only place where a token becomes certain.

        Say the cell of "the" is finished and predicts "lazy". Was "lazy" among its drafts, then that cell is now the
        oldest, and climbs on. If there was only "tired", it is dropped with all that was built on it, and "lazy"
        starts anew at depth 0.
        """
        drafts = len(cell.children) + cell.tried_stop
        self.keep_children(cell, {token: 1.0})
        self.cache.finish(cell)
        cell.in_flight, cell.event = False, "verified"
        if not self.commit(token):
            return
        for child in cell.children:
            child.parent = None
            self.result.stats["accepted"] += 1
        if not cell.children:
            self.start(None, cell.position + 1, token, 1.0)
            if drafts:
                cell.event = "corrected"
                self.result.stats["rejected"] += 1

    def keep_children(self, cell: Cell, candidates: dict[int, float]) -> int:
        """Drop the children whose token is no candidate, with all their descendants. How many there were."""
        kept = [child for child in cell.children if child.token in candidates]
        for child in kept:
            child.probability = candidates[child.token]
        for child in cell.children:
            for lost in child.family() if child not in kept else ():
                lost.in_flight, lost.event = False, "dropped"
                self.cache.free.add(lost.column)
                self.result.stats["dropped_rows"] += lost.depth
        dropped = len(cell.children) - len(kept)
        cell.children = kept
        return dropped

    def start(self, parent: Cell | None, position: int, token: int, probability: float) -> bool:
        """Start a cell, if there is room for it; otherwise the parent's next prediction tries again."""
        if not self.cache.free:
            return False
        column = max(self.cache.free)                  # next to the far columns: few unused ones in between are read
        self.cache.free.remove(column)
        cell = Cell(self.numbers, position, token, parent, column, probability)
        self.numbers += 1
        self.cache.open(cell)
        self.started.append(cell)
        if parent:
            parent.children.append(cell)
        return True


# ----------------------------------------------------------------------------------------------------------------------
# 6. The decoders


@torch.inference_mode()
def decode(model, prompt: list[int], max_new_tokens: int, eos_ids: Collection[int], candidates: dict[int, int],
           max_rows: int, on_call: Callable[[Wave], None] | None) -> Result:
    """All decoders are this one, with other candidates."""
    depth, context = model.recurrences, model.context
    if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) and token >= 0 for token in prompt):
        raise ValueError("prompt must be one list of one or more token ids (one prompt at a time)")
    if len(prompt) > context:
        raise ValueError(f"the prompt has {len(prompt)} tokens, but the model has room for {context}: shorten it")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, not {max_new_tokens}")
    if depth < 1:
        raise ValueError(f"model.recurrences must be 1 or more, not {depth}")
    if max_rows < 1:
        raise ValueError(f"max_rows must be 1 or more, not {max_rows}")
    for k, n in candidates.items():
        if not 1 <= k <= depth or n < 1 or (k == depth and n > 1):
            raise ValueError(f"candidates {{{k}: {n}}} is not possible: depths go from 1 to {depth}, numbers from 1 up, "
                             f"and depth {depth} has one candidate")
    limit = min(max_new_tokens, context - len(prompt))
    if limit == 0:
        return Result(finish="length" if max_new_tokens == 0 else "context")
    wave = Wavefront(model, prompt, limit, set(eos_ids), candidates, max_rows)
    wave.prefill()
    while not wave.result.finish:
        wave.step(on_call)
    if wave.result.finish == "length" and limit < max_new_tokens:
        wave.result.finish = "context"
    return wave.result


def autoregressive(model, prompt: list[int], max_new_tokens: int, *, eos_ids: Collection[int] = (),
                   on_call: Callable[[Wave], None] | None = None) -> Result:
    """Plain greedy decoding: T block calls for a token. This is what every other decoder must reproduce.

    prompt: one or more token ids. Generation ends behind a token of eos_ids ("stop"), with max_new_tokens ("length")
    or where the model's context ends ("context"). on_call receives a Wave after every block call. Raises ValueError
    for arguments that make no sense, and for logits that are not finite.
    """
    return decode(model, prompt, max_new_tokens, eos_ids, {}, 1, on_call)


def wavefront(model, prompt: list[int], max_new_tokens: int, *, candidates: dict[int, int] | None = None,
              max_rows: int = 32, eos_ids: Collection[int] = (), on_call: Callable[[Wave], None] | None = None) -> Result:
    """Wavefront decoding: the tokens of `autoregressive`, in fewer block calls.

    candidates maps a depth to the number of candidates that a prediction at that depth keeps open (section 5);
    None takes model.candidates. max_rows bounds the rows of a call. The rest is as for `autoregressive`.
    """
    if candidates is None:                             # model.recurrences may have been set below some of its depths
        candidates = {k: n for k, n in model.candidates.items() if k < model.recurrences}
    return decode(model, prompt, max_new_tokens, eos_ids, candidates, max_rows, on_call)
