"""Collective operations for a training program, with several processes or a single one.

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
    """Set of processes with the collective operations that they call together.

    All processes call each operation, in the same order. **Ranks are ranks within this
    collective**, 0 to `world_size - 1`, also as sources: `collective.local.broadcast(tensor, 0)`
    sends from the first process of each node. Tensors may be non-contiguous, or on another device
    than the backend needs: they are copied to it and back.

    Attributes:
        rank: rank of this process in this collective.
        world_size: number of processes in this collective.
        local_rank: index of this process, and of its device, on its node.
        dp_rank: index of this process's part of the data.
        dp_world_size: number of parts of the data.
        tp_rank: rank of this process in its tensor-parallel group.
        tp_world_size: number of processes in its tensor-parallel group.
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
    # Device to which tensors are copied for an operation; None to use them where they are.
    _communication_device: torch.device | None = None

    @property
    def local(self) -> Collective:
        """Collective of the processes on this process's node."""
        return self

    @property
    def tp_world(self) -> Collective:
        """Collective of the processes in this process's tensor-parallel group."""
        return self

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup | None:
        """Process group of the operations; None for a single process."""

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
            tensor: tensor of shape (n, ...), the same shape on all processes. A scalar counts as
                a tensor of shape (1,).

        Returns:
            A tensor of shape (world_size * n, ...), on the argument's device. Gradients do not
            flow through it.
        """
        own = self._stage(tensor if tensor.ndim else tensor.reshape(1))
        gathered = own.new_empty((self.world_size * own.shape[0], *own.shape[1:]))
        if group := self.process_group:
            dist.all_gather_into_tensor(gathered, own, group=group)
        else:
            gathered.copy_(own)
        return gathered.to(tensor.device)

    def all_gather_to_list(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, which have one shape, as a list by rank."""
        return list(self.all_gather(tensor.unsqueeze(0)).unbind())

    def all_gather_objects(self, item: Any) -> list[Any]:
        """Return the objects of all processes, which are sent by pickle, as a list by rank."""
        items = [item] * self.world_size
        if group := self.process_group:
            dist.all_gather_object(items, item, group=group)
        return items

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Copy one process's tensor into the tensors of all others, in place.

        Args:
            tensor: tensor to send or to overwrite, of the same shape and dtype on all processes.
            src: rank of the sender in this collective.

        Raises:
            ValueError: `src` is not a rank of this collective.
        """
        self._check_source(src)
        if group := self.process_group:
            with self._staged(tensor) as staged:
                dist.broadcast(staged, group=group, group_src=src)

    def broadcast_objects(self, items: list[Any], src: int = 0) -> None:
        """Copy the items of one process's list into the lists of all others, in place.

        Args:
            items: list of objects to send or to overwrite, of the same length on all processes.
            src: as in `broadcast`.
        """
        self._check_source(src)
        if group := self.process_group:
            device = self._communication_device
            dist.broadcast_object_list(items, group=group, device=device, group_src=src)

    def close(self) -> None:  # noqa: B027  (most collectives own no group)
        """Free the process groups that this collective created. A second call does nothing."""

    def _check_source(self, src: int) -> None:
        if not 0 <= src < self.world_size:
            raise ValueError(
                f"Source rank {src} of a collective of {self.world_size} processes: the source "
                f"must be a rank within the collective, 0 to {self.world_size - 1}, not a global "
                "rank."
            )

    def _stage(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if the backend can send it, else a copy that it can send."""
        plain = tensor.detach().resolve_conj().resolve_neg()  # c10d sends memory as it is
        return plain.to(self._communication_device or tensor.device).contiguous()

    @contextlib.contextmanager
    def _staged(self, tensor: Tensor) -> Iterator[Tensor]:
        staged = self._stage(tensor)
        yield staged
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)


class SingleProcessCollective(Collective):
    """Collective of a single process, without a process group.

    Args:
        device: device of its tensors; by default the current GPU, or the CPU if there is no GPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.default_device = torch.device(device or default)

    process_group = None


def destroy_dist_connection() -> None:
    """Destroy all process groups, and ignore Ctrl-C until that is done.

    Afterwards the previous SIGINT handler is restored, even after an error. In other threads than
    the main thread, which cannot set handlers, Ctrl-C is not ignored. Without a default process
    group, nothing is done.
    """
    if not dist.is_initialized():
        return
    with contextlib.ExitStack() as restored:
        if threading.current_thread() is threading.main_thread():
            # None: a handler that was not installed from Python, which Python cannot restore.
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN) or signal.SIG_DFL
            restored.callback(signal.signal, signal.SIGINT, previous)
        dist.destroy_process_group()
