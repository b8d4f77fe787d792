"""Ranks that take turns: one goes on when others have come to some point."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from meshverse.agreement.deadlock import note_key
from meshverse.agreement.rendezvous import Joined, Rendezvous, _Attempt
from meshverse.store import StoreKeys
from meshverse.world import World

_SECONDS = 60.0


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it does not hold after a minute.
    """
    end = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"After {_SECONDS:.0f} seconds: {condition}")
        time.sleep(0.01)  # sleep: it looks again


def wait_until_they_wait(*ranks: int, store: StoreKeys | None = None) -> None:
    """Wait until these ranks note in the store that they wait for others, after a second of it.

    Args:
        ranks: that will wait for this one.
        store: that they use; by default the world's.
    """
    if store is None:
        world = World.current()
        assert world is not None
        store = world.run_keys
        assert store is not None
    for rank in ranks:
        wait_until(lambda rank=rank: store.read(note_key(rank)))


@contextlib.contextmanager
def looks_for_missing_after(*ranks: int) -> Iterator[None]:
    """Let this rank, in this block, say who is missing in a rendezvous only once these ranks wait.

    Members are counted, but are known by name only after a second of waiting.
    """
    usual = _Attempt._missing

    def missing(self: _Attempt) -> str:
        store = self._store
        wait_until(lambda: self._outcome() or all(store.read(note_key(rank)) for rank in ranks))
        return usual(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Attempt, "_missing", missing)
        yield


@contextlib.contextmanager
def gives_up_after(seconds: float) -> Iterator[None]:
    """Wait no longer than this in a rendezvous, on this rank and in this block.

    So a wait that is in vain ends soon, while the groups that the other members, and later calls,
    create and use keep a timeout that no slow machine exceeds.
    """
    usual = Rendezvous.join

    def join(
        self: Rendezvous, world: World, name: str, label: str, ranks: Any, _: Any, **named: Any
    ) -> Joined:
        return usual(self, world, name, label, ranks, timedelta(seconds=seconds), **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rendezvous, "join", join)
        yield


def say_when_compared(patch: pytest.MonkeyPatch) -> None:
    """Have this rank's comparisons of calls let go the ranks that wait for them.

    Args:
        patch: that takes this back.
    """
    usual, store, numbers = StoreKeys.put_first, _store(), Counter[int]()

    def put_first(self: StoreKeys, key: str, text: str) -> str:
        found = usual(self, key, text)
        if key.startswith("calls/"):
            rank = dist.get_rank()
            numbers[rank] += 1
            store.set(f"{rank} has compared {numbers[rank]}", "")
        return found

    patch.setattr(StoreKeys, "put_first", put_first)


def wait_for_comparison(*ranks: int, number: int = 1) -> None:
    """Wait until these ranks have compared so many calls since they called `say_when_compared`."""
    _store().wait([f"{rank} has compared {number}" for rank in ranks])


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
