"""The universe: one rank map, and every process group and mesh derived over it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Hashable, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, RankMap
from meshverse.groups.request import Group
from meshverse.layouts.computed import computed
from meshverse.layouts.derivation import MeshDescription
from meshverse.layouts.rank_views import RankViews, rank_views
from meshverse.layouts.user_input import ArrayLike, read_rank_map
from meshverse.options.group_options import Defaults
from meshverse.report.pictured import ExplainedView
from meshverse.topology import Topology
from meshverse.world.users import Users
from meshverse.world.weak_registry import WeakRegistry
from meshverse.world.world import World

from .consistency import check_by_default
from .groups import UniverseGroups
from .owner import GroupOwner, WorldUniverses, ending_in_words
from .parts import Parts, ranks_outside
from .roots import RootedMesh, Roots
from .sleep import GroupMemory, memory_stats, resume, suspend
from .warm_up import WarmedUp, warm_up

__all__ = ["Member", "Universe", "share_world_wide"]


class Member(RootedMesh, Protocol):
    """What a universe asks of the meshes that are made in it."""

    # Read where the cost of a property would show.
    _description: MeshDescription
    _root_mesh: Any

    @property
    def has_groups(self) -> bool:
        """Whether process groups were made for the mesh."""

    @property
    def group_names(self) -> tuple[str, ...] | None:
        """c10d names of my groups, one an axis; none outside the mesh; None without groups."""

    @property
    def intern_key(self) -> Hashable:
        """What makes the mesh itself within its universe."""

    def take_root(self, root: Any) -> None:
        """Have this root; itself, or none yet, makes it a root."""

    def join(self, universe: Universe) -> None:
        """Enter a universe, on its process groups."""

    def forget_place(self) -> None:
        """Find this rank's coordinate anew each time it is asked for."""


_Mesh = TypeVar("_Mesh", bound=Member)


