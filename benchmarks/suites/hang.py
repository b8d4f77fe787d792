"""Cost of the watch in a step, and the time that dumps of a large job take to read."""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import meshverse
from crews import in_crew
from harness import OURS, Check, Outcome, Run
from meshverse.hang.dumps import read_dumps
from meshverse.hang.report import ReportFormatter
from meshverse.hang.verdicts import Cause, find_stuck
from meshverse.hang.watch import _WatchedWorld
from meshverse.world import World

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "Watching for hangs"
METHOD = (
    "steps: wall clock of 4 processes, watched (a look a second) and not in turn, four matrix "
    "products and two all-reduces each; a look: with a full recorder of 2,000 calls; dumps: 200 "
    "calls each, as NCCL's watchdog writes them, read from files by as many processes as there are "
    "cores; memory: resident, of the process that gathers them, after less before"
)
SCALE = "ranks"

_PROCESSES, _STEPS, _LIMIT_S = 4, 150, 400.0
_WATCH_SECONDS = 4  # so that it looks once a second, five times as often as by default
_WATCHED, _NOT_WATCHED = "watched", "not watched"
_ENTRIES, _TP, _DP = 200, 8, 160
_ODD = 5_003


def run(run: Run) -> Outcome:
    """Measure steps, a look and the reading of dumps."""
    outcome = Outcome()
    repetitions = run.choose(30, 3)
    sizes = run.choose([1_280, 10_240], [1_280])
    steps = len(sizes) + 1
    run.tell(0, steps, "steps of 4 processes")
    for name, times, looks in in_crew(_PROCESSES, _steps, repetitions, limit_s=_LIMIT_S)[0]:
        for side, samples in times.items():
            for sample in samples:
                outcome.of(name, _PROCESSES).add(side, sample)
        for sample in looks:
            outcome.of("one look of the watch", _PROCESSES).add(OURS, sample)
    for name in ("an eager step", "a compiled step"):
        step = outcome.of(name, _PROCESSES)
        pairs = zip(step.samples[_WATCHED], step.samples[_NOT_WATCHED], strict=True)
        ratio = statistics.median(watched / alone for watched, alone in pairs)
        claim = f"{name}: watched, of the time without a watch"
        outcome.checks.append(Check(claim, ratio, 1.02, at_least=False))
    for index, size in enumerate(sizes):
        run.tell(index + 1, steps, f"dumps of {size:,} ranks")
        measured = list(_read(size, run.choose(2, 1)))
        for seconds, _ in measured:
            outcome.of("dumps read, verdict found", size).add(OURS, seconds * 1e9)
        memory = outcome.of("memory to read them", size)
        memory.add(OURS, measured[0][1])  # later ones find memory that the first has left
        memory.unit = "bytes"
    return outcome


def _steps(
    rank: int, store: dist.Store, repetitions: int
) -> list[tuple[str, dict[str, list[float]], list[float]]]:
    """Time steps with and without a watch, in turn."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_PROCESSES)
    mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weights = [torch.randn(256, 256) / 16 for _ in range(4)]

    def step(x: torch.Tensor) -> torch.Tensor:
        for index, weight in enumerate(weights):
            x = x @ weight
            if index % 2:
                x = functional.wait_tensor(functional.all_reduce(x, "avg", (mesh, index // 2)))
        return x

    compiled: Callable[..., Any] = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = torch.randn(64, 256)
    torch.testing.assert_close(compiled(x), step(x))
    found = []
    for name, program in (("an eager step", step), ("a compiled step", compiled)):
        times: dict[str, list[float]] = {_NOT_WATCHED: [], _WATCHED: []}
        for repetition in range(repetitions):
            sides = list(times.items())
            for side, samples in sides[:: 1 if repetition % 2 else -1]:
                watch = meshverse.watch(_WATCH_SECONDS if side == _WATCHED else None)
                time.sleep(0.2)  # in which its thread begins
                dist.barrier()
                start = time.perf_counter_ns()
                for _ in range(_STEPS):
                    program(x)
                samples.append((time.perf_counter_ns() - start) / _STEPS)
                if watch is not None:
                    watch.stop()
        found.append((name, times, []))
    for _ in range(2_000):  # fill the recorder
        dist.all_reduce(torch.ones(1))
    world = World.current()
    assert world is not None
    watched, over = _WatchedWorld(world, 60.0, None), threading.Event()
    looks = []
    for _ in range(50):
        start = time.perf_counter_ns()
        watched.look(0.5, over)
        looks.append(time.perf_counter_ns() - start)
    dist.barrier()
    dist.destroy_process_group()
    return [found[0], (found[1][0], found[1][1], looks[1:])]


# --- dumps ----------------------------------------------------------------------------------------


def _read(size: int, repetitions: int) -> Iterator[tuple[float, int]]:
    """Read the dumps of a job in which one rank has not come; yield seconds and bytes."""
    odd = _ODD % size
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), size, odd)
        for _ in range(repetitions):
            gc.collect()
            before, start = _resident_bytes(), time.perf_counter()
            dumps = read_dumps([folder])
            found = find_stuck(dumps.records)
            text = ReportFormatter(why_no_dump=dumps.why_missing).text(found)
            seconds = time.perf_counter() - start
            held = _resident_bytes() - before
            assert found[0].cause is Cause.MISSING
            assert [missing.rank for missing in found[0].missing] == [odd]
            assert f"Verdict: rank {odd} has not called it." in text
            assert len(found) == 2  # and the default group, which follows
            yield seconds, held
            del dumps, found


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _write(folder: Path, size: int, odd: int) -> None:
    """Write dumps: the odd rank's tensor-parallel group waits for it, all others in a barrier."""
    over = [_entry(("2", "mesh_dp"), number, "all_gather", True) for number in range(_ENTRIES - 3)]
    first = odd // _TP * _TP
    for rank in range(size):
        tp, dp = rank // _TP * _TP, rank // (_TP * _DP) * _TP * _DP + rank % _TP
        names = {
            f"tp{tp}": ("mesh_tp", range(tp, tp + _TP)),
            f"dp{dp}": ("mesh_dp", range(dp, dp + _TP * _DP, _TP)),
            "0": ("default_pg", range(size)),
        }
        in_tp, in_world = (f"tp{tp}", "mesh_tp"), ("0", "default_pg")
        own = [_entry(in_tp, 41, "all_reduce", True)]
        if first <= rank < first + _TP:
            own += [] if rank == odd else [_entry(in_tp, 42, "all_reduce", False)]
        else:
            own += [_entry(in_tp, 42, "all_reduce", True), _entry(in_world, 7, "barrier", False)]
        config = {
            name: {"name": name, "desc": description, "ranks": str(list(ranks))}
            for name, (description, ranks) in names.items()
        }
        dump = {"version": "2.10", "pg_config": config, "entries": over + own}
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def _entry(group: tuple[str, str], number: int, operation: str, done: bool) -> dict[str, Any]:
    """Return an entry as torch 2.13 writes it."""
    frames = [
        {"name": f"f{index}", "filename": "/opt/trainer/site-packages/torch/x.py", "line": index}
        for index in range(12)
    ]
    return {
        "frames": [*frames, {"name": "step", "filename": "/home/me/train.py", "line": 88}],
        "record_id": number,
        "pg_id": 1,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "input_sizes": [[4096]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096]],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": 1,
        "time_discovered_completed_ns": 1 if done else None,
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }
