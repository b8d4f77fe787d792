"""`meshverse doctor` on real processes: what is well, what is not, and who does not answer."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.forked import SECONDS, Forked
from helpers.ports import held_port
from helpers.turns import wait_until

pytestmark = pytest.mark.processes

_DOCTOR = ["-m", "meshverse", "doctor"]
_LOGGED_BY_TORCH = re.compile(r"^\[[WE]\d{4} .*\] \[c10d\] .*\n", re.MULTILINE)


def _environments(
    ranks: Sequence[int],
    world_size: int,
    port: int | None = None,
    own: Mapping[int, Mapping[str, str]] | None = None,
) -> list[dict[str, str]]:
    """The environment of some ranks of a world, as srun would give it."""
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or held_port()),
        "OMP_NUM_THREADS": "1",
    }
    return [
        {**os.environ, **common, "RANK": str(rank), **(own or {}).get(rank, {})} for rank in ranks
    ]


def _start(
    ranks: Sequence[int],
    world_size: int,
    *arguments: str,
    port: int | None = None,
    own: Mapping[int, Mapping[str, str]] | None = None,
) -> list[Forked]:
    """The doctor on some ranks of a world."""
    environments = _environments(ranks, world_size, port, own)
    return [Forked([*_DOCTOR, *arguments], env=environment) for environment in environments]


def _ends(processes: Sequence[Forked]) -> list[tuple[int, str, str]]:
    """The status, output and errors of each process, without what torch's C++ code logs.

    Without IPv6, c10d warns that it cannot look up a host's name.
    """
    ends = [process.communicate() for process in processes]
    return [(status, out, _LOGGED_BY_TORCH.sub("", err)) for status, out, err in ends]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--megabytes", "2"], r"Rank 1 was started with --megabytes 2\.0, and rank 0 with 1\.0\."),
        (["--megabytes", "1", "a=2"], r"Rank 1 was started with groups \[\[\['a'\], .*\['world'\]"),
    ],
)
def test_ranks_with_different_arguments_get_an_error(arguments: list[str], said: str) -> None:
    port = held_port()
    processes = _start([0], 2, "--megabytes", "1", port=port)
    processes += _start([1], 2, *arguments, port=port)
    ends = _ends(processes)
    assert [status for status, *_ in ends] == [1, 1]
    assert re.search(said, "".join(err for *_, err in ends))


@pytest.mark.long
def test_a_job_that_is_well() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    arguments = ["dp=2,tp=2,all=dp*tp", "--view", "a=4,b=1", "--megabytes", "1", "--json"]
    done = subprocess.run(
        [*torchrun, *_DOCTOR, *arguments], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # by rank 0 alone
    assert (data["is_well"], data["problems"], data["world"]) == (True, [], 4)
    assert data["hosts"] == [socket.gethostname()] * 4
    axes = {" ".join(axis["axes"]): axis for axis in data["axes"]}
    sizes = {name: (axis["size"], axis["count"]) for name, axis in axes.items()}
    assert sizes == {"dp": (2, 2), "tp": (2, 2), "all a": (4, 1), "b": (1, 4)}
    assert all(axis["is_right"] for axis in axes.values())
    assert all(axes[name]["bytes_per_second"] > 0 for name in ("dp", "tp", "all a"))
    assert axes["b"]["bytes_per_second"] is None
    assert axes["dp"]["large_bytes"] == 2**20
    assert {(axis["nodes"], axis["planned_nodes"]) for axis in axes.values()} == {(1, 1)}


_TWICE = """
import os, torch, torch.distributed as dist
from datetime import timedelta
from meshverse.tools.doctor import examine

def ask(view):
    os.environ["NCCL_TURN"] = view  # which the reported environment then has
    found = examine([view], backend="gloo", large_bytes=1000, timeout=timedelta(seconds=30))
    return found.axes[0].axes, found.environment["NCCL_TURN"], found.problems

assert ask("a=2") == (["a"], "a=2", [])
assert ask("b=2") == (["b"], "b=2", [])
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == 2
dist.destroy_process_group()
"""


def test_examinations_and_the_job_follow_each_other_in_one_process(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(_TWICE)
    ranks = [Forked([str(script)], env=environment) for environment in _environments([0, 1], 2)]
    for status, _, err in _ends(ranks):
        assert status == 0, err


_FAILS = """
import os, torch
from datetime import timedelta
from torch.overrides import TorchFunctionMode
from meshverse.tools.doctor import NotAllHereError, examine

