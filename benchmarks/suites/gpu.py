"""NCCL communicators of one GPU: what a six-axis mesh and three views of it take.

One rank: every axis has size 1, and no bytes travel. The axes' groups have other options than the
default group, as they would be the default group itself. What is seen is what communicators cost
beside their traffic: device memory, and the time until the first collective of each is done.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as stock

import meshverse
from crews import in_crew
from harness import OURS, STOCK, Check, Outcome, Run
from trainer_views import count_process_groups

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "Communicators of one GPU"
METHOD = (
    "one NCCL rank, each side in a fresh process; device memory as the driver reports it; wall "
    "clock, after a first collective of the default group, until a first one on every group of "
    "every mesh is done"
)
SCALE = "ranks"
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_VIEWS = (("pp", "batch"), ("pp", "fsdp", "tp"), ("pp", "efsdp", "ep"))
_UNITS = {"device memory": "bytes", "set up": "ns", "process groups": "groups"}
_LIMIT_S = 120


def run(run: Run) -> Outcome:
    """Measure both sides, or say why not."""
    outcome = Outcome()
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        outcome.notes.append(
            f"Skipped: it needs a CUDA device (here: {torch.cuda.device_count()}) and a torch with "
            f"NCCL (torch {torch.__version__}: {'yes' if dist.is_nccl_available() else 'no'})."
        )
        return outcome
    repetitions = run.choose(5, 1)
    for repetition in range(repetitions):
        for index, side in enumerate([STOCK, OURS][:: 1 if repetition % 2 == 0 else -1]):
            run.tell(2 * repetition + index, 2 * repetitions, side)
            [held] = in_crew(1, _set_up, side, limit_s=_LIMIT_S)
            for what, amount in held.items():
                measurement = outcome.of(what, 1)
                measurement.unit, measurement.figure = _UNITS[what], "communicators"
                measurement.add(side, amount)
    for what in _UNITS:
        samples = outcome.of(what, 1).samples
        outcome.checks.append(Check.within(f"{what}: of stock's", 1, samples[STOCK], samples[OURS]))
    return outcome


def _set_up(rank: int, store: dist.Store, side: str) -> dict[str, float]:
    """What the meshes take more than the default group took."""
    init = meshverse.init_device_mesh if side == OURS else stock.init_device_mesh
    torch.cuda.set_device(0)
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("nccl", rank=rank, world_size=1, store=store, timeout=limit)
    try:
        _reduce(None)  # loads NCCL's kernels and makes the default group's communicator
        before, groups, start = _used_bytes(), count_process_groups(), time.perf_counter_ns()
        world = init("cuda", (1,), mesh_dim_names=("world",))
        views = [
            world._unflatten(0, (1,) * len(names), names, backend_override=_overrides(names))
            for names in (_AXES, *_VIEWS)
        ]
        for mesh in views:
            for group in mesh.get_all_groups():
                _reduce(group)
        elapsed = time.perf_counter_ns() - start
        return {
            "device memory": float(_used_bytes() - before),
            "set up": float(elapsed),
            "process groups": float(count_process_groups() - groups),
        }
    finally:
        dist.destroy_process_group()


def _overrides(names: tuple[str, ...]) -> dict[str, Any]:
    # In a world of one rank every axis is the default group, unless its options are others.
    return {name: ("nccl", dist.ProcessGroupNCCL.Options(True)) for name in names}


def _reduce(group: Any) -> None:
    total = torch.full((1024,), 3.0, device="cuda")
    dist.all_reduce(total, group=group)
    torch.cuda.synchronize()
    assert total.eq(3.0).all().item(), "one rank's sum is what it gave"


def _used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free
