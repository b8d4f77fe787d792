"""The universe: one rank map, and every process group and mesh derived over it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, Layout, RankMap
from meshverse.groups.request import Group
from meshverse.layouts.computed import computed
from meshverse.layouts.derivation import MeshDescription
from meshverse.layouts.rank_views import RankViews, rank_views
from meshverse.layouts.user_input import ArrayLike, read_rank_map
from meshverse.options.group_options import Defaults
from meshverse.report.explain import Explanation, explain
from meshverse.world.weak_registry import WeakRegistry
from meshverse.world.world import World, WorldState

from .consistency import check_by_default
from .groups import UniverseGroups
from .roots import RootedMesh, Roots
from .warm_up import WarmedUp, warm_up

__all__ = ["Member", "Universe", "WorldUniverses", "share_world_wide"]


class WorldUniverses(WorldState):
    """The universes of one world.

    Attributes:
        kept: those that made process groups, oldest first. They are kept as long as c10d keeps the
            groups, so that all ranks find the same ones, whatever garbage each has collected.
        n_ended: how many were destroyed or aborted.
    """

    def __init__(self) -> None:
        self.kept: list[Universe] = []
        self.n_ended = 0

    def end(self) -> None:
        """Keep none any more."""
        self.kept.clear()


class Member(RootedMesh, Protocol):
    """What a universe asks of the meshes that are made in it."""

    _description: MeshDescription  # read where the cost of a property would show

    @property
    def has_groups(self) -> bool:
        """Whether process groups were made for the mesh."""

    @property
    def intern_key(self) -> Hashable:
        """What makes the mesh itself within its universe."""

    def take_root(self, root: Any) -> None:
        """Have this root; itself, or none yet, makes it a root."""

    def join(self, universe: Universe) -> None:
        """Enter a universe, on its process groups."""


_Mesh = TypeVar("_Mesh", bound=Member)


class _Ending(enum.Enum):
    """How a universe ended."""

    DESTROYED = enum.auto()
    ABORTED = enum.auto()


class Universe:
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

    Attributes:
        rank_map: position -> global rank.
        rank: this process's global rank.
        position: this rank's place in the rank map, or None if it is outside.
        world: the life of the default process group it was made in; None if there was none.
        process_groups: my live process groups by c10d name, as torch.compile looks them up.
        pending_groups: the lazy groups of the world that are still to be made, by c10d name.
        roots: of the meshes made in this universe, and their flattened meshes.
        is_over: whether it was destroyed or aborted.
        generation: how many universes of this world had ended when it was made.
        serial: which one this is. 0, 1, 2, ... counts the universes that these ranks made together
            in this world, so it is the same on all of them. Negative for universes that made no
            process groups: they are numbered in each process, so ranks may differ.

    Raises:
        ValueError: ranks that repeat or are negative; a timeout that is not positive.
        TypeError: a timeout that is no timedelta, or options that are no options object.
    """

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
    ) -> None:
        self.rank_map = ranks if isinstance(ranks, RankMap) else read_rank_map(ranks)
        defaults = Defaults.of(timeout, options)
        if check_consistency is None:
            check_consistency = check_by_default()
        self.world = None if decoupled else World.current()
        # Part of what makes meshes equal: None for all universes but decoupled ones.
        self.token = object() if decoupled else None
        if rank is None:
            rank = self.world.rank if self.world is not None else dist.get_rank()  # stock's error
        self.rank = rank
        self.position = self.rank_map.position_of(rank)
        self.thread_id = None if self.world is None else self.world.thread_id
        self.roots: Roots[Member] = Roots()
        self._own_serial: int | None = None  # once it is asked for
        self._groups: UniverseGroups | None = None
        self.generation = 0
        self.process_groups: dict[str, compat.ProcessGroup] = {}
        self.pending_groups: Mapping[str, Group] = {}
        if self.world is not None:
            self._groups = UniverseGroups(
                self.rank_map,
                self.position,
                self.world,
                defaults=defaults,
                lazy=lazy,
                check_consistency=check_consistency,
                share_world=_shares_world_wide,
            )
            self.process_groups = self._groups.process_groups
            self.pending_groups = self._groups.pending
            self.generation = self.world.state(WorldUniverses).n_ended
        self._ended: _Ending | None = None
        self.is_over = False
        self._lock = threading.Lock()  # protects the roots and the next
        self._is_kept = False  # by its world, as one that made groups
        self._ranks_checked = False
        self._meshes: dict[Hashable, Member] = {}
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

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rank_map.size

    @computed
    def rank_views(self) -> RankViews:
        """The rank map as torch's own code reads it: tensor and tuple, each made when asked for."""
        return rank_views(self.rank_map)

    # --- process groups -------------------------------------------------------------------------

    def known_names(self, axes: Layout, axis_names: Sequence[str]) -> list[str] | None:
        """c10d names of my groups along these axes, if all are there with the usual options.

        A universe, world or process that has ended has none. The first thing that is asked when a
        mesh is derived, so it takes few steps.
        """
        groups = self._groups
        return None if groups is None else groups.known_names(axes, axis_names)

    @property
    def groups(self) -> UniverseGroups:
        """The live process groups here, and what makes new ones.

        Raises:
            RuntimeError: the universe or its world has ended, or it has no process groups.
            ValueError: a rank is outside the default process group.
        """
        if self._groups is None or self.world is None:
            raise RuntimeError(
                f"This mesh over {self.rank_map} was loaded without process groups. Call "
                "mesh.bind() on all its ranks, after init_process_group()."
            )
        if self._ended is not None:
            raise RuntimeError(self._why_ended(self._ended))
        _ = self.world.default_group  # raises if its life is over
        if not self._ranks_checked:
            self._check_ranks(self.world.size)
        return self._groups

    def _why_ended(self, how: _Ending) -> str:
        return (
            f"The universe of {self.rank_map} was {_in_words(how)}, and its process groups with "
            "it. Make the mesh again: init_device_mesh() without universe= makes a new universe."
        )

    def _check_ranks(self, world_size: int) -> None:
        ranks = self.rank_map
        largest = ranks.sorted().rank_at(ranks.size - 1)
        if largest >= world_size:
            raise ValueError(
                f"A mesh over {ranks} names rank {largest}, but the default process group has "
                f"ranks 0 to {world_size - 1}. Build the mesh from ranks of this world."
            )
        self._ranks_checked = True

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
        groups = self.groups
        if self.root is None:
            raise RuntimeError(f"The universe of {self.rank_map} has no mesh yet: make one first.")
        return warm_up(groups, axis_names, self.root.device_type, show_progress=show_progress)

    def explain(self, communicator_bytes: Mapping[str, int] | None = None) -> Explanation:
        """Which groups exist, for which axes, how each came to be, and how often it was asked for.

        `print(universe.explain())` shows a table; `.to_dict()` and `.to_json()` give the same as
        data.

        Args:
            communicator_bytes: device memory of one communicator by backend name, where you know
                it better than `meshverse.report.communicator_memory`.
        """
        return explain(self.rank_map, self.rank, self._groups or (), communicator_bytes)

    def known_group(self, axis: AxisLayout, key_digest: str | None) -> Group | None:
        """The group of an axis with this options key, if there is one already. O(groups)."""
        along = self._groups.along(axis) if self._groups is not None else ()
        return next((g for g in along if g.request.options.key.digest == key_digest), None)

    def likeliest_group(self, axis: AxisLayout, axis_name: str | None) -> Group | None:
        """The group of an axis of which only the name is known; None if there is none. O(groups).

        One without a tag before one with, then one that was asked for by this name, then the one
        that was made first: the same on all ranks.
        """
        along = self._groups.along(axis) if self._groups is not None else []
        return min(
            along, key=lambda g: (g.request.options.tag, axis_name not in g.requests), default=None
        )

    def has_made(self, group_name: str) -> bool:
        """Whether this is the c10d name of a group that was made here: not given, nor default."""
        return any(g.name == group_name and not g.borrowed for g in self._groups or ())

    def key_digest(self, axis: AxisLayout, group_name: str) -> str | None:
        """Digest of the options key of the group with this name along an axis; None if unknown."""
        along = self._groups.along(axis) if self._groups is not None else ()
        return next((g.request.options.key.digest for g in along if g.name == group_name), None)

    # --- the end --------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the process groups that were made here, and nothing else. All ranks call it.

        No rank may, while others still communicate in the groups or make them: with gloo, have a
        barrier before. The default group, groups the user gave, and groups that another universe
        uses too stay. The meshes here can still be held, printed, sliced and compared; use of
        their groups raises RuntimeError. If a group cannot be freed, the others are freed and the
        error is raised; a second call tries again what is left. After that, a call does nothing.
        """
        self._end(_Ending.DESTROYED)

    def abort(self) -> None:
        """As `destroy`, but ending what is going on in the groups where the backend can (NCCL).

        For ranks that are left waiting when another one has died; they need not all call it. Where
        an axis is on the default group, that ends too, and with it all groups of this process.
        """
        self._end(_Ending.ABORTED)

    def _end(self, how: _Ending) -> None:
        if self._groups is None or (self._ended is not None and self._groups.is_freed):
            return
        self._ended, self.is_over = how, True
        if self.world is not None:
            universes = self.world.state(WorldUniverses)
            universes.n_ended += 1
            if self in universes.kept:
                universes.kept.remove(self)
        self._groups.free(abort=how is _Ending.ABORTED)

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
            mesh.take_root(root)
            if not self._is_kept:
                self._keep()
        if key is None:
            key = mesh.intern_key
        return self._meshes.setdefault(key, mesh)  # type: ignore[return-value]

    def _keep(self) -> None:
        # Every call that makes groups gives a mesh, so this sees them all.
        if self._ended is not None or self.world is None or self._groups is None:
            return
        if self._groups.has_own:
            self.world.state(WorldUniverses).kept.append(self)
            self._is_kept = True

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
        state = "" if self._ended is None else f", {_in_words(self._ended)}"
        return f"Universe({self.rank_map}, {groups} groups, {len(self._meshes)} meshes{state})"


def _in_words(how: _Ending) -> str:
    return "destroyed" if how is _Ending.DESTROYED else "aborted"


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
