"""A trainer's five views on real gloo processes: set-up time, and what is held afterwards.

Wall clock, since much of setting up is waiting for others. What is held is counted in new processes
for each side, since memory that was taken once is not given back.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as stock

import meshverse
from crews import in_crew
from harness import OURS, STOCK, Check, Outcome, Run
from suites.counting_store import CountingStore
from trainer_views import Degrees, count_process_groups, five_views

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "A trainer's five views on real gloo processes"
METHOD = (
    "all ranks on one machine; time: wall clock from one barrier to the next, which the last rank "
    "ends; what is held: by each rank after the set-up, less before; store operations: counted at "
    "the store, above a real TCPStore"
)
SCALE = "processes"
_UNCOMPARED = "Meshverse, not compared"
_SIDES: dict[str, Callable[..., Any]] = {
    STOCK: stock.init_device_mesh,
    OURS: meshverse.init_device_mesh,
    _UNCOMPARED: partial(meshverse.init_device_mesh, check_consistency=False),
}
# In a fixed order, or that and its reverse, one side would always pay for what stock leaves behind.
_ORDERS = list(itertools.permutations(_SIDES))
_LIMIT_S = 400.0
_SET_UP = "set up five views"
_HELD = {
    "process groups": "groups",
    "threads": "threads",
    "descriptors": "descriptors",
    "resident memory": "bytes",
    "store operations": "operations",
}
"""Resources that a rank holds or has used, with their units."""


def run(run: Run) -> Outcome:
    """Measure worlds of several sizes, one after the other."""
    sizes = run.choose([4, 8, 16, 32], [4, 8])
    repetitions = run.choose({4: 24, 8: 24, 16: 24, 32: 18}, {4: 6, 8: 6})
    outcome = Outcome()
    if sys.platform != "linux":
        outcome.notes.append("Skipped: threads and descriptors are counted in Linux's /proc.")
        return outcome
    for step, size in enumerate(sizes):
        run.tell(4 * step, 4 * len(sizes), f"{size} processes: time")
        for times in in_crew(size, _time_sides, size, repetitions[size], limit_s=_LIMIT_S)[:1]:
            for side, samples in times.items():
                for sample in samples:
                    outcome.of(_SET_UP, size).add(side, sample)
        for index, side in enumerate(_SIDES):
            run.tell(4 * step + index + 1, 4 * len(sizes), f"{size} processes: held, {side}")
            for held in in_crew(size, _count_held, size, side, limit_s=_LIMIT_S):
                for what, amount in held.items():
                    outcome.of(what, size).add(side, amount)
    for one in outcome.measurements:
        one.unit = _HELD.get(one.operation, "ns")
        one.figure = "set-up"
    order = [_SET_UP, *_HELD]
    outcome.measurements.sort(key=lambda one: (order.index(one.operation), one.scale))
    outcome.checks = _checks(outcome, sizes)
    return outcome


def _degrees(size: int) -> Degrees:
    # Where it can be, ep is not tp: the experts' view would have the same groups as the dense one.
    return Degrees(pp=2, dp_shard=size // 4, tp=2, ep=min(4, size // 2))


def _time_sides(
    rank: int, store: dist.Store, size: int, repetitions: int
) -> dict[str, list[float]]:
    """Nanoseconds each side takes, each time in a new world of these processes."""
    times: dict[str, list[float]] = {side: [] for side in _SIDES}
    for turn in range(-1, repetitions):  # one to warm up
        for side in _ORDERS[turn % len(_ORDERS)]:
            elapsed = _set_up(rank, size, dist.PrefixStore(f"{side}/{turn}", store), side)
            if turn >= 0:
                times[side].append(elapsed)
    return times


def _set_up(rank: int, size: int, store: dist.Store, side: str) -> float:
    with _world(rank, size, store):
        dist.barrier()
        start = time.perf_counter_ns()
        views = five_views(_SIDES[side], _degrees(size))
        dist.barrier()
        elapsed = time.perf_counter_ns() - start
        _check_groups(views)
        return float(elapsed)


def _count_held(rank: int, store: dist.Store, size: int, side: str) -> dict[str, float]:
    """Return the resources that this rank holds or has used for the set-up."""
    counting = CountingStore(store)
    with _world(rank, size, counting):
        dist.barrier()
        before = _held(counting)
        views = five_views(_SIDES[side], _degrees(size))
        after = _held(counting)
        dist.barrier()
        _check_groups(views)
        return {what: after[what] - before[what] for what in _HELD}


def _held(store: CountingStore) -> dict[str, float]:
    status = Path("/proc/self/status").read_text().split()
    return {
        "process groups": count_process_groups(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident memory": 1024 * int(status[status.index("VmRSS:") + 1]),
        "store operations": sum(store.counts.values()),
    }


@contextmanager
def _world(rank: int, size: int, store: dist.Store) -> Iterator[None]:
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()  # stock's meshes are cycles, which would keep their groups' threads running


def _check_groups(views: dict[str, Any]) -> None:
    """Check that every group of every view reaches its ranks, and them only."""
    for view in views.values():
        for group in view.get_all_groups():
            total = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(dist.get_process_group_ranks(group)), view


def _checks(outcome: Outcome, sizes: list[int]) -> list[Check]:
    checks = []
    for size in sizes:
        samples = outcome.of(_SET_UP, size).samples
        claim = f"{_SET_UP}, {size} processes: of stock's time"
        checks.append(Check.within(claim, 1, samples[STOCK], samples[OURS]))
        claim = f"{_SET_UP}, {size} processes: compared, of the time without comparing"
        most = 1.25 if size < 16 else 1.15
        checks.append(Check.within(claim, most, samples[_UNCOMPARED], samples[OURS]))
        for what in ("process groups", "threads", "descriptors", "store operations"):
            samples = outcome.of(what, size).samples
            checks.append(
                Check.within(
                    f"{what}, {size} processes: of stock's", 1, samples[STOCK], samples[OURS]
                )
            )
    return checks
