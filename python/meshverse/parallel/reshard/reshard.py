"""`Reshard`: tensors move from the ranks that have them to the ranks that want them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType

import torch
from torch import Tensor
from typing_extensions import Self

from meshverse import Topology
from meshverse import _torch_compat as compat
from meshverse.options.group_options import check_timeout
from meshverse.world.world import World

from .exchange import Exchange
from .gathering import Gathering
from .inputs import Rename, check_apart, read_settings, renamed
from .known_layouts import KnownLayouts
from .messages import Traffic, plan_of
from .moves import moves_of
from .roster import (
    SIDES,
    Roster,
    RosterCollector,
    Settings,
    in_words,
    read_roster,
    what_is_said,
)
from .runs import ReshardWork, start
from .sides import Side, local_tensor, read_side
from .together import Together

Given = tuple[Mapping[str, Tensor] | None, Mapping[str, Tensor] | None]  # source and target

__all__ = ["Given", "Reshard", "default_timeout"]

_MIB = 1 << 20
_FAKING = (
    "FakeTensorMode is active, under which tensors have no data to move. Call it outside, or "
    "compile what is around it."
)
_UNTOUCHED = "Nothing was sent, and the targets are as they were. Build the move again."
_CONDITION = (
    "Each element of the targets has its old value or its new one. Build the move again, after "
    "init_process_group() if ranks have ended, and run it: that sets all of them."
)


class Reshard:
    """Moves tensors from any mesh to any other, as often as wanted.

    All ranks of both sides build it together and call it together. The ranks of the two sides may
    be the same, others, or overlap, in one default process group. Shapes and placements are
    exchanged once, when it is built. A run begins with one write to the store by each rank and one
    all-reduce of a number; then only data is exchanged. The move has a process group of its own, so
    that it never queues behind a model's collectives. A rank receives every element of its targets
    once, and not at all what it has already; among ranks that have the same, senders are on the
    receiver's node if possible, and send equally much.

    Args:
        source: tensors by name, to be read; None on ranks that have no part in this side. DTensors
            with any of `Replicate`, `Shard` and FSDP2's strided placements, on any meshes; plain
            tensors are whole on every rank that gives them.
        target: tensors by name, to be written in place; None on ranks that have no part in it. They
            may be views, such as one third of a fused weight, and of another dtype.
        rename: what sources are called in the target: by name, or a function of the name. Names
            that it lacks stay.
        name: of this move. Needed where ranks have several moves with different other ranks.
        ranks: all ranks that call it. By default those of the meshes that tensors are on and of the
            meshes that these were derived from; where a rank gives plain tensors only, all ranks.
        buffer_bytes: memory for messages on each rank, at most. The same on all ranks.
        topology: which node each rank is on; by default nodes are blocks of `LOCAL_WORLD_SIZE`
            ranks.
        timeout: how long to wait for other ranks, here and in each run; by default that of the
            default process group.

    Raises:
        TypeError: no dict of tensors, or tensors of a kind that cannot be moved.
        ValueError: a `Partial` or unknown placement; names that one side lacks, shapes that differ,
            dtypes that cannot be cast; sources and targets that overlap in memory.
        RuntimeError: a rank did not come in time, or cannot take part: all ranks are told.

    Example:
        >>> move = Reshard(trainer, generator)  # doctest: +SKIP
        >>> move()  # doctest: +SKIP
        >>> print(move.explain())  # doctest: +SKIP
    """

    def __init__(
        self,
        source: Mapping[str, Tensor] | None,
        target: Mapping[str, Tensor] | None,
        *,
        rename: Rename | None = None,
        name: str = "",
        ranks: list[int] | None = None,
        buffer_bytes: int = 64 * _MIB,
        topology: Topology | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        def given() -> Given:
            return source, target

        meeting = Gathering("Reshard", name)
        self._build(meeting, given, timeout, rename, ranks, buffer_bytes, topology)

    @classmethod
    def _met(
        cls, meeting: Gathering, given: Callable[[], Given], timeout: timedelta | None
    ) -> Self:
        """A move whose ranks have begun to meet. If `given` raises, all of them are told."""
        move = cls.__new__(cls)
        move._build(meeting, given, timeout)
        return move

    # --- building -------------------------------------------------------------------------------

    def _build(
        self,
        meeting: Gathering,
        given: Callable[[], Given],
        timeout: timedelta | None,
        rename: Rename | None = None,
        ranks: list[int] | None = None,
        buffer_bytes: int = 64 * _MIB,
        topology: Topology | None = None,
    ) -> None:
        world = meeting.world
        self._meeting, self._world, self._rank = meeting, world, world.rank
        self._timeout = default_timeout(world)
        self._lock = threading.Lock()  # one run at a time
        self._last: ReshardWork | None = None
        self._runs = 0
        self._why_broken = ""
        self._sides: dict[str, Side | None] = {"source": None, "target": None}
        self._settings = Settings(buffer_bytes)
        error: Exception | None = None
        try:
            if timeout is not None:
                check_timeout(timeout)
                self._timeout = timeout
            self._read(*given(), rename)
            self._settings = read_settings(buffer_bytes, topology, ranks, world)
        except Exception as caught:  # noqa: BLE001  (the others must not wait for this rank)
            error = caught
        roster = self._gather(error)
        self.ranks = tuple(roster.ranks)
        self._moves = moves_of(roster, world.size)
        self._tensors = {side: self._held(side) for side in SIDES}
        self._plan_own(roster)
        self._layouts = KnownLayouts(self._named_tensors())
        self._together = Together(
            self._meeting, self.ranks, self._rank, self._device, self._timeout
        )

    def _read(
        self,
        source: Mapping[str, Tensor] | None,
        target: Mapping[str, Tensor] | None,
        rename: Rename | None,
    ) -> None:
        if compat.is_faking():
            raise TypeError(f"Reshard: {_FAKING}")
        self._sides["source"] = read_side(renamed(source, rename), "source")
        self._sides["target"] = read_side(target, "target")
        check_apart(self._sides["source"], self._sides["target"])

    def _gather(self, error: Exception | None) -> Roster:
        why = f"{type(error).__name__}: {error}" if error else ""
        sides = {"source": None, "target": None} if error else self._sides
        settings = Settings(0) if error else self._settings
        said, contents = what_is_said(sides, settings, self._rank, why)
        collector = RosterCollector(self._world.size, settings.ranks, self._timeout)
        met = self._meeting.meet(said, contents, collector, self._timeout)
        if error is not None:
            raise error
        roster = read_roster(met)
        if self._rank not in roster.ranks and any(self._sides.values()):
            raise RuntimeError(
                f"Reshard: {in_words(roster.ranks)} made this move without this rank, which did "
                "not come in time or was not waited for. If ranks have moves with different other "
                "ranks, give each of these a name: Reshard(..., name=...). Or give ranks=."
            )
        return roster

    def _plan_own(self, roster: Roster) -> None:
        settings = roster.settings
        self._plan = plan_of(
            self._moves,
            self._rank,
            self._world.size,
            settings.buffer_bytes,
            settings.node_size,
            settings.nodes,
        )
        self._device = _message_device(roster.device_types, self._sides)
        self._wanted = sum(
            local_tensor(tensor).numel() * move.dtype.itemsize
            for move, tensor in zip(self._moves.moves, self._tensors["target"], strict=True)
            if tensor is not None
        )

    def _held(self, side: str) -> list[Tensor | None]:
        """This rank's tensors, one a move; None where it is none of the move's ranks."""
        has = self._sides[side]
        return [
            None
            if has is None or not self._moves.is_held(getattr(move, side), self._rank)
            else has.tensors[move.name]
            for move in self._moves.moves
        ]

    # --- running --------------------------------------------------------------------------------

    def __call__(self, *, async_op: bool = False) -> ReshardWork | None:
        """Copy what the sources have now into the targets, in place.

        Args:
            async_op: return at once. Sources must not be changed, nor targets used, until the
                handle's `wait()` returns.

        Returns:
            A handle if `async_op`, else None.

        Raises:
            RuntimeError: before anything is sent: a tensor has another layout than when this was
                built, on whichever rank; a rank did not come in time; the last run has not been
                waited for; `close()` was called. Or while data is exchanged: a rank has ended, or
                is too late. Then each element of the targets has its old value or its new one.
        """
        with self._lock:
            if self._last is not None and not self._last.is_completed():
                raise RuntimeError(
                    "Reshard: the last run is still under way. Call wait() on its handle first."
                )
            self._last = None
            if not async_op:
                self._run()
                return None
            self._last = start(self._run, self._device)
            return self._last

    def _run(self) -> None:
        if self._why_broken:
            raise RuntimeError(self._why_broken)
        if self._world.is_over:
            raise RuntimeError(
                "Reshard: the default process group in which this move was built is gone. Build "
                "the move again after init_process_group()."
            )
        self._runs += 1
        changed = f"Reshard: {_FAKING}" if compat.is_faking() else self._layouts.what_changed()
        with self._breaking("did not begin", _UNTOUCHED):
            why_not = self._together.begin(self._runs, changed)
        if why_not:
            raise RuntimeError(why_not)
        sources, targets = (
            [None if tensor is None else local_tensor(tensor) for tensor in self._tensors[side]]
            for side in SIDES
        )
        with self._breaking(f"failed on rank {self._rank} while data was exchanged", _CONDITION):
            Exchange(self._plan, self._together.group, self._device).run(sources, targets)

    @contextlib.contextmanager
    def _breaking(self, what: str, condition: str) -> Iterator[None]:
        """After an error inside, no run can be told from what is left of this one: none begins."""
        try:
            yield
        except BaseException as error:
            behind = self._together.who_is_behind(self._runs)
            for_whom = f", for which {in_words(behind)} did not come" if behind else ""
            said = str(error) or type(error).__name__
            self._why_broken = f"Reshard: run {self._runs} {what}{for_whom}: {said}\n{condition}"
            if isinstance(error, RuntimeError):
                raise RuntimeError(self._why_broken) from error
            raise  # an interrupt stays one

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for side in SIDES:
            for move, tensor in zip(self._moves.moves, self._tensors[side], strict=True):
                if tensor is not None:
                    yield f"{side} {move.name!r}", tensor

    # --- telling --------------------------------------------------------------------------------

    def explain(self) -> Traffic:
        """What this rank sends, receives and keeps in each run. Prints as a table."""
        return Traffic(self._plan, self._rank, self._wanted)

    def close(self) -> None:
        """Free the process group of this move. All its ranks call it; none runs it afterwards."""
        if self._last is not None:
            with contextlib.suppress(RuntimeError):
                self._last.wait()
        self._why_broken = self._why_broken or "Reshard: close() was called. Build it again."
        if not self._world.is_over:
            self._together.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:  # after an error the other ranks may not come here
            self.close()

    def __repr__(self) -> str:
        state = "closed or failed" if self._why_broken else f"{self._runs} runs"
        return f"Reshard({len(self._moves.moves)} tensors, {in_words(self.ranks)}, {state})"


def default_timeout(world: World) -> timedelta:
    """How long a rank waits for others where nothing else is said: as its default group does."""
    group = world.default_group
    return compat.default_timeout(compat.default_backend(group), group)


def _message_device(device_types: set[str], sides: Mapping[str, Side | None]) -> torch.device:
    """Where messages are packed: the one kind of device that all tensors are on, else the CPU."""
    if len(device_types) != 1:
        return torch.device("cpu")
    tensors = [tensor for side in sides.values() if side for tensor in side.tensors.values()]
    return tensors[0].device if tensors else torch.device(next(iter(device_types)))
