"""Creation of the process groups of one axis. The first of these cases that applies decides how.

1. The axis is over all ranks, with default options: nothing is created, the axis uses the default
   group, as in torch. (Not if torch itself would create a group; see `needs_own_world_group`.)
2. The default group can be split for this backend (it is bound to a device; see `can_split`), and
   the ranks of each group ascend: all ranks take part in one split of the default group.
3. c10d needs all ranks (see `why_all_ranks`): all ranks loop over all groups, as in torch.
4. Otherwise: the members alone create the group, at once or when it is first used.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse._core import RankGroups
from meshverse.agreement import ComparedCalls, RanksDifferError, Rendezvous
from meshverse.wording import rank_list
from meshverse.world.world import World

from .group import Group, Origin
from .registry import GroupRegistry
from .request import GroupRequest


def needs_all_ranks(request: GroupRequest, world: World) -> bool:
    """Return whether all ranks of the default group must take part in creating an axis's groups."""
    return how(request, world)[0] in (Origin.SPLIT, Origin.BY_ALL)


def how(request: GroupRequest, world: World) -> tuple[Origin, str | None]:
    """Return how an axis's groups are created, and, for BY_ALL, why all ranks must take part."""
    options = request.options
    if (
        request.axis.size == world.size
        and options.key == world.default_options.key
        and not compat.needs_own_world_group(world.default_group)
    ):
        return Origin.DEFAULT_GROUP, None
    if world.can_split(options.backend) and not request.keeps_order:
        return Origin.SPLIT, None
    reason = world.why_all_ranks(options.backend)
    return Origin.BY_ALL if reason else Origin.BY_MEMBERS, reason


def create_by_all(
    request: GroupRequest, world: World, origin: Origin, name: str | None = None
) -> compat.ProcessGroup | None:
    """Create the groups of an axis. All ranks of the default group must call this together.

    Args:
        request: request of the axis.
        world: world of the groups.
        origin: what `how` returned: SPLIT or BY_ALL.
        name: for SPLIT, the c10d name of the group if it is being revived; else a new name is
            made.

    Returns:
        This rank's group, or None if this rank is outside the rank map.
    """
    if world.is_provisional:
        if request.position is None:
            return None
        name = _new_name(request, world)
        return compat.create_provisional(request.my_ranks(), world.default_group, name)
    return _split(request, world, name) if origin is Origin.SPLIT else _make_by_all(request, world)


def _split(request: GroupRequest, world: World, name: str | None) -> compat.ProcessGroup | None:
    # Every rank of the default group must take part in a split, and pass the ranks of one group. A
    # rank outside the mesh has no group of its own: it passes the ranks of the first group, which
    # does not contain it, and gets None.
    groups = RankGroups(request.axis, request.rank_map)
    if request.position is not None and name is None:
        # The name is used up even if the split fails, which may leave keys in the store: the next
        # split must not find them.
        name = _new_name(request, world)
    return compat.create_by_split(
        request.ordered(groups.ranks_of(request.position or 0)),
        world.default_group,
        backend=request.options.backend,
        backend_options=request.options.new_backend_options_for_split(world.default_group),
        timeout=request.options.timeout,
        name=name or f"{request.axis_name} of others",
        description=describe([request.axis_name], request.my_ranks()),
    )


def _make_by_all(request: GroupRequest, world: World) -> compat.ProcessGroup | None:
    groups = RankGroups(request.axis, request.rank_map)
    if request.keeps_order and not compat.NEW_GROUP_KEEPS_ORDER:
        return _make_by_all_in_order(request, groups, world)
    return compat.create_by_all(
        groups.all().tolist(),
        backend=request.options.backend,
        backend_options=request.options.new_backend_options(),
        timeout=request.options.timeout,
        keeps_order=request.keeps_order,
        description=describe([request.axis_name], request.my_ranks()),
    )


def _make_by_all_in_order(
    request: GroupRequest, groups: RankGroups, world: World
) -> compat.ProcessGroup | None:
    if callable(getattr(world.default_group, "new_group", None)):
        raise ValueError(
            f"The order of the ranks of axis {request.axis_name!r} cannot be kept: this default "
            "group has its own `new_group` method, and torch before 2.13 sorts the ranks that it "
            "passes to it. Pass ranks that ascend along each axis, or preserve_rank_order=False, "
            "or update torch."
        )
    name = "" if request.position is None else _new_name(request, world)
    mine = None
    for index, ranks in enumerate(groups.all().tolist()):
        made = compat.create_by_members(
            ranks,
            world.default_group,
            world.connection,
            backend=request.options.backend,
            backend_options=request.options.new_backend_options(),
            timeout=request.options.timeout,
            name=name if world.rank in ranks else f"{name} {index} of others",
            attempt="",
            description=describe([request.axis_name], request.my_ranks()),
        )
        mine = made or mine
    return mine


def _new_name(request: GroupRequest, world: World) -> str:
    return world.state(GroupRegistry).new_name(request)


_LONGEST_DESCRIPTION = 60


