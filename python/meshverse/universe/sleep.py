"""Suspending process groups that nobody uses for a while, and what they hold in memory."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple

from meshverse import _torch_compat as compat
from meshverse.groups.asleep import Asleep
from meshverse.groups.request import Group
from meshverse.world.holders import Holders
from meshverse.world.world import World

from .groups import UniverseGroups
from .warm_up import in_one_order

__all__ = ["GroupMemory", "memory_stats", "resume", "suspend"]

_log = logging.getLogger(__name__)


class GroupMemory(NamedTuple):
    """What one group holds in memory, as its backend says.

    Attributes:
        axes: names of the axes it was asked for by.
        size: its number of ranks.
        suspended: whether it is suspended.
        stats: the backend's own counters, in the backend's own units (NCCL: bytes).
    """

    axes: tuple[str, ...]
    size: int
    suspended: bool
    stats: dict[str, int]


def memory_stats(
    groups: UniverseGroups, axis_names: Collection[str] | None, world: World
) -> list[GroupMemory]:
    """See `Universe.memory_stats`."""
    asleep, told = world.state(Asleep).names, []
    for group in _made(groups, axis_names):
        stats = compat.memory_stats(compat.resolve_group(str(group.name)))
        if stats is not None:
            ranks = group.request.my_ranks()
            told.append(GroupMemory(tuple(group.requests), len(ranks), group.name in asleep, stats))
    return told


def suspend(groups: UniverseGroups, axis_names: Collection[str] | None, world: World) -> None:
    """See `Universe.suspend`."""
    asleep = world.state(Asleep).names
    chosen = {str(group.name): group for group in _made(groups, axis_names)}
    able = [name for name in chosen if compat.memory_stats(compat.resolve_group(name)) is not None]
    if chosen and not able:
        backends = sorted({group.request.options.backend for group in chosen.values()})
        raise RuntimeError(
            f"suspend() of groups of {', '.join(backends)}: none of them can be suspended. NCCL's "
            "can, once they were used, from torch 2.12 and NCCL 2.29.7 on."
        )
    for name in able:
        if name not in asleep:
            # Noted first, so that no other thread begins to use it.
            asleep.add(name)
            world.state(Holders).drop(name)
            compat.suspend(compat.resolve_group(name))
            _log.info("suspended %s", tuple(chosen[name].requests))


def resume(groups: UniverseGroups, axis_names: Collection[str] | None, world: World) -> None:
    """See `Universe.resume`."""
    asleep = world.state(Asleep).names
    for group in _made(groups, axis_names):
        name = str(group.name)
        if name in asleep:
            compat.resume(compat.resolve_group(name))
            asleep.discard(name)
            groups.before_use(name)  # this universe holds the group object again
            _log.info("resumed %s", tuple(group.requests))


def _made(groups: UniverseGroups, axis_names: Collection[str] | None) -> list[Group]:
    """The groups of these axes that exist. Without names, all groups that were made here."""
    return [
        group
        for group in in_one_order(groups, axis_names)
        if compat.find_group(str(group.name)) is not None
        and (axis_names is not None or not group.borrowed)
    ]
