"""Look-ahead: where the last tokens have occurred before, try what followed them then.

A wavefront drafts one token at a time, from its youngest cell. But much text repeats itself: code,
quotations, lists. So here a new cell brings a chain of descendants along, copied from earlier text, and all
of them climb side by side. Where the copy is right, several tokens are committed in one call. Where it is
wrong, depth T finds out, as always.
"""

import torch

from wfd import Cell, Result, Wavefront, check


class LookAhead(Wavefront):
    """A Wavefront in which a new child also starts up to `lookup` descendants at its own depth."""

    def __init__(self, *arguments, lookup: int, **options):
        super().__init__(*arguments, **options)
        check(lookup >= 0, f"lookup must be 0 or more, not {lookup}")
        self.lookup = lookup
        self.looked_up: set[Cell] = set()              # the copied cells in flight

    def start(self, parent: Cell, token: int) -> None:
        before = len(self.cells)
        super().start(parent, token)
        if len(self.cells) > before:
            cell = self.cells[-1]
            for copied in self.look_up(cell):
                super().start(cell, copied)
                if not cell.children:                  # no room, or nothing may follow
                    break
                cell = cell.children[0]
                self.looked_up.add(cell)

    def look_up(self, cell: Cell) -> list[int]:
        """What followed the latest earlier occurrence of the text's last four tokens, else three, else two."""
        text, chain = self.prompt + self.result.tokens, []
        while cell.position >= len(text):              # not yet certain
            chain.append(cell.token)
            cell = cell.parent
        text = text + chain[::-1]
        characters = "".join(map(chr, text))           # one for each token: strings have a fast search
        for n in (4, 3, 2):
            place = characters.rfind(characters[-n:], 0, -1)
            if place >= 0:
                return text[place + n:place + n + self.lookup]
        return []

    def follow(self, cell: Cell, tokens: list[int]) -> None:
        """Shallow predictions were not asked about a copied child, so only depth T may drop it."""
        if cell.depth < self.model.recurrences:
            tokens = tokens + [child.token for child in cell.children if child in self.looked_up]
        super().follow(cell, tokens)
        self.looked_up.intersection_update(self.cells)


@torch.inference_mode()
def wavefront(model, prompt: list[int], max_new_tokens: int, *, lookup: int, candidates: dict[int, int] | None = None,
              max_rows: int = 32, **options) -> Result:
    """wfd.wavefront with look-ahead, and so the tokens of plain decoding. lookup: how many tokens are copied at most."""
    if candidates is None:
        candidates = {k: n for k, n in model.candidates.items() if k < model.recurrences}
    return LookAhead(model, prompt, max_new_tokens, candidates, max_rows, lookup=lookup, **options).run()
