"""A picture as SVG, written without a library, for light and dark colour schemes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .model import Cell, Gap, Line, Panel
from .palette import COLOURS, INKS, colour_index

# Lengths in pixels.
_WIDEST = 1000
_MARGIN = 16
_BETWEEN = 28
_CELL_HEIGHT = 22
_GAP_HEIGHT = 22
_HEAD_HEIGHT = 46
_CELLS_IN_ROW = 16
_LETTER = 7.2  # width of a letter at a font size of 12
_SMALL_LETTER = 6.2

_STYLE = """\
.mv{font:12px system-ui,-apple-system,"Segoe UI",sans-serif}
.mv .bg{fill:#fff}.mv .t{fill:#1b1f24}.mv .s{fill:#59636e;font-size:11px}
.mv .h{font-size:15px;font-weight:650}.mv .n{text-anchor:middle;font-variant-numeric:tabular-nums}
.mv .mine,.mv .me{fill:none;stroke:#1b1f24;stroke-width:2.5}.mv .me{stroke-width:1.5}
@media(prefers-color-scheme:dark){
.mv .bg{fill:#0d1117}.mv .t{fill:#e6edf3}.mv .s{fill:#9da7b1}.mv .mine{stroke:#fff}}
.mv .me.ifff{stroke:#fff}
"""
_COLOURS = "".join(
    f".mv .c{index}{{fill:{colour}}}.mv .i{index}{{fill:{ink}}}"
    for index, (colour, ink) in enumerate(zip(COLOURS, INKS, strict=True))
)


def as_svg(panels: Sequence[Panel], title: str, legend: str) -> str:
    """Return an SVG document of panels, in rows of as many as fit.

    Args:
        panels: one for each axis.
        title: title for screen readers.
        legend: explanation of colours and outlines.
    """
    boxes = [_Box(panel) for panel in panels]
    rows = list(_rows(boxes))
    width = max(sum(box.width for box in row) + _BETWEEN * (len(row) - 1) for row in rows)
    width = max(width, _SMALL_LETTER * len(legend))
    parts: list[str] = []
    y = float(_MARGIN)
    for row in rows:
        x = float(_MARGIN)
        for box in row:
            parts += box.draw(x, y)
            x += box.width + _BETWEEN
        y += max(box.height for box in row) + _BETWEEN
    parts.append(_text(_MARGIN, y, legend, "s"))
    described = "; ".join(f"{panel.title}: {panel.subtitle}" for panel in panels)
    size = f"{width + 2 * _MARGIN:.0f} {y + _MARGIN:.0f}"
    wide, high = size.split()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mv" role="img" width="{wide}" '
        f'height="{high}" viewBox="0 0 {size}" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(described)}. {escape(legend)}</desc>"
        f"<style>{_STYLE}{_COLOURS}</style>"
        f'<rect class="bg" width="100%" height="100%" rx="6"/>{"".join(parts)}</svg>\n'
    )


def _rows(boxes: Sequence[_Box]) -> Iterator[list[_Box]]:
    row: list[_Box] = []
    for box in boxes:
        if row and sum(one.width + _BETWEEN for one in row) + box.width > _WIDEST:
            yield row
            row = []
        row.append(box)
    yield row


class _Box:
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
            _SMALL_LETTER * len(panel.subtitle),
            9.5 * len(panel.title),
            self._label + _SMALL_LETTER * max(gaps, default=0),
        )
        self.height = _HEAD_HEIGHT + sum(map(_height, panel.lines))

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


def _height(line: Line | Gap) -> int:
    if isinstance(line, Gap):
        return _GAP_HEIGHT
    return _CELL_HEIGHT * -(-len(line.cells) // _CELLS_IN_ROW)


def _times(line: Line) -> str:
    return f"x{line.times:,}" if line.times > 1 else ""


def _cell(cell: Cell, x: float, y: float, width: float, line: Line) -> str:
    index = colour_index(cell.group)
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
    if cell.is_me:  # drawn inside the cell, so in the colour of its text
        kind = f"me {'ifff' if INKS[colour_index(cell.group)] == '#fff' else ''}".rstrip()
        yield _outline(kind, x + 4, y + 4, width - 8, _CELL_HEIGHT - 8)


def _outline(kind: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
