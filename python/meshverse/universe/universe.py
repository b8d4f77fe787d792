"""The universe: one list of ranks, with every process group and mesh made over it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, RankMap
from meshverse.layouts.computed import computed
from meshverse.layouts.rank_views import RankViews, rank_views
from meshverse.layouts.user_input import ArrayLike, read_rank_map
from meshverse.options.group_options import Defaults
from meshverse.pictures import Picture
from meshverse.report.explain import Explanation, Portion, explain
from meshverse.report.pictured import ExplainedView, node_size_here
from meshverse.topology import Topology
from meshverse.wording import rank_list
from meshverse.world.world import World

from .groups import UniverseGroups
from .meshes import UniverseMeshes
from .plain_groups import group_of, group_of_mine
from .registry import WorldUniverses, next_own_serial, note_universe
from .suspension import GroupMemory, memory_stats, resume, suspend
from .warm_up import WarmedUp, warm_up

if TYPE_CHECKING:
    from meshverse.device_mesh.device_mesh import DeviceMesh


class Universe:
    """One list of ranks, with every process group and mesh made over it.

    Every mesh belongs to one universe; what is sliced, flattened, unflattened or concatenated from
    it belongs to the same one. Axes with the same ranks and options share one process group, in
    whichever of these meshes they are. A root mesh makes a universe; pass it to
    `init_device_mesh(universe=...)` to make further root meshes in it.

    Args:
        ranks: global ranks by position: a number n for 0, 1, ... n-1, or a tensor or sequence, in
            the order in which a mesh lists them.
        timeout: of every group's operations, unless the axis's own options set one; by default that
            of the default group.
        options: options object for groups of the default group's backend, if the axis has none of
            its own. Its timeout applies if it differs from that of a new options object.
        lazy: make a group when it is first used, by its members, and not with its mesh.
        check_consistency: compare each call that makes groups with those of other ranks; by default
            yes, unless the environment has `MESHVERSE_CHECK_CONSISTENCY=0`.
        rank: this process's global rank, fixed; by default the rank in the default process group,
            for as long as that lasts.
        decoupled: whether its meshes do not depend on the current default group, and equal no
            others, until they are bound.
        topology: where the ranks of the world are, for `explain()`. It does not order `ranks`.
        part_of: a universe with these ranks and others, of which this is a part; see `part`.

    Attributes:
        rank_map: position -> global rank.
        size: number of ranks.
        rank: this process's global rank.
        has_own_rank: whether `rank` was passed, and is not that of the default process group.
        position: this rank's place in the rank map, or None if it is outside.
        world: the default process group during which it was made; None if there was none.
        groups: its process groups.
        meshes: its meshes.
        process_groups: my live process groups by c10d name, as torch.compile looks them up.
        ready_groups: those that can be used without a check.
        topology: where the ranks of the world are, or None.
        whole: the universe that this one is a part of; None if it is none.
        generation: how many universes of this world had ended when it was made.
        is_over: whether it was destroyed or aborted.
        serial: 0, 1, 2, ... among the universes that these ranks made together in this world, the
            same on all of them. Negative for universes that made no process groups: each process
            counts its own, so ranks may differ.

    Raises:
        ValueError: ranks that repeat or are negative, or that the topology does not have; a timeout
            that is not positive.
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
        topology: Topology | None = None,
        part_of: Universe | None = None,
    ) -> None:
        self.rank_map = ranks if isinstance(ranks, RankMap) else read_rank_map(ranks)
        self.size = self.rank_map.size
        self.world = None if decoupled else World.current()
        # Meshes are equal only if their universes' tokens are: None for all but decoupled ones.
        self.token = object() if decoupled else None
        if topology is None and part_of is not None:
            topology = part_of.topology
        if topology is not None:
            topology.check_has(self.rank_map)
        self.topology: Topology | None = topology
        self.has_own_rank = rank is not None
        if rank is None:
            rank = self.world.rank if self.world is not None else dist.get_rank()  # stock's error
        self.rank = rank
        self.position = self.rank_map.position_of(rank)
        self.thread_id = None if self.world is None else self.world.thread_id
        self.groups: UniverseGroups = UniverseGroups(
            self.rank_map,
            self.position,
            self.world,
            weakref.ref(self),
            defaults=Defaults.of(timeout, options),
            lazy=lazy,
            check_consistency=check_consistency,
            part_of=None if part_of is None else part_of.groups,
        )
        may_change = self.world is None or self.world.may_change
        self.process_groups = self.groups.process_groups
        self.ready_groups: Container[str] = () if may_change else self.process_groups
        # The rank is negative if it is unknown.
        is_fixed = self.has_own_rank or self.world is None or not may_change
        keeps_coordinates = rank >= 0 and is_fixed
        self.meshes = UniverseMeshes(
            keeps_coordinates=keeps_coordinates, has_plain_names=not may_change
        )
        self.whole = part_of
        self._parts: list[Universe] = []  # oldest first; those that ended too, until they are freed
        self._parts_lock = threading.RLock()
        self._own_serial: int | None = None  # set at its first read
        self.is_over = False
        self.generation = note_universe(self)

    @property
    def serial(self) -> int:
        """Number of this universe among those of its ranks; see the class."""
        if self.groups.number is not None:
            return self.groups.number
        if self._own_serial is None:
            self._own_serial = next_own_serial(self.rank_map)
        return self._own_serial

    def set_saved_serial(self, serial: int) -> None:
        """Set the serial that is saved with this universe: the one that a mesh was loaded with."""
        self._own_serial = serial

    # --- ranks ----------------------------------------------------------------------------------

    @computed
    def rank_views(self) -> RankViews:
        """The rank map as torch reads it: tensor and tuple, each made at its first read."""
        return rank_views(self.rank_map)

    # --- process groups -------------------------------------------------------------------------

    def explain(self, communicator_bytes: Mapping[str, int] | None = None) -> Explanation:
        """Report the groups: their axes, the origin of each, and how often it was requested.

        `print(universe.explain())` shows a table; `.to_dict()` and `.to_json()` give the same as
        data, and `.to_html()` a page that draws the views and lists the groups.

        Args:
            communicator_bytes: device memory of one communicator by backend name, where you know
                it better than `meshverse.report.communicator_memory`.
        """
        return self._explain(communicator_bytes, node_size_here())

    def draw(self, axis: str | None = None, *, node_size: int | None = None) -> Picture:
        """Draw the process groups: the ranks by node, coloured by group, mine outlined.

        `print()` shows it as text, `.show()` in colours (with rich), a notebook as SVG; `.to_svg()`
        and `.to_html()` give it to write to a file. O(ranks), when it is shown.

        Args:
            axis: name by which the groups were requested; by default all groups are drawn.
            node_size: ranks 0 to n-1 are on the first node, and so on. By default what torchrun
                says (`LOCAL_WORLD_SIZE`); where nothing does, ranks are drawn in lines of eight.

        Raises:
            KeyError: no groups were requested by this name.
            ValueError: there are no groups yet; a node size that is not positive.
        """
        picture = self._explain(None, node_size_here() if node_size is None else node_size).drawn()
        return picture if axis is None else picture.of_axes(axis)

    def _explain(self, figures: Mapping[str, int] | None, node_size: int | None) -> Explanation:
        views = self._views()
        parts = [Portion(str(part.rank_map), tuple(part.groups)) for part in self._all_parts()]
        return explain(
            *(self.rank_map, self.rank, self.groups, figures, views, node_size),
            topology=self.topology,
            parts=parts,
            duplicates=self.groups.duplicates(),
        )

    def _all_groups(self) -> list[UniverseGroups]:
        """Return the groups here, and those of the parts."""
        all_groups = [self.groups, *(part.groups for part in self._all_parts())]
        for groups in all_groups:
            groups.check_usable()
        return all_groups

    def group(
        self,
        ranks: RankMap | torch.Tensor | ArrayLike,
        *,
        name: str = "group",
        backend: str | None = None,
        options: compat.BackendOptions | None = None,
        timeout: timedelta | None = None,
        isolate: str | None = None,
    ) -> compat.ProcessGroup:
        """Return the process group of a list of ranks, as `torch.distributed.new_group` makes one.

        Its members make it at the first call; no other rank has to call this. Mesh axes over the
        same ranks with the same options share it, whichever is made first. `explain()` lists it,
        and it ends with the universe. If all ranks must make groups together (docs/limits.md says
        when), all of them must call this.

        Args:
            ranks: global ranks of this universe. The group has them in ascending order.
            name: for `explain()`, errors, and c10d's description of the group.
            backend: "nccl", "gloo", ...; by default that of the default group.
            options: options object for the backend, such as `ProcessGroupNCCL.Options()`; by
                default that of the universe.
            timeout: of the group's operations; by default that of the universe.
            isolate: tag, for a group of its own; see `meshverse.isolate`.

        Returns:
            The group. On a rank that is not in it `torch.distributed.GroupMember.NON_GROUP_MEMBER`,
            with which torch's collectives warn and do nothing.

        Raises:
            ValueError: ranks repeat, are negative or are outside this universe; the backend is
                unknown; the timeout is not positive; or the tag is not valid.
            TypeError: a timeout that is no timedelta, or options that are no options object.
            RanksDifferError: other members make it with other options.
            RuntimeError: this universe or its world has ended, or the group cannot be made.

        Example:
            >>> universe = meshverse.Universe(8)  # doctest: +SKIP
            >>> pair = universe.group([0, 4], timeout=timedelta(minutes=2))  # doctest: +SKIP
        """
        return group_of(
            *(self, ranks),
            name=name,
            backend=backend,
            options=options,
            timeout=timeout,
            isolate=isolate,
        )

    def groups_of(
        self,
        lists: Iterable[torch.Tensor | ArrayLike],
        *,
        name: str = "group",
        backend: str | None = None,
        options: compat.BackendOptions | None = None,
        timeout: timedelta | None = None,
        isolate: str | None = None,
    ) -> compat.ProcessGroup:
        """Return the process group of the list with this rank, in place of a loop over `new_group`.

        Each rank makes its own group only, with the other members. Arguments and errors are those
        of `group`.

        Args:
            lists: of global ranks. A rank may be in one of them, or in none.
            name: as of `group`.
            backend: as of `group`.
            options: as of `group`.
            timeout: as of `group`.
            isolate: as of `group`.

        Returns:
            As `group`.

        Raises:
            ValueError: this rank is in several lists; and as `group`.

        Example:
            >>> tp_group = universe.groups_of([[0, 1], [2, 3]], name="tp")  # doctest: +SKIP
        """
        return group_of_mine(
            *(self, lists),
            name=name,
            backend=backend,
            options=options,
            timeout=timeout,
            isolate=isolate,
        )

    # --- memory ---------------------------------------------------------------------------------

    def suspend(self, axis_names: Collection[str] | None = None) -> None:
        """Suspend process groups: their backends give back device memory until `resume`.

        All ranks of the universe must call this with the same names, while no collective is running
        in the groups. Use of a suspended group through a mesh raises RuntimeError. Code that holds
        the group itself, such as FSDP2 or a compiled graph, gets its backend's error. Groups whose
        backends cannot suspend them stay as they are, as do groups that are suspended already.

        Args:
            axis_names: of axes whose groups to suspend; by default all groups that the universe
                made, and not the default group or groups of the user.

        Raises:
            KeyError: no group was requested by one of the names.
            RuntimeError: no backend of these groups can be suspended. Or one of them refused: the
                groups before it are suspended then, it and those after it are not.
        """
        suspend(self._all_groups(), axis_names)

    def resume(self, axis_names: Collection[str] | None = None) -> None:
        """Resume suspended process groups. Arguments and ranks as for `suspend`.

        Groups that are not suspended stay as they are.
        """
        resume(self._all_groups(), axis_names)

    def memory_stats(self, axis_names: Collection[str] | None = None) -> list[GroupMemory]:
        """Return the memory that groups hold, as their backends report it.

        Arguments are as for `suspend`. Groups whose backends report none are left out. No other
        rank takes part.
        """
        return memory_stats(self._all_groups(), axis_names)

    # --- the end --------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the process groups that this universe made. All its ranks must call this.

        Its parts end too. The ranks of a part can also destroy it alone.

        Call it when no rank uses the groups any more, or makes one: with gloo, after a barrier.
        These groups stay: the default group, groups that the user made, and groups that another
        universe uses too. The meshes can still be held, printed, sliced and compared; use of their
        groups raises RuntimeError. If a group cannot be freed, the others are freed and the error
        is raised; a second call tries it again. Later calls do nothing.
        """
        self._end("destroyed")

    def abort(self) -> None:
        """Free the process groups as `destroy` does, but abort their collectives (NCCL).

        This is for ranks that are stuck because another one has died; they need not all call it. If
        an axis uses the default group, that is aborted too, and with it all groups of this process.
        """
        self._end("aborted")

    def _end(self, how: Literal["destroyed", "aborted"]) -> None:
        with contextlib.ExitStack() as ending:  # calls all of these, last first, whatever fails
            ending.callback(self._end_own, how)
            for part in list(self._parts):
                ending.callback(part._end, how)

    def _end_own(self, how: Literal["destroyed", "aborted"]) -> None:
        if self.world is None or (self.is_over and self.groups.is_freed):
            return
        self.groups.ended, self.is_over = how, True
        self.meshes.set_plain_names(False)
        self.world.state(WorldUniverses).note_end(self)
        self.groups.free(abort=how == "aborted")

    # --- meshes ---------------------------------------------------------------------------------

    @property
    def root(self) -> DeviceMesh | None:
        """The first mesh made here, which the others under its isolation tags call their root."""
        return self.meshes.root

    @property
    def flattened(self) -> Mapping[str, DeviceMesh]:
        """The flattened meshes under the isolation tags of the first mesh here, by name."""
        return {} if self.root is None else self.root.flattened

    def _views(self) -> list[ExplainedView]:
        views: dict[tuple[object, ...], ExplainedView] = {}
        for mesh in self.meshes:
            what = mesh._description
            if what.layout.size == self.size:
                key = (what.labels, what.layout, mesh.group_names)
                flattened = {} if views else self._flattened_axes()
                views.setdefault(key, ExplainedView(what, mesh.group_names, flattened))
        return list(views.values())

    def _flattened_axes(self) -> dict[str, AxisLayout]:
        return {name: mesh.layout.collapse() for name, mesh in dict(self.flattened).items()}

    def bind(self, target: Universe) -> None:
        """Give the meshes here that have no process groups those of a universe, this or another.

        They move into the target, onto the groups it has, and new ones with default options for
        axes it has none for. So all ranks of the meshes call this, with the same meshes loaded.

        Raises:
            RuntimeError: no mesh here lacks process groups.
            ValueError: the target lacks some of these ranks.
        """
        if outside := ranks_outside(self.rank_map, target.rank_map):
            raise ValueError(
                f"Meshes over {self.rank_map} cannot be bound to a universe of "
                f"{target.rank_map}: it has no ranks {outside}."
            )
        if all(mesh.has_groups for mesh in self.meshes):
            raise RuntimeError(
                f"The meshes of this universe of {self.rank_map} have process groups already; "
                "bind() is for meshes that were loaded or made without them."
            )
        if target.rank_map != self.rank_map:
            target = target.part(self.rank_map)
        self.meshes.move_without_groups(target)

    def warm_up(
        self, axis_names: Collection[str] | None = None, *, show_progress: bool = False
    ) -> list[WarmedUp]:
        """Make lazy groups now and connect every group, by one small all-reduce on each.

        The first step then does not pay for it, and ranks that use the groups in different orders
        do not wait for one another. All ranks of the universe call this with the same names.

        Args:
            axis_names: of axes whose groups are wanted, any that they were requested by; by
                default all groups.
            show_progress: draw a bar on the terminal (needs rich). The log has it in any case.

        Returns:
            What was warmed up and the seconds it took, in the order in which it was done.

        Raises:
            KeyError: no group was requested by one of the names.
            RuntimeError: the universe has no mesh or no process groups.
        """
        groups = self._all_groups()
        roots = [universe.root for universe in (self, *self._all_parts()) if universe.root]
        if not roots:
            raise RuntimeError(f"The universe of {self.rank_map} has no mesh yet: make one first.")
        return warm_up(groups, axis_names, roots[0].device_type, show_progress=show_progress)

    # --- parts ----------------------------------------------------------------------------------

    def _all_parts(self) -> Iterator[Universe]:
        """Iterate over the live parts, each with its own parts after it."""
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
        """Return the universe over some of these ranks that shares process groups with this one.

        It has meshes, a root and flattened axes of its own. A group that this universe or another
        of its parts has, over the same ranks with the same options, is not made again. Methods of
        this universe (`explain`, `warm_up`, `destroy`, ...) concern its parts too, those of a part
        that part. Made once for the same ranks in the same order.

        Args:
            ranks: as of `Universe`; all of these ranks in this order are this universe itself.
            timeout: of a new part; by default that of this universe.
            options: of a new part; by default those of this universe.
            lazy: of a new part; it is lazy in any case if this universe is.
            check_consistency: of a new part; by default as in this universe.
            rank: as of `Universe`.

        Raises:
            ValueError: a rank outside this universe; or a timeout or options for a part that
                is there already.
            RuntimeError: this universe or its world has ended, or it has no process groups.
        """
        rank_map = ranks if isinstance(ranks, RankMap) else read_rank_map(ranks)
        own: dict[str, Any] = {"timeout": timeout, "options": options, "lazy": lazy or None}
        own["check_consistency"] = check_consistency
        own = {name: value for name, value in own.items() if value is not None}
        with self._parts_lock:
            known = self._over(rank_map)
            if known is None:
                self.check_has(rank_map)
                known = Universe(rank_map, part_of=self, rank=rank, **own)
                # An ended part stays while some of its groups could not be freed.
                live = [part for part in self._parts if not (part.is_over and part.groups.is_freed)]
                self._parts = [*live, known]
                return known
        if own:
            raise ValueError(
                f"{', '.join(own)} cannot be set for a mesh over {rank_map}: these ranks have a "
                "universe, or a part of one, already. Pass it when that is made: with its first "
                "mesh, or to Universe(ranks, ...)."
            )
        return known

    def known_part(self, ranks: RankMap) -> Universe | None:
        """Return this universe, its part over these ranks in this order, or None.

        Raises:
            ValueError: a rank outside this universe.
        """
        known = self._over(ranks)
        if known is None:
            self.check_has(ranks)
        return known

    def _over(self, ranks: RankMap) -> Universe | None:
        if ranks is self.rank_map:  # equal rank maps are one object
            return self
        return next((part for part in self.parts if part.rank_map is ranks), None)

    def check_has(self, ranks: RankMap) -> None:
        """Raise ValueError unless this universe has all these ranks, in any order. O(ranks)."""
        outside = ranks_outside(ranks, self.rank_map)
        if outside:
            raise ValueError(
                f"A mesh over {ranks} cannot join a universe of {self.rank_map}, which has no "
                f"ranks {outside}: a mesh in a universe is over all its ranks or some of them. "
                "Make it without universe=, or make the universe over all ranks that are needed."
            )

    def __dir__(self) -> list[str]:
        """Return the names for users, as completion at a prompt shows them."""
        return [*_FOR_USERS, *(name for name in super().__dir__() if name.startswith("__"))]

    def _repr_html_(self) -> str:  # in a notebook
        return self.explain()._repr_html_()

    def __repr__(self) -> str:
        groups = len(self.groups)
        state = "" if self.groups.ended is None else f", {self.groups.ended}"
        parts = f", {len(self.parts)} parts" if self.parts else ""
        return (
            f"Universe({self.rank_map}, {groups} groups, {len(self.meshes)} meshes{parts}{state})"
        )


_FOR_USERS = (
    *("abort", "bind", "destroy", "draw", "explain", "group", "groups_of", "memory_stats"),
    *(
        "part",
        "parts",
        "rank",
        "rank_map",
        "resume",
        "root",
        "size",
        "suspend",
        "topology",
        "warm_up",
    ),
)


def ranks_outside(ranks: RankMap, of_universe: RankMap) -> str:
    """Return the ranks outside a universe, for a message; "" if there are none. O(ranks)."""
    if ranks == of_universe:
        return ""
    if of_universe.is_identity and ranks.sorted().rank_at(ranks.size - 1) < of_universe.size:
        return ""
    listed = ranks.ranks().tolist()
    outside = sorted(rank for rank in listed if of_universe.position_of(rank) is None)
    return f"[{rank_list(outside)}]" if outside else ""
