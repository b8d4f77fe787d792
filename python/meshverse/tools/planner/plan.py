"""A plan: the distinct process groups of all views, those that torch would create, and warnings."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from meshverse._core import AxisLayout, RankGroups, RankMap
from meshverse.explain.communicator_memory import COMMUNICATOR_BYTES, estimate_bytes, with_measured
from meshverse.tools.pictures import Picture, PicturedGroups, PicturedView
from meshverse.wording import (
    aligned,
    counted,
    did_you_mean,
    in_bytes,
    paragraph,
    rank_list,
    several,
)

from .views import View, as_view, check_fits, whole_number

if TYPE_CHECKING:
    from meshverse.tools.topology import Topology

    from .crossings import Crossing, Places

_ESTIMATED = (
    "From NCCL's default buffers in a ring over 16 channels; pass --saves for published figures."
)
_SHOULD_STAY_INSIDE = re.compile(r"(^|_)e?tp|tensor", re.IGNORECASE)


@dataclass(frozen=True)
class PlannedGroup:
    """Groups of one distinct axis layout: every rank is in exactly one of them.

    Attributes:
        axes: names of the axes that use these groups, each once, in the order of the views.
        asked: number of requests by the views, by axis name.
        layout: axis layout over the ranks, `sizes:strides`.
        size: number of ranks in a group.
        count: number of groups.
        created: whether they are created; an axis over all ranks uses the default group instead.
        stock_copies: number of times that torch's `DeviceMesh` would create these groups.
        bytes_each: estimated device memory of one communicator on each of its ranks; None if the
            backend is unknown.
        crossings: for each known level of the cluster, the parts that the groups span.
        isolated: whether they are an axis's own, by an isolation tag.
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
    isolated: bool = False


@dataclass(frozen=True)
class Mine:
    """Groups of one rank.

    Attributes:
        rank: global rank.
        groups: global ranks of its group for each of `Plan.groups`, in group-rank order.
        requested: number of groups that the views request.
        created: number of groups that Meshverse creates.
        stock_created: number of groups that torch's `DeviceMesh` would create.
        bytes: estimated device memory of the created communicators; unknown backends count 0.
        stock_bytes: the same for the communicators that torch would create.
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
    """Process groups of the views of one world.

    `str()` gives a table, `to_dict()` data, `to_html()` a page and `to_svg()` a picture.

    Attributes:
        world: number of ranks.
        views: views of the world, as they were given.
        backend: backend of the default group and all others.
        groups: the distinct groups, in the order in which the views request them.
        mine: groups of one rank.
        warnings: warnings, one or two sentences each.
        node_size: number n of ranks on each node: ranks 0 to n-1 are on the first. By default, the
            size of the nodes of the topology or of `places`; None if these are not equal blocks of
            consecutive ranks, or no nodes are known. Pictures draw nodes of this size.
        isolate: names of the axes that have groups of their own.
    """

    world: int
    views: tuple[View, ...]
    backend: str
    groups: tuple[PlannedGroup, ...]
    mine: Mine
    warnings: tuple[str, ...]
    node_size: int | None
    isolate: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Estimated device memory of the communicators of all ranks together."""
        return self.world * self.mine.bytes

    @property
    def stock_bytes(self) -> int:
        """Estimated device memory of the communicators that torch would create on all ranks."""
        return self.world * self.mine.stock_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, ready for JSON."""
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
            "isolate": list(self.isolate),
        }

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Return a self-contained HTML page: drawings of the views, and one rank's groups."""
        return self.picture.to_html()

    def to_svg(self) -> str:
        """Return an SVG document: ranks by node, colored by group, a panel per distinct group."""
        return self.picture.to_svg()

    @property
    def picture(self) -> Picture:
        """Picture of the plan, from which pages and drawings are made."""
        requests = _requests(self.views, self.isolate)
        numbers = {key: number for number, key in enumerate(requests)}
        pictured = [
            (
                name,
                [
                    (axis, numbers[_key(axis, layout, self.isolate)])
                    for axis, layout in view.axis_layouts().items()
                ],
            )
            for name, view in zip(map(str, self.views), self.views, strict=True)
        ]
        return Picture(
            title=f"Planned process groups of {counted(self.world, 'rank')}",
            rank_map=RankMap.identity(self.world),
            rank=self.mine.rank,
            groups=tuple(map(_pictured, self.groups, (key.axis for key in numbers))),
            views=tuple(PicturedView(name, tuple(axes)) for name, axes in pictured),
            node_size=self.node_size,
            summary=f"Backend {self.backend}. The views request {_counts(self.mine)}. "
            f"{_memory(self)}".rstrip(),
            notes=self.warnings,
        )

    def __str__(self) -> str:
        return "\n".join([*head(self), *_table(self.groups), "", *_foot(self)])


