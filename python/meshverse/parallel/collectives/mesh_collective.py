"""Collectives over a mesh: the world, its nodes and its tensor-parallel groups in one universe.

Example:
    >>> collective = build_collective(CollectiveConfig(device_type="cpu"))  # without torchrun
    >>> collective.rank, collective.world_size, collective.default_device
    (0, 1, device(type='cpu'))
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from meshverse import DeviceMesh, init_device_mesh

from .collective import Collective, SingleProcessCollective, destroy_dist_connection

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Meshes(NamedTuple):
    """Two views of the same processes, in one universe: equal axes share their process group."""

    parallel_mesh: DeviceMesh  # axes (dp_replicate, dp_shard, tp)
    physical_mesh: DeviceMesh  # axes (nodes, local_ranks)


class MeshCollective(Collective):
    """All processes of a world, or of a process group in it, with meshes for what they train.

    Starts the default process group if there is none: NCCL on GPUs, bound to this process's
    device, else gloo.

    Args:
        rank: of this process among them.
        world_size: their number.
        local_world_size: number of processes on each node; ranks of a node follow each other.
        local_rank: index of this process on its node, which is that of its device.
        device_type: "cpu", "cuda", or another, such as "mps", whose tensors communicate by way of
            the CPU.
        mesh: existing meshes to use; by default they are made.
        process_group: of these processes; by default the whole world's. With `mesh`, a process
            group along some of its axes limits the operations to it.
        tp_size: number of processes in a tensor-parallel group, which lies within a node. With
            `mesh`, this and the next may be left out.
        sharding_world_size: number of shards; other processes hold replicas. By default as many
            as a node has tensor-parallel groups.

    Raises:
        ValueError: sizes that do not divide each other or are not those of the meshes given; or
            ranks and sizes that are not the process group's. Nothing has been created then.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        local_world_size: int,
        local_rank: int,
        device_type: str,
        mesh: Meshes | None = None,
        process_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sharding_world_size: int | None = None,
    ) -> None:
        if mesh is None:
            shape = _parallel_shape(world_size, local_world_size, tp_size, sharding_world_size)
        else:
            shape = mesh.parallel_mesh.shape
            if tp_size not in (1, shape[2]) or sharding_world_size not in (None, shape[1]):
                raise ValueError(
                    f"tp_size={tp_size} and sharding_world_size={sharding_world_size}, but the "
                    f"mesh given has tp={shape[2]} and dp_shard={shape[1]}. Leave the sizes out."
                )
        if process_group is None and local_rank != rank % local_world_size:
            raise ValueError(
                f"local_rank={local_rank} of rank {rank} with local_world_size={local_world_size}: "
                f"expected {rank % local_world_size}, since the ranks of a node follow each other. "
                "Start the processes node by node, as torchrun does."
            )
        with contextlib.ExitStack() as made:
            if not dist.is_initialized():
                _start_world(rank, world_size, local_rank, device_type)
                made.callback(destroy_dist_connection)
            group = process_group or _default_group()
            _check_place(rank, world_size, group)
            self._ranks: Sequence[int] = dist.get_process_group_ranks(group)
            if mesh is None:
                mesh = _make_meshes(device_type, shape, local_world_size, self._ranks)
                made.callback(mesh.parallel_mesh.universe.destroy)
            self._made = made.pop_all()
        # Asked for at each use: it may be lazy, and holding it would keep its threads and sockets
        # after it was destroyed.
        self._find_group: Callable[[], dist.ProcessGroup] = (
            _default_group if process_group is None else lambda: process_group
        )
        self.meshes, parallel = mesh, mesh.parallel_mesh
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        replicas, shards, self.tp_world_size = shape
        self.dp_world_size = replicas * shards
        replica, shard, self.tp_rank = map(parallel.get_local_rank, range(3))
        self.dp_rank = replica * shards + shard
        name = f"cuda:{local_rank}" if device_type == "cuda" else device_type
        self.default_device = self._communication_device = torch.device(name)
        if parallel.device_type != device_type:
            self._communication_device = torch.device(parallel.device_type)
            warnings.warn(
                f"Tensors on {device_type!r} communicate by way of {parallel.device_type!r}, "
                "copied there and back.",
                stacklevel=2,
            )

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

    def _limited_to(self, mesh: DeviceMesh, axis: str) -> MeshCollective:
        """Return a collective along an axis, which owns nothing."""
        limited = copy.copy(self)
        for name in ("local", "tp_world"):  # those of the whole
            vars(limited).pop(name, None)
        limited._made = contextlib.ExitStack()
        ranks: list[int] = mesh[axis].mesh.tolist()
        if not set(self._ranks).issubset(ranks):  # else these processes are together already
            limited.rank, limited.world_size = mesh.get_local_rank(axis), len(ranks)
            limited._ranks, limited._find_group = ranks, partial(mesh.get_group, axis)
        return limited

    def close(self) -> None:
        """Free what this collective made: its meshes' process groups; the world, if it started it.

        All processes call this when all are done: with gloo, have a `barrier()` before.
        """
        self._made.close()


