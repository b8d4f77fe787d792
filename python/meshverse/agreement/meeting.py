"""Members of a process group wait for each other before they create it.

c10d waits for all members too, for some backends, but it cannot say why they do not come. Here each
member counts itself in, and the last one to come writes the outcome: all came. The others read the
outcome until it is there.

A group can be tried again, so its meetings are numbered. Each meeting has one outcome, which never
changes: whoever writes it first decides. It can also be decided by a member that gives up, that is
interrupted, or that sees a cycle (see `waits`). All who have come to the meeting get that outcome.
A member that comes when the outcome is there comes to the next meeting. It may be late, or it may
be trying again: the two look the same.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from .board import Board
from .claims import users_line
from .ranks_text import shortened
from .waits import (
    OwnWaits,
    Wait,
    find_cycle,
    read_step,
    read_wait,
    remove_members,
    write_members,
)

__all__ = ["has_begun", "meet", "remove_meeting"]

_log = logging.getLogger(__name__)

_ALL_CAME = "all came"
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.5
_CHECK_SECONDS = 1.0  # between two looks at whether the ranks differ
_FIRST_LOOK_SECONDS = 1.0  # until a rank notes that it waits, and looks for a cycle
_LONGEST_LOOK_SECONDS = 30.0  # between two looks for a cycle; each takes twice as long to come
_WARNING_SECONDS = 5.0
_NAMED = 16  # members that a message names


def meet(
    board: Board,
    waits: OwnWaits,
    group_name: str,
    label: str,
    ranks: Sequence[int],
    timeout: timedelta | None,
    check: Callable[[], None] | None = None,
    first_in: set[str] | None = None,
) -> int:
    """Wait until all members of a group have come.

    It takes four operations of the store, and more while this rank waits.

    Args:
        board: of the run; its rank is a member.
        waits: of this rank.
        group_name: c10d's name of the group.
        label: what the group is, for messages.
        ranks: global ranks of the members.
        timeout: how long to wait; None for as long as it takes.
        check: called about once a second; it raises if there is no use in waiting.
        first_in: takes the key of the meeting if this rank is the first to come. It is the one that
            calls `remove_meeting` later.

    Returns:
        The number of the meeting, from 0: how many meetings for this group failed before.

    Raises:
        RuntimeError: members wait for each other in a cycle, some did not come in time, or one
            left. All who had come to the meeting get the same text.
    """
    if len(ranks) == 1:
        return 0
    waits.note_thread()
    number = 0
    while board.read(_outcome_key(group_name, number)):
        number += 1
    meeting = _Meeting(board, waits, _key(group_name, number), label, ranks)
    meeting.hold(timeout, check, set() if first_in is None else first_in)
    return number


def has_begun(board: Board, group_name: str) -> bool:
    """Whether a member has come to a meeting for this group; one operation of the store."""
    return board.read(f"{_key(group_name, 0)}/came") != ""


def remove_meeting(board: Board, meeting: str) -> None:
    """Remove what a meeting has left in the store, once no member waits in it any more."""
    board.remove(f"{meeting}/outcome")
    board.remove(f"{meeting}/came")
    remove_members(board, meeting)


class _Over(Exception):  # noqa: N818  # no error
    """The outcome came while this rank was reading something else."""


class _Meeting:
    """One rank's wait for the other members of a group. Arguments as of `meet`."""

    def __init__(
        self, board: Board, waits: OwnWaits, key: str, label: str, ranks: Sequence[int]
    ) -> None:
        self._board, self._waits, self._ranks = board, waits, ranks
        self._wait = Wait(key, label, "")
        self._is_noted = False

    def hold(
        self, timeout: timedelta | None, check: Callable[[], None] | None, first_in: set[str]
    ) -> None:
        """Count this rank in, wait for the other members, and leave; see `meet`."""
        try:
            place = self._board.count(f"{self._wait.meeting}/came")
            if place == 1:
                first_in.add(self._wait.meeting)
            if place == len(self._ranks):
                outcome = self._decide(self._wait.meeting, _ALL_CAME)
            else:
                outcome = self._wait_for_outcome(timeout, check, is_first=place == 1)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # of the store
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self._decide(self._wait.meeting, f"rank {self._board.rank} left it: {why}")
            raise
        finally:
            if self._is_noted:
                with contextlib.suppress(RuntimeError):  # of the store, whose failure was raised
                    self._waits.remove(self._board)
        if outcome != _ALL_CAME:
            raise RuntimeError(outcome)

    def _wait_for_outcome(
        self, timeout: timedelta | None, check: Callable[[], None] | None, *, is_first: bool
    ) -> str:
        start = time.monotonic()
        next_check, next_look, look = _CHECK_SECONDS, _FIRST_LOOK_SECONDS, _FIRST_LOOK_SECONDS
        warned = False
        if outcome := self._outcome():  # the last one may have come just now
            return outcome
        waited = 0.0
        while True:
            # The pause delays a rank by at most a quarter of the time it has waited already.
            wanted = max(waited / 4, _FIRST_PAUSE_SECONDS)
            self._board.pause(min(wanted, _LONGEST_PAUSE_SECONDS))
            if outcome := self._outcome():
                return outcome
            waited = time.monotonic() - start
            with contextlib.suppress(_Over):
                if timeout is not None and waited > timeout.total_seconds():
                    missing = self._what_is_missing()
                    text = f"rank {self._board.rank} waited {timeout}: {missing}"
                    return self._decide(self._wait.meeting, text)
                if check is not None and waited > next_check:
                    next_check = waited + _CHECK_SECONDS
                    self._board.pause()
                    check()
                if waited > next_look:
                    look = min(2 * look, _LONGEST_LOOK_SECONDS)
                    next_look = waited + look
                    self._look_for_cycle(is_first)
                if waited > _WARNING_SECONDS and is_first and not warned:  # one line for them all
                    warned = True
                    self._warn()

    def _decide(self, meeting: str, outcome: str) -> str:
        """The outcome of a meeting: this one, unless it is decided already."""
        return self._board.put_first(f"{meeting}/outcome", outcome)

    def _outcome(self) -> str:
        return self._board.read(f"{self._wait.meeting}/outcome")

    def _read(self, key: str) -> str:
        """A text that is not urgent: each time, the outcome is read before it."""
        self._board.pause()
        if self._outcome():
            raise _Over
        self._board.pause()
        return self._board.read(key)

    # --- where the others are -------------------------------------------------------------------

    def _look_for_cycle(self, is_first: bool) -> None:
        if not self._is_noted:
            self._is_noted = True
            self._board.pause()
            if is_first:  # one member writes this for all of them
                write_members(self._board, self._wait.meeting, self._ranks)
            self._waits.write(self._board, self._wait._replace(line=users_line()))
        cycle = find_cycle(self._wait.meeting, self._ranks, self._read) if is_first else []
        if not cycle or any(self._read(f"{step.wait.meeting}/outcome") for step in cycle):
            return
        text = (
            f"ranks wait for one another: {'; '.join(map(str, cycle))} (found by rank "
            f"{self._board.rank}). All ranks of a mesh must make it, over the same ranks, and make "
            "and first use meshes in the same order; mesh.universe.warm_up() makes lazy groups "
            "ahead of time."
        )
        for step in cycle:
            self._decide(step.wait.meeting, text)

    def _warn(self) -> None:
        _log.warning(
            "Rank %d has waited %g s to make %s with ranks %s: %s",
            *(self._board.rank, _WARNING_SECONDS, self._wait.label, shortened(self._ranks)),
            self._what_is_missing(),
        )

    def _what_is_missing(self) -> str:
        self._board.pause()
        came = self._board.count(f"{self._wait.meeting}/came", 0)
        others = [rank for rank in self._ranks[:_NAMED] if rank != self._board.rank]
        waits = {rank: read_wait(rank, self._read) for rank in others}
        missing = {r: w for r, w in waits.items() if w is None or w.meeting != self._wait.meeting}
        elsewhere = [
            f"; {read_step(rank, wait, self._read)}" for rank, wait in missing.items() if wait
        ]
        name, _, number = self._wait.meeting.removeprefix("meet/").rpartition("/")
        before = self._read(_outcome_key(name, int(number) - 1))
        return (
            f"{came} of {len(self._ranks)} members came; not seen were "
            f"{f'ranks {list(missing)}' if missing else 'others'}{''.join(elsewhere)}. Those that "
            "did not come have died, or are building other meshes: all ranks of a mesh must make "
            "it, over the same ranks, and use its lazy groups."
            + (f" The attempt before failed: {before}" if before not in ("", _ALL_CAME) else "")
        )


def _key(group_name: str, number: int) -> str:
    return f"meet/{group_name}/{number}"


def _outcome_key(group_name: str, number: int) -> str:
    return f"{_key(group_name, number)}/outcome"
