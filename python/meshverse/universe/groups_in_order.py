"""The process groups of some axes, in an order that is the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from meshverse.groups.group import Group, GroupRef
from meshverse.wording import did_you_mean

from .universe_groups import UniverseGroups


class Chosen(NamedTuple):
    """A group that an operation on several groups includes.

    Attributes:
        group: the group.
        axes: names of the axes that requested it, in the universe and its parts.
        lister: the first `UniverseGroups` that lists it: that of the universe, or else of a part.
    """

    group: Group
    axes: tuple[str, ...]
    lister: UniverseGroups

    def is_first(self) -> bool:
        """Return whether this rank is the group's first, which logs for all. O(group size)."""
        request = self.group.request
        mine = request.position
        return mine is not None and request.my_ranks()[0] == request.rank_map.rank_at(mine)


def in_one_order(
    all_groups: Sequence[UniverseGroups], axis_names: Collection[str] | None
) -> list[Chosen]:
    """Return this rank's groups of these axes, in the same order on all ranks.

    Args:
        all_groups: groups of a universe and of its parts.
        axis_names: names of the axes; None for all groups.

    Raises:
        KeyError: no group was requested by one of the names.
        TypeError: `axis_names` is a string.
    """
    if isinstance(axis_names, str):
        raise TypeError(
            f"axis_names={axis_names!r} is a string: pass a list of names, [{axis_names!r}]."
        )
    pairs = [(ref, groups) for groups in all_groups for ref in groups]
    known = {name for ref, _ in pairs for name in list(ref.requests)}
    wanted = known if axis_names is None else set(axis_names)
    if not wanted <= known:
        raise KeyError(
            f"No process group was requested for axis {_names(wanted - known)}. Known axes: "
            f"{_names(known)}."
            f"{did_you_mean(min(wanted - known), known)}"
        )
    by_name: dict[str, list[tuple[GroupRef, UniverseGroups]]] = {}
    for ref, groups in pairs:
        if ref.name is not None:
            by_name.setdefault(ref.name, []).append((ref, groups))
    chosen = []
    for found in by_name.values():
        axes = tuple(dict.fromkeys(name for ref, _ in found for name in list(ref.requests)))
        first, lister = found[0]
        if wanted.intersection(axes) and first.group is not None:
            chosen.append(Chosen(first.group, axes, lister))
    return sorted(chosen, key=_place_in_order)


def _names(axis_names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(axis_names))) or "none"


def _place_in_order(chosen: Chosen) -> tuple[list[int], str, list[int], str]:
    # The same on all ranks, in whatever order each requested the groups, and through whichever
    # universe or part: so there is no deadlock. Groups along one axis come together: they have the
    # same distances between ranks.
    group = chosen.group
    ranks = list(group.request.my_ranks())
    distances = [rank - ranks[0] for rank in ranks]
    return distances, group.request.options.digest_without_timeout, ranks, group.name
