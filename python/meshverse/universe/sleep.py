"""Suspending process groups that nobody uses for a while, and what they hold in memory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

from meshverse import _torch_compat as compat
from meshverse.groups.asleep import Asleep
from meshverse.world.holders import Holders
from meshverse.world.world import World

from .groups import UniverseGroups
from .warm_up import Chosen, in_one_order

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
    universes: Sequence[UniverseGroups], axis_names: Collection[str] | None, world: World
) -> list[GroupMemory]:
    """See `Universe.memory_stats`."""
    asleep, told = world.state(Asleep).names, []
    for group, axes, _ in _made(universes, axis_names):
        stats = compat.memory_stats(compat.resolve_group(str(group.name)))
        if stats is not None:
            ranks = group.request.my_ranks()
            told.append(GroupMemory(axes, len(ranks), group.name in asleep, stats))
    return told


def suspend(
    universes: Sequence[UniverseGroups], axis_names: Collection[str] | None, world: World
) -> None:
    """See `Universe.suspend`."""
    asleep = world.state(Asleep).names
    chosen = {str(one.group.name): one for one in _made(universes, axis_names)}
    able = [name for name in chosen if compat.memory_stats(compat.resolve_group(name)) is not None]
    if chosen and not able:
        backends = sorted({one.group.request.options.backend for one in chosen.values()})
        raise RuntimeError(
            f"suspend() of groups of {', '.join(backends)}: none of them can be suspended. NCCL's "
            "can, once they were used, from torch 2.12 and NCCL 2.29.7 on."
        )
    for name in able:
        if name not in asleep:
            # Noted first, so that no other thread begins to use it.
            asleep.add(name)
            world.state(Holders).drop(name)
            try:
                compat.suspend(compat.resolve_group(name))
            except BaseException:
                asleep.discard(name)
                chosen[name].be_ready()  # its users hold the group object again
                raise
            if chosen[name].is_first():
                _log.info("suspended %s", chosen[name].axes)


def resume(
    universes: Sequence[UniverseGroups], axis_names: Collection[str] | None, world: World
) -> None:
    """See `Universe.resume`."""
    asleep = world.state(Asleep).names
    for one in _made(universes, axis_names):
        name = str(one.group.name)
        if name in asleep:
            compat.resume(compat.resolve_group(name))
            asleep.discard(name)
            one.be_ready()  # its users hold the group object again
            if one.is_first():
                _log.info("resumed %s", one.axes)


def _made(universes: Sequence[UniverseGroups], axis_names: Collection[str] | None) -> list[Chosen]:
    """The groups of these axes that exist. Without names, all groups that were made here."""
    return [
        one
        for one in in_one_order(universes, axis_names)
        if compat.find_group(str(one.group.name)) is not None
        and (axis_names is not None or not one.group.borrowed)
    ]
