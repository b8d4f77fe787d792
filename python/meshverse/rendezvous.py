"""Members of a group meet before they make it, where making it would wait for all of them.

Ranks that build meshes over other ranks, or first use lazy groups in another order, wait for one
another in different groups. c10d would do so until its timeout, without a word on why. Here they
wait in the store of the default group: a rank that has waited a while writes down in which group,
and looks at where those that it waits for are waiting.

A group can be tried again, so its meetings are numbered. Each has one outcome, which whoever comes
first decides for all who came: the last member, one that leaves, or one that sees a circle. Who
comes later comes to the next: whether it was told in another group or is late, nobody can know.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

__all__ = ["Meetings", "forget_meetings", "meet", "shortened"]

_log = logging.getLogger(__name__)

_ALL_CAME = "all came"
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.5  # so that ten thousand waiting ranks ask a store 20,000 times a second
_FIRST_LOOK_SECONDS = 1.0  # until this wait is written down and those of others are read
_LONGEST_LOOK_SECONDS = 30.0  # between two looks, of which each takes twice as long to come
_WARNING_SECONDS = 5.0
_READ_OF_GROUP = 16  # waits of members: small groups whole, of large ones a sample each time
_READ_AT_ONCE = 256  # waits in all, in one look


class Meetings:
    """The meetings that the threads of one rank are in, during one world.

    What a rank waits for in one thread says nothing of who waits for whom if another thread may
    come meanwhile. So a wait is written down only by the main thread, while it alone meets, and not
    any more once another one has.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # protects the two below, and what is written down of them
        self.open: list[_Meeting] = []
        self.is_of_main_thread = True


def meet(
    store: Any,
    meetings: Meetings,
    group_name: str,
    label: str,
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta | None,
) -> None:
    """Wait until all members of a group have come: four operations of a store, and as it waits.

    Args:
        store: of the default group, or a part of it.
        meetings: of this rank, in this world.
        group_name: c10d's name of the group.
        label: what the group is, for messages.
        ranks: global ranks of the members.
        rank: mine.
        timeout: how long to wait; None for as long as it takes.

    Raises:
        RuntimeError: members wait for one another in a circle, some did not come in time, or one
            left. All who had come are told the same.
    """
    if len(ranks) > 1:
        _Meeting(store, meetings, group_name, label, ranks, rank).hold(timeout)


def forget_meetings(store: Any, group_name: str) -> None:
    """Take what is left of a group's meetings out of the store; one rank does, once it was made."""
    attempt = 0
    while store.check([_outcome(group_name, attempt)]):
        store.delete_key(_outcome(group_name, attempt))
        store.delete_key(_arrivals(group_name, attempt))
        attempt += 1


class _Wait(NamedTuple):
    """What a rank has written down of its wait.

    Attributes:
        group_name: c10d's name of the group.
        attempt: number of the meeting.
        since: by the rank's clock, which tells this wait from an earlier one.
        label: what the group is.
    """

    group_name: str
    attempt: int
    since: int
    label: str

    @property
    def outcome(self) -> str:
        """The key under which the meeting's outcome will be: that all came, or why not."""
        return _outcome(self.group_name, self.attempt)


