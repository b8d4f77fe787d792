"""Ranks that wait for each other in a cycle find that out.

A rank that waits for the other members of a process group cannot come to another group meanwhile.
So ranks can wait for each other for ever. Example: rank 0 waits for rank 1 in group A, and rank 1
waits for rank 0 in group B.

A rank that has waited for a second writes a note: where it waits. The rank that came first to a
group then follows the notes: which member of this group waits elsewhere, which member of that other
group waits elsewhere again, and so on. If that leads back to a group on the way, it is a cycle.

Why that is proof: a rank that has come to a meeting leaves it only when the meeting is over. If
none of the meetings in the cycle is over after all the notes were read, all these ranks wait at
that moment. Each of them would have to come to the meeting before it in the cycle, and cannot.

That holds if a rank waits in its main thread only: otherwise another thread of it could come. So a
rank writes no notes once another thread of it has waited.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .board import Board
from .ranks_text import shortened

__all__ = ["OwnWaits", "Wait", "find_cycle", "read_wait", "remove_members"]

_SAMPLE = 16  # members of a large group whose notes are read, others each time
_MOST_NOTES = 64  # that are read to find one cycle
_random = random.Random()  # Python's global one is the user's


class Wait(NamedTuple):
    """A note: a rank waits in a meeting.

    Attributes:
        meeting: key of the meeting.
        label: what the group is, for people.
        line: of the program that waits.
    """

    meeting: str
    label: str
    line: str


class Step(NamedTuple):
    """A rank that is missing in one meeting and waits in another.

    Attributes:
        rank: global rank.
        wait: its note.
        ranks: members of the meeting in which it waits.
    """

    rank: int
    wait: Wait
    ranks: Sequence[int]

    def __str__(self) -> str:
        where = f"{self.wait.label} with ranks {shortened(self.ranks)}"
        return f"rank {self.rank} waits in {where} at {self.wait.line}"


class OwnWaits:
    """What one rank notes of its waits, during one run."""

    def __init__(self) -> None:
        self._may_be_noted = True  # only the main thread has waited so far

    def note_thread(self) -> None:
        """Note which thread is about to wait: no notes are written once another one has."""
        if threading.current_thread() is not threading.main_thread():
            self._may_be_noted = False

    def write(self, board: Board, wait: Wait) -> None:
        """Write a note of this rank's wait, if there may be one."""
        if self._may_be_noted:
            board.write(_note_key(board.rank), json.dumps(wait))

    def remove(self, board: Board) -> None:
        """Remove this rank's note, if there is one."""
        board.remove(_note_key(board.rank))


def write_members(board: Board, meeting: str, ranks: Sequence[int]) -> None:
    """Write down the members of a meeting; one of them does, as they can be many."""
    board.write(_members_key(meeting), json.dumps(list(ranks)))


def remove_members(board: Board, meeting: str) -> None:
    """Remove what `write_members` wrote."""
    board.remove(_members_key(meeting))


def read_wait(rank: int, read: Callable[[str], str]) -> Wait | None:
    """The note of a rank, if there is one."""
    text = read(_note_key(rank))
    return Wait(*json.loads(text)) if text else None


def read_step(rank: int, wait: Wait, read: Callable[[str], str]) -> Step:
    """A note with the members of the meeting, as far as they are known."""
    return Step(rank, wait, json.loads(read(_members_key(wait.meeting)) or "[]"))


def find_cycle(meeting: str, ranks: Sequence[int], read: Callable[[str], str]) -> list[Step]:
    """Ranks that wait for each other, and that this meeting waits for.

    Args:
        meeting: key of the meeting to begin with.
        ranks: its members.
        read: gives the text of a key, "" if there is none.

    Returns:
        Each step's rank is missing in the previous step's meeting, and the first step's rank in the
        last step's. Empty if no cycle was found. It is a cycle if none of the meetings is over now.
    """
    path: list[Step] = []
    meetings = [meeting]  # the first, then those in which the ranks of the path wait
    seen = {meeting}
    notes_left = _MOST_NOTES

    def follow(members: Sequence[int]) -> list[Step]:
        nonlocal notes_left
        for rank in _sample(members):
            if not notes_left:
                break
            notes_left -= 1
            wait = read_wait(rank, read)
            if wait is None or wait.meeting == meetings[-1]:
                continue  # it is on its way, or here
            if wait.meeting in meetings:
                return [*path, read_step(rank, wait, read)][meetings.index(wait.meeting) :]
            if wait.meeting in seen:
                continue
            seen.add(wait.meeting)
            path.append(read_step(rank, wait, read))
            meetings.append(wait.meeting)
            if cycle := follow(path[-1].ranks):
                return cycle
            path.pop()
            meetings.pop()
        return []

    return follow(ranks)


def _sample(ranks: Sequence[int]) -> Sequence[int]:
    """The ranks, or of many some at random."""
    return _random.sample(ranks, _SAMPLE) if len(ranks) > _SAMPLE else ranks


def _note_key(rank: int) -> str:
    return f"waits/{rank}"


def _members_key(meeting: str) -> str:
    return f"{meeting}/members"
