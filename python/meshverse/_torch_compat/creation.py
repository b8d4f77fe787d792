"""The ways c10d makes a process group."""

from __future__ import annotations

import inspect
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .backends import by_device, split_devices
from .groups import Ranks, current_default_group, find_group
from .options import options_of, options_timeout
from .private_names import BackendOptions, ProcessGroup, c10d

# Before 2.13, `new_group` sorts the ranks.
NEW_GROUP_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def create_by_members(
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

    Its members call this, and nobody else has to. Where c10d splits the default group for it, all
    ranks do: those that are no members get None.

    Args:
        ranks: global ranks of the group, in group-rank order.
        default_group: the default process group.
        store: of the default process group, or another connection to it.
        backend: backend string of the group.
        backend_options: options object that c10d may keep and write to, or None.
        timeout: of the group's operations; None for c10d's default.
        name: unique among the groups there are, the same on all members.
        attempt: "", or the same text on all members if there was a group of this name before, or an
            attempt to create one: this one does not find what is left of it in the store.
        description: shown in c10d's logs.
    """
    if attempt:
        store = dist.PrefixStore(f"attempt {attempt}", store)
    device = default_group.bound_device_id
    if device is not None and device.type not in by_device(backend):
        device = None  # c10d would connect the group's backend for this device, and there is none
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
        except RuntimeError as error:  # noqa: PERF203  # the loop is for that
            # First of all c10d looks for the name among its groups. Without the interpreter's lock
            # that fails when another thread makes one meanwhile; nothing was done then.
            if "changed size during iteration" not in str(error):
                raise
    if not isinstance(group, ProcessGroup):
        return None
    c10d._world.pg_group_ranks[group] = Ranks(zip(ranks, range(len(ranks)), strict=True))
    return group


def find_interrupted(name: str, ranks: list[int]) -> ProcessGroup | None:
    """Return the group that c10d made before this rank was interrupted, or None.

    Args:
        name: that `create_by_members` was given.
        ranks: the same.
    """
    group = find_group(name)
    if group is not None and group not in c10d._world.pg_group_ranks:
        c10d._world.pg_group_ranks[group] = Ranks(zip(ranks, range(len(ranks)), strict=True))
    return group


def create_by_split(
    ranks: list[int],
    default_group: ProcessGroup,
    *,
    backend: str,
    backend_options: BackendOptions | None,
    timeout: timedelta | None,
    name: str,
    description: str,
) -> ProcessGroup | None:
    """Split the ranks off the default group; every rank of the default group calls this once.

    Stock's `split_group` names the group by how many this process has. c10d itself takes a name.

    Args:
        ranks: global ranks of the group, ascending; on a rank that is in no group, those of any.
        default_group: the default process group, whose communicators are split.
        backend: backend string of the group.
        backend_options: options object that c10d may keep and write to; None for those of the
            default group.
        timeout: of the group's operations.
        name: unique among the groups there are, the same on all members.
        description: shown in c10d's logs.

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
    known_as: Any = name  # torch's own type of names is a str to everybody else
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
        # Before 2.15 the options of one backend are given to all; gloo takes its defaults then.
        if timeout is not None and options_timeout(options_of(part)) not in (None, timeout):
            part.set_timeout(timeout)
        for other in others:  # c10d before 2.15 would split it once more for each
            group._register_backend(other, dist.Backend.backend_type_map[kind], part)
    _register(group, backend, name, ranks)
    return group


# Default groups whose backends know the ranks of their members.
_know_their_ranks: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _set_ranks(backend: Any, size: int) -> None:
    """Set the ranks of a backend of the default group, which are all. O(world), once.

    gloo and NCCL look them up where they are split. Only those of the first default group of a
    process know them by themselves; the others read memory that is not theirs. 2.11-2.13.
    """
    options = options_of(backend)
    if options is not None and hasattr(options, "global_ranks_in_group"):
        options.global_ranks_in_group = list(range(size))


def _register(group: ProcessGroup, backend: str, name: Any, ranks: list[int]) -> None:
    """Have c10d know a group that it has split, as its own `split_group` does. 2.11-2.15."""
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


def create_by_all(
    all_ranks: list[list[int]],
    *,
    backend: str,
    backend_options: BackendOptions | None,
    timeout: timedelta | None,
    keeps_order: bool,
    description: str,
) -> ProcessGroup | None:
    """Create all groups of an axis as stock does, in a loop that every rank of the world runs.

    Args:
        all_ranks: global ranks of every group.
        backend: backend string of the groups.
        backend_options: options object, or None.
        timeout: of the groups' operations.
        keeps_order: whether group ranks follow the order given, not ascending ranks; only where
            `NEW_GROUP_KEEPS_ORDER`.
        description: shown in c10d's logs.

    Returns:
        My group, or None if this rank is in none of them.
    """
    order: dict[str, Any] = {"sort_ranks": False} if keeps_order else {}
    mine = None
    for ranks in all_ranks:
        group = dist.new_group(
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
    """Whether c10d could not reach other ranks, or else refused what this rank asked for."""
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

    Ranks in it are numbered by themselves, for every function of torch.distributed that takes one.

    Args:
        store: that all of its processes can reach.
        rank: of this process in the group.
        size: number of processes.
        backend: backend string of the group.
        backend_options: options object that c10d may keep and write to, or None.
        timeout: of the group's operations.
        name: unique among the groups there are, the same in all processes.
        description: shown in c10d's logs.
    """
    default_group = current_default_group()
    device = None if default_group is None else default_group.bound_device_id
    try:
        if device is not None:  # c10d would split a default group that is bound
            default_group.bound_device_id = None  # type: ignore[union-attr]
        group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],  # as of a default group: not ranks of this process's own
            backend,
            store,
            name,  # type: ignore[arg-type]
            backend_options=backend_options,
            timeout=timeout,
            group_desc=description,
        )
    finally:
        if device is not None:
            default_group.bound_device_id = device  # type: ignore[union-attr]
    assert isinstance(group, ProcessGroup)
    c10d._world.pg_group_ranks[group] = Ranks(zip(range(size), range(size), strict=True))
    return group
