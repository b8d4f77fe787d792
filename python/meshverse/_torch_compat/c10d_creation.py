"""Functions that create a process group in c10d, by its members or by all ranks."""

from __future__ import annotations

import inspect
import types
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .backends import by_device, options_of, options_timeout, split_devices
from .c10d_groups import Ranks, find_c10d_group
from .private_names import BackendOptions, ProcessGroup, c10d

# Before 2.13, `new_group` sorts the ranks.
NEW_GROUP_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def create_c10d_group(
    ranks: list[int],
    default_group: ProcessGroup,
    store: Any,
    *,
    backend: str,
    backend_options: BackendOptions | None,
    timeout: timedelta | None,
    name: str,
    attempt: str,
    description: str,
) -> ProcessGroup | None:
    """Create one process group of these ranks, in this order.

    Only its members have to call this, unless c10d splits the default group for it: then all ranks
    call it, and those outside the group get None.

    Args:
        ranks: global ranks of the group, in group-rank order.
        default_group: the default process group.
        store: store of the default process group, or another connection to it.
        backend: backend string of the group.
        backend_options: options object that c10d may keep and write to, or None.
        timeout: timeout of the group's operations; None for c10d's default.
        name: name that no live group has, the same on all members.
        attempt: "" for the first group of this name; else a string that is the same on all members
            and new, so that keys which an earlier group, or attempt to create one, left in the
            store are not found.
        description: description of the group in c10d's logs.

    Returns:
        The new group, or None on a rank outside it.
    """
    if attempt:
        store = dist.PrefixStore(f"attempt {attempt}", store)
    device = default_group.bound_device_id
    if device is not None and device.type not in by_device(backend):
        device = None  # c10d would connect the backend for this device, which the group lacks
    rank, group = default_group.rank(), None
    while group is None:
        try:
            group, _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(rank) if rank in ranks else None,
                ranks,
                backend,
                store,
                name,  # type: ignore[arg-type]
                backend_options=backend_options,
                timeout=timeout,
                device_id=device,
                group_desc=description,
            )
        except RuntimeError as error:  # noqa: PERF203  # the loop is for this error
            # c10d begins by searching its groups for the name. Without the interpreter's lock, that
            # fails if another thread creates a group meanwhile. Nothing has been done then.
            if "changed size during iteration" not in str(error):
                raise
    if not isinstance(group, ProcessGroup):
        return None
    c10d._world.pg_group_ranks[group] = Ranks(zip(ranks, range(len(ranks)), strict=True))
    return group


def find_interrupted(name: str, ranks: list[int]) -> ProcessGroup | None:
    """Return the group that c10d created before `create_c10d_group` was interrupted, or None.

    Args:
        name: name that was passed to `create_c10d_group`.
        ranks: ranks that were passed to it.
    """
    group = find_c10d_group(name)
    if group is not None and group not in c10d._world.pg_group_ranks:
        c10d._world.pg_group_ranks[group] = Ranks(zip(ranks, range(len(ranks)), strict=True))
    return group


def split_c10d_group(
    ranks: list[int],
    default_group: ProcessGroup,
    *,
    backend: str,
    backend_options: BackendOptions | None,
    timeout: timedelta | None,
    name: str,
    description: str,
) -> ProcessGroup | None:
    """Split a group off the default group; every rank of the default group calls this once.

    `torch.distributed.split_group` names the group by a counter of the process. The method of the
    default group, which this calls, takes a name.

    Args:
        ranks: global ranks of this rank's new group, ascending. A rank that is in none of the new
            groups passes the ranks of any of them.
        default_group: the default process group, whose communicators are split.
        backend: backend string of the group.
        backend_options: options object that c10d may keep and write to; None for the options of the
            default group.
        timeout: timeout of the group's operations.
        name: name that no live group has, the same on all members.
        description: description of the group in c10d's logs.

    Returns:
        The new group, or None on a rank that is not in `ranks`.
    """
    devices = split_devices(default_group, backend) or {}
    first = [each[0] for each in devices.values()]
    if default_group not in _know_their_ranks:
        for device in first:
            _set_ranks(default_group._get_backend(device), default_group.size())
        _know_their_ranks.add(default_group)
    only = {} if len(first) == len(default_group._device_types) else {"device_types": first}
    known_as: Any = name  # torch declares its own type of names, which is str at run time
    group = default_group.split_group(
        ranks,
        timeout=timeout,
        opts=backend_options,
        group_name=known_as,
        group_desc=description,
        **only,
    )
    if group is None:
        return None
    group.bound_device_id = default_group.bound_device_id
    for kind, (first_device, *others) in devices.items():
        part = group._get_backend(first_device)
        # Before 2.15, all backends get the options of one, and gloo uses its defaults instead.
        if timeout is not None and options_timeout(options_of(part)) not in (None, timeout):
            part.set_timeout(timeout)
        for other in others:  # before 2.15, c10d would split once more for each of these devices
            group._register_backend(other, dist.Backend.backend_type_map[kind], part)
    _register(group, backend, name, ranks)
    return group


