"""A picture as a self-contained HTML page: no server, no network, no script.

Names come from users, so they are escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

from meshverse._core import RankGroups
from meshverse.wording import counted, in_bytes, printable, rank_list

from .model import PicturedGroups
from .sharing import sharing_table

if TYPE_CHECKING:
    from .picture import Picture

_COLUMNS = (
    *("Axes", "Size", "Groups", "Number", "Ranks", "Nodes", "Shared by"),
    *("Created", "torch would create", "More"),
)


def as_page(picture: Picture) -> str:
    """Return the page: a drawing of each view, a table of the rank's groups, and notes."""
    folder = resources.files("meshverse.tools.pictures")
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        title=_text(picture.title),
        summary=_text(picture.summary),
        sharing=_sharing(picture),
        views="".join(_views(picture)),
        rank=picture.rank,
        totals=_totals(picture.groups),
        columns="".join(f'<th scope="col">{column}</th>' for column in _COLUMNS),
        groups="".join(f"<tr>{''.join(_row(picture, one))}</tr>" for one in picture.groups),
        notes="<h2>Warnings</h2>" + _list(map(_text, picture.notes)) if picture.notes else "",
    )


def _sharing(picture: Picture) -> str:
    """Return the table of which axes share a process group; "" if no two do."""
    sharing = picture.sharing
    return "" if sharing is None else f"<h2>{_text(sharing.title)}</h2>{sharing_table(sharing)}"


def _views(picture: Picture) -> Iterator[str]:
    """Yield each view as a <details> element; the first with several axes is open."""
    panels = dict(zip(picture.drawn, picture.panels, strict=True))
    views = {
        f"{number}: {view.title}": [
            panels[index] for index in dict.fromkeys(at for _, at in view.axes) if index in panels
        ]
        for number, view in enumerate(picture.views, 1)
    }
    in_views = {index for view in picture.views for _, index in view.axes}
    if not in_views.issuperset(panels):
        views["all groups"] = [*panels.values()]
    views = {title: drawn for title, drawn in views.items() if drawn}
    first = next((title for title, drawn in views.items() if len(drawn) > 1), next(iter(views)))
    for title, drawn in views.items():
        yield (
            f"<details{' open' * (title == first)}><summary>{_text(title)}</summary>"
            f"{picture.figure(drawn, title)}</details>\n"
        )


def _row(picture: Picture, groups: PicturedGroups) -> Iterator[str]:
    of_ranks = RankGroups(groups.axis, picture.rank_map)
    position = picture.rank_map.position_of(picture.rank)
    number, ranks, n_nodes = "-", "none", "-"
    if position is not None:
        mine = of_ranks.ranks_of(position)
        number = f"{of_ranks.group_index(position):,}"
        ranks = rank_list(mine if groups.preserve_rank_order else sorted(mine))
        if picture.node_size is not None:
            n_nodes = f"{len({rank // picture.node_size for rank in mine}):,}"
    yield f'<th scope="row">{_text(", ".join(groups.names))}</th>'
    yield from map(_number, (f"{of_ranks.group_size:,}", f"{of_ranks.n_groups:,}", number))
    yield f"<td>{ranks}</td>{_number(n_nodes)}<td>{_users(picture, groups)}</td>"
    yield _number(_held(groups.made, groups)) + _number(_held(groups.stock_copies, groups))
    yield f"<td>{_list(_text(f'{title}: {text}') for title, text in groups.facts.items())}</td>"


def _users(picture: Picture, groups: PicturedGroups) -> str:
    index = picture.groups.index(groups)
    users = [
        f"{_text(name)} of view {number}"
        for number, view in enumerate(picture.views, 1)
        for name, other in view.axes
        if other == index
    ]
    return _list(users) if len(users) > 1 else "-"


def _held(count: int | None, groups: PicturedGroups) -> str:
    if count is None:
        return "unknown"
    if not count or not groups.bytes_each:
        return str(count)
    return f"{count} ({in_bytes(count * groups.bytes_each)})"


def _totals(groups: Iterable[PicturedGroups]) -> str:
    made = stock = made_bytes = stock_bytes = 0
    for one in groups:
        if one.made is None or one.stock_copies is None:
            return ""
        made, stock = made + one.made, stock + one.stock_copies
        made_bytes += one.made * (one.bytes_each or 0)
        stock_bytes += one.stock_copies * (one.bytes_each or 0)
    is_known = all(one.bytes_each is not None for one in groups) and stock_bytes > 0
    mine, stocks = (
        f" (about {in_bytes(size)} of device memory)" if is_known else ""
        for size in (made_bytes, stock_bytes)
    )
    return (
        f"Besides the default group, each rank has {counted(made, 'communicator')}{mine}. With "
        f"torch, which creates one for every request, it would have {stock:,}{stocks}."
    )


def _number(text: str) -> str:
    return f'<td class="number">{text}</td>'


def _list(items: Iterable[str]) -> str:
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{listed}</ul>" if listed else ""


def _text(text: str) -> str:
    return escape(printable(text))
