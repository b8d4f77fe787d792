"""How one process group comes to be, and what it is called.

    axis covers the default group, default options   the default group itself, as stock
    default group bound to a device, same backend    one split of the default group
    otherwise                                        made by its members only
    where that is not safe                           stock's loop over all groups, on all ranks
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from . import _torch_compat as compat
from ._core import AxisLayout, OptionsKey, RankGroups, RankMap
from .backend_override import GroupOptions
from .rank_views import rank_views

__all__ = ["Group", "GroupMaker", "GroupRequest"]


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
        ranks = RankGroups(self.axis, self.rank_map).ranks_of(self.position)
        if not self.keeps_order:
            ranks.sort()
        return ranks


@dataclass(eq=False)
class Group:
    """One process group of a universe, as this rank sees it.

    Attributes:
        request: what was asked for, by the axis that asked first.
        name: c10d's name of my group; None on a rank that is in no group of the axis.
        how: how it came to be, in words.
        created: whether a group was made for it (the default group was there before).
        requests: how often it was asked for, by axis name.
    """

    request: GroupRequest
    name: str | None
    how: str
    created: bool
    requests: dict[str, int] = field(default_factory=dict)

    def count_request(self, axis_name: str) -> None:
        """Note that an axis of this name asked for the group."""
        self.requests[axis_name] = self.requests.get(axis_name, 0) + 1


# How often each group was made since the default group was: all its members, and nobody else, have
# that history in common. Keyed by the default group, so ranks that are threads do not mix.
_made: weakref.WeakKeyDictionary[compat.ProcessGroup, dict[bytes, int]] = (
    weakref.WeakKeyDictionary()
)
_made_lock = threading.Lock()  # protects _made


def _new_name(request: GroupRequest, ranks: list[int], default_group: compat.ProcessGroup) -> str:
    """A name from the group's own identity, so that ranks with different histories agree on it."""
    identity = hashlib.blake2b(array("q", ranks), digest_size=16)
    identity.update(f"{request.axis}|{request.options.key.digest}".encode())
    digest = identity.digest()
    with _made_lock:
        made = _made.get(default_group)
        if made is None:
            made = _made[default_group] = {}
        count = made[digest] = made.get(digest, 0) + 1
    return f"meshverse-{digest.hex()}-{count - 1}"


class GroupMaker:
    """Makes the groups of one universe, in the one way that is safe for each.

    What depends on the default group and the backend alone is decided once.
    """

    def __init__(self, default_key: OptionsKey) -> None:
        """
        Args:
            default_key: options key of a group for which nothing is overridden.
        """
        self._default_key = default_key
        self._can_split: dict[str | None, bool] = {}
        self._hazards: dict[str, str | None] = {}

    def make(self, request: GroupRequest, default_group: compat.ProcessGroup) -> Group:
        """Make my group of an axis.

        Raises:
            Whatever c10d raises; nothing is kept then.
        """
        if (
            request.axis.size == default_group.size()
            and request.options.key == self._default_key
            and not compat.needs_own_world_group(default_group)
        ):
            return Group(request, default_group.group_name, "the default group", created=False)

        group: compat.ProcessGroup | None
        if self._splits(request.options.override[0], default_group):
            group, how = _split(request), "split off the default group"
        elif hazard := self._hazard(request.options.backend, default_group):
            group, how = _create_by_all(request), f"made by all ranks ({hazard})"
        elif request.position is None:
            group, how = None, "made by its members"
        else:
            group, how = _create_by_members(request, default_group), "made by its members"
        return Group(request, group and group.group_name, how, created=group is not None)

    def _splits(self, backend: str | None, default_group: compat.ProcessGroup) -> bool:
        if backend not in self._can_split:
            self._can_split[backend] = compat.can_split(default_group, backend)
        return self._can_split[backend]

    def _hazard(self, backend: str, default_group: compat.ProcessGroup) -> str | None:
        if backend not in self._hazards:
            self._hazards[backend] = compat.members_only_hazard(default_group, backend)
        return self._hazards[backend]


def _split(request: GroupRequest) -> compat.ProcessGroup | None:
    # A rank outside the mesh takes part in the split all the same, by naming the first group.
    ranks = request.my_ranks() or RankGroups(request.axis, request.rank_map).ranks_of(0)
    return compat.create_by_split(
        ranks,
        options=request.options.options,
        timeout=request.options.timeout,
        description=f"mesh_{request.axis_name}",
    )


def _create_by_all(request: GroupRequest) -> compat.ProcessGroup | None:
    return compat.create_by_all(
        request.axis,
        rank_views(request.rank_map).tensor,
        axis_name=request.axis_name,
        backend=request.options.override[0],
        options=request.options.options,
        preserve_rank_order=request.keeps_order,
    )


def _create_by_members(
    request: GroupRequest, default_group: compat.ProcessGroup
) -> compat.ProcessGroup:
    ranks = request.my_ranks()
    return compat.create_by_members(
        ranks,
        backend=request.options.backend,
        options=request.options.options,
        timeout=request.options.timeout,
        name=_new_name(request, ranks, default_group),
        description=f"mesh_{request.axis_name}",
    )
