"""Collectives over one process group of processes that have meshes.

Example (with a `MeshCollective` on each of 16 processes, 8 a node, in tensor-parallel groups of 4):
    >>> collective.local.world_size, collective.tp_world.world_size  # doctest: +SKIP
    (8, 4)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshverse import DeviceMesh

from .base import Collective

__all__ = ["GroupCollective", "Meshes"]


class Meshes(NamedTuple):
    """Two views of the same processes, in one universe: equal axes share their process group.

    Attributes:
        parallel_mesh: axes (dp_replicate, dp_shard, tp).
        physical_mesh: axes (nodes, local_ranks).
    """

    parallel_mesh: DeviceMesh
    physical_mesh: DeviceMesh


class GroupCollective(Collective):
    """Operations on one process group of processes that have meshes. It owns nothing.

    Args:
        meshes: of all processes.
        ranks: global ranks of the processes to work with.
        rank: of this process in their process group.
        find_group: gives that process group. It is asked for at each use, and not before: it may
            be lazy, and holding it would keep its threads and sockets after it was destroyed.
        local_rank: index of this process on its node.
        default_device: where this process's tensors belong.
    """

    def __init__(
        self,
        meshes: Meshes,
        ranks: list[int],
        rank: int,
        find_group: Callable[[], dist.ProcessGroup],
        *,
        local_rank: int,
        default_device: torch.device,
    ) -> None:
        self.meshes = meshes
        self._ranks = ranks
        self._find_group = find_group
        self.rank, self.world_size = rank, len(ranks)
        self.local_rank = local_rank
        self.default_device = default_device
        parallel = meshes.parallel_mesh
        replicas, shards, self.tp_world_size = parallel.shape
        self.dp_world_size = replicas * shards
        self.tp_rank = parallel.get_local_rank("tp")
        self.dp_rank = parallel.get_local_rank("dp_replicate") * shards
        self.dp_rank += parallel.get_local_rank("dp_shard")
        self._communication_device = torch.device(parallel.device_type)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of the operations; RuntimeError after it was destroyed."""
        return self._find_group()

    @cached_property
    def local(self) -> Collective:
        """The same, limited to this process's node."""
        return self._limited_to(self.meshes.physical_mesh, "local_ranks")

    @cached_property
    def tp_world(self) -> Collective:
        """The same, limited to this process's tensor-parallel group, which is on one node."""
        return self._limited_to(self.meshes.parallel_mesh, "tp")

    def _limited_to(self, mesh: DeviceMesh, axis: str) -> Collective:
        find_group: Callable[[], dist.ProcessGroup] = partial(mesh.get_group, axis)
        ranks, rank = mesh[axis].mesh.tolist(), mesh.get_local_rank(axis)
        if set(self._ranks).issubset(ranks):  # these processes are together already
            ranks, rank, find_group = self._ranks, self.rank, self._find_group
        return GroupCollective(
            self.meshes,
            ranks,
            rank,
            find_group,
            local_rank=self.local_rank,
            default_device=self.default_device,
        )

    def barrier(self) -> None:
        """Wait until all processes are here."""
        on_gpu = self._communication_device.type == "cuda"
        dist.barrier(self.process_group, device_ids=[self.local_rank] if on_gpu else None)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Combine the tensors of all processes, in place; see `Collective.all_reduce`."""
        with self._staged(tensor) as staged:
            dist.all_reduce(staged, op, group=self.process_group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes in one; see `Collective.all_gather`."""
        mine = self._stage(tensor)
        mine = mine.reshape(1) if mine.ndim == 0 else mine
        gathered = mine.new_empty((self.world_size * mine.shape[0], *mine.shape[1:]))
        dist.all_gather_into_tensor(gathered, mine, group=self.process_group)
        return gathered.to(tensor.device)

    def all_gather_to_list(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, in the order of ranks."""
        mine = self._stage(tensor)
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(gathered, mine, group=self.process_group)
        return [each.to(tensor.device) for each in gathered]

    def all_gather_objects(self, item: Any) -> list[Any]:
        """The objects of all processes, pickled, in the order of ranks."""
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self.process_group)
        return items

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite the tensor of all processes with that of rank `src` of this collective."""
        self._check_source(src)
        with self._staged(tensor) as staged:
            dist.broadcast(staged, group=self.process_group, group_src=src)

    def broadcast_objects(self, items: list[Any], src: int = 0) -> None:
        """Overwrite the list of all processes with that of rank `src` of this collective."""
        self._check_source(src)
        dist.broadcast_object_list(
            items, group=self.process_group, device=self._stage_device(), group_src=src
        )

    def close(self) -> None:
        """There is nothing to free: the collective that this is a part of owns its groups."""

    def _stage_device(self) -> torch.device:
        """Where communication takes place."""
        if self._communication_device.type == self.default_device.type:
            return self.default_device
        return self._communication_device

    def _stage(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it can be communicated as it is, else a copy that can."""
        return tensor.detach().to(self._stage_device()).contiguous()

    @contextlib.contextmanager
    def _staged(self, tensor: Tensor) -> Iterator[Tensor]:
        staged = self._stage(tensor)
        yield staged
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)
