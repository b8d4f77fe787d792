"""Members that meet before they make a group: again and again, in threads, and elsewhere."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.crew import Crew
from meshverse.agreement import Board, OwnWaits, Run, meet, remove_meeting

_LONG, _SHORT = timedelta(seconds=20), timedelta(seconds=0.3)


def _board(store: Any, rank: int) -> Board:
    run = Run(rank, world_size=4)
    run._number = 1  # no second run begins when a member comes again
    return Board(store, run)


def _come(
    store: Any,
    name: str,
    ranks: list[int],
    rank: int,
    timeout: timedelta | None = _LONG,
    first_in: set[str] | None = None,
) -> None:
    meet(
        *(_board(store, rank), OwnWaits(), name, f"group {name}", ranks, timeout), first_in=first_in
    )


def _meet_all(store: Any, name: str, ranks: list[int]) -> list[float]:
    """All members, each a thread, come at once; how long each waited, in seconds."""
    seconds: dict[int, float] = {}

    def come(rank: int) -> None:
        start = time.monotonic()
        _come(store, name, ranks, rank)
        seconds[rank] = time.monotonic() - start

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [seconds[rank] for rank in ranks]


def test_members_meet_again_and_again() -> None:
    store = dist.HashStore()
    for _ in range(3):
        assert max(_meet_all(store, "x", [0, 1, 2])) < 5


def test_after_one_left_all_can_come_again() -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match=rf"rank {rank} waited 0:00:00.300000: 1 of 3 memb"):
            _come(store, "x", [0, 1, 2], rank, _SHORT)
    assert max(_meet_all(store, "x", [0, 1, 2])) < 5


def test_nobody_meets_alone_after_a_meeting_that_was_complete() -> None:
    store = dist.HashStore()
    _meet_all(store, "x", [0, 1])
    with pytest.raises(RuntimeError, match=r"1 of 2 members came; not seen were ranks \[1\]"):
        _come(store, "x", [0, 1], 0, _SHORT)


def test_what_a_group_left_in_the_store_can_be_taken_out() -> None:
    store, first_in = dist.HashStore(), set[str]()
    with pytest.raises(RuntimeError, match="rank 0 waited"):
        _come(store, "x", [0, 1], 0, _SHORT, first_in)
    second = threading.Thread(target=_come, args=(store, "x", [0, 1], 1))
    second.start()
    while store.num_keys() < 3:
        time.sleep(0.01)
    _come(store, "x", [0, 1], 0)
    second.join(30)
    assert store.num_keys() == 4
    assert len(first_in) == 1  # the other rank was the first to come to the second meeting
    for meeting in first_in:
        remove_meeting(_board(store, 0), meeting)
    assert store.num_keys() == 2


def test_what_was_decided_holds_for_the_last_to_come() -> None:
    store = dist.HashStore()

    class _JustNow(dist.PrefixStore):
        """Another rank decides between the arrival of the last and its own decision."""

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            if desired == "all came":
                super().compare_set(key, "", "ranks wait for one another")
            return super().compare_set(key, expected, desired)

    place = _JustNow("x", store)
    _board(place, 0).count("meet/x/0/came")
    with pytest.raises(RuntimeError, match=r"^ranks wait for one another$"):
        _come(place, "x", [0, 1], 1)


def test_one_waits_for_ever_if_told_so() -> None:
    store = dist.HashStore()
    first = threading.Thread(target=_come, args=(store, "x", [0, 1], 0, None), daemon=True)
    first.start()
    _come(store, "x", [0, 1], 1)
    first.join(30)
    assert not first.is_alive()


def test_a_group_of_one_meets_nobody() -> None:
    _come(None, "x", [3], 3)


def _interrupted() -> tuple[str, float]:
    """Rank 0 is interrupted in its wait for rank 2; what the others are told, and how soon."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    rank, told = dist.get_rank(), "all came"
    store, start = _store(), time.monotonic()
    if rank == 0:
        usual = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.7)
    if rank < 2:
        try:
            _come(store, "x", [0, 1, 2], rank)
        except (RuntimeError, KeyboardInterrupt) as error:
            told = repr(error)
    seconds = time.monotonic() - start
    if rank == 0:
        signal.signal(signal.SIGALRM, usual)
    dist.barrier()
    if rank < 3:
        _come(store, "x", [0, 1, 2], rank)
    return told, seconds


