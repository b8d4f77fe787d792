"""Operations on the store by ranks that wait for a rank that is late.

Some waiting ranks are played by threads of this process, each with the pauses of a rank of a world
of that size. What one of them asks for in a second is taken times all ranks of the world: the worst
case, in which every group of the world lacks a member.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import torch.distributed as dist

from harness import OURS, Check, Outcome, Run
from meshverse.agreement import Rendezvous
from meshverse.store import Run as GroupRun
from meshverse.store import StoreKeys

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

_GROUPS, _SIZE = 32, 16
_MOST = 20_000  # operations a second, of all ranks that wait together
TITLE = "What waiting ranks ask of the store"
METHOD = (
    f"{_GROUPS} groups of {_SIZE} ranks that lack one each, played by threads on a store in memory;"
    " operations of one rank in each second of the wait, times all ranks; wall clock"
)
SCALE = "ranks"


class _Counting:
    """A store that counts what is asked of it in each second."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._start = store, time.monotonic()
        self.by_second: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            with self._lock:
                self.by_second[int(time.monotonic() - self._start)] += 1
            return getattr(self._store, name)(*arguments)

        return ask


class _MainThread(Rendezvous):
    """The rendezvous of a rank that waits in its main thread: each of these threads is one."""

    def may_note(self) -> bool:
        return True


class _World(NamedTuple):
    """A world, as far as a rendezvous needs one."""

    run_keys: StoreKeys
    rank: int
    is_over: bool = False


def run(run: Run) -> Outcome:
    """Let one member of each group come late, in worlds of several sizes."""
    logging.getLogger("meshverse").setLevel(logging.ERROR)  # every rank says for whom it waits
    sizes = run.choose([64, 1_024, 10_240, 102_400], [64, 10_240])
    seconds = run.choose(16, 5)
    outcome = Outcome()
    for step, size in enumerate(sizes):
        run.tell(step, len(sizes), f"{size:,} ranks")
        by_second, seconds_to_end = _wait(size, seconds)
        waiting = _GROUPS * (_SIZE - 1)
        asked = [by_second[second] / waiting * size for second in range(seconds)]
        first = outcome.of("operations in the first second", size)
        first.add(OURS, asked[0])
        busiest = outcome.of("operations in the busiest second after it", size)
        busiest.add(OURS, max(asked[1:]))
        for one in (first, busiest):
            one.unit = "operations"
        outcome.of("until all know that the last one came", size).add(OURS, seconds_to_end * 1e9)
        claim = f"busiest second, {size:,} ranks: operations"
        outcome.checks.append(
            Check(claim, busiest.median(OURS), _MOST, at_least=False, unit="operations")
        )
    outcome.measurements.sort(key=lambda one: one.operation)
    return outcome


def _wait(size: int, seconds: int) -> tuple[Counter[int], float]:
    """Operations by second, and the seconds from the last arrival until all ranks know."""
    store = _Counting(dist.HashStore())
    runs = {rank: GroupRun(rank, size) for rank in range(_GROUPS * _SIZE)}
    for one in runs.values():  # before the wait, as at the first call
        one.number(store)
    store.by_second.clear()
    store._start = time.monotonic()
    failed: list[BaseException] = []

    def come(rank: int) -> None:
        first = rank - rank % _SIZE
        ranks = list(range(first, first + _SIZE))
        try:
            world: Any = _World(runs[rank].keys(store), rank)
            _MainThread().join(world, f"g{first}", "group", ranks, None)
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in runs]
    late = threads[_SIZE - 1 :: _SIZE]
    for thread in threads:
        if thread not in late:
            thread.start()
    time.sleep(seconds)
    late_start = time.monotonic()
    for thread in late:
        thread.start()
    for thread in threads:
        thread.join(60)
    seconds_to_end = time.monotonic() - late_start
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads), "some ranks still wait"
    return store.by_second, seconds_to_end
