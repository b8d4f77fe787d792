"""Axes of several views that share a process group: a row per view, a column per group."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshverse.wording import CELL, counted, printable

from .model import PicturedGroups, PicturedView, SharedColumn, Sharing

_MOST_COLUMNS = 24
_MOST_VIEWS = 24


def sharing_of(groups: Sequence[PicturedGroups], views: Sequence[PicturedView]) -> Sharing | None:
    """Return which axes share groups; None if there is one view, or nothing is shared.

    Of more than 24 distinct groups, only those of several axes are columns, up to 24; of more than
    24 views, the first are rows.
    """
    rows = views[:_MOST_VIEWS]
    if len(rows) < 2:
        return None
    columns = [_column(groups[index], index, rows) for index in range(len(groups))]
    columns = [column for column in columns if any(column.names)]
    if len(columns) > _MOST_COLUMNS:
        columns = [column for column in columns if column.is_shared][:_MOST_COLUMNS]
    if not any(column.is_shared for column in columns):
        return None
    made = [one.made for one in groups if one.made is not None]
    copies = [one.stock_copies for one in groups if one.stock_copies is not None]
    numbers = ""
    if len(made) == len(copies) == len(groups):  # and the default group
        numbers = f": {1 + sum(copies)} with torch, {1 + sum(made)} with Meshverse"
    return Sharing(
        title=f"Process groups on each rank{numbers}",
        subtitle="Axes in one column have the same ranks and share one process group."
        + " The default group is counted." * bool(numbers),
        views=tuple(printable(view.title) for view in rows),
        columns=tuple(columns),
    )


def _column(groups: PicturedGroups, index: int, views: Sequence[PicturedView]) -> SharedColumn:
    return SharedColumn(
        title=counted(groups.axis.size, "rank"),
        names=tuple(
            tuple(printable(name) for name, at in view.axes if at == index) for view in views
        ),
    )


def sharing_table(sharing: Sharing) -> str:
    """Return the table as HTML, for a page or notebook."""
    sizes = "".join(f'<th scope="col" {_CELL}>{column.title}</th>' for column in sharing.columns)
    rows = "".join(
        f'<tr><th scope="row" style="text-align:left;{CELL}">{row + 1}: {_breakable(view)}</th>'
        + "".join(_cell(column, row) for column in sharing.columns)
        + "</tr>"
        for row, view in enumerate(sharing.views)
    )
    return (
        f"<p>{escape(sharing.subtitle)}</p>"
        '<div style="overflow-x:auto"><table class="sharing"><thead><tr>'
        f'<th scope="col" style="text-align:left;{CELL}">view</th>{sizes}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _breakable(title: str) -> str:
    """Return the title of a view as HTML that a narrow screen can break after each axis."""
    return escape(title).replace(",", ",<wbr>")


_CENTERED = f"text-align:center;{CELL}"
_CELL = f'style="{_CENTERED}"'
_SHARED = f'style="{_CENTERED};background:rgb(86 180 233/.3)"'


def _cell(column: SharedColumn, row: int) -> str:
    names = "<br>".join(map(escape, column.names[row]))
    return f"<td {_SHARED if column.is_shared else _CELL}>{names}</td>"