# --- text ---------------------------------------------------------------------------------------


def _counts(mine: Mine) -> str:
    requested = counted(mine.requested, "process group")
    return f"{requested}: {mine.created} created, torch would create {mine.stock_created}"


def _memory(plan: Plan) -> str:
    """Return a sentence about the memory of communicators; "" if it is zero or unknown."""
    mine = plan.mine
    if not mine.stock_bytes or any(group.bytes_each is None for group in plan.groups):
        return ""
    return (
        f"Estimated device memory of communicators: {in_bytes(mine.bytes)} per rank (torch: "
        f"{in_bytes(mine.stock_bytes)}), {in_bytes(plan.bytes)} in all (torch: "
        f"{in_bytes(plan.stock_bytes)})."
    )


def _pictured(group: PlannedGroup, axis: AxisLayout) -> PicturedGroups:
    facts = {"layout": group.layout}
    if not group.created:
        facts["created"] = "no: it is the default group"
    for each in group.crossings:
        facts[f"{several(each.level)} per group"] = _spans(each)
        facts[f"ring steps out of a {each.level}"] = _steps(each)
    made, stock_copies = int(group.created), group.stock_copies
    return PicturedGroups(
        group.axes,
        axis,
        made=made,
        stock_copies=stock_copies,
        bytes_each=group.bytes_each,
        facts=facts,
    )


def _group_dict(group: PlannedGroup) -> dict[str, Any]:
    fields = {**asdict(group), "axes": list(group.axes)}
    crossings = {several(crossing.pop("level")): crossing for crossing in fields.pop("crossings")}
    return {**fields, **crossings}


