"""The processes of the benchmarks: what they leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.forked import SECONDS

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# The lock of a progress bar is such a one, and transformers and torch draw bars.
_HOLDS_A_LOCK = """
import multiprocessing

locks = []

def hold_a_lock(rank, store):
    locks.append(multiprocessing.Lock())
    return rank
"""
_RUNS_A_CREW = """
from crews import in_crew
from holding import hold_a_lock

if __name__ == "__main__":
    print(in_crew(2, hold_a_lock, limit_s=200))
"""


@pytest.mark.long
@pytest.mark.processes
def test_processes_take_back_the_semaphores_of_their_locks(tmp_path: Path) -> None:
    (tmp_path / "holding.py").write_text(_HOLDS_A_LOCK)
    program = f"import sys; sys.path.append({str(_BENCHMARKS)!r})\n"
    (tmp_path / "running.py").write_text(program + _RUNS_A_CREW)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "running.py")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout == "[0, 1]\n", done.stderr
    assert "leaked semaphore" not in done.stderr
