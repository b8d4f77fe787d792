"""Planning the transfers of large jobs: one rank's plan, without process groups."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from harness import OURS, Check, Measurement, Outcome, Run
from meshverse._core import Holders, Layout, RankMap, plan_reshard
from meshverse.parallel.reshard.plan import Sharding, Transfer, Transfers, plan_of

__all__ = ["check_plans", "measure_plans"]

_CORE = "its core"
_PP, _DP, _TP, _GENERATORS = 8, 160, 8, 512
_TENSORS = 1_000
_SHAPES = [(8192, 8192), (28672, 8192), (8192, 28672), (1024, 8192)]
_DTYPE = torch.bfloat16
_BUFFER_BYTES, _NODE = 64 << 20, 8
_RECEIVING, _SENDING = "plan of a rank that receives", "plan of a rank that sends"
_LIMIT_NS = 1e9


class _LargeJob(NamedTuple):
    """pp 8 x dp 160 x tp 8 of FSDP2 and TP, in replicas -> tp 8 in 512 replicas."""

    transfers: Transfers
    trainers: int
    world: int


def measure_plans(run: Run, outcome: Outcome) -> None:
    """Plan for one rank of each side, at several numbers of trainers."""
    replicas, repetitions = run.choose([1, 10, 102], [1]), run.choose(5, 1)
    for one in replicas:
        run.tell(3, 4, f"plans, {one * _PP * _DP * _TP:,} trainers")
        job = _large_job(one)
        for operation, rank in ((_RECEIVING, job.world - 1), (_SENDING, 777)):
            measurement = outcome.of(operation, job.trainers)
            measurement.figure = "plans"
            _check(job, rank, operation)
            for _ in range(repetitions):
                _measure(job, rank, measurement)


def check_plans(outcome: Outcome) -> None:
    """Check that plans take a second at most, and that more senders do not slow a receiver's."""
    for operation in (_RECEIVING, _SENDING):
        found = [one for one in outcome.measurements if one.operation == operation]
        for one in found:
            claim = f"{operation}, {one.scale:,} trainers, {_TENSORS:,} tensors"
            outcome.checks.append(Check(claim, one.median(OURS), _LIMIT_NS, False, "ns"))
        if len(found) > 1:
            claim = f"{operation}, {found[-1].scale:,} trainers: of that of {found[0].scale:,}"
            samples = [one.samples[OURS] for one in found]
            outcome.checks.append(Check.within(claim, 1.5, samples[0], samples[-1]))


def _large_job(replicas: int) -> _LargeJob:
    stage = replicas * _DP * _TP
    trainers = _PP * stage
    world = trainers + _GENERATORS * _TP
    ranks = RankMap.identity(world)
    laid_out = Layout.from_shape((replicas, _DP, _TP))
    holders = [Holders(ranks, index * stage, laid_out) for index in range(_PP)]
    holders.append(Holders(ranks, trainers, Layout.from_shape((_GENERATORS, _TP))))
    transfers = []
    for number in range(_TENSORS):
        dim = number % 2  # split by rows over TP, or by columns; by rows over FSDP2
        factors = (1, 1 if dim else _TP, 1)
        source = Sharding(number * _PP // _TENSORS, (-1, 0, dim), factors, True)
        target = Sharding(_PP, (-1, dim), (1, 1), False)
        transfers.append(Transfer(f"{number}", _SHAPES[number % 4], _DTYPE, source, target))
    return _LargeJob(Transfers(holders, transfers), trainers, world)


def _check(job: _LargeJob, rank: int, operation: str) -> None:
    """Check that a generator receives its share of every tensor, and a trainer nothing."""
    plan = plan_of(job.transfers, rank, job.world, _BUFFER_BYTES, _NODE)
    received = sum(each.received.n_bytes for each in plan.rounds if each.received)
    sent = sum(each.sent.n_bytes for each in plan.rounds if each.sent)
    if operation == _RECEIVING:
        elements = sum(math.prod(each.shape) for each in job.transfers.all)
        assert (sent, received) == (0, elements * _DTYPE.itemsize // _TP)
    else:
        assert received == 0 < sent


def _measure(job: _LargeJob, rank: int, measurement: Measurement) -> None:
    planned = [(one.shape, one.dtype.itemsize, one.source, one.target) for one in job.transfers.all]
    start = time.thread_time_ns()
    plan_of(job.transfers, rank, job.world, _BUFFER_BYTES, _NODE)
    middle = time.thread_time_ns()
    plan_reshard(job.transfers.holders, planned, rank, job.world, _BUFFER_BYTES // 4, _NODE)
    end = time.thread_time_ns()
    measurement.add(OURS, middle - start)
    measurement.add(_CORE, end - middle)
