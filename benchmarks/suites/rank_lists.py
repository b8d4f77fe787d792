"""Process groups of lists of ranks, as Megatron and DeepSpeed loop over them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # the backend "fake"
from torch.distributed import distributed_c10d as c10d

import meshverse
from harness import OURS, STOCK, Check, Outcome, Run
from suites.counting_store import CountingStore

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "Process groups of lists of ranks"
METHOD = (
    "one rank of a world with a backend that does nothing, wall clock; the lists of tensor, data "
    "and pipeline parallelism (tp 8, pp 8) and, twice as Megatron has them, those of tp and dp "
    "again for experts; loop: dist.new_group for every list; loop, members only: "
    "new_group(use_local_synchronization=True) for the lists that this rank is in; ours: "
    "universe.groups_of for each kind of list"
)
SCALE = "ranks"
_MEMBERS = "loop, members only"
_TP = _PP = 8

Lists = list[list[list[int]]]


def run(run: Run) -> Outcome:
    """Measure the three ways at several sizes of the world."""
    outcome = Outcome()
    sizes = run.choose([64, 1_024, 10_240], [64, 1_024])
    repetitions = run.choose(7, 2)
    steps = len(sizes) * repetitions
    for index, size in enumerate(sizes):
        lists = _lists(size)
        for repetition in range(repetitions):
            run.tell(index * repetitions + repetition, steps, f"{size:,} ranks")
            ways = list(_WAYS.items())
            shift = repetition % len(ways)
            answers = set()
            for side, make in ways[shift:] + ways[:shift]:
                seconds, ranks, groups, operations = _measure(make, lists, size)
                answers.add(ranks)
                outcome.of("all groups of a rank", size).add(side, seconds * 1e9)
                counted = outcome.of("process groups of a rank", size)
                counted.add(side, groups)
                counted.unit = "groups"
                asked = outcome.of("operations on the store, of a rank", size)
                asked.add(side, operations)
                asked.unit = "operations"
            assert len(answers) == 1, answers
    samples = outcome.of("all groups of a rank", sizes[-1]).samples
    claim = f"all groups of a rank of {sizes[-1]:,}"
    outcome.checks.append(
        Check.faster(f"{claim}: less time than the loop", 5, samples[STOCK], samples[OURS])
    )
    outcome.checks.append(
        Check.within(f"{claim}: of the loop of members", 4, samples[_MEMBERS], samples[OURS])
    )
    return outcome


def _lists(size: int) -> Lists:
    """The lists of each kind of parallelism, tp varying fastest, then dp, then pp."""
    stage = size // _PP
    tp = [list(range(first, first + _TP)) for first in range(0, size, _TP)]
    dp = [
        list(range(first + place, first + stage, _TP))
        for first in range(0, size, stage)
        for place in range(_TP)
    ]
    pp = [list(range(first, size, stage)) for first in range(stage)]
    return [tp, dp, pp, tp, dp]


def _loop(lists: Lists, rank: int) -> list[dist.ProcessGroup]:
    mine = []
    for kind in lists:
        for ranks in kind:
            group = dist.new_group(ranks)
            if rank in ranks:
                mine.append(group)
    return mine


def _loop_of_members(lists: Lists, rank: int) -> list[dist.ProcessGroup]:
    return [
        dist.new_group(ranks, use_local_synchronization=True)
        for kind in lists
        for ranks in kind
        if rank in ranks
    ]


def _ours(lists: Lists, rank: int) -> list[dist.ProcessGroup]:
    universe = meshverse.Universe(dist.get_world_size())
    return [universe.groups_of(kind) for kind in lists]


_WAYS: dict[str, Callable[[Lists, int], list[dist.ProcessGroup]]] = {
    STOCK: _loop,
    _MEMBERS: _loop_of_members,
    OURS: _ours,
}


def _measure(
    make: Callable[[Lists, int], list[dist.ProcessGroup]], lists: Lists, size: int
) -> tuple[float, tuple[tuple[int, ...], ...], int, int]:
    """Return seconds, the ranks of this rank's groups, how many were made, and store operations."""
    rank = size // 2 + 3
    store = CountingStore(dist.HashStore())
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        meshverse.init_device_mesh("cpu", (size,))  # what the first use of a world costs, aside
        store.counts.clear()
        before = len(c10d._world.pg_map)
        gc.collect()
        start = time.perf_counter()
        groups = make(lists, rank)
        seconds = time.perf_counter() - start
        ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
        return seconds, ranks, len(c10d._world.pg_map) - before, sum(store.counts.values())
    finally:
        dist.destroy_process_group()
