"""The parts of a universe: universes over some of its ranks that share process groups with it.

Example: a universe of ranks 0 to 7 has a mesh over all of them. A trainer has a mesh over ranks 0
to 3, a rollout one over ranks 4 to 7. Each of the two is a part: it has a root, submeshes and
flattened axes of its own, as a universe of these ranks has. But where an axis of a part has the
ranks and options of a group that the universe or another part has, it is on that group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from meshverse._core import RankMap
from meshverse.agreement import shortened

__all__ = ["Parts", "ranks_outside"]


class Part(Protocol):
    """What is asked of a part."""

    rank_map: RankMap
    is_over: bool


_Part = TypeVar("_Part", bound=Part)


class Parts(Generic[_Part]):
    """The parts of one universe, whose lock protects them."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def __iter__(self) -> Iterator[_Part]:
        """All of them, oldest first; of those that were destroyed, the last over its ranks."""
        return iter(list(self._parts))

    def alive(self) -> tuple[_Part, ...]:
        """Those that were not destroyed, oldest first."""
        return tuple(part for part in list(self._parts) if not part.is_over)

    def over(self, rank_map: RankMap) -> _Part | None:
        """The one over these ranks, in this order, if there is one."""
        return next((part for part in self.alive() if part.rank_map == rank_map), None)

    def add(self, part: _Part) -> None:
        """Take in a new part, in place of one over its ranks that was destroyed."""
        self._parts = [known for known in self._parts if known.rank_map != part.rank_map]
        self._parts.append(part)


def ranks_outside(ranks: RankMap, of_universe: RankMap) -> str:
    """The ranks that a universe has not, for a message; "" if it has all. O(ranks)."""
    if ranks == of_universe:
        return ""
    if of_universe.is_identity and ranks.sorted().rank_at(ranks.size - 1) < of_universe.size:
        return ""
    listed = ranks.ranks().tolist()
    outside = sorted(rank for rank in listed if of_universe.position_of(rank) is None)
    return shortened(outside) if outside else ""
