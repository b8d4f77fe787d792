"""NCCL's watchdog ends a call by the timeout of its mesh, not by the default group's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.at_platforms import ON_GPU
from helpers.forked import SECONDS

pytestmark = [*ON_GPU, pytest.mark.long]

_JOB = Path(__file__).parent / "nccl_timeout_job.py"
_SIZE, _ABSENT = 4, 3
_TIMEOUT_SECONDS = 120  # in which all ranks also create the communicator


def test_the_watchdog_ends_a_call_of_a_flattened_axis_by_the_meshs_timeout(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    files = [tmp_path / f"out{rank}.txt" for rank in range(_SIZE)]
    ranks = []
    for rank, file in enumerate(files):
        command = [sys.executable, str(_JOB), str(tmp_path), str(_TIMEOUT_SECONDS), str(rank)]
        with file.open("w") as out:
            ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
    try:
        ended = [one.wait(timeout=SECONDS) for one in ranks[:_ABSENT]]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    said = [file.read_text() for file in files]
    assert all("begun" in text.splitlines() for text in said), said
    assert not any("ended" in text.splitlines() for text in said)
    assert all(code != 0 for code in ended)
    # One rank's end may reach the others as an error of the network before their own timeout.
    assert f"Timeout(ms)={_TIMEOUT_SECONDS * 1000}) ran for" in "".join(said), said
