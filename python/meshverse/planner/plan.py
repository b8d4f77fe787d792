"""Working out a plan: the distinct process groups, what stock would make, and what to mind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, RankGroups, RankMap
from meshverse.report.communicator_memory import COMMUNICATOR_BYTES, estimate_bytes
from meshverse.topology import Topology

from .crossings import crossing_of, ranks_of_all_groups
from .places import Places, several
from .planned import Mine, Plan, PlannedGroup
from .views import View, check_fits, read_view, whole_number

__all__ = ["plan"]

_SHOULD_STAY_INSIDE = re.compile(r"(^|_)e?tp|tensor", re.IGNORECASE)


@compat.untraced()
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
) -> Plan:
    """What process groups these views of one world make, as one universe would make them.

    Nothing is made, and no other process is asked. O(world) in time and memory for each distinct
    group: under a second for a million ranks.

    Args:
        views: ways to split the world: as text ("pp=8,dp=160,tp=8"), sizes by name, or a `View`.
        world_size: number of ranks; by default that of the first view.
        backend: of all groups.
        rank: whose groups to list.
        node_size: ranks on each node: 0 to n-1 on the first one, and so on.
        domain_size: the same for NVLink domains.
        places: where the ranks are, if it is not in such blocks.
        topology: the same, of a cluster that is known: all its levels.
        communicator_bytes: device memory of one communicator by backend, where you have measured.

    Raises:
        ValueError: a view that cannot be read or does not cover the world; a rank outside of it;
            numbers that are no ints; a world of no rank, or of more than 2**24; node or domain
            sizes below 1; places or a topology of another number of ranks; a level that is given
            twice.
        TypeError: something that is no view, or one view that is not in a list.
    """
    if isinstance(views, (str, Mapping, View)):
        raise TypeError(
            f"views={views!r} is one view: give a list of views, such as ['dp=4,tp=8']."
        )
    read = tuple(_view(view) for view in views)
    if not read:
        raise ValueError('There is no view to plan: give one, such as "pp=2,dp=4,tp=8".')
    world = read[0].size if world_size is None else _number("world_size", world_size)
    for view in read:
        check_fits(view, world)
    number = whole_number(rank)
    if number is None or not 0 <= number < world:
        raise ValueError(f"rank={rank!r} is outside the world: give one of 0 to {world - 1}.")
    backend = backend.lower()  # as torch does
    known = [*places, *(Places.of_topology(topology) if topology is not None else ())]
    if node_size is not None:
        node_size = _number("node_size", node_size)
        known.append(Places.in_blocks("node", world, min(node_size, world)))
    if domain_size is not None:
        domain_size = _number("domain_size", domain_size)
        known.append(Places.in_blocks("domain", world, min(domain_size, world)))
    if repeated := sorted(name for name, n in Counter(p.level for p in known).items() if n > 1):
        raise ValueError(
            f"The level {', '.join(repeated)} is given twice: leave node_size=, domain_size= or "
            "places= out where a topology tells the level."
        )
    for name in (backend, *(level.level for level in known)):
        if not name.isprintable():  # it would change the terminal that shows the plan
            raise ValueError(f"{name!r} is no name of a backend or a level: give printable text.")
    for level in known:
        if len(level.of_rank) != world:
            raise ValueError(
                f"The {several(level.level)} of {len(level.of_rank)} ranks are given, but the "
                f"world has {world}: give one for each rank."
            )
    measured = {name.lower(): size for name, size in (communicator_bytes or {}).items()}
    figures = {**COMMUNICATOR_BYTES, **measured}
    asked = _asked(read)
    groups = tuple(
        _planned(axis, names, world, known, estimate_bytes(backend, axis.size, figures))
        for axis, names in asked.items()
    )
    warnings = _warnings(groups, known)
    mine = _mine(number, list(asked), groups, world)
    if node_size is None:
        node_size = next((each.block_size for each in known if each.level == "node"), None)
    return Plan(world, read, backend, groups, mine, warnings, node_size)


def _view(view: View | Mapping[str, int] | str) -> View:
    if isinstance(view, View):
        return view
    if isinstance(view, str):
        return read_view(view)
    if not isinstance(view, Mapping):
        raise TypeError(
            f"{view!r} is no view: give text such as 'dp=4,tp=8', sizes by name, or a View."
        )
    return View(view)


def _number(name: str, given: Any) -> int:
    number = whole_number(given)
    if number is None:
        raise ValueError(f"{name}={given!r}: give an int above 0.")
    return number


def _asked(views: Sequence[View]) -> dict[AxisLayout, dict[str, int]]:
    """How often each distinct group is asked for, by axis name."""
    asked: dict[AxisLayout, dict[str, int]] = {}
    for view in views:
        for name, axis in view.axis_layouts().items():
            times = asked.setdefault(axis.sorted(), {})
            times[name] = times.get(name, 0) + 1
    return asked


def _planned(
    axis: AxisLayout,
    asked: Mapping[str, int],
    world: int,
    places: Sequence[Places],
    bytes_each: int | None,
) -> PlannedGroup:
    is_default = axis.size == world
    ranks = ranks_of_all_groups(axis, world) if places else None
    crossings = () if ranks is None else tuple(crossing_of(ranks, each) for each in places)
    return PlannedGroup(
        axes=tuple(asked),
        asked=dict(asked),
        layout=str(axis),
        size=axis.size,
        count=world // axis.size,
        created=not is_default,
        stock_copies=0 if is_default else sum(asked.values()),
        bytes_each=bytes_each,
        crossings=crossings,
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
                f"{nodes.max} nodes. Tensor-parallel groups communicate in every layer; make the "
                "axis the last one, of a size that divides the ranks of a node."
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
                f"Axes {', '.join(group.axes)} share one process group: what they send at the same "
                "time queues. Where that hurts, give one of them its own: isolate=."
            )
    for level in places:
        sizes = level.of_rank.bincount()
        if len(sizes) and int(sizes.min()) != int(sizes.max()):
            warnings.append(
                f"The {several(level.level)} are uneven: they have {int(sizes.min())} to "
                f"{int(sizes.max())} ranks."
            )
    return tuple(warnings)
