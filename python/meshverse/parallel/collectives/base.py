"""What a training program asks of its other processes, and the answer of a process alone.

Example:
    >>> alone = SingleProcessCollective()
    >>> alone.all_gather(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    >>> alone.is_master, alone.local is alone
    (True, True)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Collective", "SingleProcessCollective"]


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

    rank: int
    world_size: int
    local_rank: int
    dp_rank: int
    dp_world_size: int
    tp_rank: int
    tp_world_size: int
    default_device: torch.device

    @property
    def is_master(self) -> bool:
        """Whether this is the first process of the collective."""
        return self.rank == 0

    @property
    def is_local_master(self) -> bool:
        """Whether this is the collective's first process on its node."""
        return self.local.rank == 0

    @property
    @abstractmethod
    def local(self) -> Collective:
        """The same, limited to this process's node."""

    @property
    @abstractmethod
    def tp_world(self) -> Collective:
        """The same, limited to this process's tensor-parallel group."""

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the operations; None for a process alone."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all processes are here."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Combine the tensors of all processes, in place.

        Args:
            tensor: the same shape and type on each process.
            op: how to combine; AVG is offered by NCCL only.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes in one.

        Args:
            tensor: shape (n, ...) or (), the same on each process.

        Returns:
            Shape (world_size * n, ...) or (world_size,), in the order of ranks; on the device of
            the argument.
        """

    @abstractmethod
    def all_gather_to_list(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, in the order of ranks.

        Args:
            tensor: the same shape and type on each process.
        """

    @abstractmethod
    def all_gather_objects(self, item: Any) -> list[Any]:
        """The objects of all processes, pickled, in the order of ranks."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite the tensor of all processes with one process's.

        Args:
            tensor: the same shape and type on each process.
            src: rank within this collective of the process that sends.

        Raises:
            ValueError: no such rank.
        """

    @abstractmethod
    def broadcast_objects(self, items: list[Any], src: int = 0) -> None:
        """Overwrite the list of all processes with one process's objects, pickled.

        Args:
            items: a list of the same length on each process.
            src: rank within this collective of the process that sends.

        Raises:
            ValueError: no such rank.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what this collective made. Closing again does nothing."""

    def _check_source(self, src: int) -> None:
        if not 0 <= src < self.world_size:
            raise ValueError(
                f"Source rank {src} of a collective of {self.world_size} processes: ranks are "
                f"within the collective, 0 to {self.world_size - 1}. (A global rank is no rank of "
                "`local` or `tp_world`.)"
            )


class SingleProcessCollective(Collective):
    """One process alone: what `MeshCollective` gives, without a process group.

    Args:
        device: where its tensors belong; by default the current GPU, or the CPU without one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.rank = self.local_rank = self.dp_rank = self.tp_rank = 0
        self.world_size = self.dp_world_size = self.tp_world_size = 1
        self.default_device = torch.device(
            device or ("cuda" if torch.cuda.is_available() else "cpu")
        )

    @property
    def local(self) -> Collective:
        """This collective itself."""
        return self

    @property
    def tp_world(self) -> Collective:
        """This collective itself."""
        return self

    @property
    def process_group(self) -> None:
        """None: there is no group."""
        return

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """There is nothing to combine it with."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor, with at least one dimension."""
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return copy.reshape(1) if copy.ndim == 0 else copy

    def all_gather_to_list(self, tensor: Tensor) -> list[Tensor]:
        """A list of a copy of the tensor."""
        return [tensor.detach().clone(memory_format=torch.contiguous_format)]

    def all_gather_objects(self, item: Any) -> list[Any]:
        """A list of the object."""
        return [item]

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Leave the tensor as it is; `src` must be 0."""
        self._check_source(src)

    def broadcast_objects(self, items: list[Any], src: int = 0) -> None:
        """Leave the list as it is; `src` must be 0."""
        self._check_source(src)

    def close(self) -> None:
        """There is nothing to free."""
