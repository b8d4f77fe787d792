"""What is wrong and what is slow, from the measurements of all ranks. Arithmetic only."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["clock_offsets", "differing", "slow_groups", "slow_ranks", "stragglers"]

_SLOW = 2.0
"""How many times the median of its equals something takes to be called slow."""

# What may differ between ranks of one job: where each of them is.
_OWN = ("LOCAL_WORLD_SIZE", "NCCL_HOSTID", "TORCH_NCCL_DEBUG_INFO", "platform")


def differing(environments: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """The lines of the ranks' environments that are not equal on all of them.

    Args:
        environments: of all ranks, in order of rank.

    Returns:
        By name of the line, which ranks have which value.
    """
    names = dict.fromkeys(name for each in environments for name in each)
    found: dict[str, dict[str, list[int]]] = {}
    for name in names:
        if name.startswith(_OWN):
            continue
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(environments):
            ranks_of.setdefault(each.get(name, "not set"), []).append(rank)
        if len(ranks_of) > 1:
            found[name] = ranks_of
    return found


def clock_offsets(readings: Sequence[Sequence[float]]) -> list[float]:
    """Seconds by which each rank's clock is ahead of that of rank 0.

    Args:
        readings: of each rank's clock, at the same moments.
    """
    first = readings[0]
    return [
        statistics.median(mine - base for mine, base in zip(each, first, strict=True))
        for each in readings
    ]


def slow_ranks(seconds: Sequence[float]) -> list[int]:
    """Ranks that take more than twice as long as the median rank for the same work of their own."""
    typical = statistics.median(seconds)
    return [rank for rank, mine in enumerate(seconds) if mine > _SLOW * typical]


def slow_groups(seconds: Mapping[tuple[int, ...], float]) -> list[tuple[int, ...]]:
    """Groups of one axis that take more than twice as long as their median.

    Args:
        seconds: by the ranks of a group. Of less than three groups none is called slow.
    """
    if len(seconds) < 3:
        return []
    typical = statistics.median(seconds.values())
    return [ranks for ranks, mine in seconds.items() if mine > _SLOW * typical]


def stragglers(slow: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    """Ranks that are in slow groups of at least two axes: what these groups have in common.

    Args:
        slow: the slow groups of each axis.
    """
    times = Counter(rank for groups in slow for rank in {r for group in groups for r in group})
    most = max(times.values(), default=0)
    return sorted(rank for rank, count in times.items() if count == most) if most > 1 else []
