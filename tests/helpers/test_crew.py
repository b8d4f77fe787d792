"""The crew itself: a failure shows where, a hang ends, and work goes on afterwards."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshverse
from helpers.crew import Crew, Failure, RankError, report

_LOCKS = []


def _rank_and_process() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("no such axis")
    dist.all_reduce(torch.ones(1))


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        _sleep_long()


def _sleep_long() -> None:
    time.sleep(1000)  # sleep: until the crew ends it


def _die() -> None:
    os._exit(3)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _worker_threads_beside_groups() -> tuple[int, int]:
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    groups += meshverse.init_device_mesh("cpu", (2, 1)).get_all_groups()
    for group in groups:  # a thread has its name once it runs
        dist.all_reduce(torch.zeros(1), group=group)
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # another thread has ended
            names.append(file.read_text().strip())
    return names.count("pt_gloo_runloop"), len({id(group) for group in groups})


def _hold_a_lock() -> str:
    lock = multiprocessing.Lock()  # as progress bars do
    _LOCKS.append(lock)
    return lock._semlock.name  # type: ignore[attr-defined]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system lists no threads")
def test_gloo_groups_have_one_worker_thread() -> None:
    crew = Crew()  # no group of an earlier test is left in its processes
    for n_threads, n_groups in crew.run(_worker_threads_beside_groups, 2):
        assert n_threads == n_groups > 1
    crew.stop()


def test_every_rank_is_a_process_of_its_own(crew: Crew) -> None:
    answers = crew.run(_rank_and_process, 4)
    assert [rank for rank, _ in answers] == [0, 1, 2, 3]
    assert len({process for _, process in answers} | {os.getpid()}) == 5


@pytest.mark.long
def test_a_failing_rank_shows_its_traceback_and_work_goes_on() -> None:
    crew = Crew()
    with pytest.raises(RankError, match=r"rank 1: KeyError[^$]*_fail_on[^$]*no such axis"):
        crew.run(_fail_on, 2, 1)
    with pytest.raises(RankError, match=r"rank 0: did not finish in 30 s[^$]*_sleep_long"):
        crew.run(_hang_on, 2, 0, timeout=30)  # short-timeout: it must elapse
    with pytest.raises(RankError, match="rank 0: died with exit code 3"):
        crew.run(_die, 1)
    with pytest.raises(RankError, match=r"exit code -11\n[^$]*Segmentation fault[^$]* in _crash"):
        crew.run(_crash, 1)
    assert len(crew.run(_rank_and_process, 2)) == 2
    crew.stop()


def _die_while_others_wait(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def test_the_rank_that_failed_first_is_shown_in_full_and_others_in_a_line() -> None:
    crew = Crew()
    with pytest.raises(RankError) as raised:
        crew.run(_die_while_others_wait, 3, 1)
    first, *others = str(raised.value).splitlines()
    assert first == "--- rank 1: died with exit code 3"
    lines = [line for line in others if line.startswith("--- ")]
    assert [re.match(r"--- rank (\d)", line)[1] for line in sorted(lines)] == ["0", "2"]
    assert "Traceback" not in str(raised.value)


def test_failures_are_ordered_by_the_moment_of_the_failure() -> None:
    cause = Failure(5.0, "KeyError: 'the cause'", "Traceback: the cause\n")
    consequence = Failure(5.25, "RuntimeError: closed", "Traceback: closed\n")
    waiting = Failure(math.inf, "did not finish", 'Thread:\n  File "x", line 3 in wait\n  File "y"')
    assert report({0: waiting, 1: consequence, 2: cause}) == (
        "--- rank 2: KeyError: 'the cause'\nTraceback: the cause\n\n"
        "--- rank 1, 0.2 s later: RuntimeError: closed\n"
        '--- rank 0: did not finish, in File "x", line 3 in wait'
    )
    assert report({0: waiting, 1: waiting}).count('File "y"') == 2


@pytest.mark.skipif(sys.platform != "linux", reason="looks for semaphores where Linux has them")
def test_processes_take_back_the_semaphores_of_their_locks() -> None:
    crew = Crew()
    names = crew.run(_hold_a_lock, 2)
    there = [Path(f"/dev/shm/sem.{name.lstrip('/')}") for name in names]
    assert all(path.exists() for path in there)
    crew.stop()
    assert not any(path.exists() for path in there)
