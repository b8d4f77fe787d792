"""How one process group comes to be.

- The axis covers the default group, with default options: the default group itself, as stock.
- The default group is bound to a device and the backend is the same: one split of it.
- Otherwise: made by its members only, at once or when it is first used.
- Where that is not safe: stock's loop over all groups, on all ranks.
"""

from __future__ import annotations

from meshverse import _torch_compat as compat
from meshverse._core import RankGroups, rank_group
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
) -> tuple[Group, compat.ProcessGroup | None]:
    """Make my group of an axis, and give it to be kept, where I am in one.

    Args:
        request: what it shall be.
        world: that it is made in.
        meetings: where its members wait for each other.
        call: that needs the group, if it is compared with those of other ranks.

    Raises:
        RuntimeError: other members did not come to make it, or wait for me to make another one.
        Whatever c10d raises. Nothing is kept then.
    """
    origin, hazard = _how(request, world)
    if origin is Origin.DEFAULT_GROUP:
        mine = world.default_group
        return Group(request, mine.group_name, origin, created=False, borrowed=True), mine
    if origin is Origin.SPLIT:
        return _made(request, _split(request, world), origin)
    if origin is Origin.BY_ALL:
        return _made(request, _make_by_all(request), origin, hazard)
    if request.position is None:
        return Group(request, None, origin, created=False), None
    ranks, identity = rank_group(
        request.axis, request.rank_map, request.position, request.options.name_digest
    )
    if not request.keeps_order:
        ranks.sort()
    names = world.state(Names)
    name = names.new(identity)
    try:
        mine = _make_by_members(request, ranks, name, world, meetings, call)
    except BaseException:
        # An interrupt too: if the group was not made here, the other members fail too, and do the
        # same. So all members have the same name for the next attempt.
        if not is_made(name):
            names.take_back(name)
        raise
    return Group(request, name, origin, created=True), mine


def _made(
    request: GroupRequest,
    group: compat.ProcessGroup | None,
    origin: Origin,
    hazard: str | None = None,
) -> tuple[Group, compat.ProcessGroup | None]:
    name = None if group is None else group.group_name
    return Group(request, name, origin, created=group is not None, hazard=hazard), group


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
    return request.position is not None and _how(request, world)[0] is Origin.BY_MEMBERS


def needs_all_ranks(request: GroupRequest, world: World) -> bool:
    """Whether all ranks of the default group must take part in making the groups of an axis."""
    return _how(request, world)[0] in (Origin.SPLIT, Origin.BY_ALL)


def _how(request: GroupRequest, world: World) -> tuple[Origin, str | None]:
    """How the groups of an axis come to be, and why all ranks make them, if they do."""
    options = request.options
    if (
        request.axis.size == world.size
        and options.key == world.default_options.key
        and not compat.needs_own_world_group(world.default_group)
    ):
        return Origin.DEFAULT_GROUP, None
    if world.can_split(options.backend) and not request.keeps_order:
        return Origin.SPLIT, None
    hazard = world.members_only_hazard(options.backend)
    return Origin.BY_ALL if hazard else Origin.BY_MEMBERS, hazard


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
    identity = groups.fingerprint_of(request.position, salt=request.options.name_digest)
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
    create = compat.create_by_members
    if attempt is not None:
        # While gloo connects, this rank may be interrupted when the others have the group already.
        create = interrupt_after()(create)
    default_group, own_options = world.default_group, options.backend_options_for_c10d()
    try:
        return create(
            ranks,
            default_group,
            backend=options.backend,
            options=own_options,
            timeout=options.timeout,
            name=name,
            attempt=f"{attempt or ''} again {times_before}" if times_before else attempt or "",
            description=f"mesh_{request.axis_name}",
        )
    except RuntimeError as error:
        group = f"the process group of axis {request.axis_name!r} with ranks {shortened(ranks)}"
        told = f"Rank {world.rank} could not make {group}: {error}"
        if len(ranks) > 1 and compat.is_of_other_ranks(error):
            told += (
                "\nAnother of these ranks may have died, been interrupted, or ended the group "
                "already. End a group only when all its ranks have made it."
            )
        raise type(error)(told) from error
