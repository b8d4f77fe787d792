"""Dumps of flight recorders: what is read of them, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from helpers.recorded_job import BEGIN, Format, Job, Step
from meshverse.hang.dumps import read_dumps
from meshverse.hang.records import (
    Call,
    GroupSeen,
    Progress,
    RankRecord,
    group_in_words,
    record_of,
)
from meshverse.hang.verdicts import find_stuck
from meshverse.tools.commands.main import main

# An entry as torch 2.13 writes it; the source is its FlightRecorderDetail.hpp, getCollectiveTrace.
_ENTRY = {
    "record_id": 0,
    "pg_id": 1,
    "process_group": ("7", "mesh_tp"),
    "thread_name": "python",
    "thread_id": "1",
    "collective_seq_id": 1,
    "p2p_seq_id": 0,
    "op_id": 1,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1_700_000_000_000_000_000,
    "input_sizes": [[4, 2]],
    "input_dtypes": ["BFloat16"],
    "output_sizes": [[4, 2]],
    "output_dtypes": ["BFloat16"],
    "state": "completed",
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
    "retired": True,
    "timeout_ms": 600_000,
    "is_p2p": False,
    "frames": [
        {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 9},
        {"name": "wrapped", "filename": "/x/site-packages/trainer/loop.py", "line": 5},
        {"name": "step", "filename": "/home/me/torch/train.py", "line": 88},
    ],
}


def _entry(**changed: Any) -> dict[str, Any]:
    return {**_ENTRY, **changed}


def _dump(*entries: dict[str, Any], ranks: str = "[0, 1]", **changed: Any) -> dict[str, Any]:
    """A dump as NCCL's watchdog writes it."""
    config = {"7": {"name": "7", "desc": "mesh_tp", "ranks": ranks}}
    status = {"1": {"last_enqueued_collective": 1}}
    dump = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": list(entries)}
    return {**dump, "comm_lib_version": "2.27", "nccl_comm_state": {}, **changed}


def _record(*entries: dict[str, Any], **changed: Any) -> RankRecord:
    return record_of(_dump(*entries, **changed), 0, 1_700_000_060.0)


def test_a_call_of_nccl() -> None:
    record = _record(_entry())
    (call,) = record.calls
    assert call == Call(
        group="7",
        number=1,
        operation="all_reduce",
        is_done=True,
        since=1_700_000_000.0,
        shapes=((4, 2),),
        dtype="BFloat16",
        line="/home/me/torch/train.py:88 in step",
        out_shapes=((4, 2),),
        progress=Progress.STARTED,
    )
    assert record.groups == {"7": GroupSeen("axis tp", range(2))}
    assert record.pending() == []


@pytest.mark.parametrize(
    ("backend", "state", "retired", "is_done"),
    [
        ("nccl", "completed", False, True),
        ("nccl", "scheduled", True, False),  # it timed out
        ("nccl", "started", False, False),
        ("gloo", "scheduled", True, True),  # gloo says no more
        ("gloo", "scheduled", False, False),
    ],
)
def test_what_is_over(backend: str, state: str, retired: bool, is_done: bool) -> None:
    entry = _entry(profiling_name=f"{backend}:all_reduce", state=state, retired=retired)
    assert _record(entry).calls[0].is_done == is_done


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_record_is_shortened_as_if_it_had_been_read_so(backend: str) -> None:
    shared, last = Step("all_reduce", "world"), [Step("all_reduce", "world")]
    ranks = [[shared, Step("send", "world", peer=1)] * 7 + last]
    ranks += [[shared, Step("recv", "world", peer=0)] * 7]
    dump = Job(ranks).dumps(Format(backend))[0]
    long, short = (record_of(dump, 0, BEGIN, n_kept=n_kept) for n_kept in (6, 3))
    assert long.shortened(3) == short != long


def test_calls_inside_a_coalesced_one_are_over_with_it() -> None:
    inside = [_entry(state="scheduled", retired=False, op_id=number) for number in (1, 2)]
    whole = _entry(profiling_name="nccl:coalesced", op_id=3)
    assert _record(*inside, whole).pending() == []


def test_a_call_that_the_host_is_inside_is_not_over() -> None:
    # As dumped where a rank calls with more elements than the others: NCCL connects ranks for it.
    pending = {"state": "scheduled", "retired": False}
    inside = {"state": "completed", "retired": False}
    record = _record(
        _entry(collective_seq_id=1, retired=True),
        _entry(collective_seq_id=2, **pending),
        _entry(collective_seq_id=3, **inside),
    )
    assert [call.number for call in record.pending()] == [2, 3]
    record = _record(_entry(collective_seq_id=1, **pending), _entry(collective_seq_id=2))
    assert [call.is_done for call in record.calls] == [True, True]  # it is retired


