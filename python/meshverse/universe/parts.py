"""The parts of a universe: universes over some of its ranks that share process groups with it.

Example: a universe of ranks 0 to 7 has a mesh over all of them. A trainer has a mesh over ranks 0
to 3, a rollout one over ranks 4 to 7. Each of the two is a part: it has a root, submeshes and
flattened axes of its own, as a universe of these ranks has. But where an axis of a part has the
ranks and options of a group that the universe or another part has, it is on that group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
from typing_extensions import Self

from meshverse import _torch_compat as compat
from meshverse._core import RankMap
from meshverse.agreement import shortened
from meshverse.layouts.user_input import ArrayLike, read_rank_map

__all__ = ["Divided", "Parts", "ranks_outside"]


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


class Divided:
    """A universe as one that has parts. `Universe` has the constructor."""

    rank_map: RankMap
    _parts: Parts[Any]
    _lock: threading.Lock

    def _new_part(self, rank_map: RankMap, own: dict[str, Any]) -> Self:
        raise NotImplementedError

    def _all_parts(self) -> Iterator[Self]:
        """The live parts, each with its own parts after it."""
        for part in self._parts.alive():
            yield part
            yield from part._all_parts()

    @property
    def parts(self) -> tuple[Self, ...]:
        """The universes over some of these ranks that share groups with this one, oldest first."""
        return self._parts.alive()

    def part(
        self,
        ranks: RankMap | int | torch.Tensor | ArrayLike,
        *,
        timeout: timedelta | None = None,
        options: compat.BackendOptions | None = None,
        lazy: bool = False,
        check_consistency: bool | None = None,
        rank: int | None = None,
    ) -> Self:
        """The universe over some of these ranks that shares process groups with this one.

        It has meshes, a root and flattened axes of its own. A group that this universe or another
        of its parts has, over the same ranks with the same options, is not made again. What is
        asked of this universe (`explain`, `warm_up`, `destroy`, ...) concerns its parts too; what
        is asked of a part concerns that part. Made once for the same ranks in the same order.

        Args:
            ranks: as of `Universe`; all of these ranks in this order are this universe itself.
            timeout: of a new part; by default that of this universe.
            options: of a new part; by default those of this universe.
            lazy: of a new part; it is lazy in any case if this universe is.
            check_consistency: of a new part; by default as in this universe.
            rank: as of `Universe`.

        Raises:
            ValueError: a rank that this universe has not; or a timeout or options for a part that
                is there already.
            RuntimeError: this universe or its world has ended, or it has no process groups.
        """
        rank_map = ranks if isinstance(ranks, RankMap) else read_rank_map(ranks)
        own: dict[str, Any] = {"timeout": timeout, "options": options, "lazy": lazy or None}
        own["check_consistency"] = check_consistency
        own = {name: value for name, value in own.items() if value is not None}
        with self._lock:
            known: Self | None = self if rank_map == self.rank_map else self._parts.over(rank_map)
            if known is None:
                self.check_has(rank_map)
                known = self._new_part(rank_map, {**own, "rank": rank})
                self._parts.add(known)
                return known
        if own:
            raise ValueError(
                f"{', '.join(own)}: given for a mesh over {rank_map} in a universe that has these "
                "ranks already. They belong to a universe, or to a part of one. Give them when "
                "making it: the first mesh of it, or Universe(ranks, ...)."
            )
        return known

    def known_part(self, ranks: RankMap) -> Self | None:
        """The part over these ranks, in this order, if there is one already. O(ranks).

        Raises:
            ValueError: a rank that this universe has not.
        """
        known = self._parts.over(ranks)
        if known is None:
            self.check_has(ranks)
        return known

    def check_has(self, ranks: RankMap) -> None:
        """Raise ValueError unless this universe has all these ranks, in any order. O(ranks)."""
        outside = ranks_outside(ranks, self.rank_map)
        if outside:
            raise ValueError(
                f"A mesh over {ranks} cannot join a universe of {self.rank_map}, which has no "
                f"ranks {outside}: a mesh in a universe is over all its ranks or some of them. "
                "Make it without universe=, or make the universe over all ranks that are needed."
            )


def ranks_outside(ranks: RankMap, of_universe: RankMap) -> str:
    """The ranks that a universe has not, for a message; "" if it has all. O(ranks)."""
    if ranks == of_universe:
        return ""
    if of_universe.is_identity and ranks.sorted().rank_at(ranks.size - 1) < of_universe.size:
        return ""
    listed = ranks.ranks().tolist()
    outside = sorted(rank for rank in listed if of_universe.position_of(rank) is None)
    return shortened(outside) if outside else ""
