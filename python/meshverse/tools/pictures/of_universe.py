"""Picture of a universe: its groups, and its meshes as views of the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence

from meshverse._core import RankMap
from meshverse.explain.explanation import ExplainedView
from meshverse.explain.group_explanation import GroupExplanation
from meshverse.for_extras import GroupRequest

from .model import PicturedGroups, PicturedView
from .picture import Picture


def node_size_here() -> int | None:
    """Return the number of ranks on this node, from torchrun's LOCAL_WORLD_SIZE, or None."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def picture_of(
    rank_map: RankMap,
    rank: int,
    groups: Sequence[tuple[GroupRequest, GroupExplanation]],
    views: Sequence[ExplainedView],
    node_size: int | None,
    summary: str,
) -> Picture | None:
    """Return the picture of a universe; None if it has no groups.

    Args:
        rank_map: ranks of the universe by position.
        rank: global rank whose groups are outlined.
        groups: groups of the universe, each with its request and its report.
        views: meshes of the universe.
        node_size: number of ranks on each node; None for that of this node, if it is known.
        summary: first sentence of the page.
    """
    # Omit groups over other ranks: those of a mesh of another universe that was concatenated.
    here = [pair for pair in groups if pair[0].rank_map == rank_map]
    if not here:
        return None
    return Picture(
        title=f"Process groups of {rank_map}",
        rank_map=rank_map,
        rank=rank,
        groups=tuple(_pictured(request, explained) for request, explained in here),
        views=tuple(_view(view, here) for view in views),
        node_size=node_size_here() if node_size is None else node_size,
        summary=summary,
    )


def _pictured(request: GroupRequest, explained: GroupExplanation) -> PicturedGroups:
    is_mine = explained.saved or explained.created
    facts = {
        "backend": explained.backend,
        "origin": explained.how_and_state,
    }
    if explained.tag:
        facts["isolated as"] = explained.tag
    asked = ", ".join(f"{name} {times}x" for name, times in explained.requests.items())
    return PicturedGroups(
        names=tuple(explained.requests) or (request.axis_name,),
        axis=request.axis,
        preserve_rank_order=request.options.preserve_rank_order,
        made=int(explained.created),
        stock_copies=explained.created + explained.saved if is_mine else 0,
        bytes_each=explained.bytes_each,
        facts={**facts, "requested": asked},
    )


def _view(
    view: ExplainedView, groups: Sequence[tuple[GroupRequest, GroupExplanation]]
) -> PicturedView:
    """Return the view of a mesh: its axes, and the axes flattened from it, with their groups."""
    layouts = dict(zip(view.description.labels, view.description.layout, strict=True))
    names = dict(zip(layouts, view.group_names or (), strict=False))
    found = []
    for axis_name, layout in (layouts | dict(view.flattened)).items():
        of_axis = [
            index
            for index, (request, _) in enumerate(groups)
            if request.axis in (layout, layout.sorted())
        ]
        named = [i for i in of_axis if groups[i][1].name == names.get(axis_name)]
        asked = [i for i in of_axis if axis_name in groups[i][1].requests]
        found += [(axis_name, index) for index in (named or asked or of_axis)[:1]]
    sizes = ", ".join(f"{name}={axis.size}" for name, axis in layouts.items())
    return PicturedView(sizes, tuple(found))