# Default groups whose backends already have the global ranks of their members.
_know_their_ranks: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _set_ranks(backend: Any, size: int) -> None:
    """Give a backend of the default group the global ranks of its members. O(world size), once.

    gloo and NCCL read these ranks when they are split. Only in the first default group of a process
    are they set already; in a later one, the backends would read memory out of bounds. 2.11-2.13.
    """
    options = options_of(backend)
    if options is not None and hasattr(options, "global_ranks_in_group"):
        options.global_ranks_in_group = list(range(size))


def _register(group: ProcessGroup, backend: str, name: Any, ranks: list[int]) -> None:
    """Register a split group with c10d, as `torch.distributed.split_group` does. 2.11-2.15."""
    config = c10d.BackendConfig(dist.Backend(backend))
    if (health := getattr(c10d, "HealthCheckHook", None)) is not None:  # 2.15
        health.attach(group)
    if (record := getattr(c10d, "_maybe_attach_flight_recorder", None)) is not None:  # 2.15
        record(group, config, ranks)
    world, tag = c10d._world, f"ptd:{name}"
    world.pg_map[group] = (dist.Backend(backend), group.get_group_store())
    world.pg_names[group] = name
    world.pg_backend_config[group] = str(config)
    c10d._register_process_group(name, group)
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    world.pg_group_ranks[group] = Ranks(zip(ranks, range(len(ranks)), strict=True))


def create_c10d_groups(
    all_ranks: list[list[int]],
    *,
    backend: str,
    backend_options: BackendOptions | None,
    timeout: timedelta | None,
    preserve_rank_order: bool,
    description: str,
) -> ProcessGroup | None:
    """Create all groups of an axis as torch does, in a loop that every rank of the world runs.

    Args:
        all_ranks: global ranks of each group.
        backend: backend string of the groups.
        backend_options: options object, or None.
        timeout: timeout of the groups' operations.
        preserve_rank_order: whether the ranks of a group keep the order in `all_ranks`, instead of
            ascending; True only if `NEW_GROUP_KEEPS_ORDER`.
        description: description of the groups in c10d's logs.

    Returns:
        This rank's group, or None if it is in none of them.
    """
    order: dict[str, Any] = {"sort_ranks": False} if preserve_rank_order else {}
    mine = None
    for ranks in all_ranks:
        # As torch's meshes do: not `torch.distributed.new_group`, which slime replaces.
        group = c10d.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=backend_options,
            group_desc=description,
            **order,
        )
        if isinstance(group, ProcessGroup):
            mine = group
    return mine


def is_of_other_ranks(error: RuntimeError) -> bool:
    """Whether the error means that c10d could not reach other ranks.

    Otherwise c10d rejected this rank's call.
    """
    return isinstance(error, dist.DistError) or "connectFullMesh failed" in str(error)


def create_connected(
    store: Any,
    rank: int,
    size: int,
    *,
    backend: str,
    backend_options: BackendOptions | None,
    timeout: timedelta,
    name: str,
    description: str,
) -> ProcessGroup:
    """Create a process group with processes that have another default group, or none.

    It has its own numbering of ranks: functions of torch.distributed that take a global rank take a
    rank within this group instead.

    Args:
        store: store that all processes of the group can reach.
        rank: rank of this process within the group.
        size: number of processes of the group.
        backend: backend string of the group.
        backend_options: options object that c10d may keep and write to, or None.
        timeout: timeout of the group's operations.
        name: name that no live group has, the same in all processes.
        description: description of the group in c10d's logs.
    """
    group, _ = _apart_from_the_world()(
        size,
        rank,
        [],  # as for a default group, since the members have no global ranks in common
        backend,
        store,
        name,
        backend_options=backend_options,
        timeout=timeout,
        group_desc=description,
    )
    assert isinstance(group, ProcessGroup)
    c10d._world.pg_group_ranks[group] = Ranks(zip(range(size), range(size), strict=True))
    return group


def _apart_from_the_world() -> Any:
    """Return c10d's function that creates a group, for one outside of the world. 2.11-2.15.

    If the default group is bound to a device, c10d splits each further group off it, which needs
    all ranks of the world. So this is c10d's function with globals of its own, in which there is no
    default group: nothing that other threads see changes.
    """
    function: Any = inspect.unwrap(c10d._new_process_group_helper)
    seen = {**vars(c10d), "is_initialized": lambda: False}
    apart = types.FunctionType(
        function.__code__, seen, function.__name__, function.__defaults__, function.__closure__
    )
    apart.__kwdefaults__ = function.__kwdefaults__
    return apart
