"""What keeps process groups alive: emptied when they end, so that meshes that live on keep none."""

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
    """What keeps process groups of one world alive. An ended group keeps its threads otherwise."""

    def __init__(self) -> None:
        self._holders: WeakRegistry[Holder] = WeakRegistry()

    def add(self, holder: Holder) -> None:
        """Note what will keep process groups alive, for as long as it lives itself."""
        self._holders.add(holder)

    def discard(self, holder: Holder) -> None:
        """Note that it keeps none any more."""
        self._holders.discard(holder)

    def drop(self, group_name: str) -> None:
        """Have nobody keep the group of this c10d name: it has ended."""
        for holder in self._holders.alive():
            holder.process_groups.pop(group_name, None)

    def end(self) -> None:
        """Have nobody keep any group."""
        for holder in self._holders.alive():
            holder.process_groups.clear()

    def leave_to_parent(self) -> None:
        """Have nobody use the groups of the process that this one is a fork of."""
        for holder in self._holders.alive():
            # Ending a parent's group would wait for threads that this process has not.
            _of_parents.append(dict(holder.process_groups))
            holder.process_groups.clear()


_of_parents: list[dict[str, compat.ProcessGroup]] = []  # kept for as long as this process lives
