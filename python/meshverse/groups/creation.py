"""How one process group comes to be.

- The axis covers the default group, with default options: the default group itself, as stock.
- The default group is bound to a device and the backend is the same: one split of it.
- Otherwise: made by its members only, at once or when it is first used.
- Where that is not safe: stock's loop over all groups, on all ranks.
"""

from __future__ import annotations

from functools import partial

from meshverse import _torch_compat as compat
from meshverse._core import RankGroups
from meshverse.agreement import Call, shortened
from meshverse.world.names import Names
from meshverse.world.world import World

from .interrupts import interrupt_after
from .meetings import GroupMeetings
from .request import Group, GroupRequest, Origin

__all__ = [
    "is_made",
    "is_made_by_members",
    "make_group",
    "make_prepared",
    "needs_all_ranks",
    "prepare_group",
]


def make_group(
    request: GroupRequest, world: World, meetings: GroupMeetings, call: Call | None
) -> Group:
    """Make my group of an axis.

    Args:
        request: what it shall be.
        world: that it is made in.
        meetings: where its members wait for each other.
        call: that needs the group, if it is compared with those of other ranks.

    Raises:
        RuntimeError: other members did not come to make it, or wait for me to make another one.
        Whatever c10d raises. Nothing is kept then.
    """
    if _is_default_group(request, world):
        group_name = world.default_group.group_name
        return Group(request, group_name, Origin.DEFAULT_GROUP, created=False, borrowed=True)
    if _is_split(request, world):
        return _made(request, _split(request, world), Origin.SPLIT)
    if hazard := world.members_only_hazard(request.options.backend):
        return _made(request, _make_by_all(request), Origin.BY_ALL, hazard)
    if request.position is None:
        return Group(request, None, Origin.BY_MEMBERS, created=False)
    groups = RankGroups(request.axis, request.rank_map)
    name = _new_name(request, groups, world)
    try:
        ranks = request.ordered(groups.ranks_of(request.position))
        group = _make_by_members(request, ranks, name, world, meetings, call)
    except BaseException:
        # An interrupt too: if the group was not made here, the other members fail too, and do the
        # same. So all members have the same name for the next attempt.
        if not is_made(name):
            world.state(Names).take_back(name)
        raise
    return Group(request, group.group_name, Origin.BY_MEMBERS, created=True)


def _made(
    request: GroupRequest,
    group: compat.ProcessGroup | None,
    origin: Origin,
    hazard: str | None = None,
) -> Group:
    if group is None:
        return Group(request, None, origin, created=False, hazard=hazard)
    return Group(request, group.group_name, origin, created=True, hazard=hazard)


def prepare_group(request: GroupRequest, world: World) -> Group | None:
    """My group of an axis with its name fixed, to be made by `make_prepared` when it is first used.

    None where it has to be made at once: all ranks take part, or there is nothing to make.
    """
    if not is_made_by_members(request, world):
        return None
    groups = RankGroups(request.axis, request.rank_map)
    return Group(request, _new_name(request, groups, world), Origin.NOT_YET, created=False)


def is_made(name: str) -> bool:
    """Whether c10d knows a group of this name here."""
    return compat.find_group(name) is not None


def make_prepared(
    group: Group, world: World, meetings: GroupMeetings, times_before: int = 0
) -> None:
    """Make a group that has its name already; its other members do so too.

    Args:
        group: what `prepare_group` has named, or a group that was destroyed.
        world: that it is made in.
        meetings: where its members wait for each other.
        times_before: how often it was made before in this world.

    Raises:
        As `make_group`.
    """
    assert group.name is not None
    ranks = group.request.my_ranks()
    _make_by_members(group.request, ranks, group.name, world, meetings, None, times_before)


def is_made_by_members(request: GroupRequest, world: World) -> bool:
    """Whether my group of an axis is made by its members alone, and I am one."""
    is_there = request.position is None or _is_default_group(request, world)
    return not is_there and not needs_all_ranks(request, world)


def needs_all_ranks(request: GroupRequest, world: World) -> bool:
    """Whether all ranks of the default group must take part in making the groups of an axis."""
    if _is_default_group(request, world):
        return False
    hazard = world.members_only_hazard(request.options.backend)
    return _is_split(request, world) or hazard is not None


def _is_default_group(request: GroupRequest, world: World) -> bool:
    return (
        request.axis.size == world.size
        and request.options.key == world.default_options.key
        and not compat.needs_own_world_group(world.default_group)
    )


def _is_split(request: GroupRequest, world: World) -> bool:
    return world.can_split(request.options.backend) and not request.keeps_order


def _split(request: GroupRequest, world: World) -> compat.ProcessGroup | None:
    # A rank outside the mesh takes part in the split all the same, by naming the first group.
    groups, name = RankGroups(request.axis, request.rank_map), ""
    if request.position is not None:
        # Not taken back if it fails: what a failed split has left in the store is not met again.
        name = _new_name(request, groups, world)
    return compat.create_by_split(
        request.ordered(groups.ranks_of(request.position or 0)),
        world.default_group,
        backend=request.options.backend,
        options=request.options.options_for_split(world.default_group),
        timeout=request.options.timeout,
        name=name or f"{request.axis_name} of others",
        description=f"mesh_{request.axis_name}",
    )


def _make_by_all(request: GroupRequest) -> compat.ProcessGroup | None:
    return compat.create_by_all(
        RankGroups(request.axis, request.rank_map).all().tolist(),
        backend=request.options.backend,
        options=request.options.backend_options_for_c10d(),
        timeout=request.options.timeout,
        keeps_order=request.keeps_order,
        description=f"mesh_{request.axis_name}",
    )


def _new_name(request: GroupRequest, groups: RankGroups, world: World) -> str:
    assert request.position is not None
    identity = groups.fingerprint_of(request.position, salt=request.options.name_key.digest)
    return world.state(Names).new(identity)


def _make_by_members(
    request: GroupRequest,
    ranks: list[int],
    name: str,
    world: World,
    meetings: GroupMeetings,
    call: Call | None,
    times_before: int = 0,
) -> compat.ProcessGroup:
    options = request.options
    attempt = meetings.hold(name, request.axis_name, ranks, options, call)
    create = partial(
        compat.create_by_members,
        ranks,
        world.default_group,
        backend=options.backend,
        options=options.backend_options_for_c10d(),
        timeout=options.timeout,
        name=name,
        attempt=f"{attempt or ''} again {times_before}" if times_before else attempt or "",
        description=f"mesh_{request.axis_name}",
    )
    try:
        if attempt is None:
            return create()
        # While gloo connects, this rank may be interrupted when the others have the group already.
        with interrupt_after():
            return create()
    except RuntimeError as error:
        group = f"the process group of axis {request.axis_name!r} with ranks {shortened(ranks)}"
        raise type(error)(
            f"Rank {world.rank} could not make {group}: {error}\nOne of them has died, was "
            "interrupted, or has ended the group already: no rank ends a group while others still "
            "make it."
        ) from error
