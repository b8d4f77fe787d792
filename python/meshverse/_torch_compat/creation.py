"""The ways c10d makes a process group."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from .groups import Ranks
from .private_names import BackendOptions, ProcessGroup, c10d


def create_by_members(
    ranks: list[int],
    default_group: ProcessGroup,
    *,
    backend: str,
    options: BackendOptions | None,
    timeout: timedelta | None,
    name: str,
    attempt: str,
    description: str,
) -> ProcessGroup:
    """Create one process group; only its members call this, and only they take part.

    Args:
        ranks: global ranks of the group, in group-rank order; mine among them.
        default_group: the default process group, whose store the group uses.
        backend: backend string of the group.
        options: options object that c10d may keep and write to, or None.
        timeout: of the group's operations; None for c10d's default.
        name: unique among the groups there are, the same on all members.
        attempt: "", or the same text on all members if there was a group of this name before, or an
            attempt to create one: this one does not find what is left of it in the store.
        description: shown in c10d's logs.
    """
    _, store = c10d._world.pg_map[default_group]
    if attempt:
        store = dist.PrefixStore(f"attempt {attempt}", store)
    group = None
    while group is None:
        try:
            group, _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(default_group.rank()),
                ranks,
                backend,
                store,
                name,  # type: ignore[arg-type]
                backend_options=options,
                timeout=timeout,
                device_id=default_group.bound_device_id,
                group_desc=description,
            )
        except RuntimeError as error:  # noqa: PERF203  # the loop is for that
            # First of all c10d looks for the name among its groups. Without the interpreter's lock
            # that fails when another thread makes one meanwhile; nothing was done then.
            if "changed size during iteration" not in str(error):
                raise
    c10d._world.pg_group_ranks[group] = Ranks(zip(ranks, range(len(ranks)), strict=True))
    return cast("ProcessGroup", group)


def create_by_split(
    ranks: Sequence[int],
    *,
    options: BackendOptions | None,
    timeout: timedelta | None,
    description: str,
) -> ProcessGroup | None:
    """Split the ranks off the default group; every rank of the default group calls this once.

    Returns:
        The new group, or None on a rank that is not in `ranks`.
    """
    group = dist.split_group(
        split_ranks=[list(ranks)], timeout=timeout, pg_options=options, group_desc=description
    )
    return group if isinstance(group, ProcessGroup) else None


def create_by_all(
    all_ranks: list[list[int]],
    *,
    backend: str,
    options: BackendOptions | None,
    timeout: timedelta | None,
    keeps_order: bool,
    description: str,
) -> ProcessGroup | None:
    """Create all groups of an axis as stock does, in a loop that every rank of the world runs.

    Args:
        all_ranks: global ranks of every group.
        backend: backend string of the groups.
        options: options object, or None.
        timeout: of the groups' operations.
        keeps_order: whether group ranks follow the order given, not ascending ranks.
        description: shown in c10d's logs.

    Returns:
        My group, or None if this rank is in none of them.

    Raises:
        ValueError: the order is to be kept, and this torch sorts the ranks of a group.
    """
    order: dict[str, Any] = {"sort_ranks": False} if keeps_order else {}
    if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ValueError(
            f"preserve_rank_order needs a newer torch than {torch.__version__} where all ranks "
            "take part in making a group: this one sorts the ranks. Leave it out, or update torch."
        )
    mine = None
    for ranks in all_ranks:
        group = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=options,
            group_desc=description,
            **order,
        )
        if isinstance(group, ProcessGroup):
            mine = group
    return mine
