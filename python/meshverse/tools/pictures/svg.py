"""A picture as SVG, written without a library, for light and dark color schemes.

As a document of its own, it has a background and follows the reader's color scheme. Inside a page
or notebook it has none, and its text has the color of the text around it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from .model import Cell, Gap, Line, Panel, Sharing
from .palette import COLORS, INKS, color_index

# Lengths in pixels.
_WIDEST = 1000
_MARGIN = 16
_BETWEEN = 28
_CELL_HEIGHT = 22
_GAP_HEIGHT = 22
_HEAD_HEIGHT = 46
_NAME_HEIGHT = 20
_CELLS_IN_ROW = 16
_LETTER = 7.2  # width of a letter at a font size of 12

# `:root` is the SVG only if it is a document of its own.
_STYLE = """\
.mv{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;max-width:none}
.mv .bg{fill:none}.mv .t{fill:currentColor}.mv .s{fill:currentColor;opacity:.72}
.mv .h{font-size:15px;font-weight:650}.mv .n{text-anchor:middle;font-variant-numeric:tabular-nums}
.mv .mine,.mv .me{fill:none;stroke-width:2.5}.mv .mine{stroke:currentColor}
.mv .me{stroke:#1b1f24;stroke-width:1.5}.mv .me.ifff{stroke:#fff}
.mv .one{fill:none;stroke:currentColor;opacity:.35}
.mv .many{fill:#56b4e9;fill-opacity:.3;stroke:#0072b2}
svg.mv:root{color:#1b1f24}svg.mv:root .bg{fill:#fff}
@media(prefers-color-scheme:dark){svg.mv:root{color:#e6edf3}svg.mv:root .bg{fill:#0d1117}}
"""
_COLORS = "".join(
    f".mv .c{index}{{fill:{color}}}.mv .i{index}{{fill:{ink}}}"
    for index, (color, ink) in enumerate(zip(COLORS, INKS, strict=True))
)


def as_svg(panels: Sequence[Panel], sharing: Sharing | None, title: str, legend: str) -> str:
    """Return an SVG document: what is shared, then panels in rows of as many as fit.

    Args:
        panels: one for each axis.
        sharing: which axes share process groups; None to omit it.
        title: title for screen readers.
        legend: explanation of colors and outlines.
    """
    rows: list[list[_Block]] = [[_SharingBlock(sharing)]] if sharing is not None else []
    rows += _rows([_PanelBlock(panel) for panel in panels])
    width = max(sum(block.width for block in row) + _BETWEEN * (len(row) - 1) for row in rows)
    lines = _wrapped(legend, width)
    width = max(width, *(_LETTER * 0.85 * len(line) for line in lines))
    parts: list[str] = []
    y = float(_MARGIN)
    for row in rows:
        x = float(_MARGIN)
        for block in row:
            parts += block.draw(x, y)
            x += block.width + _BETWEEN
        y += max(block.height for block in row) + _BETWEEN
    for line in lines:
        parts.append(_text(_MARGIN, y, line, "s"))
        y += 16
    described = "; ".join(block.words for row in rows for block in row)
    size = width + 2 * _MARGIN, y - 16 + _MARGIN
    return _document(parts, *size, title, f"{described}. {legend}", _STYLE + _COLORS) + "\n"


def as_figure(panels: Sequence[Panel], title: str, legend: str) -> str:
    """Return panels as an HTML element, for a page or notebook, in which they wrap.

    Args:
        panels: as in `as_svg`.
        title: as in `as_svg`.
        legend: as in `as_svg`.
    """
    blocks = [_PanelBlock(panel) for panel in panels]
    drawn = "".join(
        f'<div style="max-width:100%;overflow-x:auto">'
        f"{_document(block.draw(1, 1), block.width + 2, block.height + 2, block.words)}</div>"
        for block in blocks
    )
    return (
        f'<div class="mv" role="figure" aria-label="{escape(title)}">'
        f"<style>{_STYLE}{_COLORS}</style>"
        f'<div style="display:flex;flex-wrap:wrap;gap:{_BETWEEN}px">{drawn}</div>'
        f'<p style="opacity:.72">{escape(legend)}</p></div>\n'
    )


def _document(
    parts: Iterator[str] | Sequence[str],
    width: float,
    height: float,
    title: str,
    described: str = "",
    style: str = "",
) -> str:
    described = f"<desc>{escape(described)}</desc>" * bool(described)
    style = f"<style>{style}</style>" * bool(style)
    box = f"0 0 {width:.0f} {height:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mv" role="img" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="{box}" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{described}{style}"
        f'<rect class="bg" width="100%" height="100%" rx="6"/>{"".join(parts)}</svg>'
    )


def _wrapped(text: str, width: float) -> list[str]:
    """Split a legend at its spaces into lines of about this width."""
    return textwrap.wrap(text, max(40, int(width / (_LETTER * 0.85))))


def _rows(boxes: Sequence[_PanelBlock]) -> Iterator[list[_Block]]:
    row: list[_Block] = []
    for box in boxes:
        if row and sum(one.width + _BETWEEN for one in row) + box.width > _WIDEST:
            yield row
            row = []
        row.append(box)
    yield row


class _PanelBlock:
    """A panel with its width and height."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        lines = panel.drawn
        gaps = [len(line.text) for line in panel.lines if isinstance(line, Gap)]
        self._label = _LETTER * max((len(line.label) for line in lines), default=0) + 8
        self._cell = max(28.0, 12 + _LETTER * len(str(panel.largest_group)))
        times = max((len(_times(line)) for line in lines), default=0)
        in_row = min(panel.most_cells, _CELLS_IN_ROW)
        self.width = max(
            self._label + in_row * self._cell + (8 + _LETTER * times) * (times > 0),
            _LETTER * 0.9 * len(panel.subtitle),
            9.5 * len(panel.title),
            self._label + _LETTER * max(gaps, default=0),
        )
        self.height = _HEAD_HEIGHT + sum(map(_height, panel.lines))
        self.words = f"{panel.title}: {panel.subtitle}"

    def draw(self, x: float, y: float) -> Iterator[str]:
        yield _text(x, y + 14, self._panel.title, "t h")
        yield _text(x, y + 32, self._panel.subtitle, "s")
        y += _HEAD_HEIGHT
        on_top: list[str] = []  # outlines: drawn last, as the next cells would cover them
        for line in self._panel.lines:
            if isinstance(line, Gap):
                yield _text(x + self._label, y + 15, f"... {line.text}", "s")
            else:
                yield _text(x, y + 15, line.label, "t")
                end = x + self._label
                for index, cell in enumerate(line.cells):
                    down, right = divmod(index, _CELLS_IN_ROW)
                    left, top = x + self._label + right * self._cell, y + down * _CELL_HEIGHT
                    yield _cell(cell, left, top, self._cell, line)
                    on_top += _outlines(cell, left, top, self._cell)
                    end = left + self._cell
                if line.times > 1:
                    bottom = y + _height(line) - 7
                    yield _text(end + 8, bottom, _times(line), "t")
            y += _height(line)
        yield from on_top


class _SharingBlock:
    """A table of axis names: a row for each view, a column for each process group."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._widths = [
            14 + _LETTER * max(len(column.title), *(len(n) for row in column.names for n in row))
            for column in sharing.columns
        ]
        table = sum(self._widths) + 6 * (len(self._widths) - 1)
        self._labels = sharing.views
        if _LETTER * max(map(len, self._labels)) + table > _WIDEST:
            self._labels = tuple(f"view {number + 1}" for number in range(len(sharing.views)))
        self._label = _LETTER * max(map(len, self._labels)) + 8
        self._row_heights = [
            6 + _NAME_HEIGHT * max(1, *(len(column.names[row]) for column in sharing.columns))
            for row in range(len(sharing.views))
        ]
        self.width = max(
            self._label + table,
            9.5 * len(sharing.title),
            _LETTER * 0.9 * len(sharing.subtitle),
        )
        self.height = _HEAD_HEIGHT + 22 + sum(self._row_heights)
        self.words = f"{sharing.title}. {sharing.subtitle}"

    def draw(self, x: float, y: float) -> Iterator[str]:
        yield _text(x, y + 14, self._sharing.title, "t h")
        yield _text(x, y + 32, self._sharing.subtitle, "s")
        top = y + _HEAD_HEIGHT
        down = top + 22
        for label, height in zip(self._labels, self._row_heights, strict=True):
            yield _text(x, down + height / 2 + 4, label, "t")
            down += height
        left = x + self._label
        for column, width in zip(self._sharing.columns, self._widths, strict=True):
            kind = "many" if column.is_shared else "one"
            yield _rect(kind, left, top, width, down - top, 5)
            yield _text(left + width / 2, top + 15, column.title, "n s")
            below = top + 22
            for names, height in zip(column.names, self._row_heights, strict=True):
                first = below + height / 2 - _NAME_HEIGHT * (len(names) - 1) / 2 + 4
                for index, name in enumerate(names):
                    yield _text(left + width / 2, first + _NAME_HEIGHT * index, name, "n t")
                below += height
            left += width + 6


_Block = _PanelBlock | _SharingBlock


def _height(line: Line | Gap) -> int:
    if isinstance(line, Gap):
        return _GAP_HEIGHT
    return _CELL_HEIGHT * -(-len(line.cells) // _CELLS_IN_ROW)


def _times(line: Line) -> str:
    return f"x{line.times:,}" if line.times > 1 else ""


def _cell(cell: Cell, x: float, y: float, width: float, line: Line) -> str:
    index = color_index(cell.group)
    alike = f", and {line.times - 1:,} more like it" if line.times > 1 else ""
    return (
        f"<g><title>rank {cell.rank}: group {cell.group}{alike}</title>"
        f'<rect class="c{index}" x="{x + 1:g}" y="{y + 1:g}" width="{width - 2:g}" '
        f'height="{_CELL_HEIGHT - 2}" rx="3"/>'
        f'<text class="n i{index}" x="{x + width / 2:g}" y="{y + 15:g}">{cell.group}</text></g>'
    )


def _outlines(cell: Cell, x: float, y: float, width: float) -> Iterator[str]:
    if cell.is_mine:
        yield _outline("mine", x + 1, y + 1, width - 2, _CELL_HEIGHT - 2)
    if cell.is_me:  # drawn inside the cell, so in the color of its text
        kind = f"me {'ifff' if INKS[color_index(cell.group)] == '#fff' else ''}".rstrip()
        yield _outline(kind, x + 4, y + 4, width - 8, _CELL_HEIGHT - 8)


def _outline(kind: str, x: float, y: float, width: float, height: float) -> str:
    return _rect(kind, x, y, width, height, 3)


def _rect(kind: str, x: float, y: float, width: float, height: float, round_by: int) -> str:
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'rx="{round_by}"/>'
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
