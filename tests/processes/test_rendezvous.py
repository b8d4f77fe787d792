"""Members that meet before they make a group: again and again, in threads, and elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.crew import Crew
from meshverse.rendezvous import meet

_LONG, _SHORT = timedelta(seconds=20), timedelta(seconds=0.3)


def _meet_all(store: Any, name: str, ranks: list[int]) -> list[float]:
    """All members, each a thread, come at once; how long each waited, in seconds."""
    seconds: dict[int, float] = {}

    def come(rank: int) -> None:
        start = time.monotonic()
        meet(store, name, f"group {name}", ranks, rank, _LONG)
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


def test_one_that_left_can_come_again() -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match=r"waited 0:00:00.300000: 1 of 3 members came"):
            meet(store, "x", "group x", [0, 1, 2], rank, _SHORT)
    assert max(_meet_all(store, "x", [0, 1, 2])) < 5


def test_nobody_meets_alone_after_a_meeting_that_was_complete() -> None:
    store = dist.HashStore()
    _meet_all(store, "x", [0, 1])
    with pytest.raises(RuntimeError, match=r"1 of 2 members came, not seen were ranks \[1\]"):
        meet(store, "x", "group x", [0, 1], 0, _SHORT)


def test_a_group_of_one_meets_nobody() -> None:
    meet(None, "x", "group x", [3], 3, _SHORT)


# --- ranks that are elsewhere --------------------------------------------------------------------


def _meet_in(groups: dict[int, list[int]], seconds: float, delays: dict[int, float]) -> Any:
    """Each rank comes to its group of these; what it was told, and after how long."""
    rank = dist.get_rank()
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    time.sleep(delays.get(rank, 0))
    start, told = time.monotonic(), "all came"
    try:
        ranks, limit = groups[rank], timedelta(seconds=seconds)
        meet(store, f"{ranks}", f"group of {rank}", ranks, rank, limit)
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
    assert told.startswith("waited 0:00:09: 1 of 2 members came, not seen were ranks [1]")
    assert seconds >= 9
    assert "rank 1 waits in" not in told or "group of 1 with ranks [1, 2]" in told


def test_the_one_who_is_elsewhere_is_named(crew: Crew) -> None:
    groups = {0: [0, 1], 1: [1, 2], 2: [2], 3: [3]}
    (told, _), *_ = crew.run(_meet_in, 4, groups, 3, {0: 0.5, 1: 1})
    assert "rank 1 waits in group of 1 with ranks [1, 2]. They have died, or are build" in told


def _two_threads_wait() -> list[str]:
    """Rank 0 waits in two groups, in threads; rank 1 in one of them, and comes to the other."""
    rank = dist.get_rank()
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    told = []

    def come(name: str, delay: float) -> Callable[[], None]:
        def run() -> None:
            time.sleep(delay)
            try:
                meet(store, name, name, [0, 1], rank, _LONG)
            except RuntimeError as error:
                told.append(str(error))

        return run

    if rank == 0:
        threads = [threading.Thread(target=come(name, 0)) for name in ("x", "y")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    else:
        come("y", 3)()
        come("x", 3)()
    return told


def test_what_two_threads_wait_for_is_no_circle(crew: Crew) -> None:
    assert crew.run(_two_threads_wait, 2) == [[], []]
