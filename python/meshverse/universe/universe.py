"""The universe: one rank map, and every process group and mesh derived over it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Hashable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, RankMap
from meshverse.groups.request import Group
from meshverse.layouts.computed import computed
from meshverse.layouts.rank_views import RankViews, rank_views
from meshverse.layouts.user_input import ArrayLike, read_rank_map
from meshverse.options.group_options import Defaults
from meshverse.topology import Topology
from meshverse.world.users import Users
from meshverse.world.weak_registry import WeakRegistry
from meshverse.world.world import World

from .consistency import check_by_default
from .groups import UniverseGroups
from .members import Member, MeshOwner
from .owner import WorldUniverses, ending_in_words
from .parts import Parts
from .roots import Roots

__all__ = ["Universe", "share_world_wide"]


class Universe(MeshOwner):
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

    def stand_for(self, serial: int) -> None:
        """Be saved as the universe of this serial, of which a mesh was loaded."""
        self._own_serial = serial

    # --- ranks ----------------------------------------------------------------------------------

    @computed
    def rank_views(self) -> RankViews:
        """The rank map as torch's own code reads it: tensor and tuple, each made when asked for."""
        return rank_views(self.rank_map)

    # --- parts ----------------------------------------------------------------------------------

    def _new_part(self, rank_map: RankMap, own: dict[str, Any]) -> Universe:
        return Universe(rank_map, part_of=self, **own)

    # --- finding one ----------------------------------------------------------------------------

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
