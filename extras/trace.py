"""A whole generation as a picture: block calls go down, positions across, the depth stands in every cell.

`python demo.py --trace FILE.svg` keeps snapshot(wavefront) of every call, and draws them in the end.
"""

import html
import itertools
import weakref
from typing import NamedTuple

from wfd import Cell, Wavefront

SIZE, LEFT, TOP = 18, 120, 20                          # of a square, of the margins
BLUE, GREEN, RED, ORANGE, GREY = "#3b82f6", "#16a34a", "#ef4444", "#f59e0b", "#848d97"

# A cell has one number for life. Its id() goes to another cell once it is gone.
numbers, fresh = weakref.WeakKeyDictionary(), itertools.count()


class Row(NamedTuple):
    cell: int
    parent: int | None
    position: int
    token: int
    depth: int
    dropped: bool


def number(cell: Cell | None) -> int | None:
    return None if cell is None else numbers.setdefault(cell, next(fresh))


def snapshot(wavefront: Wavefront) -> tuple[int, list[Row]]:
    """How many tokens are certain after a call, and the rows of the call. No tensors."""
    rows = [Row(number(cell), number(cell.parent), cell.position, cell.token, cell.depth, cell.dropped)
            for cell in wavefront.rows]
    return len(wavefront.result.tokens), rows


def write(x: float, y: float, text: str, colour: str = GREY, anchor: str = "start", size: float = 11) -> str:
    return (f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">'
            f"{html.escape(printable(text))}</text>")


def square(x: float, y: float, fill: str, edge: str, opacity: float, title: str = "") -> str:
    """The title is shown under the mouse."""
    return (f'<rect x="{x + 1}" y="{y + 1}" width="{SIZE - 2}" height="{SIZE - 2}" rx="4" fill="{fill}" '
            f'fill-opacity="{opacity:.2f}" stroke="{edge}" stroke-width="1.5">'
            f"<title>{html.escape(printable(title))}</title></rect>")


def printable(text: str) -> str:
    """XML knows no control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.replace("\n", "\\n"))


def trace_svg(calls: list[tuple[int, list[Row]]], tokens: list[int], tokenizer, prompt_length: int,
              recurrences: int) -> str:
    """An SVG of snapshots, one for each block call of a generation that yielded `tokens`."""
    fed = max(0, len(tokens) - 1)                      # the last token is emitted and never fed
    width, bottom = LEFT + max(fed + 4, 45) * SIZE, TOP + len(calls) * SIZE
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 70}" width="{width}" '
           f'height="{bottom + 70}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11">']
    finished = {row.cell for _, rows in calls for row in rows if row.depth == recurrences and not row.dropped}
    known = 1                                          # the first token comes from the prompt's pass
    for i, (certain, rows) in enumerate(calls):
        y = TOP + i * SIZE
        if i == 0 or (i + 1) % 5 == 0:
            out.append(write(28, y + 13, str(i + 1), anchor="end"))
        words, known = [tokenizer.decode([token]).strip() for token in tokens[known:certain]], certain
        right = [row.position for row in rows if row.cell in finished]
        x = LEFT + (min(right, default=prompt_length) - prompt_length) * SIZE
        out.append(write(x - 5, y + 13, " ".join(words)[-24:], anchor="end"))
        out += squares(rows, y, finished, tokenizer, prompt_length, recurrences)
    x, y = 12, bottom + 14
    for fill, edge, opacity, meaning in ((BLUE, "none", 0.75, "advances: the number is its depth"),
                                         (GREEN, "none", 1.0, "finished: a token is certain"),
                                         (BLUE, ORANGE, 0.75, "drops earlier drafts"),
                                         (RED, "none", 0.2, "a wrong draft (x: now dropped)")):
        out += [square(x, y, fill, edge, opacity), write(x + SIZE + 5, y + 13, meaning)]
        x += SIZE + 16 + 6.7 * len(meaning)
    out.append(write(14, y + 38, f"{len(tokens)} tokens in {len(calls)} block calls; plain decoding needs "
                     f"{fed * recurrences}. Calls go down, positions across. Small: other drafts."))
    return "\n".join(out) + "\n</svg>\n"


def squares(rows: list[Row], y: float, finished: set[int], tokenizer, prompt_length: int,
            recurrences: int) -> list[str]:
    """One line of the picture: a square for each position, drawn for the best of its drafts."""
    out, corrected = [], {row.parent for row in rows if row.dropped}
    for position in sorted({row.position for row in rows}):
        here = [row for row in rows if row.position == position]
        here.sort(key=lambda row: (row.cell in finished, row.depth))
        row, others, x = here[-1], len(here) - 1, LEFT + (position - prompt_length) * SIZE
        right, last = row.cell in finished, row.depth == recurrences
        fill, ink = (GREEN if last else BLUE, "#fff") if right else (RED, RED)
        opacity = 0.2 if not right else 1.0 if last else 0.5 + 0.45 * row.depth / recurrences
        edge = ORANGE if row.cell in corrected and not row.dropped else "none"
        out.append(square(x, y, fill, edge, opacity, tokenizer.decode([row.token])))
        label = "x" if row.dropped else str(row.depth)
        out.append(write(x + SIZE / 2 - (2 if others else 0), y + 13, label, ink, "middle", 10))
        if others:
            out.append(write(x + SIZE - 4.5, y + 8.5, str(others), ink, "middle", 6.5))
    return out
