"""Installation of Meshverse in this process and in those that `multiprocessing` starts from it."""

from __future__ import annotations

import functools
import multiprocessing.spawn
import multiprocessing.util
import os
import sys
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from meshverse import install  # and all other names: the program gets what their import does
from meshverse._torch_compat.flight_recorder import recorder_size
from meshverse.explain.calling_threads import CallingThreads
from meshverse.explain.explanation import in_numbers, in_surplus
from meshverse.for_extras import World, WorldState, WorldUniverses, on_world_started
from meshverse.wording import counted, paragraph

from .summary import shared_group_conflicts


class Setup(NamedTuple):
    """Setup of each process of a job, before its program runs.

    Attributes:
        share: argument of `install`.
        explains: whether rank 0 prints the tables of `explain()` at the end.
    """

    share: Literal["mesh", "world"]
    explains: bool

    def begin(self) -> None:
        """Install Meshverse in this process and its children, and make rank 0 report at the end."""
        install(self.share)
        on_world_started(self._report_at_the_end)
        # A forked process inherits all of this. A spawned process first receives the dictionary
        # that this function returns, and unpickles it before it imports the program.
        get = multiprocessing.spawn.get_preparation_data

        @functools.wraps(get)
        def with_setup(name: str) -> dict[str, Any]:
            return {**get(name), "meshverse": _Begin(self)}

        multiprocessing.spawn.get_preparation_data = with_setup

    def begin_in_first_process(self) -> None:
        """Do the same, in the process that the user or a launcher started.

        If a launcher such as torchrun did, its first process says at the end if it had no mesh.
        """
        self.begin()
        if os.environ.get("RANK") == "0":
            multiprocessing.util.Finalize(None, _say_if_there_was_no_mesh, exitpriority=0)

    def _report_at_the_end(self) -> None:
        _has_had_meshes.append(True)
        world = World.current()
        if world is not None and world.rank == 0:
            report = world.state(_Report)
            report.begin(world, self)
            # For a program that does not end its world. Unlike `atexit`, this works in children.
            multiprocessing.util.Finalize(None, report.end, exitpriority=0)


_has_had_meshes: list[bool] = []  # not empty once this process has seen a world


def _say_if_there_was_no_mesh() -> None:
    """Print that there is no report, as this process created no mesh."""
    if not _has_had_meshes:
        text = (
            "meshverse run: rank 0 created no mesh, so it shared no process group. Groups of "
            "new_group() stay torch's; Universe.groups_of() can replace such calls."
        )
        print("\n".join(paragraph(text, "  ")), file=sys.stderr, flush=True)  # noqa: T201


class _Begin:
    """Object that calls `Setup.begin` in the process that unpickles it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, tuple(self._setup)


def _begin(share: Literal["mesh", "world"], explains: bool) -> None:
    Setup(share, explains).begin()


class _Report(WorldState):
    """The report on a world, printed once: when the world ends, or else when the process exits."""

    def __init__(self) -> None:
        self._universes: WorldUniverses | None = None
        self._size = self._since_ns = 0
        self._explains = False

    def begin(self, world: World, setup: Setup) -> None:
        """Store what the report on this world needs."""
        self._universes, self._size = world.state(WorldUniverses), world.size
        self._explains, self._since_ns = setup.explains, world.since_ns

    def reset_after_fork(self) -> None:
        """Print no report in a forked process: the parent prints it."""
        self._universes = None

    def end(self) -> None:
        """Print the report."""
        universes, self._universes = self._universes, None
        if universes is None:
            return
        # The program may have ended its world, as it should: that is not worth a line here.
        threads = CallingThreads(self._since_ns)  # read once for all universes
        explained = [universe.explain_with(threads) for universe in universes.with_groups]
        explanations = [replace(explanation, ended="") for explanation in explained]
        said = f"{in_numbers(explanations)}."
        if not universes.n_ended and not any(each.requested for each in explanations):
            # Such as after an error in the creation of the first mesh.
            said = "No process group was created for its meshes, so none was shared."
        lines = [f"meshverse run: rank 0 of {self._size}. {said}"]
        if universes.n_ended:
            lines.append(
                f"Not counted: {counted(universes.n_ended, 'universe')} that ended before."
            )
        n_surplus = sum(explanation.n_surplus for explanation in explanations)
        if n_surplus:
            lines.append(
                f"{in_surplus(n_surplus)} To share them, pass --share world, if all ranks use "
                "these meshes in the same order: otherwise the job can hang or compute wrong "
                "numbers. Steps that overlap them may slow down."
            )
        if queues := shared_group_conflicts(explanations):
            lines.append(
                "Axes that share a process group, which slows down only steps that overlap their "
                "collectives:"
            )
            lines += [f"  {line}" for line in queues]
            lines += ['To let two of them overlap, create one in `with meshverse.isolate("own"):`.']
            if any(len(group.threads) > 1 for each in explanations for group in each.groups):
                lines[-1] += f" Calls: of the last {recorder_size():,} on this rank."
        lines = [part for line in lines for part in paragraph(line, "  ")]
        if self._explains:
            # Without what is said of them above.
            lines += [f"\n{replace(each, n_duplicates=0)}" for each in explanations]
        print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201  # the command's output
