"""Output of a failed test, and the processes that it leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from helpers import jitter, processes
from helpers.crew import Crew
from helpers.forked import Forked

_ROOT = Path(__file__).resolve().parents[2]
_PATHS = os.pathsep.join(str(_ROOT / folder) for folder in ("tests", "examples"))

_LEAVES_A_PROCESS = """
import os
import subprocess
import sys

from helpers.forked import Forked

def test_fails():
    forked = Forked(["-c", "input()"])
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    print("left", forked.pid, other.pid)
    assert False

def test_passes():
    pass
"""


def _pid(crew: Crew) -> int:
    (pid,) = crew.run(os.getpid, 1)
    return int(pid)


def test_those_that_a_test_started_end_and_those_of_the_crew_stay(crew: Crew) -> None:
    other = Forked(["-c", "import threading; threading.Event().wait()"])
    kept, moment = _pid(crew), processes.now() + 0.2
    while processes.now() <= moment:  # the system counts ages in ticks
        pass
    left = Forked(["-c", "import threading; threading.Event().wait()"])
    assert processes.end_those_since(moment) == [left.pid]
    assert left.communicate()[0] < 0
    assert other.is_alive()
    assert _pid(crew) == kept
    other.kill()
    other.communicate()


@pytest.mark.long
@pytest.mark.processes
def test_a_failed_test_leaves_no_process_and_says_how_to_run_it_again(tmp_path: Path) -> None:
    test = tmp_path / "test_leaves.py"
    test.write_text(_LEAVES_A_PROCESS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", str(test)],
        env=os.environ | {"PYTHONPATH": _PATHS, jitter.SWITCH: "7"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout
    left = re.search(r"left (\d+) (\d+)", ran.stdout)
    assert left is not None
    assert not any(psutil.pid_exists(int(pid)) for pid in left.groups())
    assert "run this test again" in ran.stdout
    assert f"{jitter.SWITCH}=7 {sys.executable} -m pytest -m '' 'test_leaves.py::test_fails'" in (
        ran.stdout
    )