def describe(axes: Sequence[str], ranks: Sequence[int]) -> str:
    """Return a group's description in c10d's logs, profiler traces and flight recorder.

    It begins like that of torch's meshes, and has at most 60 characters. c10d copies it when it
    creates the group, so axes that share the group later are not in it.

    >>> describe(["fsdp", "batch"], [0, 2, 4, 6]), describe(["tp"], [0, 1, 5])
    ('mesh_fsdp+batch[0-6:2]', 'mesh_tp[0-5, 3 ranks]')
    """
    where = f"[{_range(ranks)}]" if ranks else ""
    shown = len(axes)
    while True:
        left_out = f"+{len(axes) - shown} more" if shown < len(axes) else ""
        text = f"mesh_{'+'.join(axes[:shown])}{left_out}{where}"
        if len(text) <= _LONGEST_DESCRIPTION or shown == 1:
            break
        shown -= 1
    if len(text) > _LONGEST_DESCRIPTION:  # of one long name
        text = f"mesh_{axes[0]}"[: _LONGEST_DESCRIPTION - len(left_out + where)] + left_out + where
    return text


def _range(ranks: Sequence[int]) -> str:
    first, last, count = ranks[0], ranks[-1], len(ranks)
    step = ranks[1] - first if count > 1 else 1
    if step < 1 or list(ranks) != list(range(first, last + 1, step)):
        return f"{min(ranks)}-{max(ranks)}, {count} ranks"
    return str(first) if count == 1 else f"{first}-{last}" + (f":{step}" if step > 1 else "")


def _axes(group: Group) -> list[str]:
    """Return the names of all axes that have requested a group so far, the first one first."""
    asked = (name for use in group.uses.alive() for name in list(use.requests))
    return list(dict.fromkeys((group.request.axis_name, *asked)))


def create_by_members(
    group: Group, world: World, ranks: list[int] | None = None
) -> compat.ProcessGroup | None:
    """Create a planned group. All its members must call this.

    Args:
        group: group to create; this rank is a member.
        world: world of the group.
        ranks: global ranks of the group in group-rank order, if the caller has computed them.

    Raises:
        RanksDifferError: ranks are building different meshes.
        RuntimeError: other members did not join, or are in a deadlock with this rank; or c10d
            could not create the group.
    """
    request = group.request
    options, ranks = request.options, ranks or request.my_ranks()
    if world.is_provisional:
        return compat.create_provisional(ranks, world.default_group, group.name)
    attempt = _join(group, ranks, world)
    create = compat.create_by_members
    if attempt is not None:
        # All members have joined, so c10d will not wait long, and the others will get the group: so
        # must this rank, even if a Ctrl-C comes meanwhile.
        create = _delay_interrupt()(create)
    default_group, backend_options = world.default_group, options.new_backend_options()
    try:
        return create(
            ranks,
            default_group,
            world.connection_of(default_group),
            backend=options.backend,
            backend_options=backend_options,
            timeout=options.timeout,
            name=group.name,
            attempt=str(attempt or ""),
            description=describe(_axes(group), ranks),
        )
    except RuntimeError as error:
        message = _could_not_create(request, ranks, world, error)
        if len(ranks) > 1 and compat.is_of_other_ranks(error):
            message += (
                "\nAnother of these ranks may have died or been interrupted, or may have destroyed "
                "the group already. No rank may destroy a group before all its ranks have "
                "created it."
            )
        raise type(error)(message) from error


def _could_not_create(
    request: GroupRequest, ranks: list[int], world: World, error: RuntimeError
) -> str:
    return (
        f"Rank {world.rank} could not create the process group of axis {request.axis_name!r} with "
        f"ranks [{rank_list(ranks)}]: {error}"
    )


def _join(group: Group, ranks: list[int], world: World) -> int | None:
    """Join the rendezvous of the group's members, if c10d would wait for them without a message.

    Returns:
        Number of the attempt to create the group, from 0; None if there was no rendezvous: c10d
        does not wait, or the world's store does not allow one.
    """
    options = group.request.options
    if len(ranks) == 1 or not world.creation_blocks(options.backend):
        return None
    store = world.run_store
    if store is None:
        return None
    world.run.add_user(group.name)
    calls = world.state(ComparedCalls)
    label = f"the process group of axis {group.request.axis_name!r}"
    rendezvous = world.state(Rendezvous)
    try:
        return rendezvous.join(
            world, group.name, label, ranks, options.timeout, check=lambda: calls.check(store)
        ).attempt
    except RanksDifferError:
        raise
    except RuntimeError as error:
        with contextlib.suppress(dist.DistError):  # the store failed; `error` says more
            calls.check(store)  # if ranks disagree, that is why the others did not join
        raise type(error)(_could_not_create(group.request, ranks, world, error)) from None
    finally:
        group.have_all_joined = rendezvous.was_complete(group.name)


@contextlib.contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Delay a Ctrl-C inside this block until the block ends. A second one is handled at once.

    Reason: Python handles a signal as soon as c10d's C++ code returns. By then all members may have
    the group, but this rank has not stored it yet.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            usual(number, frame)
        held.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if held:
            usual(signal.SIGINT, held[0])
