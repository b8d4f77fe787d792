"""The pauses of `helpers.jitter`: off by default; the same seed pauses at the same places."""

from __future__ import annotations

import sys
import time

import pytest
import torch
import torch.distributed as dist

from helpers import jitter
from helpers.crew import Crew


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each pause, which are noted only."""
    noted: list[float] = []
    monkeypatch.setattr(time, "sleep", noted.append)
    return noted


def _places(seed: str, name: str, pauses: list[float]) -> list[tuple[int, float]]:
    """Return at which of 300 operations a program pauses, and how long."""
    usual, pauses[:] = sys.getswitchinterval(), []
    pausing, places = jitter.Jitter(seed, name), []
    for number in range(300):
        pausing.pause("Store.set")
        places += [(number, pauses.pop())] if pauses else []
    sys.setswitchinterval(usual)
    return places


def test_the_same_seed_pauses_at_the_same_places(pauses: list[float]) -> None:
    first = _places("7", "test_a", pauses)
    assert first
    assert _places("7", "test_a", pauses) == first
    assert _places("8", "test_a", pauses) != first
    assert _places("7", "test_b", pauses) != first


def test_pauses_are_mostly_short_and_come_to_an_end(pauses: list[float]) -> None:
    usual = sys.getswitchinterval()
    for seed in range(20):
        pausing = jitter.Jitter(str(seed), "test")
        for number in range(2000):
            pausing.pause(f"place {number % 10}")
        assert sum(pauses) < jitter.BUDGET_SECONDS + 1
        assert all(0 <= seconds <= 1 for seconds in pauses)
        assert sum(seconds > 0.1 for seconds in pauses) < len(pauses) / 5
        pauses.clear()
    sys.setswitchinterval(usual)


def _where_it_pauses(seed: str | None) -> list[str]:
    """Return the operations around which this rank pauses or could."""
    if seed is None:
        return []
    jitter.begin(f"rank {dist.get_rank()}", seed)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{dist.get_rank()}", "")
    store.get("0")
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    return jitter.places()


@pytest.mark.long
def test_ranks_pause_around_what_they_do_together() -> None:
    crew = Crew()  # its processes are jittered from then on
    for places in crew.run(_where_it_pauses, 2, "3"):
        assert {
            "Store.set", "after Store.set", "Store.get", "ProcessGroupGloo.__init__",
            "ProcessGroup.allreduce", "ProcessGroup.shutdown",
        } <= set(places)  # fmt: skip
    crew.stop()
