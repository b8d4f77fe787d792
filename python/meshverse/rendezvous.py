"""Members of a group meet before they make it, where making it would wait for all of them.

Ranks that build meshes over other ranks, or first use lazy groups in another order, wait for one
another in different groups. c10d would do so until its timeout, without a word on why. Here they
wait in the store of the default group: a rank that has waited a while writes down in which group,
and looks at where those that it waits for are waiting.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

__all__ = ["meet"]

_log = logging.getLogger(__name__)

_ALL_CAME = "all came"
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.5  # so that ten thousand waiting ranks ask a store 20,000 times a second
_FIRST_LOOK_SECONDS = 1.0  # until this wait is written down and those of others are read
_LONGEST_LOOK_SECONDS = 30.0  # between two looks, of which each takes twice as long to come
_WARNING_SECONDS = 5.0
_READ_OF_GROUP = 16  # waits of members: small groups whole, of large ones a sample each time
_READ_AT_ONCE = 512  # waits in all, in one look


def meet(
    store: Any,
    group_name: str,
    label: str,
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta | None,
) -> None:
    """Wait until all members of a group have come, by four operations of a store, and as they wait.

    Args:
        store: of the default group, or a part of it.
        group_name: c10d's name of the group.
        label: what the group is, for messages.
        ranks: global ranks of the members.
        rank: mine.
        timeout: how long to wait; None for as long as it takes.

    Raises:
        RuntimeError: members wait for one another in a circle, or some did not come in time.
    """
    if len(ranks) > 1:
        _Meeting(store, group_name, label, ranks, rank).hold(timeout)


class _Wait(NamedTuple):
    """What a rank has written down of its wait.

    Attributes:
        group_name: c10d's name of the group.
        attempt: number of the meeting: a group that is tried again meets again.
        since: by the rank's clock, which tells this wait from an earlier one.
        ranks: the members it waits for.
        label: what the group is.
    """

    group_name: str
    attempt: int
    since: int
    ranks: list[int]
    label: str

    @property
    def outcome(self) -> str:
        """The key under which the meeting's outcome will be: whether all came, or why not."""
        return f"outcome/{self.group_name}/{self.attempt}"

    def __str__(self) -> str:
        return f"{self.label} with ranks {_short(self.ranks)}"


# The meetings that threads of this process are in. What several wait for says nothing of who waits
# for whom, so a wait is written down only while it is the only one.
_meetings: list[_Meeting] = []
_meetings_lock = threading.Lock()