def _batch(first_record: int = 0) -> list[dict[str, Any]]:
    """A send and a receive that NCCL ran as one, after a collective, as torch 2.11 records them."""
    p2p = {"collective_seq_id": 1, "p2p_seq_id": 1, "is_p2p": True, "state": "scheduled"}
    whole = p2p | {"is_p2p": False, "state": "completed", "input_sizes": [], "output_sizes": []}
    entries = [
        _entry(collective_seq_id=1, p2p_seq_id=0, op_id=1),
        _entry(**p2p, profiling_name="nccl:send 0->1", op_id=2, retired=False),
        _entry(**p2p, profiling_name="nccl:recv 0<-1", op_id=3, retired=False),
        _entry(**whole, profiling_name="nccl:coalesced", op_id=3),
    ]
    return [entry | {"record_id": first_record + i} for i, entry in enumerate(entries)]


@pytest.mark.parametrize("changed", [{}, {"is_p2p": True}])
def test_sends_and_receives_of_a_batch_are_over_with_it(changed: dict[str, Any]) -> None:
    *operations, whole = _batch()
    record = _record(*operations, whole | changed)
    assert [call.operation for call in record.calls] == ["all_reduce", "send", "recv"]
    assert record.pending() == []
    left = _record(*operations, whole | changed | {"state": "scheduled"}).pending()
    assert [(call.operation, call.number) for call in left] == [("send", 1), ("recv", 1)]


def test_the_end_of_a_batch_whose_operations_are_gone_is_no_collective() -> None:
    *_, whole = _batch(first_record=2000)
    assert _record(whole).calls == []


def test_of_groups_of_one_name_the_last_counts() -> None:
    # In a second world, c10d's default group is "0" again, and counts from 1.
    first = [_entry(collective_seq_id=number, pg_id=0) for number in (1, 2, 3)]
    second = _entry(state="started", retired=False, pg_id=5)
    assert [(call.number, call.is_done) for call in _record(*first, second).calls] == [(1, False)]


def test_gloo_runs_calls_of_a_group_side_by_side() -> None:
    first = _entry(profiling_name="gloo:all_reduce", state="scheduled", retired=False)
    later = _entry(profiling_name="gloo:all_reduce", collective_seq_id=2)
    assert [call.number for call in _record(first, later).pending()] == [1]


def test_a_send_and_a_receive_name_the_other_rank_of_the_group() -> None:
    common = {"is_p2p": True, "p2p_seq_id": 3, "collective_seq_id": 0, "state": "started"}
    sent = _entry(profiling_name="nccl:send 0->1", **common)
    received = _entry(profiling_name="nccl:recv 0<-1", **common)
    calls = _record(sent, received).calls
    assert [(call.operation, call.peer, call.number) for call in calls] == [
        ("send", 1, 3),
        ("recv", 1, 3),
    ]


def test_several_sends_at_once_are_reported_one_by_one() -> None:
    common = {"is_p2p": True, "p2p_seq_id": 3, "state": "started", "retired": False}
    sent = _entry(profiling_name="nccl:send 0->1", **common)
    together = _entry(profiling_name="nccl:coalesced", **common)
    assert [call.operation for call in _record(sent, together).calls] == ["send"]


def test_only_the_last_calls_are_kept_and_all_that_are_pending() -> None:
    over = [_entry(collective_seq_id=number) for number in range(1, 100)]
    pending = [
        _entry(collective_seq_id=number, state="started", retired=False)
        for number in range(100, 120)
    ]
    record = _record(*over, *pending)
    assert [call.number for call in record.calls] == list(range(96, 120))


def test_an_older_dump_has_fewer_fields() -> None:
    entry = _entry()
    entry["seq_id"] = entry.pop("collective_seq_id")
    for name in ("input_dtypes", "frames", "thread_id", "is_p2p"):
        del entry[name]
    dump = {"version": "1.5", "entries": [entry]}  # neither configuration nor status
    (call,) = record_of(dump, 0, 0.0).calls
    assert (call.number, call.dtype, call.line) == (1, "", "")


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_files_of_a_folder_are_read_by_rank(form: str, tmp_path: Path) -> None:
    stuck = _entry(collective_seq_id=2, state="started", retired=False)
    for rank, entries in ((0, [_entry(), stuck]), (1, [_entry()])):
        content = _dump(*entries)
        file = tmp_path / f"nccl_trace_rank_{rank}{'.json' if form == 'json' else ''}"
        if form == "json":
            file.write_text(json.dumps(content))
        else:
            file.write_bytes(pickle.dumps(content, protocol=2))
    records = read_dumps([tmp_path]).records
    assert sorted(records) == [0, 1]
    (found,) = find_stuck(records)
    assert (found.seen.label, found.call.number, [*found.waiting]) == ("axis tp", 2, [0])
    assert [(missing.rank, missing.last.number) for missing in found.missing] == [(1, 1)]  # type: ignore[union-attr]


