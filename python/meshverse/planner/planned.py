"""What was planned: as data, and as a table for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshverse._core import AxisLayout, RankMap
from meshverse.pictures import Picture, PicturedGroups, PicturedView
from meshverse.report.tables import aligned, in_bytes, shortened_ranks

from .crossings import Crossing
from .places import several
from .views import View

__all__ = ["Mine", "Plan", "PlannedGroup"]


@dataclass(frozen=True)
class PlannedGroup:
    """The groups of one distinct axis layout: every rank is in exactly one of them.

    Attributes:
        axes: names of the axes that use these groups, each once, in the order of the views.
        asked: how often the views ask for them, by axis name.
        layout: axis layout over the ranks, `sizes:strides`.
        size: ranks in a group.
        count: how many groups there are.
        created: whether they are made; the one group over all ranks is the default group itself.
        stock_copies: how many times stock makes these groups.
        bytes_each: estimated device memory of one communicator on each of its ranks; None if the
            backend is unknown.
        crossings: what a group crosses, at each level of the cluster that is known.
    """

    axes: tuple[str, ...]
    asked: Mapping[str, int]
    layout: str
    size: int
    count: int
    created: bool
    stock_copies: int
    bytes_each: int | None
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True)
class Mine:
    """What one rank has.

    Attributes:
        rank: its global rank.
        groups: global ranks of its group for each of `Plan.groups`, in group-rank order.
        requested: groups that the views ask for.
        created: groups that are made.
        stock_created: groups that stock makes.
        bytes: estimated device memory of the communicators made; of unknown backends none counts.
        stock_bytes: the same of stock's.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]
    requested: int
    created: int
    stock_created: int
    bytes: int
    stock_bytes: int