RANK = int(os.environ["RANK"])
reports = []

class Broken(TorchFunctionMode):  # multiplies no matrices
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.mm and RANK == 1:
            raise TypeError("ECC error\\nat 0x1")
        return function(*args, **(kwargs or {}))

def ask(report=reports.append):
    return examine(backend="gloo", large_bytes=1000, timeout=timedelta(seconds=30), report=report)

def error_of(*report):
    try:
        ask(*report)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def full(result):
    raise OSError(f"no space for {type(result).__name__}")

with Broken():
    error = error_of()
    assert error.startswith("NotAllHereError: Rank 1 on "), error
    assert error.endswith(" failed in its multiplications of matrices. The error was: ECC error")
    assert len(reports) == RANK, reports  # by rank 1 alone
    error = error_of(full)  # the rank that reports it raises what its report raised
    assert ("no space for NotAllHereError", "ECC error")[1 - RANK] in error, error
if RANK == 0:
    assert error_of(full) == "OSError: no space for Examination"
else:
    assert ask(full).is_well
assert ask().is_well
"""


def test_a_failure_of_one_rank_or_of_its_report_keeps_no_other_waiting(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(_FAILS)
    ranks = [Forked([str(script)], env=environment) for environment in _environments([0, 1], 2)]
    for status, _, err in _ends(ranks):
        assert status == 0, err


@pytest.mark.long
def test_srun_as_the_page_shows_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text(encoding="utf-8")
    shown = re.search(r"^srun (bash -c '[^']+')", page, re.MULTILINE)
    assert shown is not None
    _, flag, script = shlex.split(shown[1])
    script = script.replace("python ", f"{shlex.quote(sys.executable)} ")
    slurm = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    # Values that the doctor refuses: the line has to give its own.
    slurm |= dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "none")
    own = {
        rank: {**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)
    }
    ranks = [
        subprocess.Popen(["bash", flag, script], env=environment, stdout=subprocess.PIPE, text=True)
        for environment in _environments([0, 1], 2, own=own)
    ]
    outputs = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    data = json.loads(outputs[0])
    assert (data["world"], data["axes"][0]["planned_nodes"]) == (2, 1)


def test_tables_are_for_people() -> None:
    (zero, one) = _ends(_start([0, 1], 2, "dp=2", "--megabytes", "0.1"))
    assert (zero[0], one) == (0, (0, "", ""))
    assert "2 on 1 host, backend gloo" in zero[1]
    assert "bandwidth" in zero[1]
    assert zero[1].rstrip().endswith("No problem.")


def test_without_a_view_it_checks_the_world() -> None:
    ends = _ends(_start([0, 1], 2, "--json", "--megabytes", "0.1", "--view", "a=-1,b=1"))
    (axis, _) = json.loads(ends[0][1])["axes"]
    assert (axis["axes"], axis["size"], axis["count"]) == (["a"], 2, 1)
    ends = _ends(_start([0, 1], 2, "--json", "--megabytes", "0.1"))
    (axis,) = json.loads(ends[0][1])["axes"]
    assert (axis["axes"], axis["size"], axis["count"]) == (["world"], 2, 1)


def test_the_error_says_in_what_ranks_disagree() -> None:
    own = {1: {"TORCH_DISTRIBUTED_DEBUG": "INFO"}}
    ends = _ends(_start([0, 1, 2], 3, "dp=3", "--json", "--megabytes", "0.1", own=own))
    assert [status for status, _, _ in ends] == [1, 1, 1]  # on all ranks
    (problem,) = json.loads(ends[0][1])["problems"]
    assert problem == (
        "TORCH_DISTRIBUTED_DEBUG is not the same on all ranks: not set on ranks 0, 2; INFO on "
        "rank 1."
    )


# In which every step of the ranks that are there ends, on a machine however busy.
_TIMEOUT = "40"


@pytest.mark.long
@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.sweep), 2])
def test_a_rank_that_does_not_come_is_named_in_time(missing: int) -> None:
    store = None if missing else dist.TCPStore("127.0.0.1", 0, is_master=True)
    port = held_port() if store is None else store.port
    here = [rank for rank in range(3) if rank != missing]
    ends = _ends(_start(here, 3, "dp=3", "--timeout", _TIMEOUT, port=port))
    for status, out, err in ends:
        assert (status, out) == (1, "")
        assert "Traceback" not in err
    (error,) = [err for _, _, err in ends if err]  # by one rank
    assert f"rank {missing} has not started" in error


def test_many_ranks_that_do_not_come_are_one_short_line() -> None:
    own = {0: {"LOCAL_WORLD_SIZE": "1"}}
    (end,) = _ends(_start([0], 64, "--timeout", "1", own=own))  # short-timeout: it must elapse
    assert (
        end[2] == "meshverse doctor: Rank 0 waited 1 s for others: ranks 1-63 have not started.\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of systems with /dev/full")
@pytest.mark.long
def test_a_report_that_cannot_be_written_ends_with_2() -> None:
    command = [sys.executable, *_DOCTOR, "--megabytes", "0.1", "--backend", "gloo"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            env=_environments([0], 1)[0],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
    assert done.returncode == 2
    assert "meshverse: [Errno 28] No space left on device" in done.stderr


@pytest.mark.long
def test_a_rank_that_stops_in_the_middle_is_named() -> None:
    port = held_port()
    ranks = _start([0, 1, 2], 3, "dp=3", "--timeout", _TIMEOUT, "--megabytes", "64", port=port)
    _wait_for_note(2, port, "all-reduces")
    os.kill(ranks[2].pid, signal.SIGSTOP)
    try:
        ends = _ends(ranks[:2])
    finally:
        ranks[2].kill()
        ranks[2].communicate()
    assert [status for status, _, _ in ends] == [1, 1]
    (error,) = [err for _, _, err in ends if err]  # by one rank
    host = socket.gethostname()
    assert f"rank 2 on {host} has not responded during: the all-reduces of axis dp" in error
    assert not re.search(f"rank [01] on {host} (gives no|is still)", error)  # which live


def _wait_for_note(rank: int, port: int, text: str) -> None:
    """Wait until a rank notes a step with this text in its name."""
    wait_until(lambda: _listens(port))  # a TCPStore waits for seconds between its attempts
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=60))
    notes = dist.PrefixStore("meshverse doctor 0 0", store)
    key = f"note {rank}"
    wait_until(lambda: notes.check([key]) and text in notes.get(key).decode())


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dp=2"], "has 2 ranks, but the world has 3"),
        # short-timeout: it is refused
        (["dp=3", "--timeout", "0"], "--timeout 0.0: pass a number above 0"),
        (["dp=3", "tp=1"], "dp=3 tp=1: write the axes of a view without spaces, as dp=3,tp=1"),
    ],
)
def test_what_cannot_be_asked_ends_with_2_and_is_said_once(arguments, said: str) -> None:
    ends = _ends(_start([0, 1, 2], 3, *arguments))
    assert [status for status, _, _ in ends] == [2, 2, 2]
    (line,) = "".join(err for _, _, err in ends).splitlines()
    assert said in line


_PRINTS_LATE = """
import builtins, os, sys, time
from meshverse.tools.commands.main import main

