"""Weights from trainers to generators: what a run costs on real processes, and what to plan it."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from crews import in_crew
from harness import OURS, STOCK, Check, Measurement, Outcome, Run
from suites.reshard_models import Case, Job
from suites.reshard_plans import check_plans, measure_plans
from suites.reshard_ways import (
    BUFFER_BYTES,
    ONE_RANK,
    WAYS,
    Counted,
    Ours,
    Way,
    memory_peak,
    steady_memory,
)

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "Weights from trainers to generators"
METHOD = (
    "runs: 8 gloo processes on one machine; wall clock from one barrier to the next, by rank 0's "
    "clock; bytes: counted where they come to c10d, in a run that is not timed; memory: growth of "
    "a rank's resident memory during a later run, the largest of all ranks. Stock is "
    "`full_tensor()` on the trainers, a broadcast of it to generators on other ranks, and a copy "
    "of the own part; through one rank: dist.gather to the first trainer, and dist.scatter from "
    "it; the floor is what generators lack of what they want. Plans: processor time of one thread, "
    "without process groups"
)
SCALE = "ranks"
_FLOOR = "floor"
_LIMIT_S = 300
_WORLD = 8
_SOME, _OTHERS, _ALL = (0, 1, 2, 3), (4, 5, 6, 7), tuple(range(_WORLD))
_DENSE, _SAME, _EXPERTS = "dense, other ranks", "dense, same ranks", "experts, other ranks"
_SET_UP, _FIRST, _LATER = "set-up", "first run", "later runs"
_RECEIVED, _MOST_RECEIVED = "received by all", "received by one rank, at most"
_MOST_GIVEN, _MEMORY = "given by one rank, at most", "memory"
_FIGURES = {_FIRST: "time", _LATER: "time", _RECEIVED: "bytes", _MEMORY: "memory"}

_Answer = TypeVar("_Answer")


def run(run: Run) -> Outcome:
    """Copy three models in three ways, then plan the transfers of large jobs."""
    outcome = Outcome()
    if sys.platform != "linux":
        outcome.notes.append("Runs are skipped: memory is read from Linux's /proc.")
    else:
        _measure_runs(run, outcome)
    measure_plans(run, outcome)
    check_plans(outcome)
    return outcome


def _cases(run: Run) -> list[Case]:
    dense = run.choose({}, {"blocks": 2})
    sparse = {"blocks": run.choose(8, 2), "intermediate": 256}
    return [
        Case(_DENSE, False, _SOME, _OTHERS, **dense),
        Case(_SAME, False, _ALL, _ALL, **dense),
        Case(_EXPERTS, True, _SOME, _OTHERS, **sparse),
    ]


class _Cost(NamedTuple):
    """Samples of one rank on one side, by operation."""

    times: dict[str, list[float]]
    received: int
    given: int
    memory: int


def _measure_runs(run: Run, outcome: Outcome) -> None:
    cases = _cases(run)
    turns, runs = run.choose((3, 3), (1, 2))
    for step, case in enumerate(cases):
        run.tell(step, len(cases) + 1, case.name)
        costs = in_crew(_WORLD, _measure, case, turns, runs, limit_s=_LIMIT_S)
        for side in WAYS:
            _add(outcome, case, side, [by_side[side] for by_side, _ in costs])
        bounds = [bound for _, bound in costs]
        _of(outcome, case, _RECEIVED).add(_FLOOR, sum(bounds))
        _of(outcome, case, _MOST_RECEIVED).add(_FLOOR, max(bounds))
        outcome.checks += _checks(outcome, case)
    for one in outcome.measurements:
        operation = one.operation.partition(": ")[2]
        one.unit = "ns" if operation in (_SET_UP, _FIRST, _LATER) else "bytes"
        one.figure = _FIGURES.get(operation, "")


def _add(outcome: Outcome, case: Case, side: str, ranks: list[_Cost]) -> None:
    for operation, samples in ranks[0].times.items():
        for sample in samples:
            _of(outcome, case, operation).add(side, sample)
    received = [cost.received for cost in ranks]
    _of(outcome, case, _RECEIVED).add(side, sum(received))
    _of(outcome, case, _MOST_RECEIVED).add(side, max(received))
    _of(outcome, case, _MOST_GIVEN).add(side, max(cost.given for cost in ranks))
    _of(outcome, case, _MEMORY).add(side, max(cost.memory for cost in ranks))


def _measure(
    rank: int, store: dist.Store, case: Case, turns: int, runs: int
) -> tuple[dict[str, _Cost], int]:
    """Return this rank's samples of every side, and the bytes that it has to receive."""
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", rank=rank, world_size=_WORLD, store=store, timeout=limit)
    steady_memory()
    # That full_tensor() gathers along one axis after the other is said for every tensor.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    job = Job(case, rank)
    gc.collect()
    gc.freeze()  # the collections before each run need not go through what is here to stay
    times: dict[str, dict[str, list[float]]] = {side: defaultdict(list) for side in WAYS}
    counted: dict[str, tuple[int, int, int]] = {}
    bound = 0
    for turn in range(-1, turns):  # the first to check, to count and to warm up
        for side in list(WAYS)[:: 1 if turn % 2 else -1]:
            job.forget()
            set_up, way = _timed(partial(WAYS[side], job))
            first, _ = _timed(way)
            job.check(side)
            if turn < 0:
                counted[side] = _count(way, job, side)
                if isinstance(way, Ours):
                    bound = way.reshard.explain().lower_bound
                    assert counted[side][0] == bound
                    assert rank in case.trainers or bound == job.wanted_bytes
            else:
                times[side][_SET_UP].append(set_up)
                times[side][_FIRST].append(first)
                times[side][_LATER] += [_timed(way)[0] for _ in range(runs)]
            way.close()
    return {side: _Cost(dict(times[side]), *counted[side]) for side in WAYS}, bound


def _count(way: Way, job: Job, side: str) -> tuple[int, int, int]:
    """Bytes received, given and of memory, each in a run of its own that is right as well."""
    job.forget()
    with Counted() as counted:
        way()
    job.check(side)
    job.forget()
    dist.barrier()
    memory = memory_peak(way)
    job.check(side)
    return counted.received, counted.given, memory


def _timed(call: Callable[[], _Answer]) -> tuple[float, _Answer]:
    """Nanoseconds until all ranks are done, and the answer."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter_ns()
    answer = call()
    dist.barrier()
    return float(time.perf_counter_ns() - start), answer


def _of(outcome: Outcome, case: Case, operation: str) -> Measurement:
    return outcome.of(f"{case.name}: {operation}", _WORLD)


def _checks(outcome: Outcome, case: Case) -> list[Check]:
    received, later, memory = (
        _of(outcome, case, operation).samples for operation in (_RECEIVED, _LATER, _MEMORY)
    )
    claim = f"{case.name}: {_RECEIVED}, of the least possible"
    checks = [Check.within(claim, 1, received[_FLOOR], received[OURS])]
    for side in (STOCK, ONE_RANK):
        words = "stock's" if side == STOCK else f"those {side}"
        claim = f"{case.name}: bytes {_RECEIVED}, of {words}"
        checks.append(Check.within(claim, 1, received[side], received[OURS]))
        words = "stock's time" if side == STOCK else f"the time {side}"
        claim = f"{case.name}: {_LATER}, of {words}"
        checks.append(Check.within(claim, 1, later[side], later[OURS]))
    claim = f"{case.name}: {_MEMORY}, of the buffers that may be used"
    checks.append(Check(claim, max(memory[OURS]) / BUFFER_BYTES, 1.05, at_least=False))
    return checks
