"""Output of `ncclras`, in the form of NCCL's guide: there is no GPU here to run it on."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from meshverse.hang.ras import Process, findings_in, report, stacks
from meshverse.tools.commands import hang_command
from meshverse.tools.commands.main import main

_HEAD = """\
NCCL version 2.28.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  {word}

Errors
======

"""
_HEALTHY = _HEAD.format(word="OK") + "\nWarnings\n========\n\n"
_BEHIND = (
    _HEAD.format(word="MISMATCH")
    + """
Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation {number} -- GPU 3 managed by process {pid} on node {node}
"""
)
_DEAD = (
    _HEAD.format(word="INCOMPLETE")
    + """\
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank (0 additional GPUs)
  The missing ranks: 5

Warnings
========

"""
)


def test_a_rank_that_is_behind() -> None:
    (found,) = findings_in(_BEHIND.format(number=60, pid=1650386, node="node1"))
    assert (found.communicator, found.kind) == ("27a079b828ff1a75", "MISMATCH")
    assert found.processes == (Process(1650386, "node1"),)
    assert len(found.lines) == 3


def test_a_dead_process_and_what_lacks_it() -> None:
    dead, incomplete = findings_in(_DEAD)
    assert (dead.kind, dead.communicator) == ("DEAD", "")
    assert dead.processes == (Process(3487984, "172.16.64.213"),)
    assert incomplete.lines[-1] == "The missing ranks: 5"


def test_a_healthy_job_and_other_output() -> None:
    assert findings_in(_HEALTHY) == []
    assert [*report([], [], 10)] == ["NCCL's RAS reports no error and no rank that differs."]
    with pytest.raises(ValueError, match="ncclras printed no job summary: 'usage'"):
        findings_in("usage")


def test_what_changes_is_not_called_stuck() -> None:
    before, now = (
        findings_in(_BEHIND.format(number=number, pid=1, node="n")) for number in (59, 60)
    )
    assert "changed within 10 s, so perhaps not stuck" in next(report(before, now, 10))
    assert "unchanged for 10 s" in next(report(now, now, 10))


def test_a_process_of_another_host_gets_the_command() -> None:
    findings = findings_in(_DEAD)
    assert [*stacks(findings)] == [
        "For its stack, run on 172.16.64.213: py-spy dump --native --pid 3487984"
    ]


def _program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!{sys.executable}\nprint({text!r})\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_the_command_asks_twice_and_prints_stacks(tmp_path, monkeypatch, capsys) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    _program(tmp_path, "ncclras", _BEHIND.format(number=60, pid=process.pid, node="127.0.0.1"))
    _program(tmp_path, "py-spy", "Thread 0x1 (active): input (<string>:1)")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(hang_command, "_SECONDS_BETWEEN", 0.0)
    assert main(["hang", "--live", "localhost"]) == 1
    out = capsys.readouterr().out
    process.communicate(b"\n")
    assert "MISMATCH in communicator 27a079b828ff1a75, unchanged for 0 s" in out
    assert f"Stack of process {process.pid} on 127.0.0.1:\n  Thread 0x1 (active)" in out


def test_without_ncclras(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["hang", "--live", "localhost"]) == 2
    assert "ncclras is not installed here" in capsys.readouterr().err
    assert main(["hang"]) == 2
    assert "pass dumps or folders, or --live HOST" in capsys.readouterr().err
