"""One process group: what is asked for, and what was made of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from meshverse._core import AxisLayout, RankGroups, RankMap
from meshverse.agreement import shortened
from meshverse.options.group_options import GroupOptions

__all__ = ["Group", "GroupRequest", "Origin"]


class GroupRequest(NamedTuple):
    """One axis's groups, as asked for.

    Attributes:
        axis: the axis layout over positions, its groups' ranks ascending unless `keeps_order`.
        rank_map: position -> global rank.
        position: mine, or None if this rank is outside the rank map.
        options: what the group shall be.
        axis_name: of the axis that asked first; for descriptions only, never part of a name.
        keeps_order: whether group ranks follow the axis's order, not ascending global ranks.
    """

    axis: AxisLayout
    rank_map: RankMap
    position: int | None
    options: GroupOptions
    axis_name: str
    keeps_order: bool = False

    def my_ranks(self) -> list[int]:
        """Global ranks of my group, in group-rank order; empty outside the rank map. O(group)."""
        if self.position is None:
            return []
        return self.ordered(RankGroups(self.axis, self.rank_map).ranks_of(self.position))

    def ordered(self, ranks: list[int]) -> list[int]:
        """The ranks of a group, given in the order of the axis, in group-rank order."""
        if not self.keeps_order:
            ranks.sort()
        return ranks


class Origin(enum.Enum):
    """How a process group came to be, as the universe sees it that lists the group."""

    DEFAULT_GROUP = enum.auto()  # it is the default group itself
    SPLIT = enum.auto()  # split off the default group
    BY_MEMBERS = enum.auto()  # made by its members
    BY_ALL = enum.auto()  # made by all ranks
    NOT_YET = enum.auto()  # lazy: it has its name, and is made when it is first used
    AT_FIRST_USE = enum.auto()  # it was lazy, and this universe was the first to use it
    AGAIN = enum.auto()  # it was destroyed, and its members have made it again
    SHARED = enum.auto()  # another universe made it
    GIVEN = enum.auto()  # the user made it
    OTHER_UNIVERSE = enum.auto()  # of a mesh that was combined with one of this universe


@dataclass(eq=False, slots=True)
class Group:
    """One process group of a universe, as this rank sees it.

    Attributes:
        request: what was asked for, by the axis that asked first.
        name: c10d's name of my group; None on a rank that is in no group of the axis.
        origin: how it came to be.
        created: whether a group was made for it here.
        borrowed: whether it is not Meshverse's: the default group, or one the user gave.
        hazard: why all ranks had to make it, if they had to.
        requests: how often it was asked for, by axis name.
    """

    request: GroupRequest
    name: str | None
    origin: Origin
    created: bool
    borrowed: bool = False
    hazard: str | None = None
    requests: dict[str, int] = field(default_factory=dict)

    def count_request(self, axis_name: str) -> None:
        """Note that an axis of this name asked for the group."""
        self.requests[axis_name] = self.requests.get(axis_name, 0) + 1

    def in_words(self) -> str:
        """Its axes and ranks, for messages. O(group)."""
        axes = " or ".join(map(repr, self.requests)) or repr(self.request.axis_name)
        return f"process group of axis {axes} with ranks {shortened(self.request.my_ranks())}"

    def note_first_use(self, made_here: bool) -> None:
        """Note how a group that may be lazy came to be when this universe first used it."""
        if made_here:
            self.origin, self.created = Origin.AT_FIRST_USE, True
        elif self.origin is Origin.NOT_YET:
            self.origin = Origin.SHARED
