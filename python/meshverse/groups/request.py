"""A request for the process groups along one axis."""

from __future__ import annotations

from typing import NamedTuple

from meshverse._core import AxisLayout, RankGroups, RankMap, rank_group
from meshverse.options.group_options import GroupOptions

__all__ = ["GroupRequest"]


class GroupRequest(NamedTuple):
    """One axis's request for process groups.

    Attributes:
        axis: the axis layout over positions, its groups' ranks ascending unless `keeps_order`.
        rank_map: position -> global rank.
        position: mine, or None if this rank is outside the rank map.
        options: of the groups.
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
        """Return global ranks of my group, in group-rank order; empty outside. O(group)."""
        if self.position is None:
            return []
        return self.ordered(RankGroups(self.axis, self.rank_map).ranks_of(self.position))

    def ordered(self, ranks: list[int]) -> list[int]:
        """Return the ranks of a group, given in the order of the axis, in group-rank order."""
        if not self.keeps_order:
            ranks.sort()
        return ranks

    def my_rank(self) -> int:
        """Return this rank's rank in its group. O(1) where the mesh's ranks ascend, else O(group).

        Only for a rank of the rank map.
        """
        assert self.position is not None
        groups = RankGroups(self.axis, self.rank_map)
        if self.keeps_order or self.rank_map.is_sorted():
            return groups.coordinate(self.position)
        mine = self.rank_map.rank_at(self.position)
        return sum(rank < mine for rank in groups.ranks_of(self.position))

    def my_ranks_and_identity(self) -> tuple[list[int], str]:
        """Return `my_ranks`, and a text for these ranks in this order and the options. O(group).

        The text is the same on all members, and for no other group. It leaves out a timeout that
        comes from the default group, which every rank may have set for itself.
        """
        assert self.position is not None
        salt = self.options.name_digest
        ranks, identity = rank_group(self.axis, self.rank_map, self.position, salt)
        if not (self.keeps_order or self.rank_map.is_sorted()):
            in_axis_order = list(ranks)
            ranks.sort()
            if ranks != in_axis_order:
                identity = rank_group(AxisLayout(len(ranks)), RankMap.from_ranks(ranks), 0, salt)[1]
        return ranks, identity
