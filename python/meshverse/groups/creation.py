"""Creation of the process groups of one axis, by all ranks or by their members.

`way_to_create` in `request` decides which; here is how.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from meshverse._core import RankGroups
from meshverse._torch_compat.c10d_creation import (
    NEW_GROUP_KEEPS_ORDER,
    create_c10d_group,
    create_c10d_groups,
    is_of_other_ranks,
    split_c10d_group,
)
from meshverse._torch_compat.c10d_groups import end_group, find_c10d_group
from meshverse._torch_compat.private_names import ProcessGroup
from meshverse.agreement import ComparedCalls, RanksDifferError, Rendezvous
from meshverse.locks import Claim
from meshverse.store import StoreKeys
from meshverse.wording import rank_list
from meshverse.world import World

from .group import Group
from .registry import GroupRegistry
from .request import GroupRequest, Way


def create_with_all_ranks(
    request: GroupRequest, world: World, name: str | None = None
) -> ProcessGroup | None:
    """Create the groups of an axis. All ranks of the default group must call this together.

    Args:
        request: request of the axis.
        world: world of the groups.
        name: for a split, the c10d name of the group if it is being revived; else a new name is
            made.

    Returns:
        This rank's group, or None if this rank is outside the rank map.
    """
    if request.way is Way.SPLIT:
        return _split(request, world, name)
    return _create_all(request, world)


def _split(request: GroupRequest, world: World, name: str | None) -> ProcessGroup | None:
    # Every rank of the default group must take part in a split, and pass the ranks of one group. A
    # rank outside the mesh has no group of its own: it passes the ranks of the first group, which
    # does not contain it, and gets None.
    groups = RankGroups(request.axis, request.rank_map)
    if request.position is not None and name is None:
        # The name is used up even if the split fails, which may leave keys in the store: the next
        # split must not find them.
        name = _take_name(request, world)
    return split_c10d_group(
        request.ordered(groups.ranks_of(request.position or 0)),
        world.default_group,
        backend=request.options.backend,
        backend_options=request.options.new_backend_options_for_split(world.default_group),
        timeout=request.options.timeout,
        name=name or f"{request.axis_name} of others",
        description=group_desc([request.axis_name], request.my_ranks()),
    )


def _create_all(request: GroupRequest, world: World) -> ProcessGroup | None:
    groups = RankGroups(request.axis, request.rank_map)
    if request.options.preserve_rank_order and not NEW_GROUP_KEEPS_ORDER:
        return _create_all_in_order(request, groups, world)
    return create_c10d_groups(
        groups.all().tolist(),
        backend=request.options.backend,
        backend_options=request.options.new_backend_options(),
        timeout=request.options.timeout,
        preserve_rank_order=request.options.preserve_rank_order,
        description=group_desc([request.axis_name], request.my_ranks()),
    )


def _create_all_in_order(
    request: GroupRequest, groups: RankGroups, world: World
) -> ProcessGroup | None:
    if callable(getattr(world.default_group, "new_group", None)):
        raise ValueError(
            f"The order of the ranks of axis {request.axis_name!r} cannot be kept: this default "
            "group has its own `new_group` method, and torch before 2.13 sorts the ranks that it "
            "passes to it. Pass ranks that ascend along each axis, or preserve_rank_order=False, "
            "or update torch."
        )
    name = "" if request.position is None else _take_name(request, world)
    mine = None
    for index, ranks in enumerate(groups.all().tolist()):
        made = create_c10d_group(
            ranks,
            world.default_group,
            world.store_client(world.default_group),
            backend=request.options.backend,
            backend_options=request.options.new_backend_options(),
            timeout=request.options.timeout,
            name=name if world.rank in ranks else f"{name} {index} of others",
            attempt="",
            description=group_desc([request.axis_name], request.my_ranks()),
        )
        mine = made or mine
    return mine


def _take_name(request: GroupRequest, world: World) -> str:
    return world.state(GroupRegistry).take_name(request)


def agree_on_leftover(group: Group, world: World) -> None:
    """Have the other members use a leftover too, if they request a group like it.

    Where there is no rendezvous, members cannot learn of it. There, the call that repeats the
    failed one uses it, and no later one does: those of other members create a new group.
    """
    request, registry = group.request, world.state(GroupRegistry)
    by_members = request.way is Way.BY_MEMBERS
    if by_members and _store_for_rendezvous(request, request.my_ranks(), world) is not None:
        world.state(Rendezvous).set_leftover(world, registry.peek_name(request), group.name)
    else:
        registry.drop_leftover(group)


_LONGEST_DESCRIPTION = 60


def group_desc(axes: Sequence[str], ranks: Sequence[int]) -> str:
    """Return a group's description in c10d's logs, profiler traces and flight recorder.

    It begins like that of torch's meshes, and has at most 60 characters. c10d copies it when it
    creates the group, so axes that share the group later are not in it.

    >>> group_desc(["fsdp", "batch"], [0, 2, 4, 6]), group_desc(["tp"], [0, 1, 5])
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
    if step < 1 or [*ranks] != [*range(first, first + count * step, step)]:
        return f"{min(ranks)}-{max(ranks)}, {count} ranks"
    return str(first) if count == 1 else f"{first}-{last}" + (f":{step}" if step > 1 else "")