def head(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan's text that list its views."""
    ranks, views = counted(plan.world, "rank"), counted(len(plan.views), "view")
    yield f"World of {ranks}, backend {plan.backend}, {views}:"
    yield from (f"  {view}" for view in plan.views)
    if plan.isolate:
        yield f"Isolated, each with groups of its own: {', '.join(plan.isolate)}"
    yield ""


def _table(groups: Sequence[PlannedGroup]) -> list[str]:
    levels = [crossing.level for crossing in groups[0].crossings]
    titles = ["axes", "layout", "size", "groups", "torch creates"]
    titles += [f"{several(level)} per group" for level in levels]
    titles += [f"ring steps out of a {level}" for level in levels]
    rows = [titles]
    for group in groups:
        row = [_names(group), group.layout, f"{group.size:,}", f"{group.count:,}"]
        row.append(f"x{group.stock_copies}" if group.stock_copies else "none")
        row += [_spans(each) for each in group.crossings]
        row += [_steps(each) for each in group.crossings]
        rows.append(row)
    return aligned(rows, right=range(2, len(titles)))


def _names(group: PlannedGroup) -> str:
    return " ".join(group.axes) + " (isolated)" * group.isolated


def _spans(crossing: Crossing) -> str:
    same = crossing.min == crossing.max
    return str(crossing.max) if same else f"{crossing.min} to {crossing.max}"


def _steps(crossing: Crossing) -> str:
    if crossing.busiest <= crossing.mean:
        return str(crossing.busiest)
    return f"{crossing.busiest}, mean {crossing.mean:.3g}"


def _foot(plan: Plan) -> Iterator[str]:
    mine = plan.mine
    legend = "layout: sizes:strides."
    if levels := [each.level for each in plan.groups[0].crossings]:
        legend += (
            f" ring steps out of a {levels[0]}: ring transfers of the axis that leave the busiest "
            f"{levels[0]}."
        )
    yield from paragraph(legend)
    yield f"Rank {mine.rank} requests {_counts(mine)}. Its groups:"
    pairs = zip(plan.groups, mine.groups, strict=True)
    yield from aligned([[_names(group), rank_list(ranks)] for group, ranks in pairs])
    if not all(group.created for group in plan.groups):
        yield "An axis over all ranks uses the default group: no group is created for it."
    if any(group.bytes_each is None for group in plan.groups):
        hint = did_you_mean(plan.backend, COMMUNICATOR_BYTES)
        yield f"No estimate of memory: it is unknown for backend {plan.backend}.{hint}"
    elif memory := _memory(plan):
        yield from paragraph(f"{memory} {_ESTIMATED}")
    if plan.warnings:
        yield ""
        for warning in plan.warnings:
            yield from paragraph(f"Note: {warning}", indent="  ")


# --- computation --------------------------------------------------------------------------------


def plan(
    views: Sequence[View | Mapping[str, int] | str],
    *,
    world_size: int | None = None,
    backend: str = "nccl",
    rank: int = 0,
    node_size: int | None = None,
    domain_size: int | None = None,
    places: Sequence[Places] = (),
    topology: Topology | None = None,
    communicator_bytes: Mapping[str, int] | None = None,
    isolate: str | Collection[str] = (),
) -> Plan:
    """Plan the process groups that one universe would create for these views of one world.

    Creates no group and communicates with no other process. Takes O(world size) time and memory for
    each distinct group: under a second for a million ranks.

    Args:
        views: ways to split the world: strings ("pp=8,dp=160,tp=8"), mappings from axis names to
            sizes, or views. In strings and mappings, one size may be -1: it stands for the ranks
            that the other axes leave.
        world_size: number of ranks; by default that of the first view.
        backend: backend of all groups.
        rank: rank whose groups are listed.
        node_size: number n of ranks on each node: ranks 0 to n-1 are on the first, and so on.
        domain_size: number of ranks in each NVLink domain, in the same way.
        places: levels of the cluster, if their parts are not such blocks.
        topology: topology of the cluster; all its levels are used.
        communicator_bytes: device memory of one communicator by backend, if you have measured it.
        isolate: name or names of axes that get groups of their own, as with an `isolate=` tag each.

    Raises:
        ValueError: a view cannot be read or does not cover the world; the first view has a size of
            -1, and `world_size` is not given; the world has no rank or more than 16,777,216; the
            rank is outside of it; a node or domain size is not an int above 0; `places` or the
            topology have another number of ranks; a level is given twice; no view has an axis that
            `isolate` names; a communicator's bytes are not an int of 0 or more.
        TypeError: something is not a view, or `views` is one view instead of a list.
    """
    if isinstance(views, (str, Mapping, View)):
        raise TypeError(
            f"views={views!r} is one view: give a list of views, such as ['dp=4,tp=8']."
        )
    if not views:
        raise ValueError('There is no view to plan: give one, such as "pp=2,dp=4,tp=8".')
    first = None if world_size is None else _number("world_size", world_size)
    read: list[View] = []
    for given in views:
        read.append(as_view(given, first))
        first = read[0].size if first is None else first
        check_fits(read[-1], first)
    world, number = read[0].size, whole_number(rank)
    if number is None or not 0 <= number < world:
        raise ValueError(f"rank={rank!r} is outside the world: give one from 0 to {world - 1}.")
    backend = backend.lower()  # as torch does
    given_sizes = {"node": node_size, "domain": domain_size}
    sizes = {n: _number(f"{n}_size", size) for n, size in given_sizes.items() if size is not None}
    known = _places(world, places, topology, sizes)
    if repeated := sorted(name for name, n in Counter(p.level for p in known).items() if n > 1):
        raise ValueError(
            f"The level {', '.join(repeated)} is given twice: leave node_size=, domain_size= or "
            "places= out if the topology has the level."
        )
    for name in (backend, *(each.level for each in known)):
        if not name.isprintable():  # it could control the terminal that shows the plan
            raise ValueError(f"{name!r} cannot name a backend or a level: give printable text.")
    for each in known:
        if len(each.of_rank) != world:
            raise ValueError(
                f"The {several(each.level)} of {counted(len(each.of_rank), 'rank')} are given, but "
                f"the world has {world}: give a {each.level} for each rank."
            )
    names = dict.fromkeys(name for view in read for name in view.axis_layouts())
    isolate = (isolate,) if isinstance(isolate, str) else tuple(dict.fromkeys(isolate))
    for name in isolate:
        if name not in names:
            raise ValueError(
                f"isolate={name!r} names no axis of these views: they have {', '.join(names)}."
                f"{did_you_mean(name, names)}"
            )
    figures = with_measured(communicator_bytes)
    requests = _requests(read, isolate)
    axes = [key.axis for key in requests]
    groups = tuple(
        _planned(key, asked, world, crossings, estimate_bytes(backend, key.axis.size, figures))
        for (key, asked), crossings in zip(requests.items(), _crossings(axes, known), strict=True)
    )
    nodes = next((each.block_size for each in known if each.level == "node"), None)
    mine, warnings = _mine(number, axes, groups, world), _warnings(groups, known)
    node_size = sizes.get("node", nodes)
    return Plan(world, tuple(read), backend, groups, mine, warnings, node_size, isolate)


def _places(
    world: int, places: Sequence[Places], topology: Topology | None, sizes: Mapping[str, int]
) -> list[Places]:
    if topology is None and not sizes:
        return [*places]
    from .crossings import Places  # which needs torch, as a plan without nodes does not

    known = [*places, *(Places.of_topology(topology) if topology is not None else ())]
    return known + [Places.in_blocks(name, world, min(n, world)) for name, n in sizes.items()]


def _crossings(
    axes: Collection[AxisLayout], places: Sequence[Places]
) -> Sequence[tuple[Crossing, ...]]:
    if not places:
        return [()] * len(axes)
    from .crossings import crossings_of

    return [crossings_of(axis, places) for axis in axes]


def _number(name: str, given: Any) -> int:
    number = whole_number(given)
    if number is None:
        raise ValueError(f"{name}={given!r}: give an int above 0.")
    return number


class _Key(NamedTuple):
    """Layout and isolation tag that axes have in common if they share groups; "" for no tag."""

    axis: AxisLayout
    tag: str


def _key(name: str, axis: AxisLayout, isolate: Collection[str]) -> _Key:
    return _Key(axis.sorted(), name if name in isolate else "")


def _requests(views: Sequence[View], isolate: Collection[str]) -> dict[_Key, dict[str, int]]:
    """Count how often each distinct group is requested, by axis name."""
    requests: dict[_Key, dict[str, int]] = {}
    for view in views:
        for name, axis in view.axis_layouts().items():
            times = requests.setdefault(_key(name, axis, isolate), {})
            times[name] = times.get(name, 0) + 1
    return requests


def _planned(
    key: _Key,
    asked: Mapping[str, int],
    world: int,
    crossings: tuple[Crossing, ...],
    bytes_each: int | None,
) -> PlannedGroup:
    axis, is_isolated = key.axis, bool(key.tag)
    is_default = axis.size == world
    return PlannedGroup(
        axes=tuple(asked),
        asked=dict(asked),
        layout=str(axis),
        size=axis.size,
        count=world // axis.size,
        created=is_isolated or not is_default,
        stock_copies=0 if is_default else sum(asked.values()),
        bytes_each=bytes_each,
        crossings=crossings,
        isolated=is_isolated,
    )


def _mine(
    rank: int, axes: Sequence[AxisLayout], groups: Sequence[PlannedGroup], world: int
) -> Mine:
    rank_map = RankMap.identity(world)
    return Mine(
        rank=rank,
        groups=tuple(tuple(RankGroups(axis, rank_map).ranks_of(rank)) for axis in axes),
        requested=sum(sum(group.asked.values()) for group in groups),
        created=sum(group.created for group in groups),
        stock_created=sum(group.stock_copies for group in groups),
        bytes=sum(group.created * (group.bytes_each or 0) for group in groups),
        stock_bytes=sum(group.stock_copies * (group.bytes_each or 0) for group in groups),
    )


def _warnings(groups: Sequence[PlannedGroup], places: Sequence[Places]) -> tuple[str, ...]:
    warnings = []
    for group in groups:
        inside = [name for name in group.axes if _SHOULD_STAY_INSIDE.search(name)]
        nodes = next((each for each in group.crossings if each.level == "node"), None)
        if inside and nodes is not None and nodes.max > 1:
            warnings.append(
                f"Axis {inside[0]} leaves its node: a group of {group.size} ranks spans up to "
                f"{nodes.max} nodes. Tensor-parallel groups communicate in every layer: make it "
                "the last axis, with a size that divides the ranks of a node."
            )
        warnings += [
            f"Axis {group.axes[0]} loads the {several(crossing.level)} unevenly: "
            f"{crossing.busiest} ring steps leave the busiest one, {crossing.mean:.3g} the average "
            "one."
            for crossing in group.crossings
            if crossing.imbalance > 1.01
        ]
        if len(group.axes) > 1 and group.size > 1:
            warnings.append(
                f"Axes {', '.join(group.axes)} share one process group: their collectives run one "
                "after the other. An axis that must overlap gets a group of its own with --isolate "
                "AXIS, or isolate= in Python."
            )
    for level in places:
        smallest, largest = level.sizes
        if smallest != largest:
            warnings.append(
                f"The {several(level.level)} have different sizes: from {smallest} to {largest} "
                "ranks."
            )
    return tuple(warnings)
