"""The universe: one rank map, and every process group and mesh derived over it."""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Collection, Container, Hashable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, Layout, RankMap
from meshverse.agreement import check_by_default, shortened
from meshverse.groups.group import Group, GroupUse
from meshverse.layouts.computed import computed
from meshverse.layouts.rank_views import RankViews, rank_views
from meshverse.layouts.user_input import ArrayLike, read_rank_map
from meshverse.options.group_options import Defaults
from meshverse.pictures import Picture
from meshverse.report.explain import Explanation, Portion, explain
from meshverse.report.pictured import ExplainedView, node_size_here
from meshverse.topology import Topology
from meshverse.world.weak_registry import WeakRegistry
from meshverse.world.world import World, WorldState

from .groups import UniverseGroups
from .roots import Roots
from .suspension import GroupMemory, memory_stats, resume, suspend
from .warm_up import WarmedUp, warm_up

if TYPE_CHECKING:
    from meshverse.device_mesh.device_mesh import DeviceMesh

__all__ = ["Universe", "WorldUniverses", "ranks_outside", "share_world_wide"]


class WorldUniverses(WorldState):
    """The universes of one world.

    Attributes:
        kept: those that made process groups, oldest first. They are kept as long as c10d keeps the
            groups, so that all ranks find the same ones, whatever garbage each has collected.
        n_ended: how many were destroyed or aborted.
        alive: all that are alive.
    """

    def __init__(self) -> None:
        self.kept: list[Universe] = []
        self.n_ended = 0
        self.alive: WeakRegistry[Universe] = WeakRegistry()

    def end(self) -> None:
        """Keep none any more; from now on this process's rank may be another one."""
        self.kept.clear()
        for universe in self.alive.alive():
            universe.forget_places()


