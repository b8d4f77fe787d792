"""A trainer's five views on NCCL, with several ranks on one GPU.

No bytes travel between GPUs, and the ranks take turns on the one there is: nothing here says how
fast collectives are. What is seen is what communicators cost beside their traffic: the time until
the first collective of each is done, how many there are, and device memory.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as stock

import meshverse
from crews import in_crew
from harness import OURS, STOCK, Check, Outcome, Run
from one_gpu import one_gpu_environment, why_no_gpu
from trainer_views import Degrees, count_process_groups, five_views

__all__ = ["METHOD", "SCALE", "TITLE", "run", "set_up"]

TITLE = "A trainer's five views on NCCL, all ranks on one GPU"
METHOD = (
    "each side in fresh processes, which are hosts of their own to NCCL and talk over loopback; "
    "after a first collective of the default group, until a first one on every group of every view "
    "is done; time: wall clock from one barrier to the next; device memory: of all ranks, as the "
    "driver reports it, divided by their number; process groups: those that a rank has more than "
    "the default one, which all are communicators then; bound: a default group with device_id="
)
SCALE = "ranks"
_SIZES = [2, 4, 8]
_UNITS = {"set up": "ns", "process groups": "groups", "device memory of a rank": "bytes"}
_LIMIT_S = 240


def run(run: Run) -> Outcome:
    """Measure both sides, or say why not."""
    outcome = Outcome()
    why_not = why_no_gpu()
    if why_not is not None:
        outcome.notes.append(f"Skipped: {why_not}.")
        return outcome
    outcome.notes.append(_describe_gpu())
    sizes, repetitions = run.choose(_SIZES, [2]), run.choose(3, 1)
    cases = [
        (size, is_bound, side)
        for size in sizes
        for turn in range(repetitions)
        for is_bound in (False, True)
        for side in [STOCK, OURS][:: 1 if turn % 2 == 0 else -1]
    ]
    for step, (size, is_bound, side) in enumerate(cases):
        kind = "bound" if is_bound else "unbound"
        run.tell(step, len(cases), f"{size} ranks, {kind}, {side}")
        for held in in_crew(size, set_up, side, size, "cuda", is_bound, limit_s=_LIMIT_S)[:1]:
            for what, amount in held.items():
                measurement = outcome.of(f"{what}, {kind}", size)
                measurement.unit, measurement.figure = _UNITS[what], f"communicators {kind}"
                measurement.add(side, amount)
    outcome.measurements.sort(key=lambda one: one.operation)
    for one in outcome.measurements:
        claim = f"{one.operation}, {one.scale} ranks: of stock's"
        outcome.checks.append(Check.within(claim, 1, one.samples[STOCK], one.samples[OURS]))
    return outcome


def set_up(
    rank: int, store: dist.Store, side: str, size: int, device: str, is_bound: bool
) -> dict[str, float]:
    """Return what the five views take on top of the default group.

    Args:
        rank: of this process.
        store: that all ranks have.
        side: whose meshes.
        size: number of ranks.
        device: "cuda"; "cpu" for gloo and no device memory, to see that this works.
        is_bound: whether the default group is bound to the device.
    """
    init = meshverse.init_device_mesh if side == OURS else stock.init_device_mesh
    if device == "cuda":
        os.environ.update(one_gpu_environment(rank))
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        rank=rank,
        world_size=size,
        store=store,
        timeout=timedelta(seconds=_LIMIT_S),
        device_id=torch.device(device, 0) if is_bound else None,
    )
    try:
        _reduce(None, size, device)  # loads NCCL's kernels, makes the default communicator
        before, groups, start = _used_bytes(device), count_process_groups(), time.perf_counter_ns()
        views = five_views(lambda _, *shape, **names: init(device, *shape, **names), _degrees(size))
        for mesh in views.values():
            for group in mesh.get_all_groups():
                _reduce(group, dist.get_world_size(group), device)
        _reduce(None, size, device)
        elapsed = time.perf_counter_ns() - start
        seen = {
            "set up": float(elapsed),
            "process groups": float(count_process_groups() - groups),
        }
        if device == "cuda":
            seen["device memory of a rank"] = (_used_bytes(device) - before) / size
        _reduce(None, size, device)  # nobody frees any before all have looked
        return seen
    finally:
        dist.destroy_process_group()


def _degrees(size: int) -> Degrees:
    return Degrees(pp=max(1, size // 4), dp_shard=min(2, size // 2), tp=2, ep=2)


def _reduce(group: Any, size: int, device: str) -> None:
    total = torch.full((1024,), 3.0, device=device)
    dist.all_reduce(total, group=group)
    assert total.eq(3.0 * size).all().item(), "the sum is not that of the group's ranks"


def _used_bytes(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _describe_gpu() -> str:
    gpu = torch.cuda.get_device_properties(0)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB; CUDA {torch.version.cuda}, NCCL {version}"
