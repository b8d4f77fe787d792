"""Operations of a training program over its processes, or over one process alone.

Example:
    >>> alone = SingleProcessCollective()
    >>> alone.all_gather(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    >>> alone.is_master, alone.local is alone
    (True, True)
"""

from __future__ import annotations

import contextlib
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Collective(ABC):
    """Some processes that work together, seen by one of them.

    All of them call each operation, in the same order. **Ranks are ranks within this collective**,
    0 to `world_size - 1`, also those of sources: `collective.local.broadcast(tensor, 0)` sends
    from the first process of each node. Tensors may be on another device than the communication
    and need not be contiguous; they are copied there and back.

    Attributes:
        rank: of this process, in this collective.
        world_size: number of processes in this collective.
        local_rank: index of this process on its node, which is that of its device.
        dp_rank: index of this process's share of the data.
        dp_world_size: number of shares.
        tp_rank: index of this process in its tensor-parallel group.
        tp_world_size: number of processes in it.
        default_device: where this process's tensors belong.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    dp_rank: int = 0
    dp_world_size: int = 1
    tp_rank: int = 0
    tp_world_size: int = 1
    default_device: torch.device
    # Where tensors are while they are communicated; None for wherever they are.
    _communication_device: torch.device | None = None

    @property
    def local(self) -> Collective:
        """The same, limited to this process's node."""
        return self

    @property
    def tp_world(self) -> Collective:
        """The same, limited to this process's tensor-parallel group."""
        return self

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the operations; None for a process alone."""

    @property
    def is_master(self) -> bool:
        """Whether this is the first process of the collective."""
        return self.rank == 0

    @property
    def is_local_master(self) -> bool:
        """Whether this is the collective's first process on its node."""
        return self.local.rank == 0

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if group := self.process_group:
            device = self._communication_device
            on_gpu = device is not None and device.type == "cuda"
            dist.barrier(group, device_ids=[self.local_rank] if on_gpu else None)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Combine the tensors of all processes, of one shape and type, in place.

        NCCL alone offers AVG.
        """
        if group := self.process_group:
            with self._staged(tensor) as staged:
                dist.all_reduce(staged, op, group=group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all processes in one, in the order of ranks.

        Args:
            tensor: shape (n, ...), the same on each process; () is as (1,).

        Returns:
            Shape (world_size * n, ...), on the device of the argument.
        """
        mine = self._stage(tensor if tensor.ndim else tensor.reshape(1))
        gathered = mine.new_empty((self.world_size * mine.shape[0], *mine.shape[1:]))
        if group := self.process_group:
            dist.all_gather_into_tensor(gathered, mine, group=group)
        else:
            gathered.copy_(mine)
        return gathered.to(tensor.device)

    def all_gather_to_list(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, of one shape, in the order of ranks."""
        return list(self.all_gather(tensor.unsqueeze(0)).unbind())

    def all_gather_objects(self, item: Any) -> list[Any]:
        """Return the objects of all processes, pickled, in the order of ranks."""
        items = [item] * self.world_size
        if group := self.process_group:
            dist.all_gather_object(items, item, group=group)
        return items

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite the tensor of all processes, of one shape and type, with one process's.

        Args:
            tensor: which is sent, or overwritten.
            src: rank within this collective of the process that sends; ValueError for no such.
        """
        self._check_source(src)
        if group := self.process_group:
            with self._staged(tensor) as staged:
                dist.broadcast(staged, group=group, group_src=src)

    def broadcast_objects(self, items: list[Any], src: int = 0) -> None:
        """Overwrite the list of all processes, of one length, with one process's objects, pickled.

        Args:
            items: which are sent, or overwritten.
            src: as for `broadcast`.
        """
        self._check_source(src)
        if group := self.process_group:
            device = self._communication_device
            dist.broadcast_object_list(items, group=group, device=device, group_src=src)

    def close(self) -> None:  # noqa: B027  (most collectives own no group)
        """Free what this collective made. Closing again does nothing."""

    def _check_source(self, src: int) -> None:
        if not 0 <= src < self.world_size:
            raise ValueError(
                f"Source rank {src} of a collective of {self.world_size} processes: give a rank "
                f"within the collective, 0 to {self.world_size - 1}, not a global one."
            )

    def _stage(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if it can be communicated as it is, else a copy that can."""
        return tensor.detach().to(self._communication_device or tensor.device).contiguous()

    @contextlib.contextmanager
    def _staged(self, tensor: Tensor) -> Iterator[Tensor]:
        staged = self._stage(tensor)
        yield staged
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)


class SingleProcessCollective(Collective):
    """One process alone: what `MeshCollective` gives, without a process group.

    Args:
        device: where its tensors belong; by default the current GPU, or the CPU without one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.default_device = torch.device(device or default)

    process_group = None


def destroy_dist_connection() -> None:
    """Destroy the default process group and all others, not to be interrupted by Ctrl-C.

    The previous handler of SIGINT is back afterwards, also if it fails. Outside the main thread,
    which alone handles signals, SIGINT is as ever. Without a process group nothing is done.
    """
    if not dist.is_initialized():
        return
    with contextlib.ExitStack() as restored:
        if threading.current_thread() is threading.main_thread():
            # None stands for a handler that Python did not install, and cannot restore.
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN) or signal.SIG_DFL
            restored.callback(signal.signal, signal.SIGINT, previous)
        dist.destroy_process_group()
