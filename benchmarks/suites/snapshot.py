"""The cost of keeping each step's state in memory, beside torch's asynchronous checkpoints."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from crews import in_crew
from harness import OURS, STOCK, Check, Outcome, Run
from meshverse import init_device_mesh
from meshverse.parallel import Snapshot

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "The state of a step in memory"
METHOD = (
    "2 gloo processes on one machine, one thread each, wall clock of the slowest; a state of 64 "
    "sharded tensors and 640 numbers, as an optimizer's param_groups have; stock: "
    "dcp.async_save into the same file system in memory (/dev/shm), until it returns and until it "
    "is written; ours: Snapshot.save, which returns when all is written. The first save of each "
    "is not counted. A state that is loaded from each is compared with what was saved"
)
SCALE = "MB of a rank"
_RANKS, _TENSORS = 2, 64
_RETURNS, _WRITTEN, _BYTES = "until save returns", "until it is written", "bytes of a rank's step"


def run(run: Run) -> Outcome:
    """Save states of several sizes in both ways."""
    outcome = Outcome()
    if sys.platform != "linux":
        outcome.notes.append("Skipped: there is no /dev/shm.")
        return outcome
    sizes = run.choose([16, 256], [16])
    repetitions = run.choose(7, 2)
    for step, megabytes in enumerate(sizes):
        run.tell(step, len(sizes), f"{megabytes} MB")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            limit_s = 600
            samples = in_crew(_RANKS, _measure, folder, megabytes, repetitions, limit_s=limit_s)
        for by_rank in zip(*samples, strict=True):
            for side, operation, unit in by_rank[0]:
                one = outcome.of(operation, megabytes)
                one.unit = unit
                one.add(side, max(sample[side, operation, unit] for sample in by_rank))
        written = outcome.of(_WRITTEN, megabytes).samples
        claim = f"{megabytes} MB: {_WRITTEN}, faster than dcp.async_save"
        outcome.checks.append(Check.faster(claim, 1, written[STOCK], written[OURS]))
    return outcome


_Sample = dict[tuple[str, str, str], float]


def _measure(
    rank: int, store: dist.Store, folder: str, megabytes: int, repetitions: int
) -> list[_Sample]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
    mesh = init_device_mesh("cpu", (_RANKS,))
    rows = megabytes * 1_000_000 // 4 // _TENSORS // 1000
    state = _state(mesh, rows, rank + 1.0)
    snapshot, samples = Snapshot(f"{folder}/ours"), []
    for step in range(1, repetitions + 2):
        sample: _Sample = {}
        for side in (STOCK, OURS)[:: 1 if step % 2 else -1]:
            dist.barrier()
            start = time.monotonic_ns()
            if side == OURS:
                snapshot.save(step, state)
                returned = time.monotonic_ns() - start
                files = list(Path(f"{folder}/ours").glob(f"*.{step:012d}.{rank:06d}.*"))
            else:
                stock = f"{folder}/stock{step}"
                future = dcp.async_save(state, checkpoint_id=stock)
                returned = time.monotonic_ns() - start
                future.result()  # type: ignore[union-attr]
                files = list(Path(stock).glob(f"__{rank}_*"))
            written = time.monotonic_ns() - start
            sample[side, _RETURNS, "ns"] = returned
            sample[side, _WRITTEN, "ns"] = written if side == STOCK else returned
            sample[side, _BYTES, "bytes"] = sum(file.stat().st_size for file in files)
        samples.append(sample)
        dist.barrier()
        if rank == 0 and step > 1:
            shutil.rmtree(f"{folder}/stock{step - 1}")
    for load in (snapshot.load, lambda into: dcp.load(into, checkpoint_id=stock)):
        loaded = _state(mesh, rows, 0.0)
        load(loaded)
        for name, value in state.items():
            found = loaded[name]
            if isinstance(value, DTensor):
                assert torch.equal(found.to_local(), value.to_local()), name
            else:
                assert found == value, name
    dist.barrier()
    dist.destroy_process_group()
    return samples[1:]


def _state(mesh: Any, rows: int, value: float) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for index in range(_TENSORS):
        local = torch.full((rows, 1000), value + index)
        state[f"tensor{index}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        state |= {f"tensor{index}.{key}": 0.1 * bool(value) for key in range(10)}
    return state