@dataclass(frozen=True)
class Plan:
    """What the views of one world make. `str()` prints it, `to_dict()` gives data.

    `to_html()` gives a page to click through, `to_svg()` a picture.

    Attributes:
        world: number of ranks.
        views: as they were given.
        backend: of the default group and all others.
        groups: the distinct groups, in the order in which the views ask for them.
        mine: what one rank has.
        warnings: what to mind, a sentence each.
        node_size: ranks on each node, 0 to n-1 on the first one. Where it is not given, it is what
            the nodes of a topology or of places have; None where these are no equal blocks of
            ranks in order, or no nodes are known. Pictures draw nodes of this size.
    """

    world: int
    views: tuple[View, ...]
    backend: str
    groups: tuple[PlannedGroup, ...]
    mine: Mine
    warnings: tuple[str, ...]
    node_size: int | None

    @property
    def bytes(self) -> int:
        """Estimated device memory of the communicators of all ranks together."""
        return self.world * self.mine.bytes

    @property
    def stock_bytes(self) -> int:
        """The same of stock's."""
        return self.world * self.mine.stock_bytes

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return {
            "world": self.world,
            "backend": self.backend,
            "views": [str(view) for view in self.views],
            "groups": [_group_dict(group) for group in self.groups],
            "mine": asdict(self.mine),
            "bytes": self.bytes,
            "stock_bytes": self.stock_bytes,
            "warnings": list(self.warnings),
            "node_size": self.node_size,
        }

    def to_json(self) -> str:
        """`to_dict()` as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """One HTML page that needs nothing else: pick a view, an axis, a rank; see its groups."""
        return self.picture.to_html()

    def to_svg(self) -> str:
        """An SVG document: the ranks by node, coloured by group, a panel for each set of groups."""
        return self.picture.to_svg()

    @property
    def picture(self) -> Picture:
        """The same, to be drawn."""
        layouts = [view.axis_layouts() for view in self.views]
        axes = list(
            dict.fromkeys(axis.sorted() for of_view in layouts for axis in of_view.values())
        )
        numbers = {axis: number for number, axis in enumerate(axes)}
        mine = self.mine
        return Picture(
            title=f"Planned process groups of {self.world:,} ranks",
            rank_map=RankMap.identity(self.world),
            rank=mine.rank,
            groups=tuple(
                _pictured(group, axis) for group, axis in zip(self.groups, axes, strict=True)
            ),
            views=tuple(
                PicturedView(
                    str(view),
                    tuple((name, numbers[axis.sorted()]) for name, axis in axes_of.items()),
                )
                for view, axes_of in zip(self.views, layouts, strict=True)
            ),
            node_size=self.node_size,
            summary=f"Backend {self.backend}. The views ask for {mine.requested} process groups: "
            f"{mine.created} are made, stock makes {mine.stock_created}. {_memory(self)}".rstrip(),
            notes=self.warnings,
        )

    def __str__(self) -> str:
        return "\n".join([*_head(self), *_table(self.groups), "", *_foot(self)])


def _memory(plan: Plan) -> str:
    """What the communicators take, in words; empty where that is nothing, or unknown."""
    mine = plan.mine
    if not mine.stock_bytes or any(group.bytes_each is None for group in plan.groups):
        return ""
    return (
        f"Estimated device memory of communicators: {in_bytes(mine.bytes)} a rank, stock "
        f"{in_bytes(mine.stock_bytes)}; in all {in_bytes(plan.bytes)}, stock "
        f"{in_bytes(plan.stock_bytes)}."
    )


def _pictured(group: PlannedGroup, axis: AxisLayout) -> PicturedGroups:
    facts = {"layout": group.layout}
    if not group.created:
        facts["made"] = "none: the default group itself"
    for each in group.crossings:
        facts[f"{several(each.level)} a group"] = _spans(each)
        facts[f"ring steps out of a {each.level}"] = _steps(each)
    return PicturedGroups(
        names=group.axes,
        axis=axis,
        made=int(group.created),
        stock_copies=group.stock_copies,
        bytes_each=group.bytes_each,
        facts=facts,
    )


def _group_dict(group: PlannedGroup) -> dict[str, Any]:
    crossings = {
        several(crossing.level): {
            "min": crossing.min,
            "max": crossing.max,
            "busiest": crossing.busiest,
            "mean": crossing.mean,
        }
        for crossing in group.crossings
    }
    fields = asdict(group)
    del fields["crossings"]
    return {**fields, "axes": list(group.axes), **crossings}


def _head(plan: Plan) -> Iterator[str]:
    views = "1 view" if len(plan.views) == 1 else f"{len(plan.views)} views"
    yield f"World of {plan.world:,} ranks, backend {plan.backend}, {views}:"
    yield from (f"  {view}" for view in plan.views)
    yield ""


def _table(groups: Sequence[PlannedGroup]) -> list[str]:
    levels = [crossing.level for crossing in groups[0].crossings]
    titles = ["axes", "layout", "size", "groups", "stock makes"]
    titles += [f"{several(level)} a group" for level in levels]
    titles += [f"ring steps out of a {level}" for level in levels]
    rows = [titles]
    for group in groups:
        row = [" ".join(group.axes), group.layout, f"{group.size:,}", f"{group.count:,}"]
        row.append(f"x{group.stock_copies}" if group.created else "none")
        row += [_spans(each) for each in group.crossings]
        row += [_steps(each) for each in group.crossings]
        rows.append(row)
    return aligned(rows, right=range(2, len(titles)))


def _spans(crossing: Crossing) -> str:
    same = crossing.min == crossing.max
    return str(crossing.max) if same else f"{crossing.min} to {crossing.max}"


def _steps(crossing: Crossing) -> str:
    if crossing.busiest <= crossing.mean:
        return str(crossing.busiest)
    return f"{crossing.busiest}, mean {crossing.mean:.3g}"


def _foot(plan: Plan) -> Iterator[str]:
    mine = plan.mine
    yield (
        f"Rank {mine.rank} asks for {mine.requested} process groups: {mine.created} are made, "
        f"stock makes {mine.stock_created}. Its groups:"
    )
    pairs = zip(plan.groups, mine.groups, strict=True)
    yield from aligned([[" ".join(group.axes), shortened_ranks(ranks)] for group, ranks in pairs])
    if not all(group.created for group in plan.groups):
        yield "An axis over all ranks is on the default group itself: none is made for it."
    if any(group.bytes_each is None for group in plan.groups):
        yield f"No estimate of memory: what a communicator of {plan.backend} takes is unknown."
    elif memory := _memory(plan):
        yield f"{memory} docs/plan.md says where the estimate comes from."
    if plan.warnings:
        yield ""
        yield from (f"Note: {warning}" for warning in plan.warnings)
