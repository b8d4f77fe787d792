"""Meshverse, installed in this process and in those that `multiprocessing` starts from it."""

from __future__ import annotations

import functools
import multiprocessing.spawn
import multiprocessing.util
import sys
from typing import Any, Literal, NamedTuple

from meshverse.dropin import install
from meshverse.report.explain import in_other_universes
from meshverse.report.summary import in_numbers, what_queues
from meshverse.universe.registry import WorldUniverses
from meshverse.world.world import World, WorldState, on_new_world


class Setup(NamedTuple):
    """Set-up of each process of a job, before its program runs.

    Attributes:
        share: of `install`.
        explains: whether rank 0 prints the tables of `explain()` at the end.
    """

    share: Literal["mesh", "world"]
    explains: bool

    def begin(self) -> None:
        """Install Meshverse here and in child processes, and have rank 0 report at the end."""
        install(self.share)
        on_new_world.append(self._report_at_the_end)
        # A forked process has all of this. Others are sent this dictionary first of all, and
        # unpickle it before they import the program.
        get = multiprocessing.spawn.get_preparation_data

        @functools.wraps(get)
        def with_setup(name: str) -> dict[str, Any]:
            return {**get(name), "meshverse": _Begin(self)}

        multiprocessing.spawn.get_preparation_data = with_setup

    def _report_at_the_end(self) -> None:
        world = World.current()
        if world is not None and world.rank == 0:
            report = world.state(_Report)
            report.begin(world, self)
            # If the program does not end its world. Child processes call it too, unlike atexit's.
            multiprocessing.util.Finalize(None, report.end, exitpriority=0)


class _Begin:
    """Begins where it is unpickled."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, tuple(self._setup)


def _begin(share: Literal["mesh", "world"], explains: bool) -> None:
    Setup(share, explains).begin()


class _Report(WorldState):
    """The report on a world, printed once: when it ends, or with the process."""

    def __init__(self) -> None:
        self._universes: WorldUniverses | None = None
        self._size = 0
        self._explains = False

    def begin(self, world: World, setup: Setup) -> None:
        """Report on this world at its end."""
        self._universes, self._size = world.state(WorldUniverses), world.size
        self._explains = setup.explains

    def leave_to_parent(self) -> None:
        """Report nothing: the parent does."""
        self._universes = None

    def end(self) -> None:
        """Print the report."""
        universes, self._universes = self._universes, None
        if universes is None:
            return
        explanations = [universe.explain() for universe in universes.kept]
        lines = [f"meshverse run: rank 0 of {self._size}. {in_numbers(explanations)}"]
        if universes.n_ended:
            lines.append(f"Not counted: {universes.n_ended} universes that ended before.")
        n_duplicates = sum(explanation.n_duplicates for explanation in explanations)
        if n_duplicates:
            again = in_other_universes(n_duplicates)
            lines.append(f"{again} To share them, pass --share world, unless meshes must overlap.")
        if queues := what_queues(explanations):
            lines += ["Axes on one process group, whose collectives queue behind each other:"]
            lines += [f"  {line}" for line in queues]
            lines += ["To let two of them overlap, give one an isolate tag."]
        if self._explains:
            lines += [str(explanation) for explanation in explanations]
        print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201  # that is the command
