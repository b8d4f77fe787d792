"""A picture as plain text, and as colored text for rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .model import Cell, Line, Panel
from .palette import COLORS, INKS, color_index

if TYPE_CHECKING:
    from rich.text import Text

_CELLS_IN_ROW = 8


def as_text(panels: Sequence[Panel], legend: str) -> str:
    """Return panels as text. `[ ]` marks the group of the picture's rank, `< >` the rank itself."""
    return "".join(text for text, _ in _pieces(panels, legend)).rstrip()


def as_rich(panels: Sequence[Panel], legend: str) -> Text:
    """Return panels as rich text, in the colors of the groups."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ignore")
    for piece, style in _pieces(panels, legend):
        text.append(piece, style)
    text.rstrip()
    return text


_Piece = tuple[str, str]
"""A text, and its style in rich's syntax."""


def _pieces(panels: Sequence[Panel], legend: str) -> list[_Piece]:
    pieces: list[_Piece] = [(f"{legend}\n", "dim")]
    for panel in panels:
        pieces += [("\n", ""), (panel.title, "bold"), (f"  {panel.subtitle}\n", "dim")]
        pieces += _lines(panel)
    return pieces


def _lines(panel: Panel) -> list[_Piece]:
    width = max((len(line.label) for line in panel.drawn), default=0)
    digits = len(str(panel.largest_group))
    pieces: list[_Piece] = []
    for line in panel.lines:
        if not isinstance(line, Line):
            pieces.append((f"  {'':{width}}  ... {line.text}\n", "dim"))
            continue
        for start in range(0, len(line.cells), _CELLS_IN_ROW):
            pieces.append((f"  {line.label if start == 0 else '':{width}} ", ""))
            pieces += [_cell(cell, digits) for cell in line.cells[start : start + _CELLS_IN_ROW]]
            is_last = start + _CELLS_IN_ROW >= len(line.cells)
            times = f"  x{line.times:,}" if line.times > 1 and is_last else ""
            pieces.append((f"{times}\n", "bold"))
    return pieces


def _cell(cell: Cell, digits: int) -> _Piece:
    before, after = "<>" if cell.is_me else "[]" if cell.is_mine else "  "
    index = color_index(cell.group)
    ink = "#000000" if INKS[index] == "#000" else "#ffffff"  # themes change named colors
    style = f"{'bold ' * cell.is_mine}{ink} on {COLORS[index]}"
    return f"{before}{cell.group}{after}".rjust(digits + 2), style
