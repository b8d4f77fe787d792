"""The universe: one rank map, and every process group and mesh derived over it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch.distributed as dist

from . import _torch_compat as compat
from ._core import AxisLayout, GroupCache, Layout, RankMap
from .backend_override import NO_OVERRIDE, GroupOptions, Override
from .explain import Explanation, GroupExplanation
from .group_creation import Group, GroupRequest, make_group
from .rank_views import RankViews, rank_views
from .world import World

if TYPE_CHECKING:
    from .mesh_base import MeshBase

__all__ = ["Universe"]


class Universe:
    """One rank map, its world group, and every process group, submesh and flattened mesh over it.

    Every mesh belongs to exactly one universe; slicing, flattening, unflattening and concatenating
    stay inside it. Two axes with the same groups and the same options share one process group, in
    whichever mesh they occur. Made with a root mesh; pass it to `init_device_mesh(universe=...)` to
    build further meshes on the same groups.

    Attributes:
        rank_map: position -> global rank.
        rank: this process's global rank.
        position: this rank's place in the rank map, or None if it is outside.
        world: the life of the default process group it was made in; None if there was none.
        process_groups: my live process groups by c10d name, as torch.compile looks them up.
        root: the first mesh made in this universe, which every other mesh here calls its root.
        serial: how many universes of these ranks were made in this world before.
    """

    def __init__(
        self, rank_map: RankMap, *, rank: int | None = None, decoupled: bool = False
    ) -> None:
        """Describe the ranks. Creates no process group.

        Args:
            rank_map: position -> global rank.
            rank: this process's global rank; by default that of the default process group.
            decoupled: whether its meshes have nothing to do with the current default group, and
                equal no others, until they are bound.
        """
        self.world = None if decoupled else World.current()
        # Part of what makes meshes equal: None for all universes but decoupled ones.
        self.token = object() if decoupled else None
        if rank is None:
            rank = self.world.rank if self.world is not None else dist.get_rank()  # stock's error
        self.rank_map = rank_map
        self.rank = rank
        self.position = rank_map.position_of(rank)
        self.thread_id = None if self.world is None else self.world.thread_id
        self.process_groups: dict[str, compat.ProcessGroup] = {}
        self.root: MeshBase | None = None
        ordinals = _ordinals if self.world is None else self.world.ordinals
        ranks = rank_map.fingerprint
        self.serial = ordinals[ranks] = ordinals.get(ranks, -1) + 1
        self._groups = GroupCache()
        self._given_groups: list[Group] = []
        self._ranks_checked = False
        self._meshes: dict[Hashable, MeshBase] = {}
        _universes.add(self)

    # --- ranks ----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rank_map.size

    @cached_property
    def rank_views(self) -> RankViews:
        """The rank map as torch's own code reads it: tensor and tuple, each made when asked for."""
        return rank_views(self.rank_map)

    # --- process groups -------------------------------------------------------------------------

    def groups_for(
        self,
        axes: Layout,
        *,
        axis_names: Sequence[str],
        overrides: Sequence[Override],
        preserve_rank_order: bool = False,
    ) -> list[Group]:
        """My group along each axis: the known one, or a new one that its members make together.

        Everything is checked before the first group is made.

        Args:
            axes: axis layouts over positions.
            axis_names: one an axis, for `explain()` and c10d's descriptions.
            overrides: one an axis.
            preserve_rank_order: keep the axes' own order of ranks instead of ascending ranks.

        Returns:
            One group an axis. On a rank outside the rank map, groups without a name.

        Raises:
            RuntimeError: the default process group is not the one this universe was made with.
            ValueError: a rank is outside the default group, or an options key cannot be made.
        """
        world = self._live_world()
        options = [self._options(override, world) for override in overrides]
        return [
            self._group(axis, name, wanted, preserve_rank_order, world)
            for axis, name, wanted in zip(axes, axis_names, options, strict=True)
        ]

    def _live_world(self) -> World:
        if self.world is None:
            raise RuntimeError(
                f"This mesh over {self.rank_map} was loaded without process groups. Call "
                "mesh.bind() on all its ranks, after init_process_group()."
            )
        _ = self.world.default_group  # raises if its life is over
        if not self._ranks_checked:
            self._check_ranks(self.world.size)
        return self.world

    def _check_ranks(self, world_size: int) -> None:
        ranks = self.rank_map
        largest = ranks.size - 1 if ranks.is_identity else int(self.rank_views.tensor.max())
        if largest >= world_size:
            raise ValueError(
                f"A mesh over {ranks} names rank {largest}, but the default process group has "
                f"ranks 0 to {world_size - 1}. Build the mesh from ranks of this world."
            )
        self._ranks_checked = True

    def _options(self, override: Override, world: World) -> GroupOptions:
        if override == NO_OVERRIDE:
            return world.default_options
        return GroupOptions.resolve(override, world.default_group)

    def _group(
        self,
        axis: AxisLayout,
        axis_name: str,
        options: GroupOptions,
        preserve_rank_order: bool,
        world: World,
    ) -> Group:
        # Whether the order matters is decided from what all ranks share, never from my own group:
        # members of one group must agree on its key.
        ascending = axis.is_sorted()
        keeps_order = preserve_rank_order and not (ascending and self.rank_map.is_identity)
        if keeps_order:
            options = options.with_tag("preserve_rank_order")
        elif not ascending:
            axis = axis.sorted()

        def make() -> Group:
            request = GroupRequest(
                axis, self.rank_map, self.position, options, axis_name, keeps_order
            )
            made = make_group(request, world)
            if made.name is not None:
                self.process_groups[made.name] = compat.resolve_group(made.name)
            return made

        group: Group = self._groups.get_or_create(axis, options.key, make)
        group.count_request(axis_name)
        return group

    def adopt_group(self, axis: AxisLayout, axis_name: str, group: compat.ProcessGroup) -> str:
        """Take in a process group the user made, for one mesh; it is listed but not shared.

        Returns:
            The group's c10d name.
        """
        options = GroupOptions.given(group)
        request = GroupRequest(axis, self.rank_map, self.position, options, axis_name)
        given = Group(request, group.group_name, "given by the user", created=False)
        given.count_request(axis_name)
        self._given_groups.append(given)
        self.process_groups[group.group_name] = group
        return group.group_name

    def explain(self) -> Explanation:
        """Which groups exist, for which axes, how each came to be, and how often it was asked for.

        `print(universe.explain())` shows a table; `.to_dict()` gives the same as data.
        """
        cached: list[Group] = [entry for _, _, entry in self._groups.entries()]
        groups = cached + self._given_groups
        return Explanation(
            rank_map=str(self.rank_map),
            rank=self.rank,
            requested=sum(sum(group.requests.values()) for group in groups),
            created=sum(group.created for group in groups),
            groups=tuple(
                GroupExplanation(
                    name=group.name,
                    layout=str(group.request.axis),
                    ranks=tuple(group.request.my_ranks()),
                    options=str(group.request.options.key),
                    how=group.how,
                    created=group.created,
                    requests=dict(group.requests),
                )
                for group in groups
            ),
        )

    def known_group(self, axis: AxisLayout, key_digest: str | None) -> Group | None:
        """The group of an axis with this options key, if there is one already. O(groups)."""
        groups = self._groups_along(axis)
        return next((g for g in groups if g.request.options.key.digest == key_digest), None)

    def key_digest(self, axis: AxisLayout, group_name: str) -> str | None:
        """Digest of the options key of the group with this name along an axis; None if unknown."""
        groups = self._groups_along(axis)
        return next((g.request.options.key.digest for g in groups if g.name == group_name), None)

    def _groups_along(self, axis: AxisLayout) -> list[Group]:
        groups = [*(entry for _, _, entry in self._groups.entries()), *self._given_groups]
        return [group for group in groups if group.request.axis in (axis, axis.sorted())]

    # --- meshes ---------------------------------------------------------------------------------

    def intern(self, mesh: MeshBase) -> MeshBase:
        """The mesh that is here already with the same axes, names and groups, or else this one."""
        if self.root is None:
            self.root = mesh
        return self._meshes.setdefault(mesh.intern_key, mesh)

    def bind(self, target: Universe) -> None:
        """Give the meshes here that have no process groups those of a universe, this or another.

        They move into the target, onto the groups it has, and new ones with default options for
        axes it has none for. So all ranks of the meshes call this, with the same meshes loaded.

        Raises:
            RuntimeError: no mesh here lacks process groups.
            ValueError: the target has other ranks.
        """
        if target.rank_map != self.rank_map:
            raise ValueError(
                f"Meshes over {self.rank_map} cannot be bound to a universe of {target.rank_map}: "
                "the ranks must be the same, in the same order."
            )
        bare = {key: mesh for key, mesh in self._meshes.items() if not mesh.has_groups}
        if not bare:
            raise RuntimeError(
                f"The meshes of this universe of {self.rank_map} have process groups already; "
                "bind() is for meshes that were loaded or made without them."
            )
        # In an order that all ranks share, whatever order they loaded the meshes in.
        for key, mesh in sorted(bare.items(), key=lambda item: str(item[1].description)):
            mesh.join(target)
            del self._meshes[key]

    @classmethod
    def find(cls, rank_map: RankMap, serial: int) -> Universe | None:
        """A live universe of these ranks in this world: with this serial, or else the first."""
        world = World.current()
        candidates = [
            universe
            for universe in list(_universes)
            if universe.rank_map == rank_map and universe.world is world
        ]
        exact = (universe for universe in candidates if universe.serial == serial)
        return next(exact, min(candidates, key=lambda universe: universe.serial, default=None))

    def __repr__(self) -> str:
        return f"Universe({self.rank_map}, {len(self._groups)} groups, {len(self._meshes)} meshes)"


# Universes alive: a mesh that is loaded finds the one it was saved from here.
_universes: weakref.WeakSet[Universe] = weakref.WeakSet()
# Number of the last universe of each rank map, by fingerprint, where there was no world.
_ordinals: dict[str, int] = {}
