"""Members of a group meet before they make it, where making it would wait for all of them.

Groups made when they are first used can be wanted in different orders by different ranks. c10d
would then wait until its timeout, without a word on why. Here a rank writes down what it waits for,
and looks at what ranks it waits for are waiting for.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

__all__ = ["meet"]

_PREFIX = "meshverse/meet"
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.5  # so that ten thousand waiting ranks ask a store 20,000 times a second
_FIRST_LOOK_SECONDS = 1.0  # until others' waits are read first; then twice as long each time
_LONGEST_LOOK_SECONDS = 30.0
_READ_AT_ONCE = 16  # waits of other ranks: small groups whole, of large ones a sample each time


def meet(
    store: Any, group_name: str, label: str, ranks: Sequence[int], rank: int, timeout: timedelta
) -> None:
    """Wait until all members of a group have come, in a few store operations each.

    Args:
        store: the default group's.
        group_name: c10d's name of the group.
        label: what the group is, for messages.
        ranks: global ranks of the members.
        rank: mine.
        timeout: how long to wait.

    Raises:
        RuntimeError: members wait for one another in a circle, or some did not come in time.
    """
    if len(ranks) > 1:
        _Meeting(store, group_name, label, ranks, rank).hold(timeout)


class _Wait(NamedTuple):
    """What a rank waits for: a group, its members, and what it is."""

    group_name: str
    ranks: list[int]
    label: str

    def __str__(self) -> str:
        return f"{self.label} with ranks {self.ranks}"


# How many threads of this process wait. What several wait for says nothing of who waits for whom,
# so it is written down only while there is one.
_open_waits = 0
_open_waits_lock = threading.Lock()


class _Meeting:
    """One rank's wait for the other members of a group. Arguments as of `meet`."""

    def __init__(
        self, store: Any, group_name: str, label: str, ranks: Sequence[int], rank: int
    ) -> None:
        self._store, self._rank = store, rank
        self._wait = _Wait(group_name, list(ranks), label)
        self._arrivals = f"{_PREFIX}/{group_name}/arrivals"

    def hold(self, timeout: timedelta) -> None:
        """Come, wait for the others, and go; see `meet`."""
        self._tell_wait()
        # Every `size` arrivals complete one meeting: a group that is tried again meets again.
        size = len(self._wait.ranks)
        arrivals = self._store.add(self._arrivals, 1)
        complete = f"{_PREFIX}/{self._wait.group_name}/complete/{(arrivals - 1) // size}"
        if arrivals % size == 0:
            self._store.set(complete, "1")
        try:
            self._wait_for(complete, timeout)
        except RuntimeError:
            self._store.add(self._arrivals, -1)
            raise
        finally:
            self._end_wait()

    def _wait_for(self, complete: str, timeout: timedelta) -> None:
        start = time.monotonic()
        pause, look, next_look = _FIRST_PAUSE_SECONDS, _FIRST_LOOK_SECONDS, _FIRST_LOOK_SECONDS
        circle: list[int] | None = None
        while not self._store.check([complete]):
            waited = time.monotonic() - start
            if waited > timeout.total_seconds():
                raise RuntimeError(self._what_is_missing(timeout))
            if waited > next_look:
                look = min(2 * look, _LONGEST_LOOK_SECONDS)
                next_look = waited + look
                circle = self._look_around(circle)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _look_around(self, circle: list[int] | None) -> list[int] | None:
        """The circle of ranks that wait for one another, if any; raises where it is seen twice."""
        seen = self._path_to_me([self._rank], {self._rank})
        if seen is not None and seen == circle:
            # Whoever sees the circle first leaves it, so the others would not see it any more.
            steps = {rank: self._read_wait(rank) for rank in seen}
            text = ", ".join(f"rank {rank} waits in {wait}" for rank, wait in steps.items())
            for rank, wait in steps.items():
                if wait is not None:
                    self._store.set(_told(rank, wait.group_name), text)
        if steps_told := self._read(_told(self._rank, self._wait.group_name)):
            raise RuntimeError(
                "Ranks first use lazy groups in different orders and wait for one another: "
                f"{steps_told}. Use the axes in the same order on all ranks, or make the groups "
                "ahead of time with mesh.universe.warm_up()."
            )
        return seen

    def _path_to_me(self, path: list[int], visited: set[int]) -> list[int] | None:
        wait = self._read_wait(path[-1])
        if wait is None:
            return None
        members = [rank for rank in wait.ranks if rank != path[-1]]
        for member in random.sample(members, min(_READ_AT_ONCE, len(members))):
            theirs = self._read_wait(member)
            if theirs is None or theirs.group_name == wait.group_name:
                continue  # on its way, or there
            if member == self._rank:
                return path
            if member not in visited:
                visited.add(member)
                found = self._path_to_me([*path, member], visited)
                if found is not None:
                    return found
        return None

    def _what_is_missing(self, timeout: timedelta) -> str:
        looked_at = self._wait.ranks[:_READ_AT_ONCE]
        waits = {rank: self._read_wait(rank) for rank in looked_at if rank != self._rank}
        missing = {
            rank: wait
            for rank, wait in waits.items()
            if wait is None or wait.group_name != self._wait.group_name
        }
        elsewhere = [f"rank {rank} waits in {wait}" for rank, wait in missing.items() if wait]
        return (
            f"Rank {self._rank} waited {timeout} for ranks {list(missing) or 'of the group'} to "
            f"make {self._wait}; {', '.join(elsewhere) or 'they never came'}. All members of a "
            "lazy group must use it; mesh.universe.warm_up() makes groups ahead of time."
        )

    # --- what ranks write down ------------------------------------------------------------------

    def _tell_wait(self) -> None:
        global _open_waits
        name, ranks, label = self._wait
        self._store.set(_told(self._rank, name), "")
        with _open_waits_lock:
            _open_waits += 1
            text = f"{name} {','.join(map(str, ranks))} {label}" if _open_waits == 1 else ""
            self._store.set(_waits(self._rank), text)

    def _end_wait(self) -> None:
        global _open_waits
        with _open_waits_lock:
            _open_waits -= 1
            self._store.set(_waits(self._rank), "")  # not deleted: others may be reading it

    def _read_wait(self, rank: int) -> _Wait | None:
        text = self._read(_waits(rank))
        if not text:
            return None
        name, members, label = text.split(" ", 2)
        return _Wait(name, [int(member) for member in members.split(",")], label)

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _waits(rank: int) -> str:
    return f"{_PREFIX}/waits/{rank}"


def _told(rank: int, group_name: str) -> str:
    return f"{_PREFIX}/told/{rank}/{group_name}"