class _Meeting:
    """One rank's wait for the other members of a group. Arguments as of `meet`."""

    def __init__(
        self,
        store: Any,
        meetings: Meetings,
        group_name: str,
        label: str,
        ranks: Sequence[int],
        rank: int,
    ) -> None:
        self._store, self._meetings, self._rank = store, meetings, rank
        self._ranks = list(ranks)
        wait = _Wait(group_name, 0, 0, label)
        while store.check([wait.outcome]):
            wait = wait._replace(attempt=wait.attempt + 1)
        self._wait = wait
        self._arrivals = _arrivals(group_name, wait.attempt)
        self._members_of = {group_name: self._ranks}  # as far as they were read
        self._is_written_down = False

    def hold(self, timeout: timedelta | None) -> None:
        """Come, wait for the others, and go; see `meet`."""
        self._enter()
        try:
            if self._store.add(self._arrivals, 1) == len(self._ranks):
                outcome = self._decide(_ALL_CAME)
            else:
                outcome = self._outcome_after_waiting(timeout)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # of the store
                self._decide(f"rank {self._rank} left it: {type(error).__name__}")
            raise
        finally:
            self._leave()
        if outcome != _ALL_CAME:
            raise RuntimeError(outcome)

    def _outcome_after_waiting(self, timeout: timedelta | None) -> str:
        start = time.monotonic()
        look, next_look, warned = _FIRST_LOOK_SECONDS, _FIRST_LOOK_SECONDS, False
        while not (outcome := self._read(self._wait.outcome)):
            waited = time.monotonic() - start
            if timeout is not None and waited > timeout.total_seconds():
                missing = self._what_is_missing()
                return self._decide(f"rank {self._rank} waited {timeout}: {missing}")
            if waited > next_look:
                look = min(2 * look, _LONGEST_LOOK_SECONDS)
                next_look = waited + look
                self._write_down()
                self._look_around()
            if waited > _WARNING_SECONDS and not warned:
                warned = True
                _log.warning(
                    "Rank %d has waited %g s to make %s with ranks %s: %s",
                    *(self._rank, _WARNING_SECONDS, self._wait.label, shortened(self._ranks)),
                    self._what_is_missing(),
                )
            # A quarter of the wait so far: the store is asked 26 times in the first second, and
            # those who come early go on later than they could by an eighth of their wait.
            time.sleep(min(max(waited / 4, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))
        return outcome

    def _decide(self, outcome: str, wait: _Wait | None = None) -> str:
        """The outcome of a meeting, mine if not said: this one, unless it is decided already."""
        key = self._wait.outcome if wait is None else wait.outcome
        decided: bytes = self._store.compare_set(key, "", outcome)
        return decided.decode()

    # --- who waits for whom ---------------------------------------------------------------------

    def _look_around(self) -> None:
        """End the meetings of ranks that wait for one another, if I wait for one of them."""
        path = self._path_to_circle()
        # All these waits were read before now. If none of the meetings is over, and they still wait
        # for the same after that, then all of them wait now.
        if not path or any(self._read(wait.outcome) for wait in path.values()):
            return
        if any(self._read_wait(rank) != wait for rank, wait in path.items()):
            return
        steps = "; ".join(f"rank {rank} waits in {self._told(w)}" for rank, w in path.items())
        for wait in path.values():
            self._decide(
                f"ranks wait for one another: {steps} (seen by rank {self._rank}). All ranks of a "
                "mesh must make it, over the same ranks, and make and first use meshes in the same "
                "order; mesh.universe.warm_up() makes lazy groups ahead of time.",
                wait,
            )

    def _path_to_circle(self) -> dict[int, _Wait]:
        """Waits from mine on, each for the next rank, the last for one of them; or none."""
        mine = self._read_wait(self._rank)
        if mine is None:
            return {}
        path, read = {self._rank: mine}, {self._rank}
        ahead = [iter(_some(self._ranks))]  # ranks to go on with, for each step of the path
        while ahead and len(read) < _READ_AT_ONCE:
            rank = next(ahead[-1], None)
            if rank is None:
                ahead.pop()
                path.popitem()
                continue
            if rank in read:
                continue
            read.add(rank)
            here, wait = next(reversed(path.values())), self._read_wait(rank)
            if wait is None or wait.outcome == here.outcome:
                continue  # on its way, or there
            path[rank] = wait
            members = self._members(wait.group_name)
            if any(other in members for other, w in path.items() if w.outcome != wait.outcome):
                return path
            ahead.append(iter(_some(members)))
        return {}

    def _what_is_missing(self) -> str:
        waits = {rank: self._read_wait(rank) for rank in self._ranks[:_READ_OF_GROUP]}
        missing = {
            rank: wait
            for rank, wait in waits.items()
            if rank != self._rank and (wait is None or wait.outcome != self._wait.outcome)
        }
        elsewhere = [
            f"; rank {r} waits in {self._told(wait)}" for r, wait in missing.items() if wait
        ]
        came = self._store.add(self._arrivals, 0)
        before = self._read(self._wait._replace(attempt=self._wait.attempt - 1).outcome)
        return (
            f"{came} of {len(self._ranks)} members came; not seen were "
            f"{f'ranks {list(missing)}' if missing else 'others'}{''.join(elsewhere)}. Those that "
            "did not come have died, or are building other meshes: all ranks of a mesh must make "
            "it, over the same ranks, and use its lazy groups."
            + (f" The attempt before failed: {before}" if before not in ("", _ALL_CAME) else "")
        )

    def _told(self, wait: _Wait) -> str:
        return f"{wait.label} with ranks {shortened(self._members(wait.group_name))}"

    # --- what ranks write down ------------------------------------------------------------------

    def _enter(self) -> None:
        with self._meetings.lock:
            if threading.current_thread() is not threading.main_thread():
                self._meetings.is_of_main_thread = False
            for other in self._meetings.open:
                other._take_back()
            self._meetings.open.append(self)

    def _leave(self) -> None:
        with self._meetings.lock:
            self._meetings.open.remove(self)
            with contextlib.suppress(RuntimeError):  # of the store, whose failure was raised
                self._take_back()

    def _write_down(self) -> None:
        with self._meetings.lock:
            is_alone = self._meetings.is_of_main_thread and self._meetings.open == [self]
            if self._is_written_down or not is_alone:
                return
            members = f"members/{self._wait.group_name}"
            if not self._store.check([members]):  # once for all, as a group can be large
                self._store.set(members, json.dumps(self._ranks))
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

    def _members(self, group_name: str) -> list[int]:
        if group_name not in self._members_of:
            self._members_of[group_name] = json.loads(self._read(f"members/{group_name}"))
        return self._members_of[group_name]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _some(ranks: Sequence[int]) -> Sequence[int]:
    return random.sample(ranks, _READ_OF_GROUP) if len(ranks) > _READ_OF_GROUP else ranks


def shortened(ranks: list[int]) -> str:
    """Ranks as messages tell them: the first eight of many."""
    return f"{ranks[:8]} and {len(ranks) - 8} more" if len(ranks) > 8 else f"{ranks}"


def _outcome(group_name: str, attempt: int) -> str:
    return f"outcome/{group_name}/{attempt}"


def _arrivals(group_name: str, attempt: int) -> str:
    return f"arrivals/{group_name}/{attempt}"


def _waits(rank: int) -> str:
    return f"waits/{rank}"