def test_causes_are_printed_and_of_many_groups_that_follow_some(tmp_path, capsys) -> None:
    # Rank 0 has not come to the barrier of ranks 0 to 39. Each of these has a partner, 40 ranks on,
    # that waits for it.
    common = {"state": "started", "retired": False}
    for rank in range(80):
        first = rank % 40
        config = {
            "dp": {"name": "dp", "desc": "mesh_dp", "ranks": str(list(range(40)))},
            f"p{first}": {
                "name": f"p{first}",
                "desc": "mesh_pp",
                "ranks": f"[{first}, {first + 40}]",
            },
        }
        barrier = _entry(process_group=("dp", "mesh_dp"), profiling_name="nccl:barrier", **common)
        reduce = _entry(process_group=(f"p{first}", "mesh_pp"), **common)
        entries = [] if first == 0 else [barrier] if rank < 40 else [reduce]
        dump = {"version": "2.10", "pg_config": config, "entries": entries}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    assert main(["hang", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Stuck: barrier number 1 on axis dp, ranks 0-39, ")
    assert sum(line.startswith("Stuck: ") for line in lines) == 1 + 8
    assert lines[-1] == "And 31 more calls that follow from these: pass --json to see all."
    assert main(["hang", str(tmp_path), "--json"]) == 1
    groups = json.loads(capsys.readouterr().out)
    assert [one["cause"] for one in groups] == ["missing"] + ["follows"] * 39


class _Object:
    pass


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rank_0", pickle.dumps(_Object()), "it contains "),
        ("rank_0", b"{}", "no version or entries"),
        ("rank_0", b'{"version": "2.10", "entries": [{}]}', "an entry is not as torch writes it"),
        ("rank_0", pickle.dumps([1]), "it is not a dump of torch's flight recorder"),
        ("rank_0", pickle.dumps(_dump())[:40], "cannot be read"),
        ("rank_0", b"", "it is empty"),
        ("rank_0", b"{nothing", "cannot be read"),
        ("trace.pickle", pickle.dumps(_dump()), "its name does not end with a rank"),
    ],
)
def test_what_is_no_dump_is_refused(
    name: str, content: bytes, message: str, tmp_path, capsys
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["hang", str(tmp_path)]) == 2
    caught = capsys.readouterr()
    assert message in caught.err
    assert str(tmp_path / name) in caught.err
    assert caught.out == ""


def test_of_two_dumps_of_a_rank_the_newer_counts(tmp_path, capsys) -> None:
    stuck = _entry(collective_seq_id=2, state="started", retired=False)
    stuck["time_created_ns"] += 10**9
    (tmp_path / "a_0").write_bytes(pickle.dumps(_dump(_entry())))
    (tmp_path / "b_0").write_bytes(pickle.dumps(_dump(_entry(), stuck)))
    assert main(["hang", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "Stuck: all_reduce number 2" in out
    assert f"Left out: {tmp_path / 'a_0'}: there is a newer dump of this rank." in out


def test_no_dumps(tmp_path, capsys) -> None:
    assert main(["hang", str(tmp_path)]) == 2
    assert f"There are no dumps in {tmp_path}." in capsys.readouterr().err
    assert main(["hang", str(tmp_path / "missing_1")]) == 2
    assert f"{tmp_path / 'missing_1'} does not exist" in capsys.readouterr().err


def test_nothing_is_pending(tmp_path, capsys) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps(_dump(_entry())))
    assert main(["hang", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "No call is pending in the dumps of 1 rank. There is no dump of rank 1. Gloo does not "
        "record sends and receives; with NCCL, the first call of a group or of a pair of ranks is "
        "recorded once all of them have made it. If the job hangs in one, start meshverse.watch() "
        "in it, or look at the stacks of its processes (py-spy dump).\n"
    )
    assert main(["hang", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_a_file_of_another_kind_is_no_mesh(tmp_path, capsys) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps(_dump(_entry())))
    for content in ("[]", "{}", "nothing", '{"ranks": 2, "views": [{"a": "x"}], "groups": []}'):
        (tmp_path / "mesh.json").write_text(content)
        command = ["hang", str(tmp_path / "rank_0"), "--mesh", str(tmp_path / "mesh.json")]
        assert main(command) == 2
        assert f"{tmp_path / 'mesh.json'}: " in capsys.readouterr().err


def test_a_pending_call_has_the_lines_above_it() -> None:
    places = [("comm.py", 4, "reduce"), ("loop.py", 8, "router"), ("loop.py", 30, "main")]
    frames = [{"filename": f"/me/{f}", "line": line, "name": name} for f, line, name in places]
    entry = _entry(frames=[_ENTRY["frames"][0], *frames], state="scheduled", retired=False)
    (call,) = _record(entry).calls
    assert call.line == "/me/comm.py:4 in reduce"
    assert call.callers == ("/me/loop.py:8 in router", "/me/loop.py:30 in main")
    (done,) = _record({**entry, "state": "completed"}).calls
    assert (done.line, done.callers) == (call.line, ())


def test_a_group_without_a_description_is_called_by_its_ranks() -> None:
    config = {"7": {"name": "7", "desc": "undefined", "ranks": "[4, 5, 6, 9]"}}
    record = record_of(_dump(_entry(process_group=("7", "undefined")), pg_config=config), 4, 0.0)
    seen = record.groups["7"]
    assert group_in_words(seen) == "the group of ranks 4-6, 9"
    assert group_in_words(seen._replace(ranks=None)) == "an unnamed group"
