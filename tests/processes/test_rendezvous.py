"""Members that meet before they make a group: again and again, and in several threads."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

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
    with pytest.raises(RuntimeError, match=r"Rank 0 waited .* for ranks \[1, 2\]"):
        meet(store, "x", "group x", [0, 1, 2], 0, _SHORT)
    with pytest.raises(RuntimeError, match=r"Rank 1 waited .* for ranks \[0, 2\]"):
        meet(store, "x", "group x", [0, 1, 2], 1, _SHORT)
    assert max(_meet_all(store, "x", [0, 1, 2])) < 5


def test_nobody_meets_alone_after_a_meeting_that_was_complete() -> None:
    store = dist.HashStore()
    _meet_all(store, "x", [0, 1])
    with pytest.raises(RuntimeError, match=r"Rank 0 waited .* for ranks \[1\]"):
        meet(store, "x", "group x", [0, 1], 0, _SHORT)


def test_the_one_who_is_elsewhere_is_named() -> None:
    store = dist.HashStore()

    def wait_elsewhere() -> None:
        with pytest.raises(RuntimeError, match="they never came"):
            meet(store, "y", "group y", [1, 2], 1, timedelta(seconds=2))

    elsewhere = threading.Thread(target=wait_elsewhere)
    elsewhere.start()
    time.sleep(0.2)
    # Two threads of one process wait, so what the second waits for is not written down.
    with pytest.raises(RuntimeError, match=r"rank 1 waits in group y with ranks \[1, 2\]"):
        meet(store, "x", "group x", [0, 1], 0, _SHORT)
    elsewhere.join(30)


def test_a_group_of_one_meets_nobody() -> None:
    meet(None, "x", "group x", [3], 3, _SHORT)
