"""Collectives over a mesh: the world, its nodes and its tensor-parallel groups in one universe.

Example (on each of 16 processes, 8 a node):
    >>> collective = MeshCollective(  # doctest: +SKIP
    ...     rank, 16, local_world_size=8, local_rank=rank % 8, device_type="cuda", tp_size=4
    ... )
    >>> collective.meshes.parallel_mesh.shape  # doctest: +SKIP
    (2, 2, 4)
    >>> collective.tp_world.all_gather_objects(rank)  # doctest: +SKIP
    [0, 1, 2, 3]
"""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from meshverse import DeviceMesh, init_device_mesh

from .group import GroupCollective, Meshes

__all__ = ["MeshCollective", "check_sizes"]


class MeshCollective(GroupCollective):
    """All processes of a world, or of a process group in it, with meshes for what they train.

    Starts the default process group if there is none: NCCL on GPUs, bound to this process's
    device, else gloo. `close()` frees what was made here and leaves the rest: all of it where the
    default group was started here, else the meshes' process groups.

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
        ValueError: sizes that are no ints above 0, do not divide each other or are not those of the
            meshes given; or ranks and sizes that are not the process
            group's. Nothing has been created then.
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
        shape: tuple[int, ...] = ()
        if mesh is None:
            shape = _parallel_shape(world_size, local_world_size, tp_size, sharding_world_size)
        else:
            _check_sizes_of(mesh.parallel_mesh, tp_size, sharding_world_size)
        if process_group is None:
            _check_local_rank(rank, local_rank, local_world_size)
        with contextlib.ExitStack() as made:
            if not dist.is_initialized():
                _start_world(rank, world_size, local_rank, device_type)
                made.callback(_end_world)
            group = process_group or _default_group()
            _check_place(rank, world_size, group)
            if mesh is None:
                mesh = _make_meshes(device_type, shape, local_world_size, group)
                made.callback(mesh.parallel_mesh.universe.destroy)
            name = f"cuda:{local_rank}" if device_type == "cuda" else device_type
            super().__init__(
                mesh,
                dist.get_process_group_ranks(group),
                rank,
                _default_group if process_group is None else partial(_itself, process_group),
                local_rank=local_rank,
                default_device=torch.device(name),
            )
            self._made = made.pop_all()
        if device_type not in ("cpu", "cuda"):
            warnings.warn(
                f"Tensors on {device_type!r} communicate by way of the CPU, copied there and back.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Free what this collective made: its meshes' process groups; the world, if it started it.

        All processes call this, when all are done with the collective and with making it: with
        gloo, have a `barrier()` before. Closing again does nothing.
        """
        self._made.close()


def _parallel_shape(
    world_size: int, local_world_size: int, tp_size: int, sharding_world_size: int | None
) -> tuple[int, int, int]:
    """Sizes of the axes (dp_replicate, dp_shard, tp).

    Raises:
        ValueError: something is no int above 0 or does not divide what it should.
    """
    check_sizes(tp_size=tp_size, sharding_world_size=sharding_world_size)
    sizes = {"world_size": world_size, "local_world_size": local_world_size, "tp_size": tp_size}
    _check_divides("local_world_size", "world_size", sizes, "every node has as many processes")
    _check_divides("tp_size", "local_world_size", sizes, "a tensor-parallel group is on one node")
    if sharding_world_size is None:
        sharding_world_size = local_world_size // tp_size
    sizes["sharding_world_size"] = sharding_world_size
    sizes["world_size / tp_size"] = world_size // tp_size
    _check_divides("sharding_world_size", "world_size / tp_size", sizes, "replicas are alike")
    return world_size // tp_size // sharding_world_size, sharding_world_size, tp_size


def check_sizes(**sizes: Any) -> None:
    """Check that sizes are ints above 0, or None.

    Raises:
        ValueError: some are not.
    """
    for name, size in sizes.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(
                f"{name}={size!r} of type {type(size).__name__} is no number of processes: give an "
                "int above 0."
            )


def _check_sizes_of(
    parallel_mesh: DeviceMesh, tp_size: int, sharding_world_size: int | None
) -> None:
    """Check sizes that were given together with a mesh, which has its own; 1 is the default."""
    check_sizes(tp_size=tp_size, sharding_world_size=sharding_world_size)
    own_tp, own_shards = parallel_mesh["tp"].size(), parallel_mesh["dp_shard"].size()
    if tp_size not in (1, own_tp) or sharding_world_size not in (None, own_shards):
        raise ValueError(
            f"tp_size={tp_size} and sharding_world_size={sharding_world_size}, but the mesh given "
            f"has tp={own_tp} and dp_shard={own_shards}: {parallel_mesh}. Leave the sizes out, or "
            "give a mesh that has them."
        )


def _check_divides(part: str, whole: str, sizes: dict[str, int], rule: str) -> None:
    if sizes[part] < 1 or sizes[whole] < 1 or sizes[whole] % sizes[part]:
        raise ValueError(
            f"{part}={sizes[part]} does not divide {whole}={sizes[whole]}: {rule}. "
            f"All sizes: {', '.join(f'{name}={size}' for name, size in sizes.items())}."
        )


def _check_local_rank(rank: int, local_rank: int, local_world_size: int) -> None:
    if local_rank != rank % local_world_size:
        raise ValueError(
            f"local_rank={local_rank} of rank {rank} with local_world_size={local_world_size}: "
            f"expected {rank % local_world_size}, since the ranks of a node follow each other. "
            "Start the processes node by node, as torchrun does."
        )


def _check_place(rank: int, world_size: int, group: dist.ProcessGroup) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"rank={rank} of world_size={world_size} is not in the process group it was given: "
            "only members make a collective."
        )
    if (group.rank(), group.size()) != (rank, world_size):
        raise ValueError(
            f"rank={rank} of world_size={world_size}, but in the process group this process is "
            f"rank {group.rank()} of {group.size()}. Give rank and size within that group."
        )


def _start_world(rank: int, world_size: int, local_rank: int, device_type: str) -> None:
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=device)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)


def _end_world() -> None:
    if dist.is_initialized():  # unless somebody was faster
        dist.destroy_process_group()


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "The world of this collective was destroyed, by its close() or by "
            "destroy_process_group(). Make the collective again."
        )
    return cast("dist.ProcessGroup", dist.group.WORLD)


def _itself(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return group


def _make_meshes(
    device_type: str, shape: tuple[int, ...], local_world_size: int, group: dist.ProcessGroup
) -> Meshes:
    parallel_mesh = init_device_mesh(
        "cuda" if device_type == "cuda" else "cpu",
        shape,
        mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
        ranks=dist.get_process_group_ranks(group),
    )
    physical_mesh = init_device_mesh(
        parallel_mesh.device_type,
        (parallel_mesh.size() // local_world_size, local_world_size),
        mesh_dim_names=("nodes", "local_ranks"),
        universe=parallel_mesh.universe,
    )
    return Meshes(parallel_mesh, physical_mesh)
