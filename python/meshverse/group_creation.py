"""How one process group comes to be.

- The axis covers the default group, with default options: the default group itself, as stock.
- The default group is bound to a device and the backend is the same: one split of it.
- Otherwise: made by its members only.
- Where that is not safe: stock's loop over all groups, on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from . import _torch_compat as compat
from ._core import AxisLayout, RankGroups, RankMap
from .backend_override import GroupOptions
from .world import World

__all__ = ["Group", "GroupRequest", "make_group"]


class GroupRequest(NamedTuple):
    """One axis's groups, as asked for.

    Attributes:
        axis: the axis layout over positions, its groups' ranks ascending unless `keeps_order`.
        rank_map: position -> global rank.
        position: mine, or None if this rank is outside the rank map.
        options: what the group shall be.
        axis_name: of the axis that asked first; for descriptions only, never part of a name.
        keeps_order: whether group ranks follow the axis's order, not ascending global ranks.
    """

    axis: AxisLayout
    rank_map: RankMap
    position: int | None
    options: GroupOptions
    axis_name: str
    keeps_order: bool = False

    def my_ranks(self) -> list[int]:
        """Global ranks of my group, in group-rank order; empty outside the rank map. O(group)."""
        if self.position is None:
            return []
        ranks = RankGroups(self.axis, self.rank_map).ranks_of(self.position)
        if not self.keeps_order:
            ranks.sort()
        return ranks


@dataclass(eq=False)
class Group:
    """One process group of a universe, as this rank sees it.

    Attributes:
        request: what was asked for, by the axis that asked first.
        name: c10d's name of my group; None on a rank that is in no group of the axis.
        how: how it came to be, in words.
        created: whether a group was made for it (the default group was there before).
        requests: how often it was asked for, by axis name.
    """

    request: GroupRequest
    name: str | None
    how: str
    created: bool
    requests: dict[str, int] = field(default_factory=dict)

    def count_request(self, axis_name: str) -> None:
        """Note that an axis of this name asked for the group."""
        self.requests[axis_name] = self.requests.get(axis_name, 0) + 1


def make_group(request: GroupRequest, world: World) -> Group:
    """Make my group of an axis.

    Raises:
        Whatever c10d raises; nothing is kept then.
    """
    if (
        request.axis.size == world.size
        and request.options.key == world.default_options.key
        and not compat.needs_own_world_group(world.default_group)
    ):
        group_name = world.default_group.group_name
        return Group(request, group_name, "the default group", created=False)

    group: compat.ProcessGroup | None
    if world.can_split(request.options.override[0]) and not request.keeps_order:
        group, how = _split(request), "split off the default group"
    elif hazard := world.members_only_hazard(request.options.backend):
        group, how = _make_by_all(request), f"made by all ranks ({hazard})"
    elif request.position is None:
        group, how = None, "made by its members"
    else:
        group, how = _make_by_members(request, request.position, world), "made by its members"
    name = None if group is None else group.group_name
    return Group(request, name, how, created=group is not None)


def _split(request: GroupRequest) -> compat.ProcessGroup | None:
    # A rank outside the mesh takes part in the split all the same, by naming the first group.
    ranks = request.my_ranks() or RankGroups(request.axis, request.rank_map).ranks_of(0)
    return compat.create_by_split(
        ranks,
        options=request.options.options,
        timeout=request.options.timeout,
        description=f"mesh_{request.axis_name}",
    )


def _make_by_all(request: GroupRequest) -> compat.ProcessGroup | None:
    return compat.create_by_all(
        RankGroups(request.axis, request.rank_map).all().tolist(),
        backend=request.options.backend,
        options=request.options.options,
        timeout=request.options.timeout,
        keeps_order=request.keeps_order,
        description=f"mesh_{request.axis_name}",
    )


def _make_by_members(request: GroupRequest, position: int, world: World) -> compat.ProcessGroup:
    options = request.options
    groups = RankGroups(request.axis, request.rank_map)
    identity = groups.fingerprint_of(position, salt=options.name_key.digest)
    ranks = groups.ranks_of(position)
    return compat.create_by_members(
        ranks if request.keeps_order else sorted(ranks),
        world.default_group,
        backend=options.backend,
        options=options.options,
        timeout=options.timeout,
        name=world.new_name(identity),
        description=f"mesh_{request.axis_name}",
    )
