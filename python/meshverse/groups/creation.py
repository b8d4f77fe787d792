"""Creation of one process group, in one of four ways.

- The axis is over all ranks, with default options: it uses the default group, as in torch.
- The default group is bound to a device, and the backend is the same: the group is split off it.
- c10d needs all ranks (see `why_all_ranks`): all ranks loop over all groups, as in torch.
- Otherwise: its members alone make it, at once or when it is first used.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
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
    """Return whether all ranks of the default group must take part in making an axis's groups."""
    return how(request, world)[0] in (Origin.SPLIT, Origin.BY_ALL)


def how(request: GroupRequest, world: World) -> tuple[Origin, str | None]:
    """Return how the groups of an axis are made, and why by all ranks, where that is BY_ALL."""
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
    """Create the groups of an axis with all ranks of the default group, which call this together.

    Args:
        request: of the axis.
        world: in which they are made.
        origin: that `how` returned.
        name: of a group that is split again; by default a new one.

    Returns:
        My group, or None outside of the rank map.
    """
    return _split(request, world, name) if origin is Origin.SPLIT else _make_by_all(request, world)


def _split(request: GroupRequest, world: World, name: str | None) -> compat.ProcessGroup | None:
    # A rank outside the mesh takes part in the split too; it passes the ranks of the first group.
    groups = RankGroups(request.axis, request.rank_map)
    if request.position is not None and name is None:
        # Used up even if the split fails: the next one must not find the keys that this one wrote.
        name = _new_name(request, world)
    return compat.create_by_split(
        request.ordered(groups.ranks_of(request.position or 0)),
        world.default_group,
        backend=request.options.backend,
        backend_options=request.options.new_backend_options_for_split(world.default_group),
        timeout=request.options.timeout,
        name=name or f"{request.axis_name} of others",
        description=f"mesh_{request.axis_name}",
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
        description=f"mesh_{request.axis_name}",
    )


def _make_by_all_in_order(
    request: GroupRequest, groups: RankGroups, world: World
) -> compat.ProcessGroup | None:
    if callable(getattr(world.default_group, "new_group", None)):
        raise ValueError(
            f"The order of the ranks of axis {request.axis_name!r} cannot be kept: torch before "
            "2.13 sorts the ranks of groups that this default group makes itself. Pass ranks that "
            "ascend along each axis, or preserve_rank_order=False, or update torch."
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
            description=f"mesh_{request.axis_name}",
        )
        mine = made or mine
    return mine


def _new_name(request: GroupRequest, world: World) -> str:
    return world.state(GroupRegistry).new_name(request)


def create_by_members(
    group: Group, world: World, ranks: list[int] | None = None
) -> compat.ProcessGroup | None:
    """Create a planned group. Its other members call this too.

    Args:
        group: of which this rank is a member.
        world: in which it is made.
        ranks: its global ranks in group-rank order, if the caller knows them.

    Raises:
        RanksDifferError: the ranks are building different meshes.
        RuntimeError: other members did not join, or are in a deadlock with this one; or c10d's own.
    """
    request = group.request
    options, ranks = request.options, ranks or request.my_ranks()
    attempt = _join(group, ranks, world)
    create = compat.create_by_members
    if attempt is not None:
        # After the others have the group, a Ctrl-C must not make this rank lose it.
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
            description=f"mesh_{request.axis_name}",
        )
    except RuntimeError as error:
        text = _could_not_make(request, ranks, world, error)
        if len(ranks) > 1 and compat.is_of_other_ranks(error):
            text += (
                "\nAnother of these ranks may have died or been interrupted, or may have destroyed "
                "the group already. All its ranks must have made a group before one destroys it."
            )
        raise type(error)(text) from error


def _could_not_make(
    request: GroupRequest, ranks: list[int], world: World, error: RuntimeError
) -> str:
    return (
        f"Rank {world.rank} could not make the process group of axis {request.axis_name!r} with "
        f"ranks [{rank_list(ranks)}]: {error}"
    )


def _join(group: Group, ranks: list[int], world: World) -> int | None:
    """Wait for the other members, if creating the group would wait for them without a message.

    Returns:
        The number of the attempt to create it, from 0; None if creating it does not wait.
    """
    options = group.request.options
    if len(ranks) == 1 or not world.creation_blocks(options.backend):
        return None
    store = world.run_store
    if store is None:
        return None
    world.run.add_user(group.name)
    calls, label = world.state(ComparedCalls), f"axis {group.request.axis_name!r}"
    try:
        return (
            world.state(Rendezvous)
            .join(
                world, group.name, label, ranks, options.timeout, check=lambda: calls.check(store)
            )
            .attempt
        )
    except RanksDifferError:
        raise
    except RuntimeError as error:
        with contextlib.suppress(dist.DistError):  # of the store; the error itself says more
            calls.check(store)  # which says why the others did not come
        raise type(error)(_could_not_make(group.request, ranks, world, error)) from None


@contextlib.contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Delay a Ctrl-C that comes inside this block to its end. A second one is handled at once.

    Python handles a signal as soon as c10d's C++ code returns. By then all members may have the
    group, but this rank has not yet stored it.
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
