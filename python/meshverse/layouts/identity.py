"""Identity of a group's ranks and options, from which the names of groups are made.

It needs no torch: `meshverse hang` finds groups by it in dumps.
"""

from __future__ import annotations

from meshverse._core import AxisLayout, RankMap, rank_group


def ranks_and_identity(
    axis: AxisLayout,
    rank_map: RankMap,
    position: int,
    salt: str,
    *,
    preserve_rank_order: bool = False,
) -> tuple[list[int], str]:
    """Return the ranks of a position's group, and a digest of them and the salt. O(group size).

    Args:
        axis: layout of the axis, over positions.
        rank_map: position -> global rank.
        position: position of a member.
        salt: digest of the options.
        preserve_rank_order: whether group ranks follow the order of the axis, instead of
            ascending ranks.
    """
    ranks, identity = rank_group(axis, rank_map, position, salt)
    if not (preserve_rank_order or rank_map.is_sorted()):
        in_axis_order = list(ranks)
        ranks.sort()
        if ranks != in_axis_order:
            identity = rank_group(AxisLayout(len(ranks)), RankMap.from_ranks(ranks), 0, salt)[1]
    return ranks, identity