class Universe(GroupOwner):
    """One rank map, its world group, and every process group, submesh and flattened mesh over it.

    Every mesh belongs to exactly one universe; slicing, flattening, unflattening and concatenating
    stay inside it. Two axes with the same groups and the same options share one process group, in
    whichever mesh they occur. Made with a root mesh; pass it to `init_device_mesh(universe=...)` to
    build further meshes on the same groups.

    Args:
        ranks: global ranks by position: a number n for 0, 1, ... n-1, or a tensor or sequence, in
            the order in which a mesh lists them.
        timeout: of every group's operations, unless an axis's own options say another; by default
            that of the default group.
        options: options object for the groups of the default group's backend, where an axis has
            none of its own. Its timeout counts if it is not that of a fresh object.
        lazy: make a group when it is first used, by its members, instead of with its mesh.
        check_consistency: compare with the other ranks each call that makes groups; by default
            unless the environment says `MESHVERSE_CHECK_CONSISTENCY=0`.
        rank: this process's global rank; by default that of the default process group.
        decoupled: whether its meshes have nothing to do with the current default group, and equal
            no others, until they are bound.
        topology: where the ranks of the world are, for `explain()`. It does not order `ranks`.
        part_of: a universe that has these ranks, to be a part of; `part` makes one.

    Attributes:
        rank_map: position -> global rank.
        size: number of ranks.
        rank: this process's global rank.
        position: this rank's place in the rank map, or None if it is outside.
        world: the life of the default process group it was made in; None if there was none.
        process_groups: my live process groups by c10d name, as torch.compile looks them up.
        ready_groups: those that need nothing before they are used.
        pending_groups: the lazy groups of the world that are still to be made, by c10d name.
        roots: of the meshes made in this universe, and their flattened meshes.
        keeps_places: whether meshes can keep this rank's coordinate, as its rank does not change.
        is_over: whether it was destroyed or aborted.
        topology: where the ranks of the world are, if that is known.
        whole: the universe that this one is a part of; None if it is none.
        generation: how many universes of this world had ended when it was made.
        serial: which one this is. 0, 1, 2, ... counts the universes that these ranks made together
            in this world, so it is the same on all of them. Negative for universes that made no
            process groups: they are numbered in each process, so ranks may differ.

    Raises:
        ValueError: ranks that repeat or are negative, or that the topology does not have; a timeout
            that is not positive.
        TypeError: a timeout that is no timedelta, or options that are no options object.
    """

    # What its parts inherit.
    _defaults: Defaults
    _lazy: bool
    _check_consistency: bool

    def __init__(
        self,
        ranks: RankMap | int | torch.Tensor | ArrayLike,
        *,
        timeout: timedelta | None = None,
        options: compat.BackendOptions | None = None,
        lazy: bool = False,
        check_consistency: bool | None = None,
        rank: int | None = None,
        decoupled: bool = False,
        topology: Topology | None = None,
        part_of: Universe | None = None,
    ) -> None:
        self.rank_map = ranks if isinstance(ranks, RankMap) else read_rank_map(ranks)
        defaults = Defaults.of(timeout, options)
        if part_of is not None:
            defaults = defaults.or_else(part_of._defaults)
            lazy, topology = lazy or part_of._lazy, topology or part_of.topology
            if check_consistency is None:
                check_consistency = part_of._check_consistency
        if check_consistency is None:
            check_consistency = check_by_default()
        self.whole = part_of
        self._defaults, self._lazy, self._check_consistency = defaults, lazy, check_consistency
        self._parts = Parts()
        self.world = None if decoupled else World.current()
        # Part of what makes meshes equal: None for all universes but decoupled ones.
        self.token = object() if decoupled else None
        if topology is not None:
            topology.check_has(self.rank_map)
        self.topology = topology
        if rank is None:
            rank = self.world.rank if self.world is not None else dist.get_rank()  # stock's error
        self.rank = rank
        self.size = self.rank_map.size
        self.position = self.rank_map.position_of(rank)
        self.thread_id = None if self.world is None else self.world.thread_id
        self.roots: Roots[Member] = Roots()
        self._own_serial: int | None = None  # once it is asked for
        self._groups: UniverseGroups | None = None
        self.generation = 0
        self.process_groups: dict[str, compat.ProcessGroup] = {}
        self.ready_groups: Container[str] = self.process_groups
        self.pending_groups: Mapping[str, Group] = {}
        if self.world is not None:
            self._groups = UniverseGroups(
                self.rank_map,
                self.position,
                self.world,
                defaults=defaults,
                lazy=lazy,
                check_consistency=check_consistency,
                shared=self.world.state(Users).shared if _shares_world_wide else None,
                part_of=None if part_of is None else part_of.groups,
            )
            self.process_groups = self._groups.process_groups
            self.ready_groups = () if self.world.may_change else self.process_groups
            self.pending_groups = self._groups.pending
            universes = self.world.state(WorldUniverses)
            universes.alive.add(self)
            self.generation = universes.n_ended
        self._ended = None
        self.is_over = False
        self._lock = threading.Lock()  # protects the roots and the next
        self._is_kept = False  # by its world, as one that made groups
        self._ranks_checked = False
        self._meshes: dict[Hashable, Member] = {}
        self._others: WeakRegistry[Member] = WeakRegistry()  # meshes that are not among these
        # The rank is negative where nobody knows it.
        self.keeps_places = rank >= 0 and not (self.world is not None and self.world.may_change)
        _universes.add(self)

    @property
    def serial(self) -> int:
        """Which universe of its ranks this is; see the class."""
        number = None if self._groups is None else self._groups.number
        if number is not None:
            return number
        if self._own_serial is None:
            self._own_serial = _next_own_serial(self.rank_map)
        return self._own_serial

    # --- ranks ----------------------------------------------------------------------------------

    @computed
    def rank_views(self) -> RankViews:
        """The rank map as torch's own code reads it: tensor and tuple, each made when asked for."""
        return rank_views(self.rank_map)

    # --- parts ----------------------------------------------------------------------------------

    def _new_part(self, rank_map: RankMap, own: dict[str, Any]) -> Universe:
        return Universe(rank_map, part_of=self, **own)

    # --- meshes ---------------------------------------------------------------------------------

    @property
    def root(self) -> StockDeviceMesh | None:
        """The first mesh made here, which the others under its isolation tags call their root."""
        return cast("StockDeviceMesh | None", self.roots.first)

    @property
    def flattened(self) -> Mapping[str, StockDeviceMesh]:
        """The flattened meshes under the isolation tags of the first mesh here, by name."""
        return {} if self.root is None else self.root._flatten_mapping

    def add_flattened(self, name: str, tag: str, flattened: Member) -> None:
        """Note a flattened mesh, for all meshes here that may ask for it by its name."""
        with self._lock:
            self.roots.add_flattened(name, tag, flattened)

    def intern(self, mesh: _Mesh, key: Hashable = None) -> _Mesh:
        """The mesh that is here already with the same axes, names and groups, or else this one.

        Args:
            mesh: to be kept here, if there is none like it.
            key: the mesh's `intern_key`, if the caller knows it.
        """
        with self._lock:  # of several threads, one makes the root
            root = self.roots.first
            if root is None or mesh._description.tags or root._description.tags:
                root = self.roots.of(mesh)
            if mesh._root_mesh is not root:
                mesh.take_root(root)
            if not self._is_kept:
                self._keep()
        if key is None:
            key = mesh.intern_key
        return self._meshes.setdefault(key, mesh)  # type: ignore[return-value]

    def note(self, mesh: Member) -> None:
        """Know of a mesh that is not the one of its kind here."""
        self._others.add(mesh)

    def forget_places(self) -> None:
        """Have the meshes here check, each time they are asked, that this rank's place is its."""
        self.keeps_places = False
        for mesh in (*list(self._meshes.values()), *self._others.alive()):
            mesh.forget_place()

    def _views(self) -> list[ExplainedView]:
        views: dict[tuple[object, ...], ExplainedView] = {}
        for mesh in list(self._meshes.values()):
            what = mesh._description
            if what.layout.size == self.size:
                key = (what.labels, what.layout, mesh.group_names)
                flattened = {} if views else self._flattened_axes()
                views.setdefault(key, ExplainedView(what, mesh.group_names, flattened))
        return list(views.values())

    def _flattened_axes(self) -> dict[str, AxisLayout]:
        flattened = cast("Mapping[str, Member]", self.flattened)
        return {name: mesh._description.layout.collapse() for name, mesh in flattened.items()}

    def _keep(self) -> None:
        # Every call that makes groups gives a mesh, so this sees them all.
        if self._ended is not None or self.world is None or self._groups is None:
            return
        if self._groups.has_own:
            self.world.state(WorldUniverses).kept.append(self)
            self._is_kept = True

    def warm_up(
        self, axis_names: Collection[str] | None = None, *, show_progress: bool = False
    ) -> list[WarmedUp]:
        """Make lazy groups now and connect every group, by one small all-reduce on each.

        The first step then does not pay for it, and ranks that use the groups in different orders
        do not wait for one another. All ranks of the universe call this with the same names.

        Args:
            axis_names: of axes whose groups are wanted, by any name they were asked for; by
                default all groups.
            show_progress: draw a bar on the terminal (needs rich). The log tells in any case.

        Returns:
            What was warmed up and the seconds it took, in the order in which it was done.

        Raises:
            KeyError: no group was asked for by one of the names.
            RuntimeError: the universe has no mesh or no process groups.
        """
        groups = self._all_groups()
        roots = [universe.root for universe in (self, *self._all_parts()) if universe.root]
        if not roots:
            raise RuntimeError(f"The universe of {self.rank_map} has no mesh yet: make one first.")
        return warm_up(groups, axis_names, roots[0].device_type, show_progress=show_progress)

    def suspend(self, axis_names: Collection[str] | None = None) -> None:
        """Have process groups hold as little device memory as they can, until `resume`.

        All ranks of the universe call this with the same names, when nothing is going on in the
        groups. Use of a suspended group through a mesh raises RuntimeError. What holds the group
        itself, such as FSDP2 or a compiled graph, gets what the backend says. Groups whose
        backends cannot be suspended stay as they are, as do groups that are suspended already.

        Args:
            axis_names: of axes whose groups are meant, by any name they were asked for; by default
                all that were made here: not the default group, nor groups the user gave.

        Raises:
            KeyError: no group was asked for by one of the names.
            RuntimeError: no backend of these groups can be suspended.
        """
        suspend(self._all_groups(), axis_names, self._living_world)

    def resume(self, axis_names: Collection[str] | None = None) -> None:
        """Have suspended process groups ready for use again. Arguments and ranks as for `suspend`.

        Groups that are not suspended stay as they are.
        """
        resume(self._all_groups(), axis_names, self._living_world)

    def memory_stats(self, axis_names: Collection[str] | None = None) -> list[GroupMemory]:
        """What process groups hold in memory, as their backends say. Arguments as for `suspend`.

        Groups whose backends do not tell are left out. No other rank is asked.
        """
        return memory_stats(self._all_groups(), axis_names, self._living_world)

    @property
    def _living_world(self) -> World:
        assert self.world is not None  # or `groups` has raised
        return self.world

    def bind(self, target: Universe) -> None:
        """Give the meshes here that have no process groups those of a universe, this or another.

        They move into the target, onto the groups it has, and new ones with default options for
        axes it has none for. So all ranks of the meshes call this, with the same meshes loaded.

        Raises:
            RuntimeError: no mesh here lacks process groups.
            ValueError: the target has not all these ranks.
        """
        if outside := ranks_outside(self.rank_map, target.rank_map):
            raise ValueError(
                f"Meshes over {self.rank_map} cannot be bound to a universe of "
                f"{target.rank_map}: it has no ranks {outside}."
            )
        bare = {key: mesh for key, mesh in self._meshes.items() if not mesh.has_groups}
        if not bare:
            raise RuntimeError(
                f"The meshes of this universe of {self.rank_map} have process groups already; "
                "bind() is for meshes that were loaded or made without them."
            )
        if target.rank_map != self.rank_map:
            target = target.part(self.rank_map)
        # In an order that all ranks share, whatever order they loaded the meshes in.
        for key, mesh in sorted(bare.items(), key=lambda item: str(item[1].description)):
            mesh.join(target)
            del self._meshes[key]

    @classmethod
    def all_over(cls, rank_map: RankMap) -> list[Universe]:
        """The live universes of these ranks in this world; first those that made groups."""
        return sorted(cls._alive(rank_map), key=lambda universe: universe._distance(0, ()))

    @classmethod
    def _alive(cls, rank_map: RankMap) -> list[Universe]:
        world = World.current()
        return [
            universe
            for universe in _universes.alive()
            if universe.rank_map == rank_map and universe.world is world and universe._ended is None
        ]

    @classmethod
    def find(
        cls, rank_map: RankMap, serial: int, groups: Collection[tuple[AxisLayout, str | None]] = ()
    ) -> Universe | None:
        """A live universe of these ranks in this world: all ranks find the same.

        Of those that know all these groups, the one with this serial, or else the first that made
        process groups. If none knows them all, the same of the others.

        Args:
            rank_map: the ranks.
            serial: of the universe that is wanted.
            groups: axis layouts of groups in it, with the digests of their options keys.
        """
        alive = cls._alive(rank_map)
        return min(alive, key=lambda universe: universe._distance(serial, groups), default=None)

    def _distance(
        self, serial: int, groups: Collection[tuple[AxisLayout, str | None]]
    ) -> tuple[bool, bool, bool, bool, int]:
        knows_all = all(self.known_group(*group) is not None for group in groups)
        mine = self.serial
        return not knows_all, mine != serial, not self._is_kept, mine < 0, abs(mine)

    def __repr__(self) -> str:
        groups = 0 if self._groups is None else len(self._groups)
        state = "" if self._ended is None else f", {ending_in_words(self._ended)}"
        parts = f", {len(self.parts)} parts" if self.parts else ""
        return (
            f"Universe({self.rank_map}, {groups} groups, {len(self._meshes)} meshes{parts}{state})"
        )


# Universes alive: a mesh that is loaded finds the one it was saved from here.
_universes: WeakRegistry[Universe] = WeakRegistry()
_own_serials: dict[str, int] = {}  # the last one of each rank map, by fingerprint
_own_serials_lock = threading.Lock()
_shares_world_wide = False  # of universes made from now on, in all threads


def share_world_wide(share: bool) -> None:
    """Whether universes made from now on share their process groups across the whole process."""
    global _shares_world_wide
    _shares_world_wide = share


def _next_own_serial(rank_map: RankMap) -> int:
    with _own_serials_lock:
        serial = _own_serials.get(rank_map.fingerprint, 0) - 1
        _own_serials[rank_map.fingerprint] = serial
    return serial
