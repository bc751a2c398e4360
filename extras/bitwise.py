"""Bitwise mode: the logits after every token are those of plain decoding in the same mode, bit for bit.

A row of a matrix product rounds differently when the product has another number of rows. In bfloat16 that
tips near ties, and they are common. With `pad_rows`, plain decoding and the wavefront round alike, because
after the prompt's pass

    1. every model call has pad_rows rows 2. attention treats each row as a batch element with one query, over
    a multiple of 64 keys, some of them masked 3. the keys of a row stand in the order of their positions

This holds on CPUs in bfloat16, for chains and trees, with the same number of threads. In float32 it holds for
chains. For trees and wide wavefronts it needs one thread, or MKL_CBWR=AVX2,STRICT: two threads may round
equal rows differently.

    python -m extras.bitwise                        tiny/ouro in bfloat16
    python -m extras.bitwise --shape ouro-2.6b      four layers of official size, random weights
"""

import argparse
import copy

import torch
from torch import Tensor

from wfd import HIDDEN, Cache, Cell, Result, Wavefront, check, softmax_attention

SCHEDULES = {}, {1: 1}, {1: 1, 2: 1, 3: 1}, {1: 2, 2: 2, 3: 2}, {1: 3, 2: 2, 3: 2}


class InOrderView:
    """The cache for cells in flight, like RowsView. Each row gathers the keys and values of its own text, in order."""

    def __init__(self, cache: Cache, cells: list[Cell], planes: list[int]):
        length = -(-max(cell.position + 1 for cell in cells) // 64) * 64
        near = torch.zeros(len(cells), length, dtype=torch.long)  # the column of every position of a row's text
        near[:, list(cache.held)] = torch.tensor(list(cache.held.values()), dtype=torch.long)
        for row, cell in zip(near, cells):
            while cell and cell.position >= cache.finished:
                row[cell.position] = cell.column
                cell = cell.parent
        device = cache.nothing.device
        self.cache, self.near, self.planes = cache, near.to(device), torch.tensor(planes, device=device)
        self.columns = torch.tensor([cell.column for cell in cells], device=device)
        self.places = torch.arange(length, device=device)
        own = torch.tensor([[cell.position] for cell in cells], device=device)
        self.is_far = (self.places <= own - cache.window)[..., None, None, None]
        self.mask = torch.zeros(len(cells), 1, 1, length, dtype=cache.nothing.dtype, device=device)
        self.mask.masked_fill_((self.places > own)[:, None, None], HIDDEN)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v. q [rows, H, h], k and v [rows, K, h] -> [rows, H, h]."""
        near, far = self.cache.near[layer], self.cache.far[layer]
        near[:, self.planes, :, self.columns] = torch.stack((k, v), dim=1)   # [rows, 2, K, h]
        kept = near[:, self.planes[:, None], :, self.near]                   # [rows, length, 2, K, h]
        if self.cache.slots:
            planes, places = self.planes[:, None] % far.shape[1], self.places.clamp(max=far.shape[3] - 1)
            kept = torch.where(self.is_far, far[:, planes, :, places], kept)
        keys, values = kept.permute(2, 0, 3, 1, 4)                           # [rows, K, length, h] each
        return softmax_attention(q[:, :, None], keys, values, attn_mask=self.mask).squeeze(2)


class Bitwise(Wavefront):
    """A Wavefront that fills its model calls up to pad_rows rows."""

    def __init__(self, *arguments, pad_rows: int, **options):
        super().__init__(*arguments, **options)
        check(pad_rows >= self.max_rows, f"pad_rows must be at least max_rows, {self.max_rows}, not {pad_rows}")
        self.pad_rows = pad_rows

    def view(self, cells: list[Cell], planes: list[int]) -> InOrderView:
        return InOrderView(self.cache, cells, planes)

    def filled(self, cells: list[Cell]) -> list[Cell]:
        """With copies of the first cell, which write again what that writes."""
        return cells + [copy.copy(cells[0]) for _ in range(self.pad_rows - len(cells))]

    def embed(self, cells: list[Cell]) -> None:
        super().embed(self.filled(cells))

    def advance(self, cells: list[Cell]) -> None:
        super().advance(self.filled(cells))

    def read(self, cells: list[Cell]) -> list[list[int]]:
        return super().read(self.filled(cells))


@torch.inference_mode()
def autoregressive(model, prompt: list[int], max_new_tokens: int, *, pad_rows: int, **options) -> Result:
    """Plain decoding, with pad_rows rows in each call. Only one of them counts in Result.rows."""
    return Bitwise(model, prompt, max_new_tokens, {}, 1, pad_rows=pad_rows, **options).run()


@torch.inference_mode()
def wavefront(model, prompt: list[int], max_new_tokens: int, *, pad_rows: int, candidates: dict[int, int] | None = None,
              max_rows: int = 32, **options) -> Result:
    """wfd.wavefront in bitwise mode. Raises ValueError where pad_rows is less than max_rows."""
    if candidates is None:
        candidates = {k: n for k, n in model.candidates.items() if k < model.recurrences}
    return Bitwise(model, prompt, max_new_tokens, candidates, max_rows, pad_rows=pad_rows, **options).run()


class Recorded(Bitwise):
    """Keeps the logits at depth T, by position. The prompt's are left out, since all decoders share its pass."""
    final: dict[int, Tensor]

    def best(self, cells: list[Cell], logits: Tensor) -> list[list[int]]:
        self.latest = dict(zip(cells, logits))
        return super().best(cells, logits)

    def commit(self, cell: Cell, token: int) -> None:
        if cell.position >= len(self.prompt):
            self.final[cell.position] = self.latest[cell]
        super().commit(cell, token)


@torch.inference_mode()
def differences(model, prompt: list[int], new: int, rows: int) -> tuple[int, int]:
    """Over all SCHEDULES: (logit vectors compared with plain decoding's, those that differ in some bit)."""
    found = []
    for candidates in SCHEDULES:                       # the first is plain decoding
        decoder = Recorded(model, prompt, new, candidates, rows if candidates else 1, pad_rows=rows)
        decoder.final = {}
        decoder.run()
        found.append(decoder.final)
    plain, *others = found
    unequal = sum(not torch.equal(plain[p], other[p]) for other in others for p in plain.keys() & other.keys())
    missing = sum(len(plain.keys() ^ other.keys()) for other in others)
    return len(plain) * len(others), unequal + missing


def main() -> int:
    from demo import TINY, machine                     # here, since demo imports this file by way of near_tie
    from extras.bench import SHAPES, held_out_prompts, random_model
    from load_weights import load

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="four layers of this official size instead of tiny/ouro")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    model, tokenizer = load(TINY / "ouro", dtype=dtype)
    if options.shape:
        model = random_model(options.shape, "cpu", 4).to(dtype)
    compared = different = 0
    for prompt in held_out_prompts(tokenizer, 20):
        found = differences(model, prompt, 128, 8)
        compared, different = compared + found[0], different + found[1]
    print(f"{options.shape or 'tiny/ouro'}, {options.dtype}, {machine('cpu')}: "
          f"{compared} logit vectors compared, {different} differ")
    return 1 if different else 0


if __name__ == "__main__":
    from demo import run
    run(main)
