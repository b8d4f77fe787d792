"""Folders of dumps: what else lies in them costs no verdict, and is named."""

from __future__ import annotations

import errno
import os
import pickle
import random
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.hang_catalogue import CATALOGUE
from helpers.recorded_job import BEGIN, Format, Job, Step
from helpers.worlds import fake_world
from meshverse._torch_compat import flight_recorder
from meshverse.hang import write_dump
from meshverse.hang.dumps import read_dumps
from meshverse.hang.live import record_here
from meshverse.tools.commands.main import main

_OF_CPYTHON = "SystemError: deallocated bytearray object has exported buffers\n"
_NCCL = Format("nccl")
_LATE = CATALOGUE[0].job  # rank 3 of 4 is missing


def test_other_files_cost_only_themselves(tmp_path: Path, capsys) -> None:
    _LATE.write(tmp_path, _NCCL)
    whole = (tmp_path / "nccl_trace_rank_3").read_bytes()
    (tmp_path / "nccl_trace_rank_3").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "nccl_trace_rank_2").write_bytes(b"")
    (tmp_path / "job.log").write_text("epoch 1")
    (tmp_path / "epoch_7").write_text("loss 3")
    (tmp_path / "cores").mkdir()
    assert main(["hang", str(tmp_path), "--mesh", "dp=4"]) == 1
    out = capsys.readouterr().out
    assert "Stuck: all_reduce number 2 on the default group, ranks 0-3" in out
    assert "rank 2 (dp=2), no dump (nccl_trace_rank_2: it is empty)" in out
    assert "rank 3 (dp=3), no dump (nccl_trace_rank_3: it cannot be read (" in out
    for name in ("job.log: its name does not end with a rank", "epoch_7: it cannot be read"):
        assert f"Left out: {tmp_path}/{name}" in out


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_pickle_raises_nothing_but_its_own_reason(
    seed: int, tmp_path, capsys, monkeypatch
) -> None:
    # Another test's default group may have left torch's hook, which writes ranks before each line.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    _LATE.write(tmp_path, _NCCL)
    file = tmp_path / "nccl_trace_rank_0"
    whole, chance = file.read_bytes(), random.Random(seed)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 2, 5))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged[: chance.choice((len(whole), chance.randrange(len(whole))))])
        # Rank 1's records alone say that rank 3 is missing.
        assert main(["hang", str(tmp_path)]) == 1
        caught = capsys.readouterr()
        assert "rank 3" in caught.out
        # CPython's unpickler itself prints this line when it frees an incomplete bytearray.
        assert not caught.err.replace(_OF_CPYTHON, "").strip()
        file.unlink()
        file.write_bytes(damaged)
        alone = read_dumps([tmp_path]).left_out
        assert all(one.file == file for one in alone)


