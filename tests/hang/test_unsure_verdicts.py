"""Verdicts on hangs of which the records do not tell all: they say so."""

from __future__ import annotations

import _thread
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.crew import Crew
from helpers.recorded_job import BEGIN, Format, Job, Step
from helpers.turns import wait_until
from meshverse.hang.live import _joined, _outside_torch, record_here
from meshverse.hang.records import Call, GroupSeen, Progress, RankRecord, line_of
from meshverse.hang.report import ReportFormatter
from meshverse.hang.verdicts import Cause, find_stuck
from meshverse.tools.commands.main import main

_NCCL, _TIMED, _GLOO = Format("nccl"), Format("nccl", is_timed=True), Format("gloo")
_SUM = Step("all_reduce", "world")
_STOPS = Step("stops")


def _said(
    dumps: Mapping[int, dict[str, Any]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    written: Mapping[int, float] | None = None,
    status: int = 1,
) -> str:
    """Return what the command says of dumps. Keys of `written` are ranks, values times of files."""
    for rank, dump in dumps.items():
        path = folder / f"trace_rank_{rank}"
        path.write_bytes(pickle.dumps(dump))
        at = BEGIN + (written or {}).get(rank, 600)
        os.utime(path, (at, at))
    assert main(["hang", str(folder)]) == status
    return capsys.readouterr().out


def _has_ended(entry: dict[str, Any]) -> None:
    entry.update(state="completed", retired=True)


@pytest.mark.parametrize("of", [_GLOO, _NCCL])
def test_a_rank_above_all_dumps_may_have_died(of: Format, tmp_path: Path, capsys) -> None:
    dumps = Job([[_SUM, _SUM]] * 3 + [[_SUM, Step("dies")]]).dumps(of)
    for dump in dumps.values() if of is _NCCL else ():
        dump["pg_config"]["0"]["ranks"] = "[]"  # as of a second default group
    said = _said(dumps, tmp_path, capsys)
    assert "all known ranks of this group have made the call. Which other ranks it has" in said


def test_ranks_that_a_dump_lists_stay_when_dumps_of_a_larger_job_lie_beside(
    tmp_path: Path, capsys
) -> None:
    larger = Job([[_SUM, _SUM]] * 7 + [[_SUM]]).dumps(_NCCL)
    smaller = Job([[_SUM] * 4] * 3 + [[_SUM] * 3 + [_STOPS]]).dumps(_NCCL)
    for dump in smaller.values():
        for entry in dump["entries"]:
            entry["time_created_ns"] += 3600 * 10**9
    written = dict.fromkeys(range(4), 4200)
    dumps = {rank: larger[rank] for rank in range(4, 8)} | smaller
    said = _said(dumps, tmp_path, capsys, written)
    assert "all_reduce number 4 on the default group, ranks 0-3," in said
    assert "Verdict: rank 3 has not called it." in said


@pytest.mark.parametrize("of", [_GLOO, _NCCL])
def test_a_call_that_was_just_made_may_not_be_stuck(of: Format, tmp_path: Path, capsys) -> None:
    dumps = Job([[_SUM, _SUM]] * 3 + [[_SUM, _STOPS]]).dumps(of)
    last = max(entry["time_created_ns"] for entry in dumps[0]["entries"]) / 1e9 - BEGIN
    young = dict.fromkeys(range(4), last + 0.25)
    said = _said(dumps, tmp_path, capsys, young, status=0)
    assert "Pending: all_reduce number 2 on the default group, ranks 0-3" in said
    assert "Verdict: this call may not be stuck: it was 250 ms old when its ranks were" in said
    assert "If it is: rank 3 has not called it." in said
    one_old = young | {1: last + 30}  # one rank that has waited is enough
    said = _said(dumps, tmp_path, capsys, one_old)
    assert "Stuck: all_reduce number 2" in said
    assert "may not be stuck" not in said


def test_calls_that_differ_are_wrong_at_any_age(tmp_path: Path, capsys) -> None:
    dumps = Job([[_SUM, _SUM], [_SUM, Step("broadcast", "world")]]).dumps(_NCCL)
    last = max(entry["time_created_ns"] for entry in dumps[0]["entries"]) / 1e9 - BEGIN
    said = _said(dumps, tmp_path, capsys, dict.fromkeys(range(2), last + 0.25))
    assert "Verdict: the ranks make different calls" in said
    assert "may not be stuck" not in said


def test_sends_do_not_hide_the_collectives_of_their_group(tmp_path: Path, capsys) -> None:
    root = Step("broadcast", "world", root=1)
    sends, receives = [Step("send", "world", peer=3)] * 6, [Step("recv", "world", peer=1)] * 6
    job = Job([[_SUM, root], [_SUM, root, *sends], [_SUM, _STOPS], [_SUM, *receives, _STOPS]])
    dumps = job.dumps(_NCCL)
    for rank in (1, 3):  # a small broadcast is soon over on its root
        for entry in dumps[rank]["entries"]:
            _has_ended(entry)
    said = _said(dumps, tmp_path, capsys)
    assert "past it:       rank 1\n" in said
    assert "missing:       ranks 2, 3, last call in this group: all_reduce number 1" in said


@pytest.mark.parametrize(
    ("of", "late"), [(_NCCL, "may not have reached"), (_TIMED, "has not started")]
)
def test_a_send_that_has_ended_may_be_the_awaited_one(
    of: Format, late: str, tmp_path: Path, capsys
) -> None:
    receiver = [_SUM, Step("kernel"), Step("recv", "world", peer=1)]
    dumps = Job([receiver, [_SUM, Step("send", "world", peer=0), _STOPS]]).dumps(of)
    _has_ended(dumps[1]["entries"][-1])
    said = _said(dumps, tmp_path, capsys)
    assert f"a recv without its send, or a late GPU: that of rank 0 {late} it" in said
    assert "rank 1 may have sent already" in said
    assert "has not called it" not in said


def test_a_receive_that_may_be_asynchronous_is_no_sure_deadlock(tmp_path: Path, capsys) -> None:
    receives = Step("recv", "world", peer=1, is_async=True)
    sends = Step("send", "world", peer=0, is_async=True)
    said = _said(Job([[receives, _STOPS], [_SUM, sends], [_SUM]]).dumps(_TIMED), tmp_path, capsys)
    assert "Verdict: this may be a deadlock." in said
    assert "But rank 0 may not wait for its recv, which may be asynchronous." in said


def _call(group: str, number: int, line: str, progress: Progress = Progress.CALLED) -> Call:
    began = BEGIN - 60.0
    return Call(
        group, number, "all_reduce", False, began, ((4,),), "Float", line, progress=progress
    )


def _records(groups: Mapping[str, range], calls: Mapping[int, list[Call]]) -> dict[int, RankRecord]:
    seen = {name: GroupSeen(f"axis {name}", ranks) for name, ranks in groups.items()}
    return {rank: RankRecord(rank, BEGIN, own, dict(seen)) for rank, own in calls.items()}


@pytest.mark.parametrize("callers", ["", ", called at /x/train.py:50 in step"])
@pytest.mark.parametrize("doing", ["/x/data.py:99 in load_batch", "/x/train.py:20 in backward"])
def test_a_rank_that_is_elsewhere_in_the_program_is_no_sure_deadlock(
    doing: str, callers: str
) -> None:
    lines = f"/x/train.py:20 in backward{callers}", "/x/train.py:30 in forward"
    calls = {0: [_call("dp", 5, lines[0])], 1: [_call("tp", 7, lines[1])]}
    records = _records({"dp": range(2), "tp": range(2)}, calls)
    records[0].doing, records[1].doing = doing, lines[1]
    found = find_stuck(records)
    said = ReportFormatter().text(found)
    assert {one.cause for one in found} == {Cause.DEADLOCK}
    is_elsewhere = "data.py" in doing
    assert ("Verdict: this may be a deadlock." in said) == is_elsewhere
    assert ("But rank 0 is at x/data.py:99 in load_batch" in said) == is_elsewhere


@pytest.mark.parametrize("caller", ["main", "of the group", "the one that waits"])
def test_a_rank_that_waits_in_another_thread_is_no_sure_deadlock(caller: str) -> None:
    """As a thread that waits for commands while the main one is still loading a batch."""
    lines = "/x/train.py:20 in step", "/x/listen.py:30 in listen"
    calls = {0: [_call("train", 5, lines[0])], 1: [_call("control", 7, lines[1])]}
    records = _records({"train": range(2), "control": range(2)}, calls)
    load = "/x/data.py:99 in load_batch"
    records[0].doing, records[1].doing = lines[0], load if caller == "main" else lines[1]
    records[1].doing_in["control"] = lines[1]
    if caller == "of the group":  # which made the last call of the stuck group on this rank
        records[1].doing_in["train"] = load
    elif caller == "the one that waits":
        records[1].doing_in["train"] = lines[1]
    found = find_stuck(records)
    formatter = ReportFormatter()
    said, data = formatter.text(found), formatter.data(found)
    is_sure = caller == "the one that waits"
    assert {one["cause"] for one in data} == {"deadlock"}
    assert ("Verdict: a deadlock." in said) == is_sure
    assert [bool(one["doubts"]) for one in data] == [not is_sure] * 2
    assert ("rank 1 waits there in one thread, and has another at x/data.py:99" in said) != is_sure


def test_a_thread_that_waits_in_a_call_of_the_deadlock_itself_is_no_doubt() -> None:
    lines = "/x/train.py:20 in step", "/x/listen.py:30 in listen"
    calls = {
        0: [_call("train", 5, lines[0])],
        1: [_call("control", 7, lines[1]), _call("eval", 1, lines[0])],
        2: [_call("train", 5, lines[0])],
    }
    groups = {"train": range(3), "control": range(2), "eval": range(1, 3)}
    records = _records(groups, calls)
    for record in records.values():
        record.doing = lines[0]
    records[1].doing_in["control"] = lines[1]
    found = find_stuck(records)
    assert "Verdict: a deadlock." in ReportFormatter().text(found)


def test_one_rank_that_surely_waits_is_enough_for_a_deadlock() -> None:
    lines = "/x/train.py:20 in step", "/x/train.py:30 in evaluate"
    calls = {
        0: [_call("a", 5, lines[0])],
        1: [_call("b", 7, lines[1])],
        2: [_call("b", 7, lines[1])],
    }
    records = _records({"a": range(3), "b": range(3)}, calls)
    for rank, record in records.items():
        record.doing = calls[rank][0].line
    for doubtful in (1, 2):
        records[doubtful].doing = "/x/data.py:99 in load_batch"
        found = find_stuck(records)
        assert ("Verdict: a deadlock." in ReportFormatter().text(found)) == (doubtful == 1)


_BACKWARD = """
def _engine_run_backward(wait):
    wait()
"""


def test_a_thread_in_backward_is_where_the_thread_that_runs_it_is() -> None:
    """As on GPUs, where torch's own thread runs the hooks."""
    may_end, begun = threading.Event(), [threading.Event() for _ in range(2)]
    namespace: dict[str, Any] = {"__name__": "torch.autograd.graph"}
    exec(_BACKWARD, namespace)

    def wait() -> None:
        begun[0].set()
        may_end.wait()

    def hook() -> None:
        begun[1].set()
        may_end.wait()

    main = threading.Thread(target=namespace["_engine_run_backward"], args=(wait,))
    main.start()
    torchs = _thread.start_new_thread(hook, ())  # which `threading` has not started
    for each in begun:
        each.wait()
    frames = sys._current_frames()
    of_torch = {torchs: frames[torchs], main.ident: frames[main.ident or 0]}
    frames_now = {**of_torch, threading.get_ident(): sys._getframe()}
    frame = _joined(main.ident, frames_now, {torchs})
    of_others = _joined(main.ident, frames_now, set())  # that have called nothing
    assert of_others is frames_now[main.ident or 0]
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    del frames, of_torch, frames_now, of_others
    may_end.set()
    main.join()
    assert "hook" in names


def test_frames_of_cpp_are_no_lines_of_the_program() -> None:
    """As they are recorded with TORCH_FR_CPP_STACK=1."""
    cpp = [("??", 0, "torch::unwind::unwind()"), ("/pytorch/c10d/Ops.cpp", 7, "allreduce")]
    frames = [*cpp, ("/x/train.py", 20, "step")]
    named = [dict(zip(("filename", "line", "name"), each, strict=True)) for each in frames]
    assert line_of(named) == "/x/train.py:20 in step"
    assert _outside_torch(named) == ("/x/train.py", 20)


@pytest.mark.parametrize("begun", [None, 0, 2, 3])
def test_a_rank_whose_calls_are_no_longer_recorded_may_still_be_known_to_be_missing(
    begun: int | None,
) -> None:
    line = "/x/data.py:99 in load_batch"
    calls = {0: [_call("eval", 3, "/x/train.py:20 in evaluate")], 1: []}
    records = _records({"eval": range(2)}, calls)
    records[1].doing, records[1].is_cut = line, True
    if begun is not None:
        records[1].begun["eval"] = begun
    said = ReportFormatter().text(find_stuck(records))
    is_known = begun in (0, 2)
    assert ("Verdict: rank 1 has not called it: look at x/data.py:99 in load_batch." in said) == (
        is_known
    )
    assert ("no longer has calls in this group: it may have called it, or not" in said) != is_known
    assert ("no longer in its flight recorder" in said) != is_known


def _seen(kind: str) -> tuple[RankRecord, str]:
    """Return what rank 0 knows of a call that rank 1 makes later, and the call's group."""
    group = dist.new_group(group_desc=kind)  # no earlier test's, whose calls are recorded
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def call() -> None:
        if kind == "monitored barrier":
            dist.monitored_barrier(group)
        elif kind == "blocking":
            dist.all_reduce(torch.ones(2), group=group)
        else:
            works.append(dist.all_reduce(torch.ones(2), group=group, async_op=True))
            has_begun.set()
            may_go_on.wait()

    def pending() -> bool:
        record = record_here(rank, with_lines=True)
        return any(one.group == group.group_name and one.line for one in record.pending())

    works: list[dist.Work] = []
    has_begun, may_go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=call)
    if rank == 1:
        store.wait(["seen"])
    thread.start()
    if rank == 0:
        if kind == "asynchronous":
            has_begun.wait()
        wait_until(pending)
    record = record_here(rank, with_lines=True)
    store.set("seen", "x")
    may_go_on.set()
    thread.join()
    for work in works:
        work.wait()
    return record, group.group_name


