"""The watch of one process: how it begins and ends, and what it refuses."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import meshverse
from helpers import via_store
from helpers.crew import Crew
from helpers.forked import SECONDS
from helpers.tiers import in_tiers
from helpers.turns import wait_until
from helpers.worlds import fake_world
from meshverse._torch_compat.flight_recorder import FrameWait, wait_of_frame
from meshverse.hang import watch as watch_module
from meshverse.hang.live import Alarm, _add_unrecorded, _add_wait
from meshverse.hang.records import Call, GroupSeen, RankRecord
from meshverse.hang.verdicts import find_stuck
from meshverse.hang.watch import _WatchedWorld, watch_by_environment
from meshverse.store import StoreKeys
from meshverse.world import World

_NAME = "meshverse watch"


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == _NAME]


def _wait_for_threads(number: int) -> None:
    """Wait until so many are there: `stop` does not wait long for one that is busy."""
    wait_until(lambda: len(_threads()) == number)


@pytest.fixture(autouse=True)
def _no_watch_is_left() -> Iterator[None]:
    yield
    meshverse.watch(None)
    _wait_for_threads(0)


def test_there_is_one_watch_at_a_time() -> None:
    first = meshverse.watch(5)
    assert first is not None
    second = meshverse.watch(7.5)
    assert second is not None
    assert second.seconds == 7.5
    _wait_for_threads(1)
    first.stop()  # it has ended
    assert len(_threads()) == 1
    assert meshverse.watch(None) is None
    _wait_for_threads(0)


def test_it_ends_with_its_block() -> None:
    with meshverse.watch(5) as watch:
        assert watch.seconds == 5
        assert len(_threads()) == 1
    _wait_for_threads(0)


@pytest.mark.parametrize("seconds", [0, -1, 0.5, float("nan"), float("inf"), 10**9])
def test_seconds_that_cannot_be(seconds: float) -> None:
    meshverse.watch(9)
    with pytest.raises(ValueError, match=r"seconds=.*: pass 1 to 604,800\."):
        meshverse.watch(seconds)
    assert len(_threads()) == 1  # the watch before goes on


@pytest.mark.parametrize("seconds", ["60", True, timedelta(seconds=60)])
def test_seconds_that_are_no_number(seconds) -> None:
    with pytest.raises(TypeError, match="pass a number, or None to end the watch"):
        meshverse.watch(seconds)


def test_a_callback_that_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="pass a function of a Hang"):
        meshverse.watch(60, on_stuck="abort")  # type: ignore[arg-type]


def _python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_the_environment_begins_one_and_a_fork_goes_on_in_its_own_world() -> None:
    program = f"""
import os, threading
import torch.distributed as dist
import meshverse

def watched():
    return [thread.name for thread in threading.enumerate()].count({_NAME!r})

assert watched() == 1
child = os.fork()
if child == 0:
    assert watched() == 0  # it may be a worker of a data loader
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    meshverse.init_device_mesh("cpu", (1,))
    assert watched() == 1
    assert meshverse.hang.watch._current.seconds == 90
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert watched() == 1
"""
    program = program.replace(
        "meshverse.hang.watch._current", "sys.modules['meshverse.hang.watch']._current"
    ).replace("import os, threading", "import os, sys, threading")
    done = _python(program, MESHVERSE_WATCH="90", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stopped_by", in_tiers(["parent", "child"], ["child"]))
def test_a_watch_that_was_stopped_does_not_go_on_in_a_fork(stopped_by: str) -> None:
    program = f"""
import os, threading
import torch.distributed as dist
import meshverse

def watched():
    return [thread.name for thread in threading.enumerate()].count({_NAME!r})

watch = meshverse.watch(90)
if {stopped_by == "parent"}:
    watch.stop()
