"""What comparing meshes between ranks costs at set-up: real gloo ranks on a real TCPStore.

Every rank makes the same mesh with the comparison and without, in turn, in one world. Wall clock,
since what is measured is waiting: one round trip to the store, beside making the groups.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from harness import Action, Bound, Comparison, Result, Side
from meshverse import init_device_mesh
from worlds import run_ranks

__all__ = ["METHOD", "TITLE", "results"]

_PROCESSES = 4
TITLE = f"Comparing meshes between ranks, {_PROCESSES} gloo processes"

METHOD = "all ranks of one world, on one machine; wall clock until the last rank is done"

_SHAPE, _AXES = (2, 2), ("dp", "tp")


def results(repetitions: int) -> list[Result]:
    """Wall time in which a mesh is made on all ranks, without and with the comparison."""
    result = Result(_comparison())
    received: list[tuple[float, float]] = []
    run_ranks(_measure, repetitions, processes=_PROCESSES, receive=received.append, limit_s=120)
    assert len(received) == repetitions, "rank 0 tells of each repetition once"
    for without, with_it in received:
        result.baseline_ns.append(without)
        result.subject_ns.append(with_it)
    return [result]


def _comparison() -> Comparison:
    def never() -> Action:
        raise NotImplementedError("measured in processes of its own")

    side = partial(Side, set_up=never, world_size=_PROCESSES, rank=0)
    return Comparison(
        "make a mesh and its groups", side("not compared"), side("compared"), Bound(at_most=1.25)
    )


def _measure(send: Any, repetitions: int) -> None:
    for repetition in range(-2, repetitions):  # two to warm up
        order = (False, True) if repetition % 2 else (True, False)
        times = {compared: _time_ns(compared) for compared in order}
        if dist.get_rank() == 0 and repetition >= 0:
            send((times[False], times[True]))


def _time_ns(compared: bool) -> float:
    dist.barrier()
    start = time.perf_counter_ns()
    mesh = init_device_mesh("cpu", _SHAPE, mesh_dim_names=_AXES, check_consistency=compared)
    dist.barrier()  # the last rank counts
    elapsed = time.perf_counter_ns() - start
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.get_group("tp"))
    assert total.item() == _SHAPE[1], "the group does not reach its ranks"
    dist.barrier()
    mesh.universe.destroy()
    return float(elapsed)