@pytest.mark.parametrize("kind", ["asynchronous", "blocking", "monitored barrier"])
def test_a_call_is_asynchronous_if_its_thread_has_gone_on(crew: Crew, kind: str) -> None:
    (record, group), _ = crew.run(_seen, 2, kind)
    (call,) = [call for call in record.pending() if call.group == group]
    assert call.is_async == (kind == "asynchronous")
    assert call.operation == ("monitored_barrier" if "barrier" in kind else "all_reduce")
    assert call.number == 1


def test_ranks_that_have_not_joined_a_monitored_barrier_are_missing(crew: Crew) -> None:
    (record, group), _ = crew.run(_seen, 2, "monitored barrier")
    late = RankRecord(1, record.time, groups=record.groups, doing="/x/data.py:99 in load_batch")
    (stuck,) = [one for one in find_stuck({0: record, 1: late}) if one.group == group]
    said = ReportFormatter().text([stuck])
    assert "Stuck: monitored_barrier number 1 on group 'monitored barrier', ranks 0, 1" in said
    assert "Verdict: rank 1 has not called it: look at x/data.py:99 in load_batch." in said


def test_a_call_that_follows_names_a_way_to_its_cause_through_any_call_of_a_rank() -> None:
    # Rank 0 waits in two calls, of which the second one leads to the cause.
    calls = {
        0: [_call(name, 1, "", Progress.STARTED) for name in ("a", "b")],
        1: [_call("c", 1, "", Progress.STARTED)],
        2: [_call("b", 1, "", Progress.STARTED)],
    }
    groups = {"a": range(2), "c": range(2), "b": range(0, 3, 2)}
    said = ReportFormatter().text(find_stuck(_records(groups, calls)))
    assert said.count("Verdict: caused by another hang: rank ") == 2


def test_calls_of_an_earlier_default_group_are_none_of_this_ones() -> None:
    def calls(*, of_both: bool) -> list[tuple[int, bool]]:
        for n_calls in (3, 1 if of_both else 0):
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            for _ in range(n_calls):
                dist.all_reduce(torch.ones(2))
        record = record_here(0, with_lines=False)
        dist.destroy_process_group()
        assert record.time <= time.time()
        return [(call.number, call.is_done) for call in record.calls]

    assert calls(of_both=False) == []
    assert [number for number, _ in calls(of_both=True)] == [1]
