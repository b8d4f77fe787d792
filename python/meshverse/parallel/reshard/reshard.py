"""`Reshard` copies tensors from some meshes to others; `redistribute` does so for one DTensor."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import Self

import meshverse
from meshverse._core import shard_shape
from meshverse._torch_compat.tracing import is_faking
from meshverse.locks import Lock

from .exchange import Exchange
from .plan import ReshardBytes, plan_of, transfers_of
from .ranks import ReshardGroup, in_words
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
    "FakeTensorMode is active, so tensors have no data to transfer. Call Reshard outside this "
    "mode; compile only the code around the call."
)
_UNTOUCHED = "Nothing was sent, and the targets are unchanged."
_TORN = "Each element of the targets has its old value or its new one."
_CURE = "Construct a new Reshard. If a rank has ended, create a new default process group before."


class Reshard:
    """Reusable transfer that copies source tensors on some meshes into target tensors on others.

    Call the object to copy the sources' current values; each call is a *run*. All `ranks` must
    construct it, call it and close it together. The ranks of the two sides may be the same, overlap
    or be disjoint, within one default process group or, with `group`, in several worlds.

    Shapes and placements are exchanged once, at construction. A run begins with an all-reduce of
    one integer; then only data is exchanged. Without `group`, each `Reshard` has its own process
    group, so its operations are not serialized with a model's collectives.

    A rank receives each element of its targets once, except elements that it already has: these are
    copied locally. If several ranks have an element, one on the receiver's node sends it where
    possible. The data to send is divided about equally between such ranks.

    Args:
        source: tensors to read, by name; None on ranks without sources. DTensors may have
            `Replicate`, `Shard` and FSDP2's strided placements, on any meshes. A plain tensor is
            not split: every rank that passes it has all of it.
        target: tensors to write in place, by name; None on ranks without targets. They may be
            views, such as one third of a fused weight, and may have another dtype than the sources.
            On either side, a `Piece` is a part of a tensor. A slice of a DTensor along a sharded
            dimension is a copy: it is refused, but after `detach()` that cannot be known.
        rename: dict or function from a source's name to its name in the target. Names that a dict
            lacks are unchanged.
        name: name of this `Reshard` in messages. If several threads construct one over the same
            ranks at the same time, each must pass a different name.
        ranks: global ranks that call it; by default all ranks of the default group.
        buffer_bytes: upper limit for the staging buffers of a run, per rank. Must be the same on
            all ranks.
        topology: topology with the node of each rank. By default, each `LOCAL_WORLD_SIZE`
            consecutive ranks are a node. Must be the same on all ranks.
        timeout: how long to wait for other ranks, at construction and in each run; by default the
            default process group's timeout. Must be the same on all ranks.
        group: the `Connection` that `meshverse.connect` returned, to copy between worlds. All its
            processes call this, each with tensors on meshes of its own world. Ranks and timeout are
            the connection's. Only one `Reshard` of a connection can run at a time.

    Attributes:
        ranks: global ranks that call it, ascending; with `group`, ranks in the connection.

    Raises:
        TypeError: a side is not a dict of tensors, or a tensor is of a kind that cannot be
            transferred.
        ValueError: this rank is not among `ranks`; a placement is `Partial` or unknown; one side
            lacks a name; shapes disagree; torch cannot cast or copy a dtype; or a target overlaps
            in memory with a source or another target.
        RuntimeError: a rank did not join in time, or another rank raised one of these errors.

    Example:
        >>> reshard = Reshard(trainer, generator)  # doctest: +SKIP
        >>> reshard()  # doctest: +SKIP
        >>> print(reshard.explain())  # doctest: +SKIP
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
        topology: meshverse.Topology | None = None,
        timeout: timedelta | None = None,
        group: meshverse.Connection | None = None,
    ) -> None:
        def read() -> dict[str, Side | None]:
            return read_sides(renamed(source, rename), target, group)

        of_ranks = ReshardGroup("Reshard", name, ranks, timeout, group)
        self._build(of_ranks, read, buffer_bytes, topology)

    @classmethod
    def _over(cls, group: ReshardGroup, read: Callable[[], dict[str, Side | None]]) -> Self:
        """Construct a `Reshard` over an existing group."""
        reshard = cls.__new__(cls)
        reshard._build(group, read)
        return reshard

    def _build(
        self,
        group: ReshardGroup,
        read: Callable[[], dict[str, Side | None]],
        buffer_bytes: int = 64 * _MIB,
        topology: meshverse.Topology | None = None,
    ) -> None:
        self._group, self.ranks = group, group.ranks
        self._process_id = os.getpid()
        # Held by the thread that runs, for as long as the run lasts.
        self._lock, self._is_running = Lock(), False
        self._last: ReshardWork | None = None
        self._runs, self._why_broken = 0, ""
        self._exchange: Exchange | None = None  # None after close()

        def describe_own() -> Description:
            if is_faking():
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
        # If ranks disagree on the size of nodes, nodes are unknown.
        node_size = own.node_size if len(node_sizes) == 1 else 1
        transfers, nodes = transfers_of(described, contents), (node_size, contents[own.nodes])
        ranks = self._group.rank, self._group.world_size
        self._plan = plan_of(transfers, *ranks, own.buffer_bytes, *nodes)
        self._n_tensors = len({transfer.name for transfer in transfers.all})
        # Messages are packed on the device type of all tensors of all ranks; on the CPU, if there
        # are several types.
        types = {each for description in described.values() for each in description.device_types}
        tensors = {name: side.tensors if side else {} for name, side in self._sides.items()}
        devices = [tensor.device for side in tensors.values() for tensor in side.values()]
        self._device = torch.device(types.pop() if len(types) == 1 else "cpu")
        if devices and devices[0].type == self._device.type:
            self._device = devices[0]
        self._exchange = Exchange(self._plan, self._device, tensors)
        self._target_bytes = self._exchange.target_bytes

    def __call__(self, *, async_op: bool = False) -> ReshardWork | None:
        """Copy the sources' current values into the targets, in place. All `ranks` call this.

        Args:
            async_op: whether to run in the background. Until the returned handle's `wait()`
                returns, do not change sources and do not use targets.

        Returns:
            A handle if `async_op` is True, else None.

        Raises:
            RuntimeError: in one of three cases. With `async_op`, the handle's `wait()` raises the
                errors of the run.

                - The last run is still under way, `close()` was called, or this process is a
                  fork. This rank raises at once, without the others.
                - A tensor's layout (shape, dtype, device, placements) on some rank is not that at
                  construction, or tensors overlap in memory now. All ranks raise, and nothing is
                  sent. Restore the tensors to run again.
                - A rank did not call in time, or has ended. Nothing was sent if the message says
                  so; else each element of the targets has its old value or its new one. No later
                  run is possible: construct a new `Reshard`.
        """
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"{self._group.label} cannot run in a fork (process {os.getpid()} of process "
                f"{self._process_id}): process groups do not survive one. Run it in the process "
                "that constructed it."
            )
        with self._lock.held:
            # A signal handler of the thread that runs finds `_is_running`.
            if self._is_running or (self._last is not None and not self._last.is_completed()):
                raise RuntimeError(
                    "Reshard: the last run is still under way. Call wait() on its handle before "
                    "the next run."
                )
            if self._last is not None and (error := self._last.unseen_error()):
                _log.error("The last run failed, and nobody called wait() on its handle: %s", error)
            self._last = None
            if not async_op:
                self._is_running = True
                try:
                    self._run()
                finally:
                    self._is_running = False
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
                f"{self._group.label}: the default process group in which it was constructed was "
                "destroyed. Construct a new Reshard after init_process_group()."
            )
        with self._group.in_use():
            self._run_alone(self._exchange)

    def _run_alone(self, exchange: Exchange) -> None:
        self._runs += 1
        change = _FAKING if is_faking() else exchange.find_change()
        with self._breaking(
            "did not begin, because a rank has ended or did not call it", _UNTOUCHED
        ):
            rank, reason = self._group.find_reason(change, self._device)
        if reason:
            raise RuntimeError(
                f"{self._group.label}: rank {rank} cannot run: {reason} {_UNTOUCHED}"
            )
        with self._breaking("failed while data was exchanged", _TORN):
            exchange.run(self._group.group)

    @contextlib.contextmanager
    def _breaking(self, what: str, state: str) -> Iterator[None]:
        """Make all later runs raise after an error inside: they could receive this run's messages.

        Args:
            what: words of the error about the run.
            state: words of the error about the targets.
        """
        try:
            yield
        except BaseException as error:
            text = str(error) or type(error).__name__
            run = f"{self._group.label}: run {self._runs}"
            self._why_broken = f"{run} {what}: {text}\n{state} {_CURE}"
            if isinstance(error, RuntimeError):
                raise RuntimeError(self._why_broken) from error
            raise  # such as KeyboardInterrupt

    def explain(self) -> ReshardBytes:
        """Return the bytes that this rank sends, receives and copies locally in each run.

        The result prints as a table.
        """
        return ReshardBytes(self._plan, self._group.rank, self._target_bytes)

    def parts_to_revive(self) -> tuple[object, ...]:
        """Return (): it asks its mesh for the process group at each run."""
        return ()

    def close(self) -> None:
        """Free the process group. All `ranks` call this; no run is possible afterwards.

        Waits for an asynchronous run. A connection stays open.
        """
        if self._last is not None:
            with contextlib.suppress(RuntimeError):
                self._last.wait()
        self._why_broken = self._why_broken or "Reshard: close() was called. Construct a new one."
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
    source: Tensors | None, target: Tensors | None, connection: meshverse.Connection | None = None
) -> dict[str, Side | None]:
    """Return both sides on this rank, each read by `read_side`."""
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
            f"{said[1]} on rank {other}. All ranks must pass the same value."
        )