said, rank = sys.argv[1], int(os.environ["RANK"])
plain = print

def late(*values, **options):
    time.sleep(4)  # sleep: so that who does not wait for it ends before
    plain(*values, **options)
    open(said, "a").write("said")

builtins.print = late
status = main(["doctor", *sys.argv[2:]])
assert os.path.exists(said), f"rank {rank} ended before somebody had spoken"
sys.exit(status)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "own", "status"),
    [
        pytest.param(["dp=3"], {1: {"TORCH_DISTRIBUTED_DEBUG": "INFO"}}, 1, id="problem"),
        pytest.param(["dp=2"], {}, 2, id="wrong view"),
        pytest.param(
            ["dp=4", "--timeout", _TIMEOUT], {}, 1, id="missing rank", marks=pytest.mark.sweep
        ),
    ],
)
def test_no_rank_ends_before_the_report_is_printed(tmp_path: Path, arguments, own, status) -> None:
    script, said = tmp_path / "late.py", tmp_path / "said"
    script.write_text(_PRINTS_LATE)
    size = 4 if arguments[0] == "dp=4" else 3  # rank 3 does not come
    ranks = [
        Forked([str(script), str(said), *arguments], env=environment)
        for environment in _environments([0, 1, 2], size, own=own)
    ]
    ends = _ends(ranks)
    assert [status_of for status_of, _, _ in ends] == [status] * 3, ends
    assert said.read_text() == "said"  # once


def test_without_a_launcher_it_says_how_to_start() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    status, _, err = Forked([*_DOCTOR, "dp=2"], env=environment).communicate()
    assert status == 2
    assert "torchrun --nproc-per-node 4 -m meshverse doctor dp=2,tp=2" in err
