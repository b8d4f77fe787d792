"""Jobs of four ranks that hang on NCCL: verdicts of the watch, of the dumps and of NCCL's RAS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.at_platforms import ON_GPU
from helpers.forked import SECONDS
from meshverse.tools.commands.main import main

pytestmark = [*ON_GPU]

_JOB = Path(__file__).parent / "nccl_hang_job.py"
_ODD = "rank 3 (dp=1, tp=1) has not called it: look at gpu/nccl_hang_job.py"


class Hang(NamedTuple):
    """A hang, and its cause and a part of its verdict.

    Attributes:
        name: of the job.
        cause: of the first verdict; None where the dumps are said to show none.
        watch: part of a verdict of the watch.
        dumps: part of the output for the dumps; by default, as the watch's.
        is_timed: whether the GPUs' starts are recorded.
    """

    name: str
    cause: str | None
    watch: str
    dumps: str = ""
    is_timed: bool = False


_UNRECORDED = "the first call of a group or of a pair of ranks is recorded once all"
_HANGS = [
    Hang("sleeps", "missing", _ODD, "rank 3 (dp=1, tp=1) has not called it"),
    Hang("is_in_a_kernel", "unknown", "all ranks have enqueued the call"),
    Hang(
        "is_in_a_kernel",
        "late",
        "the GPU of rank 3 (dp=1, tp=1) has not started it",
        is_timed=True,
    ),
    Hang("crosses_two_groups", "deadlock", "a deadlock. Rank"),
    Hang("skips_then_barrier", "deadlock", "a deadlock. Rank"),
    Hang("calls_another_operation", "mismatch", "_all_gather_base on rank 3"),
    Hang("has_another_shape", "mismatch", "(4194304,) on rank 3"),
    Hang("dies", "missing", "rank 3 (dp=1, tp=1) is not responding", "no dump of rank 3"),
    Hang("lacks_a_send", "partner", _ODD, "rank 3 (dp=1, tp=1) has not called it"),
    Hang("receives_first", None, _ODD, _UNRECORDED),
    Hang("is_absent_from_the_first_call", None, _ODD, _UNRECORDED),
    Hang(
        "is_absent_from_the_first_call_as_its_first_rank",
        None,
        "rank 2 (dp=1, tp=0) has not called it: look at gpu/nccl_hang_job.py",
        _UNRECORDED,
    ),
]


_SHORT = ("sleeps", "crosses_two_groups", "lacks_a_send", "is_absent_from_the_first_call")
_CASES = [
    pytest.param(
        hang,
        id=hang.name + "-timed" * hang.is_timed,
        marks=() if hang.name in _SHORT else pytest.mark.long,
    )
    for hang in _HANGS
]


def _run(hang: Hang, folder: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCH_NCCL_ENABLE_TIMING": str(int(hang.is_timed)),
    }
    ranks = []
    for rank in range(4):
        with (folder / f"out{rank}.txt").open("w") as out:
            command = [sys.executable, str(_JOB), hang.name, str(folder), str(rank)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
    try:
        for one in ranks:
            one.wait(timeout=SECONDS)
    finally:
        for one in ranks:
            one.kill()
            one.wait()


@pytest.mark.parametrize("hang", _CASES)
def test_the_cause_is_found(hang: Hang, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(hang, tmp_path)
    said = "\n".join((tmp_path / f"out{rank}.txt").read_text() for rank in range(4))
    verdicts = [json.loads(file.read_text()) for file in tmp_path.glob("verdict_*")]
    assert hang.watch in "\n".join(one["text"] for one in verdicts), said
    if hang.name != "dies":
        assert "not responding" not in said
    command = ["hang", str(tmp_path / "dumps"), "--mesh", str(tmp_path / "mesh.json")]
    assert main(command) == (0 if hang.cause is None else 1)
    assert (hang.dumps or hang.watch) in capsys.readouterr().out
    if hang.cause is not None:
        main([*command, "--json"])
        assert json.loads(capsys.readouterr().out)[0]["cause"] == hang.cause
        assert hang.cause in {one["groups"][0]["cause"] for one in verdicts}
    if hang.name == "sleeps" and shutil.which("ncclras") is not None:
        ras = (tmp_path / "ras.txt").read_text()
        assert "NCCL's RAS: MISMATCH in communicator" in ras
        assert "Rank 1 has launched up to operation 3" in ras
