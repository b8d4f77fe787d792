"""Deadlocks among ranks that wait for one another in different rendezvous.

A rank that waits for the members of one process group cannot join another group meanwhile. So ranks
can wait for each other until their timeout. Example: rank 0 waits for rank 1 in group A, and rank 1
waits for rank 0 in group B.

How a deadlock is found:

1. Each rank that has waited for a second writes a note into the store: its rendezvous and the
   members of that. (A rank on which a thread other than the main one has ever joined a rendezvous
   writes no note: it can join one rendezvous while it waits in another.)
2. The rank that joined a rendezvous first reads the notes of the members. If the note of a member
   names another rendezvous, it reads the notes of the members of that one, and so on.
3. A rendezvous that is reached again on one path closes a cycle: each rank of the cycle is a member
   of the previous rank's rendezvous, but waits in another one.
4. The notes were read one after another, so some may be outdated. Therefore the searching rank
   reads the notes of the cycle once more, and then the outcomes of its rendezvous. If no note has
   changed and none has an outcome, all ranks of the cycle waited when the first reading ended:
   this is a deadlock. (Without an outcome alone, a rendezvous may be over: its keys are removed
   with its group. But its members have removed their notes by then.)
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshverse.wording import rank_list

_SAMPLE = 16  # most members of one group whose notes a search reads; another sample each time
_MOST_NOTES = 64  # most notes that one search reads
_MOST_MEMBERS = 64  # most members that a note lists
_random = random.Random()  # not Python's global generator, which belongs to the user


class Wait(NamedTuple):
    """A rank's note in the store, which says in which rendezvous it waits.

    Attributes:
        rank: global rank.
        rendezvous: key of the rendezvous.
        label: description of the group that its members create, for messages.
        line: file and line of the user's program.
        ranks: global ranks of the members; a sample of them if there are many.
        size: number of members.
    """

    rank: int
    rendezvous: str
    label: str
    line: str
    ranks: Sequence[int]
    size: int

    def __str__(self) -> str:
        group = f"{self.label} with ranks [{rank_list(self.ranks)}]"
        if self.size > len(self.ranks):
            group = f"{self.label} with {self.size} ranks, among them [{rank_list(self.ranks)}],"
        return f"rank {self.rank} waits to create {group} at {self.line}"

    def to_text(self) -> str:
        """Return the string that is stored."""
        some = self.ranks
        if len(some) > _MOST_MEMBERS:
            some = sorted({self.rank, *_random.sample(list(some), _MOST_MEMBERS - 1)})
        return json.dumps(self._replace(ranks=list(some)))


def note_key(rank: int) -> str:
    """Return the key of a rank's note in the store."""
    return f"waits/{rank}"


def read_wait(rank: int, read: Callable[[str], str]) -> Wait | None:
    """Return the note of a rank, or None if it has none."""
    text = read(note_key(rank))
    return Wait(*json.loads(text)) if text else None


def find_deadlock(rendezvous: str, ranks: Sequence[int], read: Callable[[str], str]) -> list[Wait]:
    """Search for a cycle in the wait-for graph, from one rendezvous on; see the module's docstring.

    Args:
        rendezvous: key of the rendezvous to begin with.
        ranks: global ranks of its members.
        read: function that returns the value of a key, "" if it has none.

    Returns:
        The notes of a cycle of ranks, or [] if the search found none. The rank of each note is a
        member of the rendezvous that the note before it names; the first rank is a member of the
        last note's rendezvous. The caller must check them once more; see the module's docstring.
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
                continue  # it has not waited for a second, or it waits in this rendezvous
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
