"""How one process group comes to be.

- The axis covers the default group, with default options: the default group itself, as stock.
- The default group is bound to a device and the backend is the same: one split of it.
- Otherwise: made by its members only, at once or when it is first used.
- Where that is not safe: stock's loop over all groups, on all ranks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from . import _torch_compat as compat
from ._core import AxisLayout, RankGroups, RankMap
from .group_options import GroupOptions
from .rendezvous import forget_meetings, meet, shortened
from .world import World

__all__ = [
    "SHARED",
    "Group",
    "GroupRequest",
    "forget_meeting",
    "is_made_by_members",
    "make_group",
    "make_prepared",
    "prepare_group",
]


SHARED = "shared with another mesh"
"""How a group came to be, seen from a universe that another one made it for."""
_BY_MEMBERS = "made by its members"
_NOT_YET = "not made yet (lazy)"


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
        created: whether a group was made for it here.
        borrowed: whether it is not Meshverse's: the default group, or one the user gave.
        requests: how often it was asked for, by axis name.
    """

    request: GroupRequest
    name: str | None
    how: str
    created: bool
    borrowed: bool = False
    requests: dict[str, int] = field(default_factory=dict)

    def count_request(self, axis_name: str) -> None:
        """Note that an axis of this name asked for the group."""
        self.requests[axis_name] = self.requests.get(axis_name, 0) + 1

    def note_first_use(self, made_here: bool) -> None:
        """Note how a group that may be lazy came to be when this universe first used it."""
        if made_here:
            self.how, self.created = "made by its members at first use", True
        elif self.how == _NOT_YET:
            self.how = SHARED


def make_group(request: GroupRequest, world: World) -> Group:
    """Make my group of an axis.

    Raises:
        RuntimeError: other members did not come to make it, or wait for me to make another one.
        Whatever c10d raises. Nothing is kept then.
    """
    if _is_default_group(request, world):
        group_name = world.default_group.group_name
        return Group(request, group_name, "the default group", created=False, borrowed=True)

    group: compat.ProcessGroup | None
    if _is_split(request, world):
        group, how = _split(request), "split off the default group"
    elif hazard := world.members_only_hazard(request.options.backend):
        group, how = _make_by_all(request), f"made by all ranks ({hazard})"
    elif request.position is None:
        group, how = None, _BY_MEMBERS
    else:
        name = _new_name(request, world)
        try:
            _meet(request, name, world)
        except BaseException:  # an interrupt too
            world.take_back_name(name)
            raise
        group, how = _make_by_members(request, name, world), _BY_MEMBERS
    if group is None:
        return Group(request, None, how, created=False)
    return Group(request, group.group_name, how, created=True)


def prepare_group(request: GroupRequest, world: World) -> Group | None:
    """My group of an axis with its name fixed, to be made by `make_prepared` when it is first used.

    None where it has to be made at once: all ranks take part, or there is nothing to make.
    """
    if not is_made_by_members(request, world):
        return None
    return Group(request, _new_name(request, world), _NOT_YET, created=False)


def make_prepared(group: Group, world: World, times_before: int = 0) -> None:
    """Make a group that has its name already; its other members do so too.

    Args:
        group: what `prepare_group` has named, or a group that was destroyed.
        world: that it is made in.
        times_before: how often it was made before in this world.

    Raises:
        As `make_group`.
    """
    assert group.name is not None
    _meet(group.request, _meeting_name(group.name, times_before), world)
    _make_by_members(group.request, group.name, world, times_before)


def _meeting_name(name: str, times_before: int) -> str:
    return f"{name}-again-{times_before}" if times_before else name


def forget_meeting(group: Group, world: World, times_before: int = 0) -> None:
    """Take out of the store what the members' meeting for a group left there; the first does."""
    assert group.name is not None
    place, ranks = _meeting_place(group.request, world), group.request.my_ranks()
    if place is not None and len(ranks) > 1 and world.rank == ranks[0]:
        with contextlib.suppress(dist.DistError):  # where the store's host is gone, so is the rest
            forget_meetings(place, _meeting_name(group.name, times_before))


def is_made_by_members(request: GroupRequest, world: World) -> bool:
    """Whether my group of an axis is made by its members alone, and I am one."""
    return not (
        request.position is None
        or _is_default_group(request, world)
        or _is_split(request, world)
        or world.members_only_hazard(request.options.backend)
    )


def _is_default_group(request: GroupRequest, world: World) -> bool:
    return (
        request.axis.size == world.size
        and request.options.key == world.default_options.key
        and not compat.needs_own_world_group(world.default_group)
    )


def _is_split(request: GroupRequest, world: World) -> bool:
    return world.can_split(request.options.override[0]) and not request.keeps_order


def _split(request: GroupRequest) -> compat.ProcessGroup | None:
    # A rank outside the mesh takes part in the split all the same, by naming the first group.
    ranks = request.my_ranks() or RankGroups(request.axis, request.rank_map).ranks_of(0)
    return compat.create_by_split(
        ranks,
        options=request.options.options_to_give_away(),
        timeout=request.options.timeout,
        description=f"mesh_{request.axis_name}",
    )


def _make_by_all(request: GroupRequest) -> compat.ProcessGroup | None:
    return compat.create_by_all(
        RankGroups(request.axis, request.rank_map).all().tolist(),
        backend=request.options.backend,
        options=request.options.options_to_give_away(),
        timeout=request.options.timeout,
        keeps_order=request.keeps_order,
        description=f"mesh_{request.axis_name}",
    )


def _new_name(request: GroupRequest, world: World) -> str:
    assert request.position is not None
    groups = RankGroups(request.axis, request.rank_map)
    identity = groups.fingerprint_of(request.position, salt=request.options.name_key.digest)
    return world.new_name(identity)


def _meet(request: GroupRequest, name: str, world: World) -> None:
    """Wait for the other members in the store, if making the group would wait for them silently."""
    place = _meeting_place(request, world)
    if place is None:
        return
    ranks, label = request.my_ranks(), f"axis {request.axis_name!r} of layout {request.axis}"
    try:
        meet(place, world.meetings, name, label, ranks, world.rank, request.options.timeout)
    except RuntimeError as error:
        raise type(error)(f"{_could_not(request, ranks, world)}: {error}") from None


def _meeting_place(request: GroupRequest, world: World) -> dist.Store | None:
    """Where members of a group meet, if making it would wait for them."""
    store = world.store
    if store is None or not compat.creation_blocks(request.options.backend):
        return None
    return dist.PrefixStore("meshverse/meet", store)


def _make_by_members(
    request: GroupRequest, name: str, world: World, times_before: int = 0
) -> compat.ProcessGroup:
    options, ranks = request.options, request.my_ranks()
    try:
        return compat.create_by_members(
            ranks,
            world.default_group,
            backend=options.backend,
            options=options.options_to_give_away(),
            timeout=options.timeout,
            name=name,
            description=f"mesh_{request.axis_name}",
            times_before=times_before,
        )
    except RuntimeError as error:
        raise type(error)(
            f"{_could_not(request, ranks, world)}: {error}\nOne of them has died, or has ended the "
            "group already: no rank ends a group while others still make it."
        ) from error


def _could_not(request: GroupRequest, ranks: list[int], world: World) -> str:
    what = f"the process group of axis {request.axis_name!r} with ranks {shortened(ranks)}"
    return f"Rank {world.rank} could not make {what}"