class Ending(enum.Enum):
    """How a universe ended."""

    DESTROYED = "destroyed"
    ABORTED = "aborted"


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
        has_plain_names: whether meshes may give torch plain lists of names of groups, as none of
            them has to be looked at before it is used.
        is_lazy: whether groups are made when they are first used.
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

    # Said here too, as its parts read them.
    topology: Topology | None
    is_lazy: bool
    _defaults: Defaults
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
            lazy, topology = lazy or part_of.is_lazy, topology or part_of.topology
            if check_consistency is None:
                check_consistency = part_of._check_consistency
        if check_consistency is None:
            check_consistency = check_by_default()
        self.whole = part_of
        self._defaults, self.is_lazy, self._check_consistency = defaults, lazy, check_consistency
        self._parts: list[Universe] = []  # oldest first; of those over some ranks, the last
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
        self.roots = Roots()
        self._own_serial: int | None = None  # once it is asked for
        self._groups: UniverseGroups | None = None
        self.generation = 0
        self.process_groups: dict[str, compat.ProcessGroup] = {}
        self.ready_groups: Container[str] = self.process_groups
        self.has_plain_names = False
        if self.world is not None:
            self._groups = UniverseGroups(
                self.rank_map,
                self.position,
                self.world,
                defaults=defaults,
                lazy=lazy,
                check_consistency=check_consistency,
                part_of=None if part_of is None else part_of.groups,
                share_world_wide=_shares_world_wide,
            )
            self.process_groups = self._groups.process_groups
            self.ready_groups = () if self.world.may_change else self.process_groups
            self.has_plain_names = not self.world.may_change
            self._groups.universe = weakref.ref(self)
            universes = self.world.state(WorldUniverses)
            universes.alive.add(self)
            self.generation = universes.n_ended
        self._ended: Ending | None = None
        self.is_over = False
        self._lock = threading.RLock()  # protects the parts, the roots and the next
        self._is_kept = False  # by its world, as one that made groups
        self._ranks_checked = False
        self._meshes: dict[Hashable, DeviceMesh] = {}
        self._others: WeakRegistry[DeviceMesh] = WeakRegistry()  # meshes that are not among these
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

    # --- process groups -------------------------------------------------------------------------

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
        _ = self.world.default_group  # raises if the world has ended
        if not self._ranks_checked:
            self._check_ranks(self.world.size)
        return self._groups

    def known_names(
        self, layout: Layout, axis_names: Sequence[str], first: int = 0
    ) -> list[str] | None:
        """c10d names of my groups along some axes, if all are there with the usual options.

        Arguments as of `UniverseGroups.known_names`. None too if the universe, its world or its
        process has ended. Every derived mesh asks this first, so it is short.
        """
        groups = self._groups
        return None if groups is None else groups.known_names(layout, axis_names, first)

    def _why_ended(self, how: Ending) -> str:
        return (
            f"The universe of {self.rank_map} was {how.value}, and its process groups "
            "with it. Make the mesh again: init_device_mesh() without universe= makes a new "
            "universe."
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

    def explain(self, communicator_bytes: Mapping[str, int] | None = None) -> Explanation:
        """Which groups exist, for which axes, how each came to be, and how often it was asked for.

        `print(universe.explain())` shows a table; `.to_dict()` and `.to_json()` give the same as
        data, and `.to_html()` a page where one picks a view, an axis and a rank.

        Args:
            communicator_bytes: device memory of one communicator by backend name, where you know
                it better than `meshverse.report.communicator_memory`.
        """
        return self._explain(communicator_bytes, node_size_here())

    def draw(self, axis: str | None = None, *, node_size: int | None = None) -> Picture:
        """The process groups as a picture: the ranks by node, coloured by group, mine outlined.

        `print()` shows it as text, `.show()` in colours (with rich), a notebook as SVG; `.to_svg()`
        and `.to_html()` give it to write to a file. O(ranks), when it is shown.

        Args:
            axis: name that the groups were asked for by; by default all groups are drawn.
            node_size: ranks 0 to n-1 are on the first node, and so on. By default what torchrun
                says (`LOCAL_WORLD_SIZE`); where nothing does, ranks are drawn in lines of eight.

        Raises:
            KeyError: no groups were asked for by this name.
            ValueError: there are no groups yet; a node size that is not positive.
        """
        picture = self._explain(None, node_size_here() if node_size is None else node_size).drawn()
        return picture if axis is None else picture.of_axes(axis)

    def _explain(self, figures: Mapping[str, int] | None, node_size: int | None) -> Explanation:
        views = self._views()
        parts = [
            Portion(str(part.rank_map), tuple(part._groups or ())) for part in self._all_parts()
        ]
        return explain(
            *(self.rank_map, self.rank, self._groups or (), figures, views, node_size),
            topology=self.topology,
            parts=parts,
        )

    def _all_groups(self) -> list[UniverseGroups]:
        """The groups here, and those of the parts."""
        return [self.groups, *(part.groups for part in self._all_parts())]

    def known_group(self, axis: AxisLayout, key_digest: str | None) -> GroupUse | None:
        """The group of an axis with this options key, if there is one already."""
        return None if self._groups is None else self._groups.known(axis, key_digest)

    def likeliest_group(self, axis: AxisLayout, axis_name: str | None) -> GroupUse | None:
        """The group of an axis whose options are not known; None if there is none. O(groups).

        If there are several, those without a tag come first, then those that were asked for under
        this axis name, then the one that was made first. All ranks choose the same.
        """
        along = self._groups.along(axis) if self._groups is not None else []
        return min(
            along, key=lambda g: (g.request.options.tag, axis_name not in g.requests), default=None
        )

    def planned_group(self, group_name: str | None) -> Group | None:
        """Return the group of this c10d name if it is lazy and still to be made, else None."""
        if group_name is None or self._groups is None:
            return None
        return self._groups.planned(group_name)

    def has_made(self, group_name: str) -> bool:
        """Whether this is the c10d name of a group that was made here: not given, nor default."""
        return any(g.name == group_name and not g.borrowed for g in self._groups or ())

    def key_digest(self, axis: AxisLayout, group_name: str) -> str | None:
        """Digest of the options key of the group with this name along an axis; None if unknown."""
        along = self._groups.along(axis) if self._groups is not None else ()
        return next((g.request.options.digest for g in along if g.name == group_name), None)

    # --- memory ---------------------------------------------------------------------------------

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
            RuntimeError: no backend of these groups can be suspended. Or one of them refused: the
                groups before it are suspended then, it and those after it are not.
        """
        suspend(self._all_groups(), axis_names)

    def resume(self, axis_names: Collection[str] | None = None) -> None:
        """Have suspended process groups ready for use again. Arguments and ranks as for `suspend`.

        Groups that are not suspended stay as they are.
        """
        resume(self._all_groups(), axis_names)

    def memory_stats(self, axis_names: Collection[str] | None = None) -> list[GroupMemory]:
        """Return the memory that groups hold, as their backends say. Arguments as for `suspend`.

        Groups whose backends do not tell are left out. No other rank is asked.
        """
        return memory_stats(self._all_groups(), axis_names)

    # --- the end --------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the process groups that were made here, and nothing else. All ranks call it.

        Those of its parts end too. A part can be destroyed by itself, by its own ranks.

        Call it when no rank communicates in the groups any more, or makes one: with gloo, after a
        barrier. These groups stay: the default group, groups the user gave, and groups that another
        universe uses too. The meshes here can still be held, printed, sliced and compared; use of
        their groups raises RuntimeError. If a group cannot be freed, the others are freed and the
        error is raised; a second call tries again what is left. After that, a call does nothing.
        """
        self._end(Ending.DESTROYED)

    def abort(self) -> None:
        """As `destroy`, but ending what is going on in the groups where the backend can (NCCL).

        For ranks that are left waiting when another one has died; they need not all call it. Where
        an axis is on the default group, that ends too, and with it all groups of this process.
        """
        self._end(Ending.ABORTED)

    def _end(self, how: Ending) -> None:
        with contextlib.ExitStack() as ending:  # calls all of these, last first, whatever fails
            ending.callback(self._end_own, how)
            for part in list(self._parts):
                ending.callback(part._end, how)

    def _end_own(self, how: Ending) -> None:
        if self._groups is None or (self._ended is not None and self._groups.is_freed):
            return
        self._ended, self.is_over = how, True
        self.set_plain_names(False)
        if self.world is not None:
            universes = self.world.state(WorldUniverses)
            universes.n_ended += 1
            if self in universes.kept:
                universes.kept.remove(self)
        self._groups.free(abort=how is Ending.ABORTED)

    # --- meshes ---------------------------------------------------------------------------------

    @property
    def root(self) -> DeviceMesh | None:
        """The first mesh made here, which the others under its isolation tags call their root."""
        return self.roots.first

    @property
    def flattened(self) -> Mapping[str, DeviceMesh]:
        """The flattened meshes under the isolation tags of the first mesh here, by name."""
        return {} if self.root is None else self.root.flattened

    def add_flattened(self, name: str, tag: str, flattened: DeviceMesh) -> None:
        """Note a flattened mesh, for all meshes here that may ask for it by its name."""
        with self._lock:
            self.roots.add_flattened(name, tag, flattened)

    def find_mesh(self, key: Hashable) -> DeviceMesh | None:
        """Return the mesh of this description and these names of groups, or None."""
        return self._meshes.get(key)

    def intern(self, mesh: DeviceMesh, key: Hashable) -> DeviceMesh:
        """Return the mesh that is here already under a key, or else this one, kept here.

        Args:
            mesh: to be kept here, if there is none like it.
            key: its description and names of groups; of a mesh of a user's subclass, its id.
        """
        with self._lock:  # of several threads, one makes the root
            root = self.roots.first
            if root is None or mesh._description.tags or root._description.tags:
                root = self.roots.of(mesh)
            if mesh._root_mesh is not root:
                mesh._take_root(root)
            if not self._is_kept:
                self._keep()
        return self._meshes.setdefault(key, mesh)

    def keep(self, mesh: DeviceMesh) -> None:
        """Intern a mesh that somebody has already, or know of it, if there is one like it."""
        if self.intern(mesh, mesh._intern_key) is not mesh:
            self.note(mesh)

    def note(self, mesh: DeviceMesh) -> None:
        """Know of a mesh that is not the one of its kind here."""
        self._others.add(mesh)

    def set_plain_names(self, is_plain: bool) -> None:
        """Have meshes give torch plain lists of names of groups, or lists that look at each use."""
        if self.world is None or self.world.may_change or not (is_plain or self.has_plain_names):
            return
        self.has_plain_names = is_plain
        for mesh in (*list(self._meshes.values()), *self._others.alive()):
            mesh._renew_group_names()

    def forget_places(self) -> None:
        """Have the meshes find the coordinate at each read, and raise if this is another rank."""
        self.keeps_places = False
        for mesh in (*list(self._meshes.values()), *self._others.alive()):
            mesh._forget_coordinate()

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
        return {name: mesh.layout.collapse() for name, mesh in self.flattened.items()}

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
            mesh._join(target)
            del self._meshes[key]

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

    # --- parts ----------------------------------------------------------------------------------

    def _all_parts(self) -> Iterator[Universe]:
        """The live parts, each with its own parts after it."""
        for part in self.parts:
            yield part
            yield from part._all_parts()

    @property
    def parts(self) -> tuple[Universe, ...]:
        """The universes over some of these ranks that share groups with this one, oldest first."""
        return tuple(part for part in list(self._parts) if not part.is_over)

    def part(
        self,
        ranks: RankMap | int | torch.Tensor | ArrayLike,
        *,
        timeout: timedelta | None = None,
        options: compat.BackendOptions | None = None,
        lazy: bool = False,
        check_consistency: bool | None = None,
        rank: int | None = None,
    ) -> Universe:
        """The universe over some of these ranks that shares process groups with this one.

        It has meshes, a root and flattened axes of its own. A group that this universe or another
        of its parts has, over the same ranks with the same options, is not made again. What is
        asked of this universe (`explain`, `warm_up`, `destroy`, ...) concerns its parts too; what
        is asked of a part concerns that part. Made once for the same ranks in the same order.

        Args:
            ranks: as of `Universe`; all of these ranks in this order are this universe itself.
            timeout: of a new part; by default that of this universe.
            options: of a new part; by default those of this universe.
            lazy: of a new part; it is lazy in any case if this universe is.
            check_consistency: of a new part; by default as in this universe.
            rank: as of `Universe`.

        Raises:
            ValueError: a rank that this universe has not; or a timeout or options for a part that
                is there already.
            RuntimeError: this universe or its world has ended, or it has no process groups.
        """
        rank_map = ranks if isinstance(ranks, RankMap) else read_rank_map(ranks)
        own: dict[str, Any] = {"timeout": timeout, "options": options, "lazy": lazy or None}
        own["check_consistency"] = check_consistency
        own = {name: value for name, value in own.items() if value is not None}
        with self._lock:
            known = self._over(rank_map)
            if known is None:
                self.check_has(rank_map)
                known = Universe(rank_map, part_of=self, rank=rank, **own)
                self._parts = [part for part in self._parts if part.rank_map != rank_map]
                self._parts.append(known)
                return known
        if own:
            raise ValueError(
                f"{', '.join(own)}: given for a mesh over {rank_map} in a universe that has these "
                "ranks already. They belong to a universe, or to a part of one. Give them when "
                "making it: the first mesh of it, or Universe(ranks, ...)."
            )
        return known

    def known_part(self, ranks: RankMap) -> Universe | None:
        """This universe or its part over these ranks, in this order; None if there is none yet.

        Raises:
            ValueError: a rank that this universe has not.
        """
        known = self._over(ranks)
        if known is None:
            self.check_has(ranks)
        return known

    def _over(self, ranks: RankMap) -> Universe | None:
        return next((one for one in (self, *self.parts) if one.rank_map == ranks), None)

    def check_has(self, ranks: RankMap) -> None:
        """Raise ValueError unless this universe has all these ranks, in any order. O(ranks)."""
        outside = ranks_outside(ranks, self.rank_map)
        if outside:
            raise ValueError(
                f"A mesh over {ranks} cannot join a universe of {self.rank_map}, which has no "
                f"ranks {outside}: a mesh in a universe is over all its ranks or some of them. "
                "Make it without universe=, or make the universe over all ranks that are needed."
            )

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
        state = "" if self._ended is None else f", {self._ended.value}"
        parts = f", {len(self.parts)} parts" if self.parts else ""
        return (
            f"Universe({self.rank_map}, {groups} groups, {len(self._meshes)} meshes{parts}{state})"
        )


def ranks_outside(ranks: RankMap, of_universe: RankMap) -> str:
    """The ranks that a universe has not, for a message; "" if it has all. O(ranks)."""
    if ranks == of_universe:
        return ""
    if of_universe.is_identity and ranks.sorted().rank_at(ranks.size - 1) < of_universe.size:
        return ""
    listed = ranks.ranks().tolist()
    outside = sorted(rank for rank in listed if of_universe.position_of(rank) is None)
    return shortened(outside) if outside else ""


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
