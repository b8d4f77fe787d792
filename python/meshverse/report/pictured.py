"""Picture of a universe: its groups, and its meshes as views of the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshverse._core import AxisLayout, RankMap
from meshverse.groups.group import GroupUse
from meshverse.layouts.derivation import MeshDescription
from meshverse.pictures import Picture, PicturedGroups, PicturedView

from .group_explanation import GroupExplanation


class ExplainedView(NamedTuple):
    """A mesh, as a view of the ranks.

    Attributes:
        description: layout and axis names of the mesh.
        group_names: c10d names of its groups on this rank, one per axis; None or empty if it has no
            groups on this rank.
        flattened: layouts of the axes flattened from it or its submeshes, by name.
    """

    description: MeshDescription
    group_names: Sequence[str] | None
    flattened: Mapping[str, AxisLayout]


def node_size_here() -> int | None:
    """Return the number of ranks on this node, from torchrun's LOCAL_WORLD_SIZE, or None."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def picture_of(
    rank_map: RankMap,
    rank: int,
    groups: Sequence[tuple[GroupUse, GroupExplanation]],
    views: Sequence[ExplainedView],
    node_size: int | None,
    summary: str,
) -> Picture | None:
    """Return the picture of a universe; None if it has no groups.

    Args:
        rank_map: ranks of the universe by position.
        rank: global rank whose groups are outlined.
        groups: groups of the universe, each with its report.
        views: meshes of the universe.
        node_size: number of ranks on each node; None if unknown.
        summary: first sentence of the page.
    """
    # Omit groups over other ranks: those of a mesh of another universe that was concatenated.
    here = [(group, explained) for group, explained in groups if group.request.rank_map == rank_map]
    if not here:
        return None
    return Picture(
        title=f"Process groups of {rank_map}",
        rank_map=rank_map,
        rank=rank,
        groups=tuple(_pictured(group, explained) for group, explained in here),
        views=tuple(_view(view, [group for group, _ in here]) for view in views),
        node_size=node_size,
        summary=summary,
    )


def _pictured(group: GroupUse, explained: GroupExplanation) -> PicturedGroups:
    is_mine = explained.avoided or explained.created
    facts = {
        "backend": explained.backend,
        "origin": explained.how + ", suspended" * explained.suspended,
    }
    if explained.tag:
        facts["isolated as"] = explained.tag
    asked = ", ".join(f"{name} {times}x" for name, times in explained.requests.items())
    return PicturedGroups(
        names=tuple(explained.requests) or (group.request.axis_name,),
        axis=group.request.axis,
        keeps_order=group.request.keeps_order,
        made=int(explained.created),
        stock_copies=explained.created + explained.avoided if is_mine else 0,
        bytes_each=explained.bytes_each,
        facts={**facts, "requested": asked},
    )


def _view(view: ExplainedView, groups: Sequence[GroupUse]) -> PicturedView:
    """Return the view of a mesh: its axes, and the axes flattened from it, with their groups."""
    layouts = dict(zip(view.description.labels, view.description.layout, strict=True))
    names = dict(zip(layouts, view.group_names or (), strict=False))
    found = []
    for axis_name, layout in (layouts | dict(view.flattened)).items():
        of_axis = [i for i, group in enumerate(groups) if _is_along(group, layout)]
        named = [i for i in of_axis if groups[i].name == names.get(axis_name)]
        asked = [i for i in of_axis if axis_name in groups[i].requests]
        found += [(axis_name, index) for index in (named or asked or of_axis)[:1]]
    sizes = ", ".join(f"{name}={axis.size}" for name, axis in layouts.items())
    return PicturedView(sizes, tuple(found))


def _is_along(group: GroupUse, layout: AxisLayout) -> bool:
    return group.request.axis in (layout, layout.sorted())
