"""Requests for process groups: one per axis of a mesh, with its options filled in."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from meshverse._core import AxisLayout, Layout, OptionsKey, RankGroups, RankMap, rank_group
from meshverse._torch_compat.backends import needs_own_world_group
from meshverse._torch_compat.private_names import ProcessGroup
from meshverse.layouts.rank_views import ascends
from meshverse.options.group_options import (
    NO_DEFAULTS,
    NO_OVERRIDE,
    Defaults,
    GroupOptions,
    Override,
)
from meshverse.world import World


class Way(enum.Enum):
    """How a universe gets the process groups of an axis. The values are in words, for users."""

    DEFAULT_GROUP = "the default group"
    SPLIT = "split off the default group"
    BY_ALL = "created by all ranks"
    BY_MEMBERS = "created by its members"
    USER_PROVIDED = "given by the user"
    OTHER_UNIVERSE = "of another universe"  # of a mesh that was combined with one of this universe

    @property
    def needs_all_ranks(self) -> bool:
        """Whether all ranks of the default group must take part in creating these groups."""
        return self in (Way.SPLIT, Way.BY_ALL)

    @property
    def borrows(self) -> bool:
        """Whether the universe uses groups that are not its own, and so never ends them."""
        return self in (Way.DEFAULT_GROUP, Way.USER_PROVIDED, Way.OTHER_UNIVERSE)


def way_to_create(axis: AxisLayout, options: GroupOptions, world: World) -> tuple[Way, str | None]:
    """Return how the groups of an axis are created, and, for BY_ALL, why all ranks must take part.

    The first of these cases that applies decides:

    1. The axis is over all ranks, with default options: nothing is created, the axis uses the
       default group, as in torch. (Not if torch itself would create a group; see
       `needs_own_world_group`.)
    2. The default group is bound to a device and can be split for this backend (`split_devices`),
       and the ranks of each group ascend: all ranks take part in one split of the default group.
    3. c10d needs all ranks (see `all_ranks_reason`): all ranks loop over all groups, as in torch.
    4. Otherwise: the members alone create the group, at once or when it is first used.

    Isolation tags and a kept order are part of the options' key, so an axis with one never has
    default options.
    """
    if (
        axis.size == world.size
        and options.key == world.default_options.key
        and not needs_own_world_group(world.default_group)
    ):
        return Way.DEFAULT_GROUP, None
    creation = world.how_created(options.backend)
    if creation.splits and not options.preserve_rank_order:
        return Way.SPLIT, None
    reason = creation.all_ranks_reason
    return (Way.BY_MEMBERS, None) if reason is None else (Way.BY_ALL, reason)


class GroupRequest(NamedTuple):
    """One axis's request for process groups.

    Attributes:
        axis: layout of the axis over positions. Unless the options preserve the order of ranks,
            positions in a group ascend.
        rank_map: position -> global rank.
        position: this rank's position, or None if this rank is outside the rank map.
        options: options of the groups.
        axis_name: name of the axis, for messages and c10d's descriptions. The c10d names of this
            rank's groups do not contain it, so axes of other names can share them.
        way: how the universe gets these groups.
        all_ranks_reason: why all ranks create the groups together, if the way is BY_ALL; else None.
    """

    axis: AxisLayout
    rank_map: RankMap
    position: int | None
    options: GroupOptions
    axis_name: str
    way: Way
    all_ranks_reason: str | None = None

    def my_ranks(self) -> list[int]:
        """Return the global ranks of this rank's group, in group-rank order. O(group size).

        [] if this rank is outside the rank map.
        """
        if self.position is None:
            return []
        return self.ordered(RankGroups(self.axis, self.rank_map).ranks_of(self.position))

    def ordered(self, ranks: list[int]) -> list[int]:
        """Return ranks of a group in group-rank order, given in axis order. May sort in place."""
        if not self.options.preserve_rank_order:
            ranks.sort()
        return ranks

    def my_rank(self) -> int:
        """Return this rank's group rank. This rank must be in the rank map.

        O(1) if the rank map ascends or the order of ranks is preserved, else O(group size).
        """
        assert self.position is not None
        groups = RankGroups(self.axis, self.rank_map)
        if self.options.preserve_rank_order or self.rank_map.is_sorted():
            return groups.coordinate(self.position)
        mine = self.rank_map.rank_at(self.position)
        return sum(rank < mine for rank in groups.ranks_of(self.position))

    def ranks_and_digest(self) -> tuple[list[int], str]:
        """Return `my_ranks`, and a digest of them, in order, and of the options. O(group size).

        All members get the same digest; groups with other ranks, another order or other options get
        another one. Groups of other scopes (see `GroupRegistry`), and groups that differ only in
        their timeout, get the same digest. Timeouts are left out as each rank may set its own.
        """
        assert self.position is not None
        options = self.options
        ascending = not options.preserve_rank_order
        return rank_group(
            self.axis, self.rank_map, self.position, options.digest_without_timeout, ascending
        )


class RequestBuilder:
    """Builder of the requests of axes, which fills in the defaults of one universe.

    Args:
        rank_map: position -> global rank.
        position: this rank's position, or None if this rank is outside the rank map.
        world: world whose default group supplies each option that neither the axis nor the universe
            sets; None if no request will be built.
        defaults: the universe's options, for axes without options of their own.

    Attributes:
        default_key: options key of axes without options of their own; None before the first
            request.
    """

    def __init__(
        self, rank_map: RankMap, position: int | None, world: World | None, defaults: Defaults
    ) -> None:
        self._rank_map, self._position = rank_map, position
        self._world, self._defaults = world, defaults
        self._default: GroupOptions | None = None  # of an axis without options of its own
        self._ascending: dict[AxisLayout, bool] = {}
        self.default_key: OptionsKey | None = None

    def of_axes(
        self,
        layout: Layout,
        axis_names: Sequence[str],
        overrides: Sequence[Override],
        tags: Sequence[str],
        preserve_rank_order: bool,
        first: int = 0,
    ) -> list[GroupRequest]:
        """Return one request per axis.

        Args:
            layout: layout of a mesh, over positions.
            axis_names: names of consecutive axes of the mesh, for `explain()` and c10d's
                descriptions.
            overrides: one override per axis; empty if no axis has one.
            tags: one isolation tag per axis, "" for none; empty if no axis has one.
            preserve_rank_order: keep the axes' own order of ranks instead of ascending ranks.
            first: index of the first of these axes in the layout.

        Raises:
            TypeError: a field of an options object cannot be read or compared.
        """
        axes = layout.axes if preserve_rank_order else layout.ascending
        axes = axes[first : first + len(axis_names)]
        options = [self._default or self._resolve_default()] * len(axis_names)
        if overrides:
            options = [self.resolve(override) for override in overrides]
        if tags:
            options = [one.with_tag(tag) for one, tag in zip(options, tags, strict=True)]
        return [
            self.with_options(axis, name, wanted, preserve_rank_order=preserve_rank_order)
            for axis, name, wanted in zip(axes, axis_names, options, strict=True)
        ]

    def inherited(self, axis: AxisLayout, axis_name: str) -> GroupRequest:
        """Return the request of an axis without options of its own."""
        return self.with_options(axis.sorted(), axis_name, self.resolve(NO_OVERRIDE))

    def over_whole_universe(
        self, name: str, override: Override, timeout: timedelta | None, tag: str
    ) -> GroupRequest:
        """Return the request for one group of all ranks of the universe.

        Args:
            name: name of the request, for `explain()` and c10d's descriptions.
            override: backend and options object of the group.
            timeout: timeout of the group's operations; None for the universe's timeout.
            tag: isolation tag; "" for none.

        Raises:
            TypeError: a field of the options object cannot be read or compared.
        """
        assert self._world is not None
        defaults = self._defaults if timeout is None else replace(self._defaults, timeout=timeout)
        options = GroupOptions.resolve(override, self._world.default_group, defaults).with_tag(tag)
        return self.with_options(AxisLayout(self._rank_map.size), name, options)

    def with_options(
        self,
        axis: AxisLayout,
        axis_name: str,
        options: GroupOptions,
        *,
        preserve_rank_order: bool = False,
    ) -> GroupRequest:
        """Return the request for the groups of an axis with these options.

        If the axis's own order of ranks is to be kept, and ascends, it is like any other axis.
        """
        world = self._world
        assert world is not None
        if preserve_rank_order:
            if self.ascends(axis):
                axis = axis.sorted()
            else:
                options = options.in_mesh_order()
        way = way_to_create(axis, options, world)
        return GroupRequest(axis, self._rank_map, self._position, options, axis_name, *way)

    def adopted(self, axis: AxisLayout, axis_name: str, group: ProcessGroup) -> GroupRequest:
        """Return the request that stands for a process group which the user created."""
        options = GroupOptions.given(group)
        return GroupRequest(
            axis, self._rank_map, self._position, options, axis_name, Way.USER_PROVIDED
        )

    def resolve(self, override: Override) -> GroupOptions:
        """Return the options of an axis with this override.

        Raises:
            TypeError: a field of an options object cannot be read or compared.
        """
        if override == NO_OVERRIDE:
            return self._default or self._resolve_default()
        assert self._world is not None
        return GroupOptions.resolve(override, self._world.default_group, self._defaults)

    def _resolve_default(self) -> GroupOptions:
        world = self._world
        assert world is not None
        self._default = (
            world.default_options
            if self._defaults is NO_DEFAULTS
            else GroupOptions.resolve(NO_OVERRIDE, world.default_group, self._defaults)
        )
        self.default_key = self._default.key
        return self._default

    def ascends(self, axis: AxisLayout) -> bool:
        """Return whether the ranks ascend in every group of an axis.

        Not only in this rank's group: all ranks of the mesh must compute the same options key. Up
        to O(number of ranks), once per axis; O(1) if the rank map ascends.
        """
        if self._rank_map.is_sorted():
            return axis.is_sorted()
        if axis not in self._ascending:
            self._ascending[axis] = ascends(RankGroups(axis, self._rank_map))
        return self._ascending[axis]
