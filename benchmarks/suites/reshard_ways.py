"""Ways of copying weights: Meshverse's, and two that need nothing but torch. And what they cost."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness import OURS, STOCK
from meshverse.parallel import Reshard
from suites.reshard_models import Job, own_part

__all__ = [
    "BUFFER_BYTES",
    "ONE_RANK",
    "WAYS",
    "Counted",
    "Ours",
    "Way",
    "memory_peak",
    "steady_memory",
]

ONE_RANK = "through one rank"
"""The side that collects every tensor on one rank and hands it out from there."""


class Way(Protocol):
    """Built by all ranks together, called by all of them, closed by all of them."""

    def __call__(self) -> None:
        """Copy the weights once."""

    def close(self) -> None:
        """Free its process groups."""


BUFFER_BYTES = 16 << 20
"""Memory that Meshverse may use for messages on each rank."""


class Ours:
    """Meshverse's.

    Attributes:
        reshard: the `Reshard`.
    """

    def __init__(self, job: Job) -> None:
        self.reshard = Reshard(job.source, job.target, buffer_bytes=BUFFER_BYTES)

    def __call__(self) -> None:
        self.reshard()

    def close(self) -> None:
        self.reshard.close()


class _FullTensors:
    """`full_tensor()` on all trainers; the first broadcasts to generators that are no trainers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        case = job.case
        self._first = case.trainers[0]
        others = [rank for rank in case.generators if rank not in case.trainers]
        self._members = [self._first, *others] if others else []
        self._group: Any = dist.new_group(self._members) if others else None

    def __call__(self) -> None:
        job = self._job
        for name, shape in job.shapes.items():
            if job.source is not None:
                parameter = job.source[name]
                assert isinstance(parameter, DTensor)
                whole = parameter.full_tensor()
            elif job.target is not None:
                whole = torch.empty(shape)
            else:
                continue
            if job.rank in self._members:
                dist.broadcast(whole, src=self._first, group=self._group)
            if job.target is not None:
                job.target[name].to_local().copy_(job.own_part(whole, name, job.rank))

    def close(self) -> None:
        if self._job.rank in self._members:
            dist.destroy_process_group(self._group)


class _OneRank:
    """The trainers' first rank gathers all shards and scatters those that generators want."""

    def __init__(self, job: Job) -> None:
        self._job = job
        case = job.case
        self._first = case.trainers[0]
        self._outer = sorted({self._first, *case.generators})
        self._gathering: Any = dist.new_group(list(case.trainers))
        self._scattering: Any = dist.new_group(self._outer)

    def __call__(self) -> None:
        for name in self._job.shapes:
            whole = self._gathered(name)
            self._scatter(name, whole)

    def _gathered(self, name: str) -> Tensor | None:
        """Return the whole tensor, on the first rank."""
        job = self._job
        if job.source is None:
            return None
        parameter = job.source[name]
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        is_first = job.rank == self._first
        parts = [torch.empty_like(local) for _ in job.case.trainers] if is_first else None
        dist.gather(local, parts, dst=self._first, group=self._gathering)
        if parts is None:
            return None
        whole = torch.empty(job.shapes[name])
        mesh = parameter.device_mesh
        axes = job.trainer.mesh_dim_names
        for index, part in enumerate(parts):
            # By name: what TP does not split is on dp only, or on one axis of all trainers.
            by_name = dict(zip(axes, divmod(index, job.trainer.size(1)), strict=True))
            coordinate = [by_name.get(name, index) for name in mesh.mesh_dim_names or ()]
            where = own_part(whole, tuple(mesh.shape), parameter.placements, coordinate)
            where.copy_(part)
        return whole

    def _scatter(self, name: str, whole: Tensor | None) -> None:
        job = self._job
        if job.rank not in self._outer:
            return
        if whole is None:
            assert job.target is not None
            dist.scatter(job.target[name].to_local(), src=self._first, group=self._scattering)
            return
        parts = [
            job.own_part(whole, name, rank).contiguous()
            for rank in self._outer
            if rank in job.case.generators
        ]
        if job.target is None:
            parts.insert(0, torch.empty_like(parts[0]))
        own = parts[0] if job.target is None else job.target[name].to_local()
        dist.scatter(own, parts, src=self._first, group=self._scattering)

    def close(self) -> None:
        for group in (self._gathering, self._scattering):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


WAYS: dict[str, Callable[[Job], Way]] = {STOCK: _FullTensors, OURS: Ours, ONE_RANK: _OneRank}
"""By side."""


class Counted(TorchDispatchMode):
    """Counts bytes where they come to c10d, while it is entered.

    Attributes:
        received: bytes that this rank receives, at the least that the collective allows.
        given: bytes that it gives to others: a broadcast's once, since others can pass them on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received = self.given = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, name = func._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional"):
            received, given = _counted(name, args)
            self.received += received
            self.given += given
        return func(*args, **(kwargs or {}))


# They send nothing; the all-reduce is of one number, by which the ranks of a run agree.
_FREE = ("wait_tensor", "_wrap_tensor_autograd", "allreduce_")


def _counted(name: str, args: Any) -> tuple[int, int]:
    """Bytes received and given by one operation."""
    if name == "recv_":
        return _n_bytes(args[0]), 0
    if name == "send":
        return 0, _n_bytes(args[0])
    if name == "all_gather_into_tensor":
        n_bytes = args[0].nbytes
        return (args[1] - 1) * n_bytes, (args[1] - 1) * n_bytes
    if name == "broadcast_":
        is_root = dist.ProcessGroup.unbox(args[1]).rank() == args[2]
        return (0, _n_bytes(args[0])) if is_root else (_n_bytes(args[0]), 0)
    if name == "gather_":  # outputs, inputs, group, root
        others = dist.ProcessGroup.unbox(args[2]).size() - 1
        n_bytes = _n_bytes(args[1])
        is_root = dist.ProcessGroup.unbox(args[2]).rank() == args[3]
        return (others * n_bytes, 0) if is_root else (0, n_bytes)
    if name == "scatter_":  # outputs, inputs, group, root
        others = dist.ProcessGroup.unbox(args[2]).size() - 1
        n_bytes = _n_bytes(args[0])
        is_root = dist.ProcessGroup.unbox(args[2]).rank() == args[3]
        return (0, others * n_bytes) if is_root else (n_bytes, 0)
    assert name in ("wait_tensor", "_wrap_tensor_autograd", "allreduce_"), (
        f"the bytes of {name} are not counted"
    )
    return 0, 0  # an all-reduce is of one number, by which the ranks of a run agree


def _n_bytes(tensors: Any) -> int:
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
_LARGE = 65_536


def steady_memory() -> None:
    """Have the C library give large blocks back at once when they are freed, as at the start."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


def memory_peak(call: Callable[[], None]) -> int:
    """Measure the largest growth of this process's resident memory during a call, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = _status("VmRSS:")
    call()
    return max(0, 1024 * (_status("VmHWM:") - before))


def _status(key: str) -> int:
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index(key) + 1])