def test_a_number_that_is_no_rank_ends_a_name(tmp_path: Path, capsys) -> None:
    _LATE.write(tmp_path, _NCCL)
    (tmp_path / "nccl_trace_rank_3").rename(tmp_path / "nccl_trace_rank_3_1764108000.pickle")
    assert len(read_dumps([tmp_path]).left_out) == 1
    assert main(["hang", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "there is no dump of rank 3" in out
    assert "its name ends with 1764108000, which is too large for a rank: rename it" in out


@pytest.mark.parametrize("odd", [None, 5, ["b"], {}], ids=repr)
def test_an_odd_value_in_a_dump_costs_only_that_dump(odd: object, tmp_path, capsys) -> None:
    _LATE.write(tmp_path, _NCCL)
    dump, file = _LATE.dumps(_NCCL)[0], tmp_path / "nccl_trace_rank_0"
    entry = dump["entries"][-1]
    for key, usual in list(entry.items()):
        for value in (odd, [odd], [[odd], odd]):
            entry[key] = value
            file.write_bytes(pickle.dumps(dump))
            assert main(["hang", str(tmp_path)]) == 1
            out = capsys.readouterr().out
            assert "Stuck: all_reduce number" in out
            if key == "profiling_name" or (key == "input_dtypes" and value == [odd]):
                assert f"{file}: an entry is not as torch writes it: TypeError(" in out
        entry[key] = usual


def test_dumps_of_different_moments_are_not_mixed(tmp_path: Path, capsys) -> None:
    step = Step("all_reduce", "world")
    early = Job([[step, step]] + [[step]] * 3)  # as if all but rank 0 were in their data loaders
    late = Job([[step] * 9] * 3 + [[step] * 8])  # where rank 3 is
    early.write(tmp_path, _NCCL)
    for rank, dump in late.dumps(_NCCL).items():
        if rank != 2:
            (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    for rank in range(4):  # rank 2 was dumped three seconds into the job
        time = BEGIN + (3 if rank == 2 else 600)
        os.utime(tmp_path / f"nccl_trace_rank_{rank}", (time, time))
    assert main(["hang", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "no dump of rank 2 (nccl_trace_rank_2: it is of another moment, " in out
    assert "rank 3 has not called it" in out


def test_sends_and_receives_of_gloo_alone_are_said_to_be_unrecorded(tmp_path, capsys) -> None:
    job = Job([[Step("recv", "pp", peer=1)], [Step("stops")]], {"pp": [(0, 1)]})
    job.write(tmp_path, Format("gloo"))
    assert main(["hang", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "No collective is pending" in out
    assert "Gloo does not record sends and receives; " in out


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("dp=2", "has 2 ranks, but there is a dump of rank 3"),
        ("dp=2 dp=2", "each axis has one name"),
        ("dp=0", "a size of at least 1"),
        ("dp=4 tp", "is neither a file nor the sizes of a mesh's axes"),
        ("no/such/file", "is neither a file nor the sizes of a mesh's axes"),
        ("", "--mesh '' is neither a file nor the sizes"),
        (".", "is neither a file nor the sizes"),
    ],
)
def test_wrong_sizes_of_a_mesh(mesh: str, message: str, tmp_path: Path, capsys) -> None:
    _LATE.write(tmp_path, _NCCL)
    assert main(["hang", str(tmp_path), "--mesh", mesh]) == 2
    assert message in capsys.readouterr().err


def test_the_help_says_first_that_any_program_will_do(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["hang", "--help"])
    out = capsys.readouterr().out
    assert "Works on the dumps of any torch program, whether it uses Meshverse or not." in out


@pytest.mark.processes
def test_a_job_in_another_thread_has_that_threads_line(crew, tmp_path) -> None:
    assert "in trains_here" in crew.run(_line_of_thread, 1)[0]


def _line_of_thread() -> str:
    is_there, may_end = threading.Event(), threading.Event()

    def trains_here() -> None:
        dist.all_reduce(torch.ones(1))
        is_there.set()
        may_end.wait()

    thread = threading.Thread(target=trains_here)
    thread.start()
    is_there.wait()
    record = record_here(0, with_lines=True)
    may_end.set()
    thread.join()
    return next(iter(record.doing_in.values()), "")


def test_write_dump_needs_a_group(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="no default process group"):
        write_dump(tmp_path)


def test_a_dump_is_as_old_as_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([BEGIN, BEGIN + 60.0])

    def snapshot() -> bytes:
        next(clock)  # it takes a minute
        return b"snapshot"

    monkeypatch.setattr(flight_recorder, "not_recording_reason", str)
    monkeypatch.setattr(flight_recorder, "recorded_pickle", snapshot)
    with fake_world(4):
        monkeypatch.setattr(time, "time", lambda: next(clock))
        file = write_dump(tmp_path)
        monkeypatch.undo()
    assert file.stat().st_mtime == BEGIN


def test_a_dump_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_by_halves(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(flight_recorder, "not_recording_reason", str)
    monkeypatch.setattr(flight_recorder, "recorded_pickle", lambda: b"snapshot")
    with fake_world(4):
        file = write_dump(tmp_path)
        monkeypatch.setattr(Path, "write_bytes", written_by_halves)
        with pytest.raises(OSError, match="No space left"):
            write_dump(tmp_path)
    assert file.read_bytes() == b"snapshot"
    assert [*tmp_path.iterdir()] == [file]


def test_a_damaged_dump_of_the_last_rank_is_named(tmp_path: Path, capsys) -> None:
    dumps = Job([[Step("all_reduce", "world")] * 2] * 2 + [[Step("all_reduce", "world")]])
    for rank, dump in dumps.dumps(Format("gloo")).items():
        content = b"" if rank == 2 else pickle.dumps(dump)
        (tmp_path / f"trace_rank_{rank}").write_bytes(content)
    (tmp_path / "epoch_7").write_text("loss 3")  # no dump of a rank 7
    assert main(["hang", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "Stuck: all_reduce number 2 on the default group, ranks 0-2," in said
    assert "Verdict: there is no dump of rank 2 (trace_rank_2: it is empty)." in said


def test_a_file_that_is_given_twice_is_read_once(tmp_path: Path, capsys) -> None:
    _LATE.write(tmp_path, _NCCL)
    main(["hang", str(tmp_path), str(tmp_path / "nccl_trace_rank_0"), "--mesh", "dp=4"])
    assert "Left out" not in capsys.readouterr().out
