"""`Reshard` moves tensors between meshes of any ranks; `redistribute` moves one DTensor."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import Self

from meshverse import Connection, Topology
from meshverse import _torch_compat as compat
from meshverse._core import shard_shape

from .exchange import Exchange
from .plan import Traffic, plan_of, transfers_of
from .ranks import MoveGroup, in_words
from .sides import (
    Description,
    Piece,
    Rename,
    Side,
    describe,
    nodes_of,
    read_side,
    renamed,
    shard_coordinates,
)

Tensors = Mapping[str, Tensor | Piece]

_log = logging.getLogger(__name__)

_MIB = 1 << 20
_FAKING = (
    "FakeTensorMode is active, so tensors have no data to move. Call the move outside this mode; "
    "compile only the code around it."
)
_UNTOUCHED = "Nothing was sent, and the targets are as they were."
_TORN = "Each element of the targets has its old value or its new one."
_CURE = (
    "Build the move again, and run that. If a rank has ended, create a new default process group "
    "first."
)


class Reshard:
    """Moves tensors from any mesh to any other, as often as wanted.

    All `ranks` build it together, call it together and close it together. The two sides may have
    the same ranks, some in common, or none, in one default process group; with `group`, in several
    worlds. Shapes and placements are exchanged once, when the move is built. A run begins with one
    all-reduce of a number; then only data is exchanged. The move has its own process group, so it
    never queues behind a model's collectives. A rank receives each element of its targets once, and
    none that it already has. If several ranks have an element, one on the receiver's node sends it
    where possible, and these senders send about equally much.

    Args:
        source: tensors to read, by name; None on ranks that are not on this side. DTensors may have
            `Replicate`, `Shard` and FSDP2's strided placements, on any meshes. A plain tensor is
            whole on every rank that passes it.
        target: tensors to write in place, by name; None on ranks that are not on this side. They
            may be views, such as one third of a fused weight, and may have another dtype. On either
            side, a `Piece` is a part of a tensor.
        rename: the sources' names in the target: a dict, or a function of the name. Names that the
            dict lacks stay.
        name: name of this move in messages. Threads that build moves of the same ranks at the same
            time must pass a different name for each.
        ranks: global ranks that call it; by default all ranks of the default group.
        buffer_bytes: memory for messages on each rank, at most. The same on all ranks.
        topology: which node each rank is on; by default nodes are blocks of `LOCAL_WORLD_SIZE`
            ranks.
        timeout: how long to wait for other ranks, here and in each run; by default that of the
            default process group. The same on all ranks.
        group: the `Connection` that `meshverse.connect` returned, to move tensors between worlds.
            All its processes call this, each with tensors on meshes of its own world. `ranks`,
            timeout and peers are the connection's. It runs one move at a time.

    Attributes:
        ranks: global ranks that call it, ascending; with `group`, the connection's ranks.

    Raises:
        TypeError: a side is not a dict of tensors, or a tensor is of a kind that cannot be moved.
        ValueError: this rank is not among `ranks`; a placement is `Partial` or unknown; one side
            lacks a name; shapes disagree; a dtype cannot be cast; sources and targets overlap in
            memory.
        RuntimeError: a rank did not join in time, or raised one of these errors: all ranks raise.

    Example:
        >>> move = Reshard(trainer, generator)  # doctest: +SKIP
        >>> move()  # doctest: +SKIP
        >>> print(move.explain())  # doctest: +SKIP
    """

    def __init__(
        self,
        source: Tensors | None,
        target: Tensors | None,
        *,
        rename: Rename | None = None,
        name: str = "",
        ranks: Sequence[int] | None = None,
        buffer_bytes: int = 64 * _MIB,
        topology: Topology | None = None,
        timeout: timedelta | None = None,
        group: Connection | None = None,
    ) -> None:
        def read() -> dict[str, Side | None]:
            return read_sides(renamed(source, rename), target, group)

        of_ranks = MoveGroup("Reshard", name, ranks, timeout, group)
        self._build(of_ranks, read, buffer_bytes, topology)

    @classmethod
    def _over(cls, group: MoveGroup, read: Callable[[], dict[str, Side | None]]) -> Self:
        """Build a move over a group that exists already."""
        move = cls.__new__(cls)
        move._build(group, read)
        return move

    def _build(
        self,
        group: MoveGroup,
        read: Callable[[], dict[str, Side | None]],
        buffer_bytes: int = 64 * _MIB,
        topology: Topology | None = None,
    ) -> None:
        self._group, self.ranks = group, group.ranks
        self._lock = threading.Lock()  # one run at a time
        self._last: ReshardWork | None = None
        self._runs, self._why_broken = 0, ""
        self._exchange: Exchange | None = None  # None once it is closed

        def describe_own() -> Description:
            if compat.is_faking():
                raise TypeError(f"Reshard: {_FAKING}")
            self._sides = read()
            nodes = nodes_of(topology, group.world_size)
            if topology is None and group.connection is not None:
                nodes = group.connection.nodes
            description, self._contents = describe(self._sides, buffer_bytes, nodes)
            return description

        try:
            with group.in_use():
                described = dict(zip(self.ranks, group.gather(describe_own), strict=True))
                digests = [each.digests for each in described.values()]
                contents = group.share(self._contents, digests)
                group.gather(lambda: self._make_plan(described, contents))
        except BaseException:
            group.close()
            raise

    def _make_plan(self, described: Mapping[int, Description], contents: Mapping[str, Any]) -> None:
        own = described[self._group.rank]
        _check_settings(described, contents)
        node_sizes = {each.node_size for each in described.values()}
        node_size = own.node_size if len(node_sizes) == 1 else 1  # nodes of unequal size: unknown
        transfers, nodes = transfers_of(described, contents), (node_size, contents[own.nodes])
        ranks = self._group.rank, self._group.world_size
        self._plan = plan_of(transfers, *ranks, own.buffer_bytes, *nodes)
        self._n_tensors = len({transfer.name for transfer in transfers.all})
        # Messages are packed on the one type of device that all tensors are on, else on the CPU.
        types = {each for description in described.values() for each in description.device_types}
        tensors = {name: side.tensors if side else {} for name, side in self._sides.items()}
        devices = [tensor.device for side in tensors.values() for tensor in side.values()]
        self._device = torch.device(types.pop() if len(types) == 1 else "cpu")
        if devices and devices[0].type == self._device.type:
            self._device = devices[0]
        self._exchange = Exchange(self._plan, self._device, tensors)
        self._wanted_bytes = self._exchange.wanted_bytes

    def __call__(self, *, async_op: bool = False) -> ReshardWork | None:
        """Copy the sources' current values into the targets, in place. All `ranks` call it.

        With `async_op`, return a handle at once: sources must not be changed, nor targets used,
        until its `wait()` returns.

        Raises:
            RuntimeError: before anything is sent: on any rank, a tensor's layout is not the one
                that the move was built for (with the old layout back, the move runs again); the
                last run is still under way; `close()` was called; a rank did not call in time. Or
                while data is exchanged: a rank has ended, or is too late. Then each element of the
                targets has its old value or its new one. After a late or ended rank, the move
                cannot run again.
        """
        with self._lock:
            if self._last is not None and not self._last.is_completed():
                raise RuntimeError(
                    "Reshard: the last run is still under way. Call wait() on its handle first."
                )
            if self._last is not None and (error := self._last.unseen_error()):
                _log.error("The last run failed, and nobody called wait() on its handle: %s", error)
            self._last = None
            if not async_op:
                self._run()
                return None
            self._last = ReshardWork(self._run, self._device)
            return self._last

    def _run(self) -> None:
        if self._why_broken or self._exchange is None:
            raise RuntimeError(self._why_broken)
        if not self._group.is_open():
            if self._group.connection is not None:
                _ = self._group.group  # raises
            raise RuntimeError(
                f"{self._group.label}: the default process group in which this move was built is "
                "gone. Build the move again after init_process_group()."
            )
        with self._group.in_use():
            self._run_alone(self._exchange)

    def _run_alone(self, exchange: Exchange) -> None:
        self._runs += 1
        change = _FAKING if compat.is_faking() else exchange.find_change()
        with self._breaking("did not begin, as a rank has ended or did not call it", _UNTOUCHED):
            rank, reason = self._group.find_reason(change, self._device)
        if reason:
            raise RuntimeError(
                f"{self._group.label}: rank {rank} cannot run: {reason} {_UNTOUCHED}"
            )
        with self._breaking("failed while data was exchanged", _TORN):
            exchange.run(self._group.group)

    @contextlib.contextmanager
    def _breaking(self, what: str, state: str) -> Iterator[None]:
        """Refuse all later runs after an error inside: they would receive leftovers of this one."""
        try:
            yield
        except BaseException as error:
            text = str(error) or type(error).__name__
            run = f"{self._group.label}: run {self._runs}"
            self._why_broken = f"{run} {what}: {text}\n{state} {_CURE}"
            if isinstance(error, RuntimeError):
                raise RuntimeError(self._why_broken) from error
            raise  # an interrupt stays one

    def explain(self) -> Traffic:
        """Return the bytes that this rank sends, receives and keeps in each run, as a table."""
        return Traffic(self._plan, self._group.rank, self._wanted_bytes)

    def close(self) -> None:
        """Free the process group of this move, which cannot run afterwards. All its ranks call it.

        A connection stays open.
        """
        if self._last is not None:
            with contextlib.suppress(RuntimeError):
                self._last.wait()
        self._why_broken = self._why_broken or "Reshard: close() was called. Build the move again."
        self._exchange, self._last, self._sides, self._contents = None, None, {}, {}
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error, other ranks may never call close()
            self.close()

    def __repr__(self) -> str:
        state = "closed or failed" if self._why_broken else f"{self._runs} runs"
        return f"Reshard({self._n_tensors} tensors, {in_words(self.ranks)}, {state})"


def read_sides(
    source: Tensors | None, target: Tensors | None, connection: Connection | None = None
) -> dict[str, Side | None]:
    """Read both sides of this rank, each with `read_side`."""
    given = {"source": source, "target": target}
    rank_of = None if connection is None else connection.rank_of
    return {name: read_side(tensors, name, rank_of) for name, tensors in given.items()}


def _check_settings(described: Mapping[int, Description], contents: Mapping[str, Any]) -> None:
    """Raise RuntimeError unless all ranks passed the same settings."""
    for setting in ("buffer_bytes", "nodes"):
        values = {rank: getattr(each, setting) for rank, each in described.items()}
        first = min(values)
        other = next((rank for rank in values if values[rank] != values[first]), None)
        if other is None:
            continue
        name, said = setting, [values[rank] for rank in (first, other)]
        if setting == "nodes":
            name, found = "topology", [contents[digest] for digest in said]
            said = ["None" if one is None else f"nodes {one!r:.80}" for one in found]
        raise RuntimeError(
            f"Reshard: ranks {first} and {other} pass different {name}: {said[0]} on rank {first}, "
            f"{said[1]} on rank {other}. All ranks must pass the same."
        )


class ReshardWork:
    """Handle of a run: calling a `Reshard` with `async_op=True` returns it."""

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        """Start the run in a thread, on its own stream if the device has streams."""
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._is_seen = False  # by a call of `wait`
        self._begun = self._ready = None if device.type == "cpu" else torch.Event(device=device)
        if self._begun is not None:
            self._begun.record()
        thread = threading.Thread(
            target=self._body, args=(run, device), name="meshverse reshard", daemon=True
        )
        thread.start()

    def _body(self, run: Callable[[], None], device: torch.device) -> None:
        try:
            if self._begun is None:
                run()
                return
            with torch.Stream(device=device):
                self._begun.wait()
                run()
                self._ready = torch.Event(device=device)
                self._ready.record()
        except BaseException as error:  # noqa: BLE001  (`wait` raises it)
            self._error = error
        finally:
            self._done.set()

    def unseen_error(self) -> BaseException | None:
        """Return the error of a run that nobody has waited for, or None."""
        return None if self._is_seen else self._error

    def is_completed(self) -> bool:
        """Whether the run has ended, with or without an error. Does not wait."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the targets have the new values.

        Args:
            timeout: how long to wait; by default until the run ends, which has its own timeout.

        Raises:
            TimeoutError: the run is still under way, and goes on.
            RuntimeError: the run failed; the message says which values the targets have.
        """
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(f"The run is still under way after {timeout}. It goes on.")
        self._is_seen = True
        if self._error is not None:
            raise self._error
        if self._ready is not None:
            self._ready.wait()


def redistribute(
    dtensor: DTensor | None,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    name: str = "",
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> DTensor:
    """Return a DTensor with the same values on another mesh, of any ranks.

    All `ranks` call it. On the tensor's own mesh it calls DTensor's `redistribute`. To move several
    tensors, or to move them repeatedly, build a `Reshard`. If one rank's arguments are wrong, that
    rank raises the error, and the other ranks raise a RuntimeError with its text.

    Args:
        dtensor: the tensor; None on ranks that are not in its mesh.
        mesh: the mesh of the result.
        placements: for each axis of the mesh, `Replicate` or `Shard`.
        name: as in `Reshard`.
        ranks: global ranks that call it, those of both meshes among them; by default all ranks of
            the default group.
        timeout: how long to wait for other ranks.

    Returns:
        A DTensor, without autograd history unless it stays on its mesh.

    Raises:
        RuntimeError: the tensor requires a gradient, which does not pass between meshes; other
            ranks did not join in time, or raised an error.
        TypeError: `dtensor` is no DTensor, `mesh` no DeviceMesh, or a placement neither `Replicate`
            nor `Shard`.
        ValueError: the number of placements is not the number of axes, or a dimension does not
            exist.
    """
    if isinstance(dtensor, DTensor) and dtensor.device_mesh == mesh:
        return dtensor.redistribute(mesh, placements)
    group = MoveGroup("redistribute", name, ranks, timeout)

    def describe() -> tuple[torch.Size, torch.dtype] | None:
        _check(dtensor, mesh, placements)
        return None if dtensor is None else (dtensor.shape, dtensor.dtype)

    try:
        found = [each for each in group.gather(describe) if each is not None]
    except BaseException:
        group.close()
        raise
    made: list[DTensor] = []

    def read() -> dict[str, Side | None]:
        if not found:
            raise ValueError(
                "redistribute(None, ...) on all ranks: the ranks of the tensor's mesh must pass it."
            )
        made.append(_empty(mesh, placements, *found[0]))
        source = None if dtensor is None else {"tensor": dtensor.detach()}
        return read_sides(source, {"tensor": made[0]})

    with Reshard._over(group, read) as move:
        move()
    return made[0]


def _check(dtensor: object, mesh: object, placements: Sequence[Placement]) -> None:
    if dtensor is not None and not isinstance(dtensor, DTensor):
        raise TypeError(
            f"redistribute({type(dtensor).__name__}, ...): give a DTensor, as distribute_tensor() "
            "returns, or None on ranks that are not in its mesh."
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"redistribute to a {type(mesh).__name__}: give a meshverse.DeviceMesh.")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"redistribute: {len(placements)} placements for a mesh of {mesh.ndim} axes. Give one "
            "for each."
        )
    for placement in placements:
        if type(placement) not in (Replicate, Shard):
            raise TypeError(f"redistribute to {placement}: give Replicate() or Shard(dim).")
    if dtensor is not None and dtensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "redistribute to another mesh: gradients do not pass between meshes. Give "
            "dtensor.detach(), or call it under torch.no_grad()."
        )


def _empty(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype
) -> DTensor:
    for placement in placements:
        if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
            raise ValueError(
                f"redistribute to {placement}: a tensor of shape {tuple(shape)} has no such "
                "dimension."
            )
    local_shape: Sequence[int] = (0,)  # of torch's DTensors too, on ranks outside the mesh
    if mesh.get_coordinate() is not None:
        dims = [each.dim % len(shape) if isinstance(each, Shard) else -1 for each in placements]
        at = shard_coordinates(mesh)
        local_shape = shard_shape(shape, dims, [1] * mesh.ndim, False, list(mesh.shape), at)
    local = torch.empty(local_shape, dtype=dtype, device=mesh.device_type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
