"""The example of repair: with processes started by hand, and with one torchrun for each node."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from helpers.forked import Forked, printed_by, torchrun
from helpers.jobs import Jobs

pytest.importorskip("transformers", reason="transformers is not installed")

_EXAMPLE = Path(__file__).parents[2] / "examples" / "repair.py"
_SECONDS = 240  # on a busy machine
_STEPS = 8
_KILLED_AFTER = 6  # steps, one more than the last checkpoint has
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(3 * _SECONDS)]


def _losses(outputs: Sequence[str]) -> dict[int, set[str]]:
    """The losses that were printed by step: with 9 digits, by which any two float32 differ."""
    found: dict[int, set[str]] = {}
    for output in outputs:
        for step, loss in re.findall(r"^step (\d+) loss (\S+)\n", output, re.MULTILINE):
            found.setdefault(int(step), set()).add(loss)
    return found


def _arguments(jobs: Jobs, name: str, ranks: int, folder: Path) -> list[str]:
    return [
        *(f"--store={jobs.address}", f"--name={name}", f"--ranks={ranks}", f"--steps={_STEPS}"),
        f"--folder={folder / name}",
    ]


def _by_hand(jobs: Jobs, name: str, ranks: int, folder: Path, n_processes: int) -> list[Forked]:
    arguments = _arguments(jobs, name, ranks, folder)
    return [Forked([str(_EXAMPLE), *arguments], env=_ENVIRONMENT) for _ in range(n_processes)]


def _ended(processes: Sequence[Forked]) -> list[tuple[int, str, str]]:
    return [one.communicate(_SECONDS) for one in processes]


def _undisturbed(jobs: Jobs, ranks: int, folder: Path) -> dict[int, set[str]]:
    ends = _ended(_by_hand(jobs, "undisturbed", ranks, folder, ranks))
    losses = _losses([out for _, out, _ in ends])
    assert list(losses) == list(range(1, _STEPS + 1)), ends
    assert all(len(of_step) == 1 for of_step in losses.values())
    return losses


def _wait_for(step: int, printed: Callable[[], list[str]], processes: Sequence[Forked]) -> None:
    """Wait until a step is printed."""
    while step not in _losses(printed()):
        assert all(one.is_alive() for one in processes), _ended(processes)
        time.sleep(0.02)


def test_it_is_short() -> None:
    assert len(_EXAMPLE.read_text().splitlines()) < 120


def test_a_spare_takes_the_place_of_a_killed_process(jobs: Jobs, tmp_path: Path) -> None:
    expected = _undisturbed(jobs, 8, tmp_path)
    processes = _by_hand(jobs, "disturbed", 8, tmp_path, 9)

    def printed() -> list[str]:
        return [one.printed_so_far()[0] for one in processes]

    _wait_for(_KILLED_AFTER, printed, processes)
    [rank_0] = [one for one, out in zip(processes, printed(), strict=True) if out]
    rank_0.kill()
    ends = _ended(processes)
    assert sorted(status for status, _, _ in ends) == [-signal.SIGKILL, *[0] * 8], ends
    outputs = [out for _, out, _ in ends]
    assert len([one for one in outputs if one]) == 2, "no other process became rank 0"
    assert _losses(outputs) == expected


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12))
def test_processes_are_killed_at_random_moments(jobs: Jobs, tmp_path: Path, seed: int) -> None:
    begin = monotonic()
    expected = _undisturbed(jobs, 4, tmp_path)
    longest, random = monotonic() - begin, Random(seed)
    begin = monotonic()
    processes = _by_hand(jobs, "disturbed", 4, tmp_path, 7)
    killed = random.sample(processes, random.randint(1, 3))
    for moment, process in sorted(
        (random.uniform(0.5, longest), process.pid) for process in killed
    ):
        time.sleep(max(0.0, begin + moment - monotonic()))
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(process, signal.SIGKILL)
    ends = _ended(processes)
    for process, (status, _, _) in zip(processes, ends, strict=True):
        assert status == 0 or (status == -signal.SIGKILL and process in killed), ends
    assert _losses([out for _, out, _ in ends]) == expected, ends


def test_torchrun_restarts_the_workers_of_one_node_only(jobs: Jobs, tmp_path: Path) -> None:
    expected = _undisturbed(jobs, 4, tmp_path)
    arguments = _arguments(jobs, "disturbed", 4, tmp_path)
    logs = [tmp_path / "logs" / str(node) for node in range(2)]
    agents = [
        torchrun(2, _EXAMPLE, *arguments, folder=folder, restarts=3, env=_ENVIRONMENT)
        for folder in logs
    ]

    def printed() -> list[str]:
        return [printed_by(rank, folder) for folder in logs for rank in range(2)]

    _wait_for(_KILLED_AFTER, printed, agents)
    before = [_worker(logs[0], rank) for rank in range(2)]
    os.kill(_worker(logs[1], rank=1), signal.SIGKILL)
    while not [*logs[1].glob("*/attempt_1/*/stdout.log")]:
        assert all(one.is_alive() for one in agents), _ended(agents)
        time.sleep(0.02)
    assert [_worker(logs[0], rank) for rank in range(2)] == before
    ends = _ended(agents)
    errors = {str(log): log.read_text() for log in tmp_path.glob("logs/*/*/*/*/stderr.log")}
    assert [status for status, _, _ in ends] == [0, 0], (ends, errors)
    assert _losses(printed()) == expected
    attempts = [sorted(one.name for one in folder.glob("*/attempt_*")) for folder in logs]
    assert attempts == [["attempt_0"], ["attempt_0", "attempt_1"]], (ends, errors)


def _worker(logs: Path, rank: int) -> int:
    """The process whose standard output is a log of this rank of an agent."""
    [process] = [
        int(stdout.parts[2])
        for stdout in Path("/proc").glob("[0-9]*/fd/1")
        if Path(os.path.realpath(stdout)).match(f"{logs}/*/*/{rank}/stdout.log")
    ]
    return process
