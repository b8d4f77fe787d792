"""The time that a killed rank costs a job, beside a job that saves checkpoints to disk."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

from crews import in_crew
from harness import OURS, STOCK, Check, Outcome, Run
from meshverse.parallel import Snapshot
from suites.counting_store import CountingStore

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "A killed rank"
METHOD = (
    "torchrun restarts 2 gloo processes (FSDP2, AdamW, 0.26 million parameters) on one machine; "
    "rank 0 kills itself at step 150; stock: dcp.save to disk every 100 steps; ours: Snapshot.save "
    "after each step; a whole step is the first one after those that were done before the kill, "
    "and its loss is the same on both sides; the time of a step includes saves. Store operations "
    "are counted on gloo, for a snapshot that is made, saved three times and loaded; and on one "
    "rank of a fake world of 10,240, whose collectives answer at once as if all ranks had sent "
    "what this one sends"
)
SCALE = "ranks"
_RANKS, _KILL_AT, _BETWEEN, _LARGE = 2, 150, 100, 10_240
_JOB = Path(__file__).with_name("restart_job.py")
_WHOLE, _STEP = "from SIGKILL to the next whole step", "a step, saves included"
_LOST = "steps computed again"


def run(run: Run) -> Outcome:
    """Kill a rank on each side in turn, and count store operations."""
    outcome = Outcome()
    if sys.platform != "linux":
        outcome.notes.append("Skipped: there is no /dev/shm.")
        return outcome
    repetitions, sizes = run.choose(3, 1), run.choose([2, 4, 8], [2, 4])
    for number in range(repetitions):
        losses = {}
        for side in (STOCK, OURS)[:: 1 if number % 2 else -1]:
            run.tell(number, repetitions + 1, f"restart, {side}")
            killed, resumed = _restart(side)
            losses[side] = resumed["loss"]
            outcome.of(_WHOLE, _RANKS).add(side, resumed["at_ns"] - killed["at_ns"])
            outcome.of(_STEP, _RANKS).add(side, killed["step_ns"])
            outcome.of(_LOST, _RANKS).add(side, _KILL_AT - resumed["first"])
        assert losses[STOCK] == losses[OURS], losses
    outcome.of(_LOST, _RANKS).unit = "steps"
    # No target for the time: most of it is the start of processes, which is the same on both sides.
    n_lost = max(outcome.of(_LOST, _RANKS).samples[OURS])
    outcome.checks.append(Check(_LOST, n_lost, 0, at_least=False, unit="steps"))
    run.tell(repetitions, repetitions + 1, "store operations")
    for size in sizes:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            for counts in in_crew(size, _count, size, folder, limit_s=300):
                _add_counts(outcome, size, counts)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for counts in in_crew(1, _count, _LARGE, folder, limit_s=300):
            _add_counts(outcome, _LARGE, counts)
    n_operations = max(outcome.of("store operations of Snapshot", _LARGE).samples[OURS])
    claim = f"store operations of Snapshot on a rank of {_LARGE:,}"
    outcome.checks.append(Check(claim, n_operations, 0, at_least=False, unit=""))
    return outcome


def _restart(side: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the job once; return what it noted at the kill, and after the next whole step."""
    with contextlib.ExitStack() as stack:
        memory = "/dev/shm" if side == OURS else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={_RANKS}", "--max-restarts=1", "--monitor-interval=0.1"]
        command += [str(_JOB), str(folder), side, str(_KILL_AT), str(_BETWEEN)]
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
        killed, resumed = (
            json.loads((folder / name).read_text()) for name in ("killed", "resumed")
        )
    return killed, resumed


def _add_counts(outcome: Outcome, size: int, counts: dict[str, float]) -> None:
    for operation, count in counts.items():
        one = outcome.of(operation, size)
        one.unit = "ns" if operation.startswith("Snapshot.") else "operations"
        one.add(STOCK if operation.startswith("init") else OURS, count)


def _count(rank: int, store: dist.Store, size: int, folder: str) -> dict[str, float]:
    counting = CountingStore(store)
    if size == _LARGE:
        dist.init_process_group("fake", store=counting, rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo", store=counting, rank=rank, world_size=size)
    of_group = counting.counts.total()
    state: dict[str, Any] = {"tensor": torch.ones(1000), "number": 1}
    times: dict[str, float] = {}
    for attempt in range(2):
        snapshot = Snapshot(f"{folder}/host{rank % 2}")
        start = time.monotonic_ns()
        assert snapshot.load(state) == (3 if attempt else None)
        times["Snapshot.load"] = time.monotonic_ns() - start
        for step in range(3 if not attempt else 0):
            start = time.monotonic_ns()
            snapshot.save(step + 1, state)
            times["Snapshot.save"] = time.monotonic_ns() - start
            if size != _LARGE:
                dist.barrier()
    of_snapshot = counting.counts.total() - of_group
    dist.destroy_process_group()
    counts = {"store operations of Snapshot": of_snapshot, **times}
    if size != _LARGE:
        counts["init_process_group's store operations"] = of_group
    return counts