class ReshardWork:
    """Handle of an asynchronous run, which calling a `Reshard` with `async_op=True` returns."""

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        """Start the run in a thread, on its own stream if the device has streams."""
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._is_seen = False  # whether `wait` has reported the end of the run
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
        """Return the error of the run if no `wait` has raised it, else None."""
        return None if self._is_seen else self._error

    def is_completed(self) -> bool:
        """Return whether the run has ended, with or without an error, without waiting."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the targets have the new values; on a GPU, for work on the current stream.

        Args:
            timeout: how long to wait; by default until the run ends or reaches its own timeout.

        Raises:
            TimeoutError: the run is still under way, and continues.
            RuntimeError: the run failed; the message says whether targets have changed.
        """
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(f"The run is still under way after {timeout}, and continues.")
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
    """Return a DTensor with the same values on another mesh, which may have other ranks.

    All `ranks` call this. If `mesh` is the tensor's own mesh and has all `ranks`, it calls
    DTensor's `redistribute`, which compares no arguments between ranks and does not use `timeout`.
    For several tensors, or for repeated transfers, construct a `Reshard`. Otherwise, if the
    arguments of one rank are wrong, that rank raises the error, and the other ranks raise a
    RuntimeError with its message.

    Args:
        dtensor: the tensor; None on ranks that are not in its mesh.
        mesh: mesh of the result.
        placements: `Replicate` or `Shard` for each axis of `mesh`.
        name: as in `Reshard`.
        ranks: global ranks that call this, including all ranks of both meshes; by default all ranks
            of the default group.
        timeout: how long to wait for other ranks; by default the default group's timeout.

    Returns:
        A DTensor on `mesh`. It has no autograd history, unless DTensor's `redistribute` is called.

    Raises:
        RuntimeError: the tensor requires a gradient, and DTensor's `redistribute` is not called; or
            another rank did not join in time, or raised an error.
        TypeError: `dtensor` is not a DTensor, `mesh` is not a DeviceMesh, or a placement is neither
            `Replicate` nor `Shard`.
        ValueError: the number of placements is not the number of axes, or a placement's dimension
            does not exist.
    """
    n_ranks = dist.get_world_size() if ranks is None else len(ranks)
    # Ranks outside the mesh cannot know that it is the tensor's own: then all copy as to another.
    if isinstance(dtensor, DTensor) and dtensor.device_mesh == mesh and mesh.size() == n_ranks:
        _check_placements(mesh, placements)
        return dtensor.redistribute(mesh, placements)
    group = ReshardGroup("redistribute", name, ranks, timeout)

    def describe() -> tuple[torch.Size, torch.dtype] | None:
        _check(dtensor, mesh, placements)
        return None if dtensor is None else (dtensor.shape, dtensor.dtype)

    try:
        found = [each for each in group.gather(describe) if each is not None]
    except BaseException:
        group.close()
        raise
    result: list[DTensor] = []

    def read() -> dict[str, Side | None]:
        if not found:
            raise ValueError(
                "redistribute(None, ...) on all ranks: ranks of the tensor's mesh must pass the "
                "tensor."
            )
        result.append(_empty(mesh, placements, *found[0]))
        source = None if dtensor is None else {"tensor": dtensor.detach()}
        return read_sides(source, {"tensor": result[0]})

    with Reshard._over(group, read) as reshard:
        reshard()
    return result[0]


