"""The half of a universe that owns process groups: who has them, what happened, how they end."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Collection, Mapping, Sequence

from meshverse._core import AxisLayout, Layout
from meshverse.groups.asleep import Asleep
from meshverse.groups.request import Group
from meshverse.pictures import Picture
from meshverse.report.explain import Explanation, Portion, explain
from meshverse.report.pictured import ExplainedView, node_size_here
from meshverse.topology import Topology
from meshverse.world.weak_registry import WeakRegistry
from meshverse.world.world import World, WorldState

from .groups import UniverseGroups
from .parts import Divided
from .sleep import GroupMemory, memory_stats, resume, suspend

__all__ = ["Ending", "GroupOwner", "WorldUniverses", "ending_in_words"]


class WorldUniverses(WorldState):
    """The universes of one world.

    Attributes:
        kept: those that made process groups, oldest first. They are kept as long as c10d keeps the
            groups, so that all ranks find the same ones, whatever garbage each has collected.
        n_ended: how many were destroyed or aborted.
        alive: all that are alive.
    """

    def __init__(self) -> None:
        self.kept: list[GroupOwner] = []
        self.n_ended = 0
        self.alive: WeakRegistry[GroupOwner] = WeakRegistry()

    def end(self) -> None:
        """Keep none any more; from now on this process's rank may be another one."""
        self.kept.clear()
        for universe in self.alive.alive():
            universe.forget_places()


class Ending(enum.Enum):
    """How a universe ended."""

    DESTROYED = enum.auto()
    ABORTED = enum.auto()


class GroupOwner(Divided):
    """A universe as the owner of process groups. `Universe` has the constructor."""

    rank: int
    world: World | None
    is_over: bool
    topology: Topology | None
    _groups: UniverseGroups | None
    _ended: Ending | None
    _ranks_checked: bool

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

    def forget_places(self) -> None:
        """See `MeshOwner`."""
        raise NotImplementedError

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
            f"The universe of {self.rank_map} was {ending_in_words(how)}, and its process groups "
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
        asleep = () if self.world is None else self.world.state(Asleep).names
        views = self._views()
        parts = [
            Portion(str(part.rank_map), tuple(part._groups or ())) for part in self._all_parts()
        ]
        return explain(
            *(self.rank_map, self.rank, self._groups or (), figures, asleep, views, node_size),
            topology=self.topology,
            parts=parts,
        )

    def _all_groups(self) -> list[UniverseGroups]:
        """The groups here, and those of the parts."""
        return [self.groups, *(part.groups for part in self._all_parts())]

    def _views(self) -> list[ExplainedView]:
        """The meshes that split all ranks, for pictures."""
        return []

    def known_group(self, axis: AxisLayout, key_digest: str | None) -> Group | None:
        """The group of an axis with this options key, if there is one already."""
        return None if self._groups is None else self._groups.known(axis, key_digest)

    def likeliest_group(self, axis: AxisLayout, axis_name: str | None) -> Group | None:
        """The group of an axis whose options are not known; None if there is none. O(groups).

        If there are several, those without a tag come first, then those that were asked for under
        this axis name, then the one that was made first. All ranks choose the same.
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
            for part in self._parts:
                ending.callback(part._end, how)

    def _end_own(self, how: Ending) -> None:
        if self._groups is None or (self._ended is not None and self._groups.is_freed):
            return
        self._ended, self.is_over = how, True
        if self.world is not None:
            universes = self.world.state(WorldUniverses)
            universes.n_ended += 1
            if self in universes.kept:
                universes.kept.remove(self)
        self._groups.free(abort=how is Ending.ABORTED)


def ending_in_words(how: Ending) -> str:
    """What happened to a universe, for messages."""
    return "destroyed" if how is Ending.DESTROYED else "aborted"
