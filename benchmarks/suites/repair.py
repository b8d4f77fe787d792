"""Recovery of a job that has lost a rank: seconds on real processes, and load of the store.

Three ways are compared. In each, a rank of 8 kills itself in the middle of a step. What counts is
the time from there until every rank has finished this step. Stock torch restarts all processes, by
torchrun, or creates everything again in those that are left. Meshverse repairs the job.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from harness import OURS, STOCK, Check, Outcome, Run
from suites.repair_model import RANKS, Plan
from suites.repair_store import measure_store

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "A job that has lost a rank"
METHOD = (
    "losses: 8 gloo processes (HSDP 2 x 2, TP 2) and a spare on one machine, one thread each; a "
    "Llama model of 4 layers with AdamW; wall clock from SIGKILL, between a forward and a "
    "backward pass, until all ranks have finished that step; each part ends when the last rank "
    "has done it. Stock is `torchrun --max-restarts`; in process: all ranks that are left end "
    "their groups and build everything again with a spare, with torch only. Both load a "
    "checkpoint of the step before, for which nobody waited; torch's collectives have a timeout "
    "of 10 s. Before times count, the losses of all steps are compared with an undisturbed run's, "
    "bit by bit. Store: ranks of a large job are played by a few threads and processes"
)
SCALE = "ranks"
_IN_PROCESS, _UNDISTURBED = "in process", "undisturbed"
_LIMIT_S = 600
_LOSSES = {2: 5, 5: 2, 8: 0}  # the rank that is lost, by the number of the step
_STEPS = 10

_TOTAL, _NOTICED_TOTAL = "from the loss to the next whole step", "the same, without noticing it"
_PARTS = {
    "noticed": "of it, noticed by all",
    "started": "of it, processes ended and started",
    "imported": "of it, imports",
    "ended": "of it, old groups ended",
    "decided": "of it, new ranks decided",
    "default group": "of it, default group",
    "built": "of it, model built (Meshverse: on the spare)",
    "revived": "of it, groups revived",
    "state": "of it, state fetched or loaded",
    "finished": "of it, the step",
}
"""The events that end the parts, in the order in which they come."""
_FASTER_THAN = {STOCK: ("torchrun's restart", 3.0), _IN_PROCESS: ("torch alone in process", 1.5)}


def run(run: Run) -> Outcome:
    """Lose ranks in all three ways, eager and compiled; then load a store as a large job does."""
    outcome = Outcome()
    if sys.platform != "linux":
        outcome.notes.append("Lost ranks are skipped: the clock that processes share is Linux's.")
    else:
        _measure_losses(run, outcome)
    run.tell(0, 1, "store")
    measure_store(run, outcome)
    return outcome


def _measure_losses(run: Run, outcome: Outcome) -> None:
    sides = [STOCK, _IN_PROCESS, OURS]
    repetitions = run.choose(2, 1)
    losses = run.choose(_LOSSES, dict(list(_LOSSES.items())[:1]))
    kinds = run.choose([False, True], [False])
    steps, step = len(kinds) * (1 + repetitions * len(sides)), itertools.count()
    for compiled in kinds:
        kind = "compiled" if compiled else "eager"
        run.tell(next(step), steps, f"{kind}, undisturbed")
        expected = _play(_UNDISTURBED, {}, compiled).losses
        for repetition in range(repetitions):
            for side in sides[:: 1 if repetition % 2 == 0 else -1]:
                run.tell(next(step), steps, f"{kind}, {side}")
                played = _play(side, losses, compiled)
                _compare(played.losses, expected, f"{side}, {kind}")
                for loss in played.repairs:
                    _add(outcome, kind, side, loss)
        outcome.checks += _checks(outcome, kind)
    for one in outcome.measurements:
        one.figure = "losses" if one.operation.endswith(_TOTAL) else ""


_Losses = set[tuple[int, int, str]]
"""Rank, step and loss, of each rank and step."""


def _compare(found: _Losses, expected: _Losses, who: str) -> None:
    """Compare losses with those of an undisturbed run."""
    assert len(expected) == RANKS * _STEPS
    assert found == expected, f"{who}: losses {sorted(found ^ expected)} are of one run only"


def _add(outcome: Outcome, kind: str, side: str, ends: dict[str, float]) -> None:
    outcome.of(f"{kind}: {_TOTAL}", RANKS).add(side, ends["finished"])
    if "noticed" in ends:
        seconds = ends["finished"] - ends["noticed"]
        outcome.of(f"{kind}: {_NOTICED_TOTAL}", RANKS).add(side, seconds)
    last = 0.0
    for event, part in _PARTS.items():
        if event in ends:
            outcome.of(f"{kind}: {part}", RANKS).add(side, max(0.0, ends[event] - last))
            last = max(last, ends[event])


def _checks(outcome: Outcome, kind: str) -> list[Check]:
    total = outcome.of(f"{kind}: {_TOTAL}", RANKS).samples
    checks = [
        Check.faster(f"{kind}: {_TOTAL}, faster than {words}", times, total[side], total[OURS])
        for side, (words, times) in _FASTER_THAN.items()
    ]
    noticed = outcome.of(f"{kind}: {_NOTICED_TOTAL}", RANKS).samples
    claim = f"{kind}: {_NOTICED_TOTAL}, of the time of torch alone in process"
    return [*checks, Check.within(claim, 1, noticed[_IN_PROCESS], noticed[OURS])]


# --- a run ----------------------------------------------------------------------------------------


class _Played(NamedTuple):
    """A run of the job.

    Attributes:
        losses: those of all ranks, also from before a restart.
        repairs: of each lost rank, when the last rank came to each event; nanoseconds after it.
    """

    losses: _Losses
    repairs: list[dict[str, float]]


def _play(side: str, losses: dict[int, int], compiled: bool) -> _Played:
    folder = Path(tempfile.mkdtemp(prefix="repair-"))
    try:
        plan = Plan(str(folder), _STEPS, losses, compiled)
        _launch(side, plan)
        found = {
            (rank, int(step), loss)
            for rank in range(RANKS)
            for step, loss in map(str.split, (folder / f"losses-{rank}").read_text().splitlines())
        }
        return _Played(found, _repairs(folder, len(losses)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _repairs(folder: Path, n_losses: int) -> list[dict[str, float]]:
    lines = [line for path in folder.glob("events-*") for line in path.read_text().splitlines()]
    events = sorted(
        (int(at), int(step), event) for at, step, event in (line.split(" ", 2) for line in lines)
    )
    repairs: list[dict[str, float]] = []
    start, lost_in = 0, -1
    for at, step, event in events:
        if event == "killed":
            start, lost_in = at, step
            repairs.append({})
        elif repairs and (event != "finished" or step == lost_in):
            repairs[-1][event] = float(at - start)
    assert len(repairs) == n_losses, f"{len(repairs)} ranks were lost"
    return repairs


def _launch(side: str, plan: Plan) -> None:
    """Run the job in processes of its own, all of which have ended afterwards."""
    here = Path(__file__).resolve().parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
        # Else torch 2.13 gives restarted ranks a store with the gloo addresses of ended ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if side == STOCK:
        options = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
        module = ["torch.distributed.run", *options, "-m", "suites.repair_torchrun"]
    else:
        module = ["suites.repair_jobs", side]
    output = Path(plan.folder, "output")
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, plan.text()],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise RuntimeError(f"{side} ended with {code}:\n{output.read_text()[-4000:]}")
    time.sleep(0.5)  # until the system has taken the memory of all processes back
