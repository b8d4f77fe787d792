"""Input of the doctor: every rank checks it before anything starts."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshverse.tools.commands.main import main
from meshverse.tools.doctor import NotAllHereError, examine

_LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a launcher, with a port that nobody may open: nothing can start."""
    monkeypatch.setenv(_WAIT, "")  # what the command sets ends with the test
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", _WAIT):
        monkeypatch.delenv(name, raising=False)
    for name, value in _LAUNCHED.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "RANK",
            "1",
            "RANK='1' in the environment: the launcher must set it to an int from 0 to 0",
        ),
        ("RANK", "-1", "RANK='-1'"),
        ("RANK", "zero", "RANK='zero'"),
        ("RANK", "\u0660", "RANK='\u0660'"),  # a digit of another script
        ("RANK", "9" * 5000, "in the environment: the launcher must set it to an int from 0 to 0"),
        (
            "WORLD_SIZE",
            "0",
            "WORLD_SIZE='0' in the environment: the launcher must set it to an int of",
        ),
        ("WORLD_SIZE", "1.0", "WORLD_SIZE='1.0'"),
        ("MASTER_PORT", "http", "MASTER_PORT='http'"),
        ("MASTER_PORT", "65536", "an int from 1 to 65535"),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE='0'"),
        ("LOCAL_WORLD_SIZE", "8(x2)", "LOCAL_WORLD_SIZE='8(x2)'"),
        ("LOCAL_RANK", "", "LOCAL_RANK=''"),
    ],
)
def test_a_variable_that_is_no_number_is_named(monkeypatch, name, value, said: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(said)):
        examine(["dp=1"], backend="gloo")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "nope"}, "The backend 'nope' cannot be examined. This torch has gloo"),
        ({"backend": "cpu:gloo,cuda:nope"}, "cannot be examined. This torch has gloo"),
        ({"backend": ""}, "The backend '' cannot be examined"),
        ({"backend": "fake"}, "The backend 'fake' cannot be examined. This torch has gloo"),
        ({"backend": "gloo,cuda:gloo"}, "'gloo' in the backend 'gloo,cuda:gloo' has no device"),
        ({"backend": "undefined"}, "cannot be examined"),
        ({"timeout": timedelta(0)}, "give a timedelta from 1 ms to 30 days"),
        ({"timeout": timedelta.max}, "give a timedelta from 1 ms to 30 days"),
        ({"timeout": 60}, "timeout=60: give a timedelta"),
        ({"large_bytes": 0}, "large_bytes=0: give an int from 1 to 2**40"),
        ({"large_bytes": 2.5}, "large_bytes=2.5: give an int from 1"),
        ({"large_bytes": True}, "large_bytes=True: give an int from 1"),
        ({"large_bytes": 10**30}, f"large_bytes={10**30}: give an int from 1"),
    ],
)
def test_what_cannot_be_examined_raises(options, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        examine(["dp=1"], **{"backend": "gloo", **options})


@pytest.mark.parametrize("number", ["inf", "1e30", "nan", "-1", "0"])
@pytest.mark.parametrize("option", ["--timeout", "--megabytes"])
def test_a_number_that_no_job_can_have_ends_with_2(option: str, number: str, capsys) -> None:
    assert main(["doctor", "dp=1", option, number]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pass a number above 0, at most 1,000,000" in line


def test_a_default_group_that_is_there_stays(world) -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="There is a default process group already"):
        examine(["dp=1"], backend="gloo")
    assert dist.group.WORLD is group


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:NCCL"])
def test_nccl_without_a_device_raises_and_sets_nothing(backend: str) -> None:
    with pytest.raises(ValueError, match=r"needs a CUDA device|cannot be examined"):
        examine(["dp=1"], backend=backend)
    assert _WAIT not in os.environ


def test_gloo_needs_no_variable_of_nccl() -> None:
    assert main(["doctor", "dp=2", "--backend", "gloo"]) == 2  # the world has one rank
    assert _WAIT not in os.environ


@pytest.mark.long
def test_a_port_that_accepts_and_does_not_answer_ends_with_the_timeout(monkeypatch) -> None:
    reported: list[object] = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for name, value in (
            ("RANK", 1),
            ("WORLD_SIZE", 2),
            ("MASTER_PORT", silent.getsockname()[1]),  # port: it stays bound
        ):
            monkeypatch.setenv(name, str(value))
        with pytest.raises(NotAllHereError, match="nothing there has answered as a store"):
            # short-timeout: it must elapse
            examine(["dp=2"], backend="gloo", timeout=timedelta(seconds=1), report=reported.append)
    (error,) = reported
    assert "MASTER_ADDR=127.0.0.1" in str(error)
