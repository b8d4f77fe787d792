"""Deadlocks among ranks that wait for one another in different rendezvous.

A rank that waits for the other members of a process group cannot join another group meanwhile. So
ranks can wait for each other for ever. Example: rank 0 waits for rank 1 in group A, and rank 1
waits for rank 0 in group B.

A rank that has waited for a second notes in the store where it waits. The rank that joined a
rendezvous first then searches the wait-for graph: which member waits elsewhere, which member of
that other group waits elsewhere again, and so on. A path that leads back to where it began is a
deadlock, if none of its rendezvous is over once all notes were read: each of these ranks leaves its
rendezvous only when that is over, and is needed in the one before it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshverse.wording import rank_list

_SAMPLE = 16  # members of a large group whose notes are read, others each time
_MOST_NOTES = 64  # that are read in one search
_MOST_MEMBERS = 64  # that a note names
_random = random.Random()  # Python's global one is the user's


class Wait(NamedTuple):
    """A rank's note of where it waits.

    Attributes:
        rank: global rank.
        rendezvous: key of the rendezvous.
        label: the group that is to be made, for people.
        line: file and line of the program that waits.
        ranks: global ranks of the members, or of many some.
    """

    rank: int
    rendezvous: str
    label: str
    line: str
    ranks: Sequence[int]

    def __str__(self) -> str:
        group = f"{self.label} with ranks [{rank_list(self.ranks)}]"
        return f"rank {self.rank} waits in {group} at {self.line}"

    def to_text(self) -> str:
        """Return the note as it is stored."""
        some = self.ranks
        if len(some) > _MOST_MEMBERS:
            some = sorted({self.rank, *_random.sample(list(some), _MOST_MEMBERS - 1)})
        return json.dumps(self._replace(ranks=list(some)))


def note_key(rank: int) -> str:
    """Return the key of a rank's note."""
    return f"waits/{rank}"


def read_wait(rank: int, read: Callable[[str], str]) -> Wait | None:
    """Return the note of a rank, or None if it has none."""
    text = read(note_key(rank))
    return Wait(*json.loads(text)) if text else None


def find_deadlock(rendezvous: str, ranks: Sequence[int], read: Callable[[str], str]) -> list[Wait]:
    """Search for ranks that wait for one another, and that a rendezvous waits for.

    Args:
        rendezvous: key of the rendezvous to begin with.
        ranks: its members.
        read: gives the text of a key, "" if there is none.

    Returns:
        Waits of which each rank is needed where the one before it waits, and the first where the
        last one waits; empty if none were found. Whether they still wait is for the caller to see.
    """
    seen, notes_left = {rendezvous}, _MOST_NOTES

    def follow(ranks: Sequence[int], path: list[Wait]) -> list[Wait]:
        nonlocal notes_left
        on_path = [rendezvous, *(wait.rendezvous for wait in path)]
        for rank in _sample(ranks):
            if not notes_left:
                break
            notes_left -= 1
            wait = read_wait(rank, read)
            if wait is None or wait.rendezvous == on_path[-1]:
                continue  # it is on its way, or here
            if wait.rendezvous in on_path:
                return [*path, wait][on_path.index(wait.rendezvous) :]
            if wait.rendezvous not in seen:
                seen.add(wait.rendezvous)
                if cycle := follow(wait.ranks, [*path, wait]):
                    return cycle
        return []

    return follow(ranks, [])


def _sample(ranks: Sequence[int]) -> Sequence[int]:
    return _random.sample(list(ranks), _SAMPLE) if len(ranks) > _SAMPLE else ranks