child = os.fork()
if child == 0:
    watch.stop()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    meshverse.init_device_mesh("cpu", (1,))
    os._exit(watched())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = _python(program, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr


def test_a_receive_that_follows_one_that_was_stuck_is_reported_too(caplog, monkeypatch) -> None:
    # It has no number, and the first one may end between two looks.
    with fake_world(4, 1), caplog.at_level(logging.WARNING, logger="meshverse.hang.watch"):
        meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        world = World.current()
        assert world is not None
        watched, now = _WatchedWorld(world, 60.0, None), time.time()
        first = Call("7", 0, "recv", False, now - 90, peer=1, is_recorded=False)
        second = first._replace(since=now - 70)
        record = RankRecord(1, now, [first], {"7": GroupSeen("axis pp", [1, 3])})
        monkeypatch.setattr(watched, "_record", lambda *, with_lines: record)
        monkeypatch.setattr("meshverse.hang.watch.find_stuck", lambda records, shortest: [])
        watched._report_alone([first])
        record.calls = [second]
        watched._log_ended()
        watched._report_alone([second])
        watched._report_alone([second])
    said = [line.getMessage() for line in caplog.records]
    assert [text.startswith("Rank 1: A collective is stuck") for text in said] == [
        True,
        False,
        True,
    ]
    assert "recv on axis pp, ranks 1, 3 (tp=1) is no longer stuck, 90 s" in said[1]


@pytest.mark.parametrize("text", ["soon", "-3"])
def test_an_environment_that_is_no_number(text: str, monkeypatch) -> None:
    monkeypatch.setenv("MESHVERSE_WATCH", text)
    with pytest.raises(ValueError, match=f"MESHVERSE_WATCH='{text}': set it to a number of sec"):
        watch_by_environment()
    monkeypatch.setenv("MESHVERSE_WATCH", "0")
    watch_by_environment()
    assert not _threads()


def test_a_call_that_ended_is_named_as_in_the_report(caplog, monkeypatch) -> None:
    # Gloo's receives have no number: only the peer distinguishes those from two ranks.
    with fake_world(4, 1), caplog.at_level(logging.WARNING, logger="meshverse.hang.watch"):
        meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        world = World.current()
        assert world is not None
        watched, now = _WatchedWorld(world, 60.0, None), time.time()
        groups = {"7": GroupSeen("axis pp", [1, 3]), "8": GroupSeen("the default group", range(4))}
        pending = [
            Call("7", 0, "recv", False, now - 90, peer=1),
            Call("8", 0, "recv", False, now - 90, peer=2),
            Call("9", 5, "all_reduce", False, now - 90),  # its group has ended since
        ]
        record = RankRecord(1, now, pending, groups)
        monkeypatch.setattr(watched, "_record", lambda *, with_lines: record)
        monkeypatch.setattr("meshverse.hang.watch.find_stuck", lambda records, shortest: [])
        watched._report_alone(pending)
        record.calls = [pending[1]._replace(peer=0)]
        caplog.clear()
        watched._log_ended()
    names = [line.getMessage().partition(" is no longer stuck, 90 s")[0] for line in caplog.records]
    assert names == [
        "Rank 1: recv on axis pp, ranks 1, 3 (tp=1)",
        "Rank 1: recv on the default group, ranks 1, 2",
        "Rank 1: all_reduce number 5 on 9",
    ]


def test_a_rank_alone_says_of_the_others_that_it_could_not_ask_them(caplog, monkeypatch) -> None:
    heard: list[meshverse.Hang] = []
    with fake_world(4, 1), caplog.at_level(logging.ERROR, logger="meshverse.hang.watch"):
        meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        world = World.current()
        assert world is not None
        watched, now = _WatchedWorld(world, 60.0, heard.append), time.time()
        watched._why_alone = "the store does not answer (closed)"
        groups = {"7": GroupSeen("axis pp", [1, 3]), "8": GroupSeen("the default group", range(4))}
        pending = [
            Call("8", 4, "all_reduce", False, now - 90),
            Call("7", 0, "recv", False, now - 90, peer=1),
        ]
        record = RankRecord(1, now, pending, groups)
        monkeypatch.setattr(watched, "_record", lambda *, with_lines: record)
        watched._report_alone(pending)
    (hang,) = heard
    assert hang.text in caplog.text
    (logged,) = caplog.records
    assert logged.getMessage().startswith("Rank 1: A collective is stuck, and ranks cannot ")
    assert "not responding" not in hang.text
    assert "has not called it" not in hang.text
    assert "missing:       ranks 0, 2, 3, flight recorder unreadable" in hang.text
    assert [group["verdict"] for group in hang.groups] == [
        "the flight recorders of ranks 0, 2, 3 were unreadable: they may have called it.",
        "the flight recorder of rank 3 (pp=1, tp=1) was unreadable: it may have called the send.",
    ]


def _answer_each_alarm(store: StoreKeys, peers: list[RankRecord], is_over: threading.Event) -> None:
    for number in itertools.count():
        alarm = Alarm(store, number)
        while not alarm.is_raised():
            if is_over.wait(0.01):  # short-timeout: it must elapse, between two looks
                return
        for peer in peers:
            peer.time = time.time()
            alarm.answer(peer)


def test_a_call_that_followed_another_one_is_reported_again_with_a_cause_of_its_own(
    caplog, monkeypatch
) -> None:
    store, heard, is_over = StoreKeys(dist.HashStore(), "", 4), [], threading.Event()
    monkeypatch.setattr(_WatchedWorld, "_store_keys", lambda _: store)
    monkeypatch.setattr(watch_module, "longest_wait", lambda: 60.0)
    monkeypatch.setattr(watch_module, "_LONGEST_SECONDS_TO_ANSWER", 60.0)  # the peers do answer
    began = time.time() - 60

    def call(group: str, number: int, *, is_done: bool = False) -> Call:
        return Call(group, number, "all_reduce", is_done, began + number, line="train.py:8 in step")

    tp, dp = GroupSeen("axis tp", [0, 1]), GroupSeen("axis dp", [0, 2])
    mine = RankRecord(1, began, [call("tp", 7)], {"tp": tp})
    first = RankRecord(0, began, [call("tp", 6, is_done=True), call("dp", 4)], {"tp": tp, "dp": dp})
    slow = RankRecord(2, began, [call("dp", 3, is_done=True)], {"dp": dp})
    arguments = (store, [first, slow], is_over)
    answering = threading.Thread(target=_answer_each_alarm, args=arguments, daemon=True)
    with fake_world(4, 1), caplog.at_level(logging.INFO, logger="meshverse.hang.watch"):
        world = World.current()
        assert world is not None
        watched = _WatchedWorld(world, 1.0, lambda hang: heard.append(hang.groups[0]["cause"]))

        def record(*, with_lines: bool, n_kept: int = 0) -> RankRecord:
            mine.time = time.time()
            return mine

        def look_until(causes: list[str]) -> None:
            wait_until(lambda: watched.look(0.0, threading.Event()) or heard == causes)

        monkeypatch.setattr(watched, "_record", record)
        answering.start()
        look_until(["follows"])
        for _ in range(3):  # looks before the next one is due
            watched.look(0.0, threading.Event())
        assert heard == ["follows"]
        # The other call is over, and rank 0 has skipped the one that this rank waits in.
        first.calls[-1] = call("dp", 4, is_done=True)
        first.doing = "data.py:9 in load_batch"
        look_until(["follows", "missing"])
        is_over.set()
        answering.join()
    logged = [(each.levelno, each.getMessage()) for each in caplog.records]
    assert [level for level, _ in logged] == [logging.INFO, logging.ERROR]
    assert "caused by another hang: rank 0 waits in all_reduce number 4 on axis dp" in logged[0][1]
    assert "Verdict: rank 0 has not called it: look at data.py:9 in load_batch." in logged[1][1]


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_call_is_reported_by_another_rank_if_the_first_reporter_does_not(
    is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, heard = StoreKeys(dist.HashStore(), "", 4), []
    monkeypatch.setattr(_WatchedWorld, "_store_keys", lambda _: store)
    monkeypatch.setattr(watch_module, "longest_wait", lambda: 60.0)
    monkeypatch.setattr(watch_module, "_LONGEST_SECONDS_TO_ANSWER", 0.0)
    monkeypatch.setattr(watch_module, "_SECONDS_TO_REPORT", 0.0)
    tp = {"tp": GroupSeen("axis tp", [0, 1, 2])}
    mine, other = (
        RankRecord(rank, time.time(), [Call("tp", 7, "all_reduce", False, time.time() - 60)], tp)
        for rank in (1, 2)
    )
    first = Alarm(store, 0)
    assert first.claim("tp", other)  # then it is stopped, or its process dies
    with fake_world(4, 1):
        world = World.current()
        assert world is not None
        watched = _WatchedWorld(world, 1.0, lambda hang: heard.append(hang.is_logged_here))
        monkeypatch.setattr(watched, "_record", lambda **_: mine)
        watched.look(0.0, threading.Event())
        assert not heard
        assert first.is_raised()
        if is_reported:
            store.write(first.verdict_key("tp", other), json.dumps(["verdict", []]))
        watched._last_raised = float("-inf")  # it has waited long enough
        for _ in range(3):
            watched.look(0.0, threading.Event())
    assert heard == [not is_reported]
    assert Alarm(store, 1).is_raised() != is_reported


# --- on ranks -------------------------------------------------------------------------------------


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _logged() -> _Lines:
    lines = _Lines()
    logging.getLogger("meshverse.hang.watch").addHandler(lines)
    return lines


def _with_recorder_off() -> list[str]:
    lines = _logged()
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    try:
        meshverse.watch(1)
        if dist.get_rank() == 0:
            wait_until(lambda: bool(lines.texts))
        dist.barrier()
        time.sleep(1)  # sleep: it looks again meanwhile; nothing depends on it
    finally:
        del os.environ["TORCH_FR_BUFFER_SIZE"]
        meshverse.watch(None)
    return lines.texts


def test_a_recorder_that_is_off_is_said_once(crew: Crew) -> None:
    first, _ = crew.run(_with_recorder_off, world_size=2)
    (line,) = first
    assert line.startswith(
        "Meshverse's watch cannot find stuck collectives: torch's flight recorder is off: set"
    )


def _stuck_twice() -> list[str]:
    """Get stuck in two worlds, with an `on_stuck` that raises."""
    lines, default_store = _logged(), dist.distributed_c10d._get_default_store

    def fail(hang: meshverse.Hang) -> None:
        default_store().set("reported", "x")
        raise OSError(f"no pager: {len(hang.groups)}")

    # A call of the rank that comes late takes less.
    meshverse.watch(3, on_stuck=fail)
    second = dist.PrefixStore("second", default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(2):
        if number == 1:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=second, rank=rank, world_size=size)
        mesh = meshverse.init_device_mesh("cpu", (size,), mesh_dim_names=(f"dp{number}",))
        store, begun, timeout = default_store(), len(lines.texts), timedelta(seconds=SECONDS)
        if rank == 1:
            store.wait(["reported"], timeout)
        dist.all_reduce(torch.ones(3), group=mesh.get_group())
        if rank == 0:
            wait_until(lambda begun=begun: any("no longer stuck" in t for t in lines.texts[begun:]))
            store.set("ended", "x")
        else:  # in no collective: that would be stuck
            store.wait(["ended"], timeout)
    meshverse.watch(None)
    return lines.texts


@pytest.mark.long
def test_a_second_world_is_watched_too_and_a_callback_may_fail(crew: Crew) -> None:
    lines, others = crew.run(_stuck_twice, world_size=2)
    assert [line.partition("\n")[0] for line in lines if "no longer stuck" not in line] == [
        "Rank 0: A collective is stuck.",
        "on_stuck= of meshverse.watch() failed",
    ] * 2
    assert "rank 1" in lines[0]
    assert others == []


def _receives_from_two_late_ranks() -> list[str]:
    lines, rank, tensor = _logged(), dist.get_rank(), torch.zeros(1)
    store, reported = dist.distributed_c10d._get_default_store(), iter((1, 2))
    watch = meshverse.watch(3, on_stuck=lambda hang: store.set(f"reported {next(reported)}", "x"))
    if rank == 0:
        for peer in (1, 2):
            dist.recv(tensor, src=peer)
        wait_until(lambda: sum("no longer stuck" in text for text in lines.texts) == 2)
        store.set("done", "x")
    else:
        store.wait([f"reported {rank}"], timedelta(seconds=SECONDS))
        dist.send(tensor, dst=0)
        store.wait(["done"], timedelta(seconds=SECONDS))  # in no collective: that would be stuck
    assert watch is not None
    watch.stop()
    dist.barrier()
    return [line for text in lines.texts for line in text.splitlines()]


@pytest.mark.long
def test_a_receive_right_after_one_that_was_reported_is_reported_too(crew: Crew) -> None:
    lines, *_ = crew.run(_receives_from_two_late_ranks, world_size=3)
    kept = [line for line in lines if line.startswith("Stuck:") or "no longer stuck" in line]
    for peer, (stuck, ended) in enumerate([kept[:2], kept[2:]], start=1):
        assert stuck.startswith(f"Stuck: recv on the default group, ranks 0, {peer}, for ")
        assert ended.startswith(
            f"Rank 0: recv on the default group, ranks 0, {peer} is no longer stuck, "
        )


def _waits_behind_another() -> list[tuple[str, str]]:
    """Get stuck on rank 0 behind rank 1, which waits for rank 2; return level and text, by line."""
    rank, tensor = dist.get_rank(), torch.zeros(1)
    logger = logging.getLogger("meshverse.hang.watch")
    before, found = logger.level, []
    lines = _logged()
    lines.emit = lambda record: found.append((record.levelname, record.getMessage()))
    logger.setLevel(logging.INFO)
    store, timeout = dist.distributed_c10d._get_default_store(), timedelta(seconds=SECONDS)
    answers = watch_module._LONGEST_SECONDS_TO_ANSWER
    watch_module._LONGEST_SECONDS_TO_ANSWER = SECONDS  # however late rank 1 answers, it is heard
    watch = meshverse.watch(3, on_stuck=lambda hang: store.set(f"reported {rank}", "x"))
    behind, late = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank == 0:  # stuck for as long as rank 1 is, so that this is no other hang
        store.wait(["reported 1"], timeout)
    if rank == 2:
        store.wait(["reported 0"], timeout)
    if rank > 0:
        dist.all_reduce(tensor, group=late)
    if rank < 2:
        dist.all_reduce(tensor, group=behind)
    if rank == 0:
        wait_until(lambda: any("no longer stuck" in text for _, text in found))
        store.set("ended", "x")
    else:  # in no collective: that would be stuck
        store.wait(["ended"], timeout)
    assert watch is not None
    watch.stop()
    watch_module._LONGEST_SECONDS_TO_ANSWER = answers
    logger.setLevel(before)
    logger.removeHandler(lines)
    dist.barrier()
    return [(level, text.partition("\n")[0]) for level, text in found]


@pytest.mark.long
def test_the_end_of_a_hangs_consequence_is_logged_as_the_consequence_was(crew: Crew) -> None:
    first, *_ = crew.run(_waits_behind_another, world_size=3)
    (level, stuck), (after, ended) = first
    assert stuck == "Rank 0: A collective is stuck."
    assert ended.startswith("Rank 0: all_reduce number 1 on ")
    assert (level, after) == ("INFO", "INFO")


def _unrecorded(library: Path) -> list[str]:
    """Get stuck in a group of a backend that records nothing, as NCCL before its communicator."""
    lines, rank = _logged(), dist.get_rank()
    via_store.register(library)
    store, timeout = dist.distributed_c10d._get_default_store(), timedelta(seconds=SECONDS)
    group = dist.new_group([0, 1], backend=via_store.NAME, group_desc="uneven")
    watch = meshverse.watch(3, on_stuck=lambda hang: store.set("reported", "x"))
    if rank == 1:
        store.wait(["reported"], timeout)
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 0:
        wait_until(lambda: any("no longer stuck" in text for text in lines.texts))
        store.set("ended", "x")
    else:  # in no collective: that would be stuck
        store.wait(["ended"], timeout)
    assert watch is not None
    watch.stop()
    return [line for text in lines.texts for line in text.splitlines()]


@pytest.mark.long
def test_a_collective_that_torch_does_not_record_is_found(
    fresh_crew: Crew, via_store_library: Path
) -> None:
    # A recorder that earlier tests have filled may have lost rank 1's call: no verdict then.
    lines, others = fresh_crew.run(_unrecorded, 2, via_store_library)
    assert others == []
    call = r"all_reduce (number 1 )?on group 'uneven', ranks 0, 1"  # torch 2.15 counts those, too
    assert re.match(f"Stuck: {call}, for ", lines[1])
    assert "test_watch.py" in lines[2]
    assert " in _unrecorded" in lines[2]
    assert any(line.startswith("Verdict: rank 1 has not called it: look") for line in lines), lines
    assert re.match(f"Rank 0: {call} is no longer stuck", lines[-1])


def _watches_late() -> list[str]:
    """Begin to watch on rank 1 after rank 0 has raised an alarm."""
    lines, rank = _logged(), dist.get_rank()
    world = World.current()
    assert world is not None
    assert world.run_keys is not None
    store, timeout = dist.distributed_c10d._get_default_store(), timedelta(seconds=SECONDS)
    if rank == 1:
        wait_until(Alarm(world.run_keys, 0).is_raised)
    watch = meshverse.watch(1, on_stuck=lambda hang: store.set("reported", "x"))
    if rank == 1:
        store.wait(["reported"], timeout)
    dist.all_reduce(torch.ones(3))
    assert watch is not None
    watch.stop()
    return [line for text in lines.texts for line in text.splitlines()]


def test_a_rank_whose_watch_begins_after_an_alarm_answers_it(crew: Crew) -> None:
    lines, _ = crew.run(_watches_late, 2)
    (verdict,) = [line for line in lines if line.startswith("Verdict: ")]
    assert verdict.startswith("Verdict: rank 1 has not called it: look")


_OVER = Call("7", 7, "all_reduce", True, 50.0)
_INSIDE = _OVER._replace(is_retired=False)  # the host is inside NCCL: torch takes it for over


@pytest.mark.parametrize(
    ("last", "sequence", "pending"),
    [
        (None, 0, [0]),
        (None, 9, [9]),  # the recorder no longer has the earlier ones
        (_OVER, 0, [8]),
        (_OVER, 8, [8]),
        (_OVER, 7, []),  # just over, and the thread still in the function
        (_OVER._replace(since=150.0), 0, []),
        (_INSIDE, 0, [7]),
        (_INSIDE._replace(since=150.0), 7, [7]),
    ],
)
def test_what_is_added_of_a_collective_that_is_not_recorded_as_pending(
    last: Call | None, sequence: int, pending: list[int]
) -> None:
    record = RankRecord(0, 200.0, [] if last is None else [last], is_cut=True)
    _add_unrecorded(record, Call("7", 0, "all_reduce", False, 100.0), sequence)
    assert [call.number for call in record.pending()] == pending


_RECEIVE = Call("7", 0, "recv", False, 50.0, peer=1)
_ON_GLOO = Call("7 (gloo)", 3, "barrier", False, 50.0)


@pytest.mark.parametrize(
    ("pending", "peer", "added"),
    [
        (_RECEIVE, None, True),  # a thread receives, while another one is in a collective
        (_RECEIVE, 1, False),
        (_ON_GLOO, None, False),  # of a group with two backends, this is the recorded call
        (_ON_GLOO, 1, True),
    ],
)
def test_a_thread_in_a_call_that_is_recorded_adds_none(
    pending: Call, peer: int | None, added: bool
) -> None:
    record = RankRecord(0, 200.0, [pending])
    wait = FrameWait(sys._getframe(), 100.0, "barrier" if peer is None else "recv", "7", peer, None)
    _add_wait(record, wait)
    assert len(record.pending()) == 1 + added


def test_operations_that_are_known_by_frames_are_no_mismatch() -> None:
    # torch records all_gather_into_tensor as _all_gather_base.
    seen = {"7": GroupSeen("axis tp", [0, 1])}
    recorded = Call("7", 1, "_all_gather_base", False, 50.0, shapes=((4,),), dtype="Float")
    by_frame = Call("7", 1, "all_gather_into_tensor", False, 50.0, is_recorded=False)
    records = {0: RankRecord(0, 99.0, [recorded], seen), 1: RankRecord(1, 99.0, [by_frame], seen)}
    (stuck,) = find_stuck(records)
    assert stuck.differing == {}


def _calls_that_threads_are_in(library: Path, how: str) -> list[tuple[str, bool]]:
    """Return what the frames of a thread say while it waits for rank 1, in two calls."""
    via_store.register(library)
    group = dist.new_group([0, 1], backend=via_store.NAME)
    calls = {
        "c10d": lambda: dist.all_reduce(torch.ones(3), group=group),
        "functional": lambda: funcol.all_reduce(torch.ones(3), "sum", group) + 1,
        "gathered": lambda: funcol.all_gather_tensor(torch.ones(3), 0, group) + 1,
    }
    store, found = dist.distributed_c10d._get_default_store(), []
    for turn in range(2):
        if dist.get_rank() == 0:
            thread = threading.Thread(target=calls[how])
            thread.start()
            wait_until(lambda thread=thread: _wait_of(thread) is not None)
            first = _wait_of(thread)
            time.sleep(0.05)  # sleep: it looks again
            again = _wait_of(thread)
            assert first is not None
            assert again is not None
            assert (first.frame, first.since) == (again.frame, again.since)
            found.append((first.operation, first.group == group.group_name))
            del first, again
            store.set(f"seen {turn}", "x")
            thread.join()
        else:
            store.wait([f"seen {turn}"], timedelta(seconds=SECONDS))
            calls[how]()
    return found


def _wait_of(thread: threading.Thread) -> FrameWait | None:
    return wait_of_frame(sys._current_frames().get(thread.ident or 0), time.time())


@pytest.mark.parametrize(
    ("how", "operation"),
    [("c10d", "all_reduce"), ("functional", "all_reduce"), ("gathered", "all_gather")],
)
def test_a_thread_is_found_in_its_collective(
    crew: Crew, via_store_library: Path, how: str, operation: str
) -> None:
    found, _ = crew.run(_calls_that_threads_are_in, 2, via_store_library, how)
    assert len(found) == 2
    for said, is_this_group in found:
        assert said.startswith(operation)
        assert is_this_group


def _many_short_calls(library: Path, how: str) -> tuple[int, int]:
    """Call often, for 0.05 s each; return the numbers of hangs reported and of long calls.

    A long call took half the limit or more, as when the machine is busy.
    """
    via_store.register(library)
    group = dist.new_group([0, 1], backend=via_store.NAME) if how == "all_reduce" else None
    heard, rank, tensor, n_long = [], dist.get_rank(), torch.ones(4), 0
    with meshverse.watch(1, on_stuck=heard.append):
        for _ in range(60):
            if rank == 0:
                time.sleep(0.05)  # sleep: the other one waits so long
            begin = time.monotonic()
            if how == "all_reduce":
                dist.all_reduce(tensor, group=group)
            elif rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
            n_long += time.monotonic() - begin >= 0.5
    return len(heard), n_long


@pytest.mark.long
@pytest.mark.parametrize("how", ["all_reduce", "send"])
def test_many_short_calls_are_no_long_one(crew: Crew, via_store_library: Path, how: str) -> None:
    heard, n_long = zip(*crew.run(_many_short_calls, 2, via_store_library, how), strict=True)
    assert max(heard) <= sum(n_long)


def _operations_of_looks(n_looks: int) -> Counter[str]:
    """Count what looks ask of the store while nothing is stuck."""
    asked: Counter[str] = Counter()

    def counted(name: str) -> Any:
        usual = getattr(StoreKeys, name)

        def ask(*arguments: Any, **named: Any) -> Any:
            asked[name] += 1
            return usual(*arguments, **named)

        return ask

    names = ("read", "put_first", "write", "count", "append", "remove")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(StoreKeys, name, counted(name))
        world = World.current()
        assert world is not None
        watched = _WatchedWorld(world, 60.0, None)
        for _ in range(n_looks):
            dist.all_reduce(torch.ones(1))
            watched.look(0.1, threading.Event())
    return asked


def test_a_look_asks_the_store_once(crew: Crew) -> None:
    # The first finds out how many alarms there have been.
    assert crew.run(_operations_of_looks, 2, 10) == [{"read": 11}] * 2


def _texts_after_a_second_alarm() -> list[str]:
    world = World.current()
    assert world is not None
    store = world.run_keys
    assert store is not None
    watched, is_over = _WatchedWorld(world, 60.0, None), threading.Event()
    is_over.set()  # it waits for nobody
    for number in range(2):
        watched._answer(Alarm(store, number), 0.1, is_over)
    return [store.read(f"watch/{number}/rank/{world.rank}") for number in range(2)]


def test_a_second_alarm_leaves_what_the_reporter_of_the_first_still_reads(crew: Crew) -> None:
    for texts in crew.run(_texts_after_a_second_alarm, 2):
        assert all(texts)


def test_the_work_of_a_report_grows_no_faster_than_the_pending_calls() -> None:
    assert _steps_of_a_report(400) < 3 * _steps_of_a_report(200)


def _steps_of_a_report(n_pending: int) -> int:
    """Return how often Python enters a function, or goes on in a generator, for a report."""
    store, now, tp = StoreKeys(dist.HashStore(), "", 4), time.time(), GroupSeen("axis tp", [0, 1])
    pending = [Call("tp", n, "all_reduce", False, now - 60) for n in range(1, n_pending + 1)]
    records = [RankRecord(rank, now, pending[rank:], {"tp": tp}) for rank in range(2)]
    alarm, steps = Alarm(store, 0), 0

    def count(_frame: object, event: str, _: object) -> None:
        nonlocal steps
        steps += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for record in records:
            alarm.answer(record)
        stuck = find_stuck(alarm.collect("tp", records[0]), 1.0)
    finally:
        sys.setprofile(before)
    assert len(stuck) == 1
    return steps
