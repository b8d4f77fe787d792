"""Collective operations for a training program, on several processes or on one alone.

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
    """A set of processes with the collective operations that they call together.

    All of them call each operation, in the same order. **Ranks are ranks within this collective**,
    0 to `world_size - 1`, also as sources: `collective.local.broadcast(tensor, 0)` sends from the
    first process of each node. Tensors need not be contiguous, nor on the device on which the
    backend communicates: they are copied there and back.

    Attributes:
        rank: rank of this process in this collective.
        world_size: number of processes in this collective.
        local_rank: index of this process, and of its device, on its node.
        dp_rank: index of this process's share of the data.
        dp_world_size: number of shares.
        tp_rank: index of this process in its tensor-parallel group.
        tp_world_size: number of processes in that group.
        default_device: device for this process's tensors.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    dp_rank: int = 0
    dp_world_size: int = 1
    tp_rank: int = 0
    tp_world_size: int = 1
    default_device: torch.device
    # Device on which tensors are communicated; None for the device that they are on.
    _communication_device: torch.device | None = None

    @property
    def local(self) -> Collective:
        """This collective limited to the process's node."""
        return self

    @property
    def tp_world(self) -> Collective:
        """This collective limited to the process's tensor-parallel group."""
        return self

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the operations; None for a single process."""

    @property
    def is_master(self) -> bool:
        """Whether this is the first process of the collective."""
        return self.rank == 0

    @property
    def is_local_master(self) -> bool:
        """Whether this is the collective's first process on its node."""
        return self.local.rank == 0

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if group := self.process_group:
            device = self._communication_device
            on_gpu = device is not None and device.type == "cuda"
            dist.barrier(group, device_ids=[self.local_rank] if on_gpu else None)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce tensors of one shape and dtype over all processes, in place.

        Only NCCL supports AVG.
        """
        if group := self.process_group:
            with self._staged(tensor) as staged:
                dist.all_reduce(staged, op, group=group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all processes, concatenated in the order of ranks.

        Args:
            tensor: shape (n, ...), the same on each process; () counts as (1,).

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
        """Return the list of all processes' tensors, of one shape, in the order of ranks."""
        return list(self.all_gather(tensor.unsqueeze(0)).unbind())

    def all_gather_objects(self, item: Any) -> list[Any]:
        """Return the list of all processes' objects, sent by pickle, in the order of ranks."""
        items = [item] * self.world_size
        if group := self.process_group:
            dist.all_gather_object(items, item, group=group)
        return items

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite the tensors of all processes, of one shape and dtype, with one process's.

        Args:
            tensor: the tensor to send, or to overwrite.
            src: rank of the sender in this collective; ValueError if there is no such rank.
        """
        self._check_source(src)
        if group := self.process_group:
            with self._staged(tensor) as staged:
                dist.broadcast(staged, group=group, group_src=src)

    def broadcast_objects(self, items: list[Any], src: int = 0) -> None:
        """Overwrite the items of all processes' lists, of one length, with one process's.

        Args:
            items: the list of objects to send, or to overwrite.
            src: as in `broadcast`.
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
                f"Source rank {src} of a collective of {self.world_size} processes: it must be a "
                f"rank within the collective, 0 to {self.world_size - 1}, not a global rank."
            )

    def _stage(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if the backend can send it, else a copy that it can send."""
        return tensor.detach().to(self._communication_device or tensor.device).contiguous()

    @contextlib.contextmanager
    def _staged(self, tensor: Tensor) -> Iterator[Tensor]:
        staged = self._stage(tensor)
        yield staged
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)


class SingleProcessCollective(Collective):
    """Collective of a single process, without a process group.

    Args:
        device: device for its tensors; by default the current GPU, or the CPU if there is none.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.default_device = torch.device(device or default)

    process_group = None


def destroy_dist_connection() -> None:
    """Destroy the default process group and all others, ignoring Ctrl-C meanwhile.

    The previous SIGINT handler is restored afterwards, also after an error. Outside the main
    thread, which alone can set handlers, Ctrl-C is not ignored. Without a process group, nothing is
    done.
    """
    if not dist.is_initialized():
        return
    with contextlib.ExitStack() as restored:
        if threading.current_thread() is threading.main_thread():
            # None: a handler that was not installed from Python, which Python cannot restore.
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN) or signal.SIG_DFL
            restored.callback(signal.signal, signal.SIGINT, previous)
        dist.destroy_process_group()