def create_by_members(
    group: Group,
    world: World,
    ranks: list[int] | None = None,
    has_group: Callable[[str], bool | None] | None = None,
) -> ProcessGroup | None:
    """Create a planned group. All its members must call this.

    Args:
        group: group to create; this rank is a member.
        world: world of the group.
        ranks: global ranks of the group in group-rank order, if the caller has computed them.
        has_group: as in `Rendezvous.join`.

    Raises:
        LeftoverError: the members use another group instead, which this rank has; see
            `agree_on_leftover`.
        RanksDifferError: ranks are building different meshes.
        RuntimeError: other members did not join, or are in a deadlock with this rank; or c10d
            could not create the group.
    """
    request = group.request
    options, ranks = request.options, ranks or request.my_ranks()
    requested = (name for ref in group.refs.alive() for name in list(ref.requests))
    default_group, backend_options = world.default_group, options.new_backend_options()
    create = partial(
        create_c10d_group,
        ranks,
        default_group,
        world.store_client(default_group),
        backend=options.backend,
        backend_options=backend_options,
        timeout=options.timeout,
        name=group.name,
        description=group_desc(list(dict.fromkeys((request.axis_name, *requested))), ranks),
    )
    rendezvous, interruption = world.state(Rendezvous), None
    before = rendezvous.complete_attempt(group.name)
    try:
        attempt = _rendezvous(group, ranks, world, has_group)
    except BaseException as error:
        attempt = rendezvous.complete_attempt(group.name)
        if attempt == before:
            raise
        interruption = error  # of a signal handler, when all members had joined
    create = partial(create, attempt=str(attempt or ""))  # attempt 0: as without a rendezvous
    try:
        # Once all members have joined, c10d will not wait long, and the others will get the group:
        # so must this rank, whatever a signal handler raises meanwhile.
        if attempt is not None and world.thread_id is None:
            return _uninterrupted(create, partial(end_group, group.name, abort=True), interruption)
        made = create()
        if interruption is not None:
            raise interruption
        return made
    except RuntimeError as error:
        if find_c10d_group(group.name) is not None:
            raise  # a signal handler has raised it
        message = _could_not_create(request, ranks, world)
        if not _is_plain(error):
            if sys.version_info >= (3, 11):
                error.add_note(f"{message}.")
            raise
        message += f": {error}"
        if len(ranks) > 1 and is_of_other_ranks(error):
            message += (
                "\nAnother of these ranks may have died or been interrupted, or may have destroyed "
                "the group already. No rank may destroy a group before all its ranks have "
                "created it."
            )
        raise type(error)(message) from error
    finally:
        interruption = None  # its traceback has this frame


def _is_plain(error: RuntimeError) -> bool:
    """Return whether an error can be raised again with more text: it is only a message.

    Others, such as those that a signal handler raises, may have attributes and a constructor of
    their own.
    """
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _could_not_create(request: GroupRequest, ranks: list[int], world: World) -> str:
    return (
        f"Rank {world.rank} could not create the process group of axis {request.axis_name!r} with "
        f"ranks [{rank_list(ranks)}]"
    )