class _Meeting:
    """One rank's wait for the other members of a group. Arguments as of `meet`."""

    def __init__(
        self, store: Any, group_name: str, label: str, ranks: Sequence[int], rank: int
    ) -> None:
        self._store, self._rank = store, rank
        attempt = store.add(_attempts(group_name), 0)
        self._wait = _Wait(group_name, attempt, 0, list(ranks), label)
        self._arrivals = f"arrivals/{group_name}/{attempt}"
        self._is_written_down = False

    def hold(self, timeout: timedelta | None) -> None:
        """Come, wait for the others, and go; see `meet`."""
        with _meetings_lock:
            for other in _meetings:
                other._take_back()
            _meetings.append(self)
        try:
            if self._store.add(self._arrivals, 1) == len(self._wait.ranks):
                self._end(self._wait, _ALL_CAME)
            else:
                self._wait_for_others(timeout)
        finally:
            with _meetings_lock:
                _meetings.remove(self)
                self._take_back()

    def _wait_for_others(self, timeout: timedelta | None) -> None:
        start = time.monotonic()
        look, next_look, warned = _FIRST_LOOK_SECONDS, _FIRST_LOOK_SECONDS, False
        while not self._is_over():
            waited = time.monotonic() - start
            if timeout is not None and waited > timeout.total_seconds():
                missing = self._what_is_missing()
                self._store.add(self._arrivals, -1)
                if self._is_over():
                    return
                raise RuntimeError(f"waited {timeout}: {missing}")
            if waited > next_look:
                look = min(2 * look, _LONGEST_LOOK_SECONDS)
                next_look = waited + look
                self._write_down()
                self._look_around()
            if waited > _WARNING_SECONDS and not warned:
                warned = True
                _log.warning(
                    "Rank %d has waited %g s to make %s: %s",
                    *(self._rank, _WARNING_SECONDS, self._wait, self._what_is_missing()),
                )
            # An eighth of the wait so far: those who come early are late by little.
            time.sleep(min(max(waited / 8, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))

    def _is_over(self) -> bool:
        """Whether all came; raises if they wait for one another."""
        outcome = self._read(self._wait.outcome)
        if outcome not in ("", _ALL_CAME):
            raise RuntimeError(
                f"ranks wait for one another: {outcome}. All ranks of a mesh must make it, over "
                "the same ranks, and make and first use meshes in the same order; "
                "mesh.universe.warm_up() makes lazy groups ahead of time."
            )
        return outcome != ""

    def _end(self, wait: _Wait, outcome: str) -> None:
        if self._store.compare_set(wait.outcome, "", outcome).decode() == outcome:
            self._store.add(_attempts(wait.group_name), 1)

    # --- who waits for whom ---------------------------------------------------------------------

    def _look_around(self) -> None:
        """End the meetings of all who wait in a circle, or for one."""
        path = self._path_to_circle()
        # All these waits were going on when the last was first read, if they are still the same.
        if any(self._read_wait(rank) != wait for rank, wait in path.items()):
            return
        steps = "; ".join(f"rank {rank} waits in {wait}" for rank, wait in path.items())
        for wait in path.values():
            self._end(wait, f"{steps} (seen by rank {self._rank})")

    def _path_to_circle(self) -> dict[int, _Wait]:
        """Waits from mine on, each for the next rank, the last for one of them; or none."""
        path: dict[int, _Wait] = {}
        read: set[int] = set()
        ahead = [iter([self._rank])]  # ranks to go on with, for each step of the path
        while ahead:
            rank = next(ahead[-1], None)
            if rank is None:
                ahead.pop()
                if path:
                    path.popitem()
                continue
            here = next(reversed(path.values()), None)
            wait = path.get(rank) or (None if rank in read else self._read_wait(rank))
            read.add(rank)
            if wait is None or (here is not None and wait.outcome == here.outcome):
                continue  # it is on its way, or there; or nobody on from it waits in a circle
            if rank in path:
                return path
            if len(read) > _READ_AT_ONCE or self._read(wait.outcome):
                continue
            path[rank] = wait
            ahead.append(iter(_some(wait.ranks)))
        return {}

    def _what_is_missing(self) -> str:
        ranks = self._wait.ranks
        waits = {rank: self._read_wait(rank) for rank in ranks[:_READ_OF_GROUP]}
        missing = {
            rank: wait
            for rank, wait in waits.items()
            if rank != self._rank and (wait is None or wait.outcome != self._wait.outcome)
        }
        elsewhere = [f"; rank {rank} waits in {wait}" for rank, wait in missing.items() if wait]
        came = self._store.add(self._arrivals, 0)
        before = self._read(self._wait._replace(attempt=self._wait.attempt - 1).outcome)
        return (
            f"{came} of {len(ranks)} members came, not seen were "
            f"{f'ranks {list(missing)}' if missing else 'others'}{''.join(elsewhere)}. They have "
            "died, or are building other meshes: all ranks of a mesh must make it, over the same "
            "ranks, and use its lazy groups."
            + (
                f" Before, ranks waited for one another: {before}."
                if before not in ("", _ALL_CAME)
                else ""
            )
        )

    # --- what ranks write down ------------------------------------------------------------------

    def _write_down(self) -> None:
        with _meetings_lock:
            if not self._is_written_down and _meetings == [self]:
                self._is_written_down = True
                self._wait = self._wait._replace(since=time.time_ns())
                self._store.set(_waits(self._rank), json.dumps(self._wait))

    def _take_back(self) -> None:
        if self._is_written_down:
            self._is_written_down = False
            self._store.set(_waits(self._rank), "")  # not deleted: others may be reading it

    def _read_wait(self, rank: int) -> _Wait | None:
        text = self._read(_waits(rank))
        return _Wait(*json.loads(text)) if text else None

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _some(ranks: Sequence[int]) -> Sequence[int]:
    return random.sample(ranks, _READ_OF_GROUP) if len(ranks) > _READ_OF_GROUP else ranks


def _short(ranks: list[int]) -> str:
    return f"{ranks[:8]} and {len(ranks) - 8} more" if len(ranks) > 8 else f"{ranks}"


def _attempts(group_name: str) -> str:
    return f"attempts/{group_name}"


def _waits(rank: int) -> str:
    return f"waits/{rank}"