def test_one_that_is_interrupted_tells_the_others(crew: Crew) -> None:
    (first, _), (second, seconds), *_ = crew.run(_interrupted, 4)
    assert first == "KeyboardInterrupt()"
    assert second == "RuntimeError('rank 0 left it: KeyboardInterrupt')"
    assert seconds < 5


# --- ranks that are elsewhere --------------------------------------------------------------------


def _store() -> dist.Store:
    return dist.PrefixStore("test", dist.distributed_c10d._get_default_store())


def _meet_in(groups: dict[int, list[int]], seconds: float, delays: dict[int, float]) -> Any:
    """Each rank comes to its group of these; what it was told, and after how long."""
    rank, store = dist.get_rank(), _store()
    dist.barrier()  # who comes after the others were told comes to the next meeting
    time.sleep(delays.get(rank, 0))
    start, told = time.monotonic(), "all came"
    ranks, limit = groups[rank], timedelta(seconds=seconds)
    try:
        meet(_board(store, rank), OwnWaits(), f"{ranks}", f"group of {rank}", ranks, limit)
    except RuntimeError as error:
        told = str(error)
    return told, time.monotonic() - start


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param({0: [0, 1], 1: [0, 1, 2], 2: [0, 1, 2], 3: [3]}, id="inside"),
        pytest.param({0: [0, 1], 1: [1, 2], 2: [2, 3], 3: [3, 0]}, id="around"),
        pytest.param({0: [0, 1, 3], 1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1, 3]}, id="across"),
    ],
)
def test_all_whose_group_is_in_a_circle_are_told_soon(
    crew: Crew, groups: dict[int, list[int]]
) -> None:
    for rank, (told, seconds) in enumerate(crew.run(_meet_in, 4, groups, 30, {0: 2})):
        if groups[rank] == [rank]:
            assert told == "all came"
            continue
        assert told.startswith("ranks wait for one another: rank ")
        assert told.count("waits in group of") >= 2
        assert seconds < 8


def test_who_waits_for_no_circle_waits_on(crew: Crew) -> None:
    groups = {0: [0, 1], 1: [1, 2], 2: [2, 3], 3: [2, 3]}
    seen = crew.run(_meet_in, 4, groups, 9, {3: 6})
    assert [told for told, _ in seen[2:]] == ["all came"] * 2
    told, seconds = seen[0]
    assert told.startswith("rank 0 waited 0:00:09: 1 of 2 members came; not seen were ranks [1]")
    assert seconds >= 9


def test_the_one_who_is_elsewhere_is_named(crew: Crew) -> None:
    groups = {0: [0, 1], 1: [1, 2], 2: [2], 3: [3]}
    (told, _), *_ = crew.run(_meet_in, 4, groups, 4, {1: 0.5})
    assert "rank 1 waits in group of 1 with ranks [1, 2] at " in told
    assert ". Those that did not come have" in told


def _in_two_threads(delays: dict[tuple[int, str], float]) -> list[str]:
    """Each rank comes to x in its main thread and to y in another; errors."""
    rank, store, waits, told = dist.get_rank(), _store(), OwnWaits(), []

    def come(name: str) -> None:
        time.sleep(delays.get((rank, name), 0))
        try:
            meet(_board(store, rank), waits, name, name, [0, 1], _LONG)
        except RuntimeError as error:
            told.append(str(error))

    other = threading.Thread(target=come, args=("y",))
    other.start()
    come("x")
    other.join(30)
    return told


@pytest.mark.parametrize(
    "delays",
    [
        pytest.param({(1, "x"): 3, (1, "y"): 4}, id="one rank waits in both"),
        pytest.param({(0, "y"): 4, (1, "x"): 4}, id="each waits in one, and comes to the other"),
    ],
)
def test_what_threads_wait_for_is_no_circle(
    crew: Crew, delays: dict[tuple[int, str], float]
) -> None:
    assert crew.run(_in_two_threads, 2, delays) == [[], []]