def _store_for_rendezvous(
    request: GroupRequest, ranks: list[int], world: World
) -> StoreKeys | None:
    """Return the store in which the members have a rendezvous, or None; see `_rendezvous`."""
    waits = len(ranks) > 1 and world.how_created(request.options.backend).blocks
    return world.run_keys if waits else None


def _rendezvous(
    group: Group, ranks: list[int], world: World, has_group: Callable[[str], bool | None] | None
) -> int | None:
    """Join the rendezvous of the group's members, if c10d would wait for them without a message.

    Returns:
        Number of the attempt to create the group, from 0; None if there was no rendezvous: c10d
        does not wait, or the world's store does not allow one.
    """
    store = _store_for_rendezvous(group.request, ranks, world)
    if store is None:
        return None
    calls = world.state(ComparedCalls)
    label = f"the process group of axis {group.request.axis_name!r}"

    def check() -> RuntimeError | None:
        # A signal handler or another thread may have ended it.
        return group.error_if_ended() or calls.find_mismatch(store)

    rendezvous = world.state(Rendezvous)
    before = rendezvous.complete_attempt(group.name)
    try:
        return rendezvous.join(
            world,
            group.name,
            label,
            ranks,
            group.request.options.timeout,
            check=check,
            has_group=has_group,
        ).attempt
    except RanksDifferError as error:
        calls.note_raised(error)
        raise
    except RuntimeError as error:
        if not _is_plain(error) or rendezvous.complete_attempt(group.name) != before:
            raise
        difference = None
        with contextlib.suppress(dist.DistError):  # the store failed; `error` says more
            difference = calls.find_mismatch(store)
        if difference is not None:  # that is why the others did not join
            calls.note_raised(difference)
            raise difference from None
        message = _could_not_create(group.request, ranks, world)
        raise type(error)(f"{message}: {error}") from None
    finally:
        group.have_all_joined = rendezvous.complete_attempt(group.name) is not None


def _uninterrupted(
    create: Callable[[], ProcessGroup | None],
    undo: Callable[[], object],
    interruption: BaseException | None = None,
) -> ProcessGroup | None:
    """Create a group, whatever the signal handlers of this thread raise meanwhile.

    Python runs signal handlers in the main thread, as soon as c10d's C++ code returns: what they
    raise there would lose a group that the other members have. So another thread creates it, while
    the main one waits. What a handler raises is raised when the group is created, or could not be;
    if another one raises before, at once.

    Args:
        create: function that creates the group.
        undo: function that ends it, if it is created after this call has raised.
        interruption: what a handler has raised already.
    """
    raised = [] if interruption is None else [interruption]
    if threading.current_thread() is not threading.main_thread():
        made = create()
        if raised:
            raise raised[0]
        return made
    begin, finish, is_over = Claim(), Claim(), list[bool]()
    # The other thread frees it. A handler that raises inside `Event.wait` can leave the event's own
    # lock taken, so that `set` waits for ever.
    running = threading.Lock()
    running.acquire()
    # Each thread has a current device of its own.
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if is_used else None
    groups: list[ProcessGroup | None] = []
    errors: list[BaseException] = []

    def run() -> None:
        if not begin.take():
            return
        try:
            if device is not None:
                torch.cuda.set_device(device)
            group = create()
            if finish.take():
                groups.append(group)
            else:
                undo()
        except BaseException as error:  # noqa: BLE001  (raised in the main thread)
            errors.append(error)
        is_over.append(True)
        running.release()

    process_id, has_started = os.getpid(), False
    while True:
        try:
            if not has_started:  # again, if `start` was interrupted; one thread creates the group
                run_here = partial(contextvars.copy_context().run, run)
                threading.Thread(target=run_here, name="meshverse creation", daemon=True).start()
                has_started = True
            while not is_over:
                running.acquire(timeout=1.0)
                if os.getpid() != process_id:
                    raise RuntimeError("a signal handler has forked while the group was created")
            break
        except BaseException as error:
            if raised and finish.take():
                raise
            raised.append(error)
    if errors or raised:
        try:
            if raised and errors:
                raised[0].__context__ = errors[0]
            raise (raised or errors)[0]
        finally:  # its traceback has this frame
            errors.clear()
            raised.clear()
            groups.clear()
    return groups[0]
