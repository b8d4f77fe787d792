"""Suspension of process groups that are not used for a while, and the memory that they hold."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

from meshverse._torch_compat.c10d_groups import resolve_group
from meshverse._torch_compat.c10d_suspension import memory_stats as backend_memory_stats
from meshverse.groups.group import Group, State

from .groups_in_order import Chosen, in_one_order
from .universe_groups import UniverseGroups

_log = logging.getLogger(__name__)


class GroupMemory(NamedTuple):
    """Memory that one group holds, as its backend reports it.

    Attributes:
        axes: names of the axes that requested the group.
        size: number of ranks in the group.
        suspended: whether the group is suspended.
        stats: the backend's own counters, in the backend's own units (NCCL: bytes).
    """

    axes: tuple[str, ...]
    size: int
    suspended: bool
    stats: dict[str, int]


def memory_stats(
    all_groups: Sequence[UniverseGroups], axis_names: Collection[str] | None
) -> list[GroupMemory]:
    """Return the memory that groups hold; see `Universe.memory_stats`."""
    report = []
    for one in _made(all_groups, axis_names):
        stats = _stats(one.group)
        if stats is not None:
            is_suspended = one.group.state is State.SUSPENDED
            size = len(one.group.request.my_ranks())
            report.append(GroupMemory(one.axes, size, is_suspended, stats))
    return report


def suspend(all_groups: Sequence[UniverseGroups], axis_names: Collection[str] | None) -> None:
    """Suspend groups; see `Universe.suspend`."""
    chosen = _made(all_groups, axis_names)
    able = [one for one in chosen if _stats(one.group) is not None]
    if chosen and not able:
        backends = sorted({one.group.request.options.backend for one in chosen})
        raise RuntimeError(
            f"suspend(): none of these groups of {', '.join(backends)} can be suspended. NCCL "
            "groups that were used can be, with torch 2.12 and NCCL 2.29.7 or newer."
        )
    for one in able:
        if one.group.suspend() and one.is_first():
            _log.info("suspended %s", one.axes)


def resume(all_groups: Sequence[UniverseGroups], axis_names: Collection[str] | None) -> None:
    """Resume groups; see `Universe.resume`."""
    for one in _made(all_groups, axis_names):
        if one.group.resume() and one.is_first():
            _log.info("resumed %s", one.axes)


def _stats(group: Group) -> dict[str, int] | None:
    return backend_memory_stats(resolve_group(group.name))


def _made(all_groups: Sequence[UniverseGroups], axis_names: Collection[str] | None) -> list[Chosen]:
    """Return the created groups of these axes; without names, those that Meshverse created."""
    return [
        one
        for one in in_one_order(all_groups, axis_names)
        if one.group.state in (State.LIVE, State.SUSPENDED)
        and (axis_names is not None or not one.group.is_external)
    ]
