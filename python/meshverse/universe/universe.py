"""The universe: meshes over one list of ranks, and the process groups that they share."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from meshverse._core import AxisLayout, RankMap
from meshverse._torch_compat.private_names import BackendOptions, ProcessGroup
from meshverse.descriptors import computed
from meshverse.layouts.rank_views import RankViews, rank_views
from meshverse.layouts.user_input import ArrayLike, TopologyLike, read_rank_map
from meshverse.locks import state_lock
from meshverse.options.group_options import Defaults
from meshverse.wording import counted, rank_list
from meshverse.world import World

from .universe_groups import UniverseGroups
from .universe_meshes import UniverseMeshes
from .world_universes import WorldUniverses, next_own_serial, note_universe

if TYPE_CHECKING:
    from meshverse.device_mesh.device_mesh import DeviceMesh
    from meshverse.explain.calling_threads import CallingThreads
    from meshverse.explain.explanation import ExplainedView, Explanation
    from meshverse.tools.pictures import Picture

    from .suspension import GroupMemory
    from .warm_up import WarmedUp

# What most programs do not call is imported when it is called.


class Universe:
    """Meshes over one list of ranks, and the process groups that they share.

    Every mesh belongs to one universe. Meshes that are sliced, flattened, unflattened or
    concatenated from it belong to the same universe. In all these meshes, axes with the same ranks
    and options share one process group. A root mesh creates a universe; pass that to
    `init_device_mesh(universe=...)` to create further root meshes in it.

    Args:
        ranks: global ranks in the order in which a mesh lists them, as a tensor or sequence; a
            number n means 0, 1, ... n-1.
        timeout: timeout of every group's operations, unless the axis's own options set one; by
            default that of the default group.
        options: options object for groups of the default group's backend whose axis has no options
            of its own. Its timeout applies if it differs from that of a newly created options
            object.
        lazy: whether the members of a group create it when it is first used, not with its mesh.
        check_consistency: whether calls that request groups are compared between ranks; by default
            they are, unless the environment has `MESHVERSE_CHECK_CONSISTENCY=0`.
        rank: this process's global rank, which then never changes. By default the rank in the
            default process group; once that has ended, coordinates are checked at each read.
        decoupled: whether its meshes are independent of the current default group. Until they are
            bound, they are equal only to meshes of this universe.
        topology: hardware that each rank of the world is on, for `explain()`. It does not change
            the order of `ranks`.
        part_of: universe with these ranks and others, of which this one is a part; see `part`.

    Attributes:
        rank_map: position -> global rank.
        size: number of ranks.
        rank: this process's global rank.
        rank_was_passed: whether `rank` was passed, not taken from the default process group.
        position: this rank's position in the rank map; None if it is not in it.
        world: lifetime of the default process group in which the universe was created; None if
            there was no such group, or if `decoupled`.
        groups: its process groups.
        meshes: its meshes.
        process_groups: this rank's live process groups by c10d name; torch.compile reads it.
        ready_groups: c10d names of the groups that can be used without a check.
        topology: hardware that each rank of the world is on, or None.
        whole: universe that this one is a part of, or None.
        n_ended_before: how many universes of this world had ended when this one was created.
        is_over: whether it was destroyed or aborted, or the call that created it failed.
        serial: number of this universe, from 0, among those over these ranks that created process
            groups in this world; the same on all of these ranks. Before a call over all ranks has
            created groups: the serial that was saved with a loaded universe, else a negative
            number chosen per process, which may differ between ranks.

    Raises:
        ValueError: ranks repeat, are negative or are not in the topology; or the timeout is not
            positive.
        TypeError: the timeout is not a timedelta, `options` is not an options object, or `rank` is
            no integer.
    """

    def __init__(
        self,
        ranks: RankMap | int | torch.Tensor | ArrayLike,
        *,
        timeout: timedelta | None = None,
        options: BackendOptions | None = None,
        lazy: bool = False,
        check_consistency: bool | None = None,
        rank: int | None = None,
        decoupled: bool = False,
        topology: TopologyLike | None = None,
        part_of: Universe | None = None,
    ) -> None:
        self.rank_map = ranks if isinstance(ranks, RankMap) else read_rank_map(ranks)
        self.size = self.rank_map.size
        self.world = None if decoupled else World.current()
        # Meshes are equal only if their universes' tokens are. Each decoupled one has its own, and
        # gives it to its parts.
        self.decoupled_token = object() if decoupled else None
        if part_of is not None:
            self.decoupled_token = self.decoupled_token or part_of.decoupled_token
            topology = part_of.topology if topology is None else topology
            rank = part_of.rank if rank is None and part_of.rank_was_passed else rank
        if topology is not None:
            topology.check_has(self.rank_map)
        self.topology: TopologyLike | None = topology
        self.rank_was_passed: bool = rank is not None
        if rank is None:
            rank = self.world.rank if self.world is not None else dist.get_rank()  # torch's error
        rank = operator.index(rank)  # numpy's integers could be saved, but not loaded
        self.rank: int = rank
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
        is_fixed = self.rank_was_passed or self.world is None or not may_change
        stores_coordinates = rank >= 0 and is_fixed
        self.meshes = UniverseMeshes(
            stores_coordinates=stores_coordinates, has_plain_names=not may_change
        )
        self.whole = part_of
        self._parts: list[Universe] = []  # oldest first; `part()` drops those that are freed
        self._own_serial: int | None = None  # set at its first read
        self.is_over = False
        self.n_ended_before = note_universe(self)

    @property
    def serial(self) -> int:
        """Number of this universe among those over its ranks; see the class."""
        if self.groups.calls.number is not None:
            return self.groups.calls.number
        if self._own_serial is None:
            self._own_serial = next_own_serial(self.rank_map)
        return self._own_serial

    def set_saved_serial(self, serial: int) -> None:
        """Set the serial that a loaded mesh was saved with. It applies until groups are created."""
        self._own_serial = serial

    # --- ranks ----------------------------------------------------------------------------------

    @computed
    def rank_views(self) -> RankViews:
        """Rank map as the tensor and the tuple that torch reads, each created at its first read."""
        return rank_views(self.rank_map)

    # --- process groups -------------------------------------------------------------------------

    def explain(self, communicator_bytes: Mapping[str, int] | None = None) -> Explanation:
        """Report the process groups: axes and origin of each, and how often it was requested.

        `print(universe.explain())` shows a table. `.to_dict()` and `.to_json()` return the same as
        data, and `.to_html()` a page that draws the views and lists the groups.

        Args:
            communicator_bytes: device memory of one communicator, in bytes, by backend name. It
                replaces the figures of `meshverse.explain.communicator_memory`.

        Raises:
            ValueError: a communicator's bytes are not an int of 0 or more.
        """
        from meshverse.explain.calling_threads import CallingThreads

        threads = None if self.world is None else CallingThreads(self.world.since_ns)
        return self.explain_with(threads, communicator_bytes)

    def draw(self, axis: str | None = None, *, node_size: int | None = None) -> Picture:
        """Draw the process groups: ranks by node, colored by group, this rank's groups outlined.

        `print()` shows the picture as text, `.show()` in colors (with rich), and a notebook as
        SVG. `.to_svg()` and `.to_html()` return it for a file. O(number of ranks), when it is
        shown.

        Args:
            axis: name by which the groups were requested; by default all groups are drawn.
            node_size: number of ranks per node: ranks 0 to n-1 are on the first one, and so on. By
                default that of torchrun (`LOCAL_WORLD_SIZE`); without it, ranks are drawn in lines
                of eight.

        Raises:
            KeyError: no groups were requested by this name.
            ValueError: there are no groups yet, or the node size is not positive.
        """
        picture = self.explain_with(None).drawn(node_size)
        return picture if axis is None else picture.of_axes(axis)

    def explain_with(
        self,
        threads: CallingThreads | None,
        communicator_bytes: Mapping[str, int] | None = None,
    ) -> Explanation:
        """Explain as `explain` does, with the threads that have used groups; None if not known."""
        from meshverse.explain.explanation import ReportSection, explain

        views = self._views()
        parts = [
            ReportSection(str(part.rank_map), tuple(part.groups)) for part in self._all_parts()
        ]
        return explain(
            self.rank_map,
            self.rank,
            self.groups,
            communicator_bytes,
            views,
            topology=self.topology,
            parts=parts,
            duplicates=self.groups.registry.duplicates(),
            surplus=self.groups.registry.duplicates(beyond_first=True),
            ended=self.groups.why_ended(),
            threads=threads,
        )

    def _all_groups(self) -> list[UniverseGroups]:
        """Return the groups of this universe and of its parts; RuntimeError if one has ended."""
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
        options: BackendOptions | None = None,
        timeout: timedelta | None = None,
        isolate: str | None = None,
    ) -> ProcessGroup:
        """Return the process group of a list of ranks, in place of `torch.distributed.new_group`.

        Its members create it at their first call; no other rank has to call this. Mesh axes over
        the same ranks with the same options share it, whether they are created before or after.
        `explain()` lists it, and it ends with the universe. If all ranks must create groups
        together (docs/limits.md says when), all of them must call this.

        Args:
            ranks: global ranks of this universe. The group has them in ascending order.
            name: name of the group in `explain()`, in errors and in c10d's description.
            backend: "nccl", "gloo", ...; by default that of the default group.
            options: options object for the backend, such as `ProcessGroupNCCL.Options()`; by
                default that of the universe.
            timeout: timeout of the group's operations; by default that of the universe.
            isolate: isolation tag, with which the group is separate; see `meshverse.isolate`.

        Returns:
            The group. On a rank outside it, `torch.distributed.GroupMember.NON_GROUP_MEMBER`, with
            which torch's collectives warn and do nothing.

        Raises:
            ValueError: ranks repeat, are negative or are outside this universe; the backend is
                unknown; the timeout is not positive, or differs from one that `options` sets; or
                the tag is not valid.
            TypeError: the timeout is not a timedelta, or `options` is not an options object.
            RanksDifferError: other members create it with other options.
            RuntimeError: this universe or its world has ended, or the group cannot be created.

        Example:
            >>> universe = meshverse.Universe(8)  # doctest: +SKIP
            >>> pair = universe.group([0, 4], timeout=timedelta(minutes=2))  # doctest: +SKIP
        """
        from .groups_of_ranks import group_of

        return group_of(
            self,
            ranks,
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
        options: BackendOptions | None = None,
        timeout: timedelta | None = None,
        isolate: str | None = None,
    ) -> ProcessGroup:
        """Return the group of the list that contains this rank, in place of loops over `new_group`.

        Each rank creates only its own group, with the other members (or all groups, if all ranks
        must create them together). Arguments and errors are those of `group`.

        Args:
            lists: lists of global ranks. A rank may be in one of them, or in none.
            name: as in `group`.
            backend: as in `group`.
            options: as in `group`.
            timeout: as in `group`.
            isolate: as in `group`.

        Returns:
            The group, or `NON_GROUP_MEMBER` on a rank that is in no list.

        Raises:
            ValueError: this rank is in several lists; or a list has a rank that is not in this
                universe (on all ranks); or as in `group`.
            TypeError: `lists` is no iterable of lists of ranks; or as in `group`.

        Example:
            >>> tp_group = universe.groups_of([[0, 1], [2, 3]], name="tp")  # doctest: +SKIP
        """
        from .groups_of_ranks import group_containing_rank

        return group_containing_rank(
            self,
            lists,
            name=name,
            backend=backend,
            options=options,
            timeout=timeout,
            isolate=isolate,
        )

    # --- memory ---------------------------------------------------------------------------------

    def suspend(self, axis_names: Collection[str] | None = None) -> None:
        """Suspend process groups: their backends free device memory until `resume`.

        All ranks of the universe must call this with the same names, while no collective is running
        in the groups. Use of a suspended group through a mesh raises RuntimeError. Code that holds
        the group itself, such as FSDP2 or a compiled graph, gets its backend's error. Groups that
        are suspended already, or whose backends cannot suspend them, stay as they are.

        Args:
            axis_names: names of axes whose groups to suspend. By default, all groups except the
                default group and those that the user created.

        Raises:
            KeyError: no group was requested by one of the names.
            RuntimeError: none of the groups' backends can suspend them; or a backend failed to
                suspend its group. Then only the groups before that one are suspended.
        """
        from .suspension import suspend

        suspend(self._all_groups(), axis_names)

    def resume(self, axis_names: Collection[str] | None = None) -> None:
        """Resume suspended process groups. All ranks must call this, with the same names.

        Groups that are not suspended stay as they are. The arguments are those of `suspend`.
        """
        from .suspension import resume

        resume(self._all_groups(), axis_names)

    def memory_stats(self, axis_names: Collection[str] | None = None) -> list[GroupMemory]:
        """Return the memory that groups hold, as their backends report it.

        The arguments are those of `suspend`. Groups whose backends report none are left out. No
        other rank has to call this.
        """
        from .suspension import memory_stats

        return memory_stats(self._all_groups(), axis_names)

    # --- the end --------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the process groups that this universe and its parts created.

        All its ranks must call this, after all of them have stopped using and creating groups: with
        gloo, after a barrier. The ranks of a part can also destroy the part alone.

        The default group, groups that the user created, and groups that another universe shares
        stay. (Groups that another universe only borrows, because one of its meshes was concatenated
        with one of this universe, end.) The meshes can still be held, printed, sliced and compared;
        use of their groups raises RuntimeError. If a group cannot be freed, the others are freed
        and the error is raised; the next call tries that group again. Once all are freed, further
        calls do nothing.
        """
        self._end("destroyed")

    def abort(self) -> None:
        """End the process groups at once, without waiting for their collectives or other ranks.

        It ends the same groups as `destroy`, for ranks that are stuck because another one has
        died; they need not all call it. NCCL aborts pending collectives. gloo cannot: they stay
        behind until their timeout. Meshverse's keys stay in the store. If an axis uses the default
        group, all groups of this process are aborted first, also those of other universes.
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
        self.groups.ended = how
        self.meshes.use_checked_group_names()
        self.world.state(WorldUniverses).note_end(self)
        self.groups.free(abort=how == "aborted")

    # --- meshes ---------------------------------------------------------------------------------

    @property
    def root(self) -> DeviceMesh | None:
        """First mesh of this universe: root of all that are under its isolation tags; or None."""
        return self.meshes.root

    @property
    def flattened(self) -> Mapping[str, DeviceMesh]:
        """Flattened meshes under the isolation tags of the first mesh, by name."""
        return {} if self.root is None else self.root._root()._flatten_mapping

    def _views(self) -> list[ExplainedView]:
        from meshverse.explain.explanation import ExplainedView

        views: dict[tuple[object, ...], ExplainedView] = {}
        for mesh in self.meshes:
            what = mesh._description
            if what.layout.size == self.size:
                key = (what.labels, what.layout, mesh._names_of_groups)
                flattened = {} if views else self._flattened_axes()
                views.setdefault(key, ExplainedView(what, mesh._names_of_groups, flattened))
        return list(views.values())

    def _flattened_axes(self) -> dict[str, AxisLayout]:
        return {
            name: mesh._description.layout.collapse() for name, mesh in dict(self.flattened).items()
        }

    def bind(self, target: Universe) -> None:
        """Give process groups to the meshes of this universe that have none.

        These meshes then belong to the target, or to its part over these ranks. Each of their axes
        gets the group there with default options, which is created if there is none. So all ranks
        of the meshes must call this, after loading the same meshes.

        Args:
            target: universe that has these ranks, in any order and with or without others; it may
                be this universe itself.

        Raises:
            RuntimeError: all meshes of this universe have process groups.
            ValueError: the target lacks some of these ranks.
        """
        if outside := ranks_outside(self.rank_map, target.rank_map):
            raise ValueError(
                f"Meshes over {self.rank_map} cannot be bound to a universe of "
                f"{target.rank_map}: it has no ranks {outside}."
            )
        if all(mesh._has_groups for mesh in self.meshes):
            raise RuntimeError(
                f"The meshes of this universe of {self.rank_map} have process groups already; "
                "bind() is for meshes that were loaded or created without them."
            )
        if target.rank_map != self.rank_map:
            target = target.part(self.rank_map)
        self.meshes.move_without_groups(target)

    def warm_up(
        self, axis_names: Collection[str] | None = None, *, show_progress: bool = False
    ) -> list[WarmedUp]:
        """Create lazy groups now and connect every group, by one small all-reduce on each.

        The first step then spends no time on this, and ranks do not deadlock by creating or
        connecting groups in different orders. (Collectives in different orders can still deadlock.)
        All ranks of the universe must call this with the same names.

        Args:
            axis_names: names of axes whose groups to warm up; by default all groups.
            show_progress: whether to draw a progress bar on the terminal (needs rich). Each group
                is logged in any case.

        Returns:
            The groups in the order in which they were warmed up, each with the seconds that it
            took.

        Raises:
            KeyError: no group was requested by one of the names.
            RuntimeError: the universe has no mesh yet, has ended, or was loaded without process
                groups and is not bound.
        """
        from .warm_up import warm_up

        groups = self._all_groups()
        roots = [universe.root for universe in (self, *self._all_parts()) if universe.root]
        if not roots:
            raise RuntimeError(f"The universe of {self.rank_map} has no mesh: create one first.")
        return warm_up(groups, axis_names, roots[0].device_type, show_progress=show_progress)

    # --- parts ----------------------------------------------------------------------------------

    def _all_parts(self) -> Iterator[Universe]:
        """Iterate over the live parts, each with its own parts after it."""
        for part in self.parts:
            yield part
            yield from part._all_parts()

    @property
    def parts(self) -> tuple[Universe, ...]:
        """Parts of this universe that have not ended, oldest first; see `part`."""
        return tuple(part for part in list(self._parts) if not part.is_over)

    def part(
        self,
        ranks: RankMap | int | torch.Tensor | ArrayLike,
        *,
        timeout: timedelta | None = None,
        options: BackendOptions | None = None,
        lazy: bool = False,
        check_consistency: bool | None = None,
        rank: int | None = None,
    ) -> Universe:
        """Return a part: a universe over some of these ranks that shares groups with this one.

        A part has its own meshes, root and flattened axes. It uses groups with the same ranks and
        options that this universe or another of its parts has created. Methods of this universe
        (`explain`, `warm_up`, `destroy`, ...) include its parts; those of a part do not include
        this universe. A second call with the same ranks in the same order returns the same part.

        Args:
            ranks: as in `Universe`. All ranks of this universe, in its order, give this universe.
            timeout: as in `Universe`, for a new part; by default that of this universe.
            options: as in `Universe`, for a new part; by default those of this universe.
            lazy: as in `Universe`, for a new part, which is always lazy if this universe is.
            check_consistency: as in `Universe`, for a new part; by default as in this universe.
            rank: as in `Universe`, for a new part; by default the one passed to this universe.

        Raises:
            ValueError: a rank is outside this universe; or the part exists already, and a setting
                such as a timeout is passed, or another rank.
            RuntimeError: this universe or its world has ended, or it was loaded without process
                groups and is not bound.
        """
        rank_map = ranks if isinstance(ranks, RankMap) else read_rank_map(ranks)
        own: dict[str, Any] = {"timeout": timeout, "options": options, "lazy": lazy or None}
        own["check_consistency"] = check_consistency
        own = {name: value for name, value in own.items() if value is not None}
        known = self._over(rank_map)
        if known is None:
            self.check_has(rank_map)
            new = Universe(rank_map, part_of=self, rank=rank, **own)
            with state_lock.held:
                known = self._over(rank_map)  # another thread may have made it meanwhile
                if known is None:
                    # An ended part stays as long as some of its groups could not be freed.
                    parts = [
                        one for one in self._parts if not (one.is_over and one.groups.is_freed)
                    ]
                    self._parts = [*parts, new]
                    return new
        if rank is not None and rank != known.rank:
            own["rank"] = rank
        if own:
            raise ValueError(
                f"{', '.join(own)} cannot be set for {rank_map}: a universe or part over these "
                "ranks exists already. Pass such settings to the call that creates it: "
                "init_device_mesh(), Universe(ranks, ...) or universe.part(ranks, ...)."
            )
        return known

    def known_part(self, ranks: RankMap) -> Universe | None:
        """Return the existing universe over these ranks in this order: this one, a part, or None.

        Raises:
            ValueError: a rank is outside this universe.
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
        """Raise ValueError unless this universe has all these ranks. O(number of ranks)."""
        outside = ranks_outside(ranks, self.rank_map)
        if outside:
            raise ValueError(
                f"A mesh or group over {ranks} cannot be in a universe of {self.rank_map}, which "
                f"has no ranks {outside}: all its meshes, groups and parts are over some or all of "
                "its ranks. Use a universe over all ranks that are needed, or create the mesh "
                "without universe=."
            )

    def __dir__(self) -> list[str]:
        """Return the public names, which completion at a prompt shows."""
        return [*_FOR_USERS, *(name for name in super().__dir__() if name.startswith("__"))]

    def _repr_html_(self) -> str:  # in a notebook
        return self.explain()._repr_html_()

    def __repr__(self) -> str:
        shown = [counted(len(self.groups), "group"), counted(len(self.meshes), "mesh")]
        if self.parts:
            shown.append(counted(len(self.parts), "part"))
        if self.groups.ended is not None:
            shown.append(self.groups.ended)
        return f"Universe({self.rank_map}, {', '.join(shown)})"


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
        "whole",
    ),
)


def ranks_outside(ranks: RankMap, of_universe: RankMap) -> str:
    """Return the ranks that a universe lacks, for a message; "" if none. O(number of ranks)."""
    if ranks == of_universe:
        return ""
    if of_universe.is_identity and ranks.sorted().rank_at(ranks.size - 1) < of_universe.size:
        return ""
    listed = ranks.ranks().tolist()
    outside = sorted(rank for rank in listed if of_universe.position_of(rank) is None)
    return f"[{rank_list(outside)}]" if outside else ""


def check_universe(universe: object) -> None:
    """Raise TypeError if this is neither a universe nor None, but for example a mesh."""
    if universe is not None and not isinstance(universe, Universe):
        raise TypeError(
            f"universe={universe!r} of type {type(universe).__name__}: give the universe of a "
            "mesh, mesh.universe, or a meshverse.Universe."
        )
