"""Processes that do the same by turns, one at a time: what slows the machine slows all of them.

For sides that cannot share a process, such as models on equal meshes, for which torch caches plans.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["Operation", "take_turns"]

_MOST_SECONDS = 8.0  # of one process and operation; then it lets the others go on


@dataclass(frozen=True)
class Operation:
    """A timed action.

    Attributes:
        name: the same in all processes.
        run: called with what `prepare` gave.
        prepare: called before each turn, outside of the clock.
        loops: how often it runs in one turn.
    """

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    loops: int = 1


def take_turns(
    store: dist.Store, rank: int, players: int, operations: Sequence[Operation], rounds: int
) -> dict[str, list[float]]:
    """Run operations round by round, in each round one process after the other.

    Args:
        store: that all processes have in common.
        rank: of this process, which is its place in a round.
        players: number of processes.
        operations: the same in all processes.
        rounds: of each operation; a process that has taken long enough sits the rest out.

    Returns:
        Nanoseconds of this thread's processor time for one run, by operation and round.
    """
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{player}" for player in range(players)])
    times: dict[str, list[float]] = {operation.name: [] for operation in operations}
    gc.collect()
    gc.disable()
    for number, (operation, turn) in enumerate((o, t) for o in operations for t in range(rounds)):
        mine = number * players + rank
        if mine > 0:
            store.wait([f"done/{mine - 1}"])
        taken = times[operation.name]
        if sum(taken) * operation.loops < _MOST_SECONDS * 1e9:
            taken.append(_time_ns(operation))
            if turn % 5 == 0:
                gc.collect()
        store.set(f"done/{mine}", "1")
    gc.enable()
    return times


def _time_ns(operation: Operation) -> float:
    subject = operation.prepare()
    start = time.thread_time_ns()
    for _ in range(operation.loops):
        operation.run(subject)
    return (time.thread_time_ns() - start) / operation.loops
