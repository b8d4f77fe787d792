"""The objects that keep process groups alive, and how they let go of groups that end.

A mesh can outlive its process groups. An ended group that is still held keeps its threads, file
descriptors and memory. So whoever holds groups is listed here, and is told when they end.
"""

from __future__ import annotations

from typing import Protocol

from meshverse import _torch_compat as compat

from .weak_registry import WeakRegistry
from .world import WorldState

__all__ = ["Holders"]


class Holder(Protocol):
    """What keeps process groups alive, by c10d name."""

    process_groups: dict[str, compat.ProcessGroup]


class Holders(WorldState):
    """The objects that keep process groups of one world alive."""

    def __init__(self) -> None:
        self._holders: WeakRegistry[Holder] = WeakRegistry()

    def add(self, holder: Holder) -> None:
        """List an object that will hold process groups, for as long as it lives itself."""
        self._holders.add(holder)

    def alive(self) -> list[Holder]:
        """The objects that are listed, oldest first."""
        return self._holders.alive()

    def discard(self, holder: Holder) -> None:
        """Take an object off the list: it holds no process groups any more."""
        self._holders.discard(holder)

    def drop(self, group_name: str) -> None:
        """Have all holders let go of the group of this c10d name: it has ended."""
        for holder in self._holders.alive():
            holder.process_groups.pop(group_name, None)

    def end(self) -> None:
        """Have all holders let go of all groups."""
        for holder in self._holders.alive():
            holder.process_groups.clear()

    def leave_to_parent(self) -> None:
        """In a forked process: have all holders let go of the parent's groups, which live on."""
        for holder in self._holders.alive():
            # Ending a parent's group would wait for threads that this process has not.
            _of_parents.append(dict(holder.process_groups))
            holder.process_groups.clear()


_of_parents: list[dict[str, compat.ProcessGroup]] = []  # kept for as long as this process lives
