"""Lines of text in columns, of a given width whatever is in them: pure, so that a live view never wraps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

_GAP = "  "
_ELLIPSIS = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column.

    Attributes:
        right: Numbers stand at the right.
        least: It may be made as narrow as this, in cells of a terminal; 0 is never narrower than what is in it.
    """

    heading: str
    right: bool = False
    least: int = 0


def shorten_name(name: str, width: int) -> str:
    """A name in at most so many cells: what differs between names is at their ends, so the middle goes."""
    if cell_len(name) <= width:
        return name
    tail = (width - 1) // 2
    head = width - 1 - tail
    if head < 1:
        return _ELLIPSIS[:width]
    return set_cell_size(name, head).rstrip() + _ELLIPSIS + set_cell_size(name[::-1], tail)[::-1].lstrip()


def shorten_sentence(text: str, width: int) -> str:
    """A sentence in at most so many cells: its end goes."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(0, width - 1)).rstrip() + _ELLIPSIS if width else ""


def fold_sentence(text: str, width: int, *, indent: int) -> list[str]:
    """A sentence, whole, in lines of at most `width` cells that begin with a margin."""
    margin = " " * indent
    return textwrap.wrap(
        text, max(width, indent + 8), initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )


def column_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Cells for each column, with gaps at most `width` together if the columns can be made so narrow."""
    widths = [
        max(map(cell_len, (column.heading, *(row[number] for row in rows)))) for number, column in enumerate(columns)
    ]
    excess = sum(widths) + len(_GAP) * (len(columns) - 1) - width
    while excess > 0:
        # The widest first: short names stay readable for as long as possible.
        spare = [number for number, column in enumerate(columns) if column.least and widths[number] > column.least]
        if not spare:
            break
        widths[max(spare, key=lambda number: widths[number])] -= 1
        excess -= 1
    return widths


def column_line(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str]) -> str:
    """One row; a cell that does not fit is shortened in its middle."""
    parts = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        text = shorten_name(cell, width)
        space = " " * (width - cell_len(text))
        parts.append(space + text if column.right else text + space)
    return _GAP.join(parts).rstrip()