def _check(dtensor: object, mesh: object, placements: Sequence[Placement]) -> None:
    if dtensor is not None and not isinstance(dtensor, DTensor):
        raise TypeError(
            f"redistribute({type(dtensor).__name__}, ...): give a DTensor, as distribute_tensor() "
            "returns, or None on ranks that are not in its mesh."
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"redistribute to a {type(mesh).__name__}: mesh must be a DeviceMesh.")
    _check_placements(mesh, placements)
    if dtensor is not None and dtensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "redistribute: gradients do not pass between meshes. Give dtensor.detach(), or call it "
            "under torch.no_grad(). To stay on the tensor's own mesh, call dtensor.redistribute()."
        )


def _check_placements(mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"redistribute: {len(placements)} placements for a mesh of {mesh.ndim} axes. Give one "
            "placement per axis."
        )
    for placement in placements:
        if type(placement) not in (Replicate, Shard):
            raise TypeError(f"redistribute to {placement}: give Replicate() or Shard(dim).")


def _empty(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype
) -> DTensor:
    for placement in placements:
        if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
            raise ValueError(
                f"redistribute to {placement}: a tensor of shape {tuple(shape)} has no such "
                "dimension."
            )
    # Counted from 0, because outside the mesh torch counts back from the dims of the local tensor.
    placements = [
        Shard(each.dim % len(shape)) if isinstance(each, Shard) else each for each in placements
    ]
    local_shape: Sequence[int] = (0,)  # on ranks outside the mesh, as in torch's DTensors
    if mesh.get_coordinate() is not None:
        dims = [each.dim if isinstance(each, Shard) else -1 for each in placements]
        at = shard_coordinates(mesh)
        local_shape = shard_shape(shape, dims, [1] * mesh.ndim, False, list(mesh.shape), at)
    local = torch.empty(local_shape, dtype=dtype, device=mesh.device_type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