def _parallel_shape(
    world_size: int, local_world_size: int, tp_size: int, sharding_world_size: int | None
) -> tuple[int, ...]:
    """Return the sizes of the axes (dp_replicate, dp_shard, tp)."""
    sizes = {"world_size": world_size, "local_world_size": local_world_size, "tp_size": tp_size}
    if sharding_world_size is not None:
        sizes["sharding_world_size"] = sharding_world_size
    wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
    if wrong:
        raise ValueError(f"Numbers of processes {wrong}: give ints above 0.")
    shards = sizes.setdefault("sharding_world_size", local_world_size // tp_size)
    rows = sizes["world_size / tp_size"] = world_size // tp_size
    for part, whole, rule in (
        ("local_world_size", "world_size", "every node has as many processes"),
        ("tp_size", "local_world_size", "a tensor-parallel group is on one node"),
        ("sharding_world_size", "world_size / tp_size", "replicas are alike"),
    ):
        if sizes[whole] % sizes[part]:
            raise ValueError(
                f"{part}={sizes[part]} does not divide {whole}={sizes[whole]}: {rule}. "
                f"All sizes: {', '.join(f'{name}={size}' for name, size in sizes.items())}."
            )
    return rows // shards, shards, tp_size


def _check_place(rank: int, world_size: int, group: dist.ProcessGroup) -> None:
    is_member = isinstance(group, dist.ProcessGroup)
    if not is_member or (group.rank(), group.size()) != (rank, world_size):
        own = f"rank {group.rank()} of {group.size()}" if is_member else "no member"
        raise ValueError(
            f"rank={rank} of world_size={world_size}, but in the process group this process is "
            f"{own}. Members alone make a collective, each with its rank and the size there."
        )


def _start_world(rank: int, world_size: int, local_rank: int, device_type: str) -> None:
    if device_type != "cuda":
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        return
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=device)


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "The world of this collective was destroyed, by its close() or by "
            "destroy_process_group(). Make the collective again."
        )
    return cast("dist.ProcessGroup", dist.group.WORLD)


def _make_meshes(
    device_type: str, shape: tuple[int, ...], local_world_size: int, ranks: Sequence[int]
) -> Meshes:
    kind = "cuda" if device_type == "cuda" else "cpu"
    axes = ("dp_replicate", "dp_shard", "tp")
    parallel_mesh = init_device_mesh(kind, shape, mesh_dim_names=axes, ranks=ranks)
    physical_mesh = init_device_mesh(
        kind,
        (len(ranks) // local_world_size, local_world_size),
        mesh_dim_names=("nodes", "local_ranks"),
        universe=parallel_mesh.universe,
    )
    return Meshes(parallel_mesh, physical_mesh)


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """Settings of the collective that `build_collective` builds, as for `MeshCollective`.

    Without a `device_type` it is on the GPU, or on the CPU without one.
    """

    device_type: str | None = None
    tp_size: int = 1
    sharding_world_size: int | None = None


def build_collective(config: CollectiveConfig) -> Collective:
    """Build the collective of the processes that torchrun started, or of this one if it did not.

    Raises:
        ValueError: only some of torchrun's environment variables are set; or the sizes do not fit
            the number of processes.
    """
    tp_size, shards = config.tp_size, config.sharding_world_size
    device_type = config.device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    missing = [name for name in _VARIABLES if name not in os.environ]
    if len(missing) == len(_VARIABLES):
        if tp_size != 1 or shards not in (None, 1):
            raise ValueError(
                f"tp_size={tp_size} and sharding_world_size={shards} for one process: start more "
                "of them with torchrun, or set both to 1."
            )
        return SingleProcessCollective(device_type)
    if missing:
        raise ValueError(
            f"The environment has not all of torchrun's {', '.join(_VARIABLES)}: {missing} are "
            "missing. Start the processes with torchrun, or unset the others for one process."
        )
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in _VARIABLES)
    return MeshCollective(
        rank,
        world_size,
        local_world_size=local_world_size,
        local_rank=local_rank,
        device_type=device_type,
        tp_size=tp_size,
        sharding_world_size=shards,
    )
