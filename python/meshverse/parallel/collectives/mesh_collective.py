"""Collectives over the world, its nodes and its tensor-parallel groups, in one universe.

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
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from meshverse import DeviceMesh, init_device_mesh

from .collective import Collective, SingleProcessCollective, destroy_dist_connection

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Meshes(NamedTuple):
    """Two meshes over the same processes, in one universe: equal axes share a process group."""

    parallel_mesh: DeviceMesh  # axes (dp_replicate, dp_shard, tp)
    physical_mesh: DeviceMesh  # axes (nodes, local_ranks)


class MeshCollective(Collective):
    """Collective of all processes of the default group or of another one, with training meshes.

    Creates the default process group if there is none: with NCCL on GPUs, bound to this process's
    device; with gloo otherwise.

    Args:
        rank: rank of this process in the collective.
        world_size: number of processes in the collective.
        local_world_size: number of processes on each node; a node's ranks are consecutive.
        local_rank: index of this process, and of its device, on its node.
        device_type: "cpu", "cuda", or another, such as "mps", whose tensors are sent via the CPU;
            without an index, which `local_rank` is.
        mesh: existing meshes to use; by default new ones are created.
        process_group: process group of the operations; by default the default group. With `mesh`,
            it may be a group along some axes of the mesh.
        tp_size: number of processes in a tensor-parallel group, which is within a node; by default
            that of `mesh`, or 1.
        sharding_world_size: number of shards of each replica. By default that of `mesh`, or the
            number of tensor-parallel groups on a node.

    Raises:
        ValueError: sizes are not divisible as required or disagree with `mesh`, or rank and size
            are not those of the process group. No process group is left behind then.
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
        tp_size: int | None = None,
        sharding_world_size: int | None = None,
    ) -> None:
        if torch.device(device_type).index is not None:
            raise ValueError(
                f"device_type={device_type!r} must be without an index: this process's device is "
                f"that of local_rank={local_rank}. Give {torch.device(device_type).type!r}."
            )
        if mesh is None:
            tp_size = 1 if tp_size is None else tp_size
            shape = _parallel_shape(world_size, local_world_size, tp_size, sharding_world_size)
        else:
            shape = mesh.parallel_mesh.shape
            if process_group is None and world_size != mesh.parallel_mesh.size():
                raise ValueError(
                    f"world_size={world_size}, but mesh= has {mesh.parallel_mesh.size()} ranks. "
                    "They must agree, unless process_group= is given."
                )
            if local_world_size != mesh.physical_mesh.shape[-1]:
                raise ValueError(
                    f"local_world_size={local_world_size}, but mesh= has "
                    f"{mesh.physical_mesh.shape[-1]} ranks on each node. They must agree."
                )
            if tp_size not in (None, shape[2]) or sharding_world_size not in (None, shape[1]):
                raise ValueError(
                    f"tp_size={tp_size} and sharding_world_size={sharding_world_size}, but mesh= "
                    f"has tp={shape[2]} and dp_shard={shape[1]}. They must agree: leave them out."
                )
        if process_group is None and local_rank != rank % local_world_size:
            raise ValueError(
                f"local_rank={local_rank} of rank {rank} with local_world_size={local_world_size}: "
                f"it must be {rank % local_world_size}, because ranks of a node are consecutive. "
                "Start the processes node by node, as torchrun does."
            )
        with contextlib.ExitStack() as made:
            if not dist.is_initialized():
                _start_world(rank, world_size, local_rank, device_type)
                made.callback(destroy_dist_connection)
            group = process_group or _default_group()
            _check_rank_and_size(rank, world_size, group)
            self._ranks: Sequence[int] = dist.get_process_group_ranks(group)
            if mesh is None:
                mesh = _make_meshes(device_type, shape, local_world_size, self._ranks)
                made.callback(mesh.parallel_mesh.universe.destroy)
            self._made = made.pop_all()
        # Found at each use: the group may be lazy, and a reference to it would keep its threads and
        # sockets alive after it is destroyed.
        self._find_group: Callable[[], dist.ProcessGroup] = _default_group
        self._given_group = process_group
        self.meshes, parallel = mesh, mesh.parallel_mesh
        self._local: Collective | None = None  # computed when it is first read
        self._tp_world: Collective | None = None
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
                f"Tensors on {device_type!r} are copied to {parallel.device_type!r} and back for "
                "each operation.",
                stacklevel=2,
            )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Process group of the operations; RuntimeError after it was destroyed."""
        return self._given_group or self._find_group()

    def parts_to_revive(self) -> tuple[object, ...]:
        """Return what `meshverse.revive` looks into, besides the attributes of this object."""
        return vars(self).get("local"), vars(self).get("tp_world")  # those that are in use

    @property
    def local(self) -> Collective:
        """Collective of the processes on this process's node."""
        if self._local is None:
            self._local = self._limited_to(self.meshes.physical_mesh, "local_ranks")
        return self._local

    @property
    def tp_world(self) -> Collective:
        """Collective of this process's tensor-parallel group, which is on one node."""
        if self._tp_world is None:
            self._tp_world = self._limited_to(self.meshes.parallel_mesh, "tp")
        return self._tp_world

    def _limited_to(self, mesh: DeviceMesh, axis: str) -> MeshCollective:
        """Return the collective over the group along an axis; its `close()` frees nothing."""
        limited = copy.copy(self)
        limited._local = limited._tp_world = None
        limited._made = contextlib.ExitStack()
        ranks: list[int] = mesh[axis].mesh.tolist()
        if not set(self._ranks).issubset(ranks):  # else it is within that group
            limited.rank, limited.world_size = mesh.get_local_rank(axis), len(ranks)
            limited._ranks, limited._find_group = ranks, partial(mesh.get_group, axis)
            limited._given_group = None
        return limited

    def close(self) -> None:
        """Free the process groups that this collective created, including the default group.

        All processes call this after all have finished: with gloo, call `barrier()` first.
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
        raise ValueError(f"Numbers of processes {wrong} must be ints above 0.")
    shards = sizes.setdefault("sharding_world_size", local_world_size // tp_size)
    rows = sizes["world_size / tp_size"] = world_size // tp_size
    for part, whole, rule in (
        ("local_world_size", "world_size", "all nodes have equally many processes"),
        ("tp_size", "local_world_size", "a tensor-parallel group is on one node"),
        ("sharding_world_size", "world_size / tp_size", "replicas have equally many shards"),
    ):
        if sizes[whole] % sizes[part]:
            raise ValueError(
                f"{part}={sizes[part]} does not divide {whole}={sizes[whole]}, and must: {rule}. "
                f"All sizes: {', '.join(f'{name}={size}' for name, size in sizes.items())}."
            )
    return rows // shards, shards, tp_size


def _check_rank_and_size(rank: int, world_size: int, group: dist.ProcessGroup) -> None:
    is_member = isinstance(group, dist.ProcessGroup)
    if not is_member or (group.rank(), group.size()) != (rank, world_size):
        own = f"rank {group.rank()} of {group.size()} in" if is_member else "not a member of"
        raise ValueError(
            f"rank={rank} of world_size={world_size}, but this process is {own} the process group. "
            "Pass the rank and the size that this process has in the group."
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
            "The world of this collective was destroyed by close() or destroy_process_group(). "
            "Create a new collective."
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
    """Settings of `build_collective`, with the meaning that they have in `MeshCollective`.

    If `device_type` is None, the collective uses the GPU, or the CPU if there is no GPU.
    """

    device_type: str | None = None
    tp_size: int = 1
    sharding_world_size: int | None = None


def build_collective(config: CollectiveConfig) -> Collective:
    """Return the collective of all processes that torchrun started, else that of this process.

    Raises:
        ValueError: only some of torchrun's environment variables are set, or the sizes do not fit
            the number of processes.
    """
    tp_size, shards = config.tp_size, config.sharding_world_size
    device_type = config.device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    missing = [name for name in _VARIABLES if name not in os.environ]
    if len(missing) == len(_VARIABLES):
        if tp_size != 1 or shards not in (None, 1):
            raise ValueError(
                f"tp_size={tp_size} and sharding_world_size={shards} for one process must be 1. "
                "Set both to 1, or start more processes with torchrun."
            )
        return SingleProcessCollective(device_type)
    if missing:
        raise ValueError(
            f"Some of torchrun's environment variables {', '.join(_VARIABLES)} are set, but "
            f"{missing} are missing. Start the processes with torchrun, or unset the others for a "
            "single process."
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
