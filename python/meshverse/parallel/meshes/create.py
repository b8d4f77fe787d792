"""The meshes of a trainer, in one universe, built from degrees.

Example:
    >>> mesh, moe_mesh = create_fsdp2_device_mesh(  # doctest: +SKIP
    ...     ParallelismSizes(tp_size=2, cp_size=2, ep_size=4), world_size=16
    ... )
    >>> mesh.shape, moe_mesh.shape  # doctest: +SKIP
    ((1, 1, 4, 2, 2), (4, 4))
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from meshverse import DeviceMesh, Universe, init_device_mesh

from .degrees import (
    ParallelismSizes,
    check_replicas,
    data_parallel_size,
    degree,
    is_degree,
    rank_count,
    refuse_degrees,
    world_ranks,
)
from .spec import MeshSpec, validate_mesh_spec
from .submesh import register_flattened_axes

__all__ = [
    "asked_ep_size",
    "create_fsdp2_device_mesh",
    "create_megatron_fsdp_device_mesh",
    "create_moe_mesh",
    "fsdp2_specs",
]

# So that a strategy that is given only the root mesh knows what was asked for.
_ep_sizes: WeakKeyDictionary[Universe, int] = WeakKeyDictionary()


def create_fsdp2_device_mesh(
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
    universe: Universe | None = None,
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The root mesh (pp, dp_replicate, dp_shard, cp, tp), and the experts' mesh if ep > 1.

    Axes of size 1 are there too. The flattened axes dp = (dp_replicate, dp_shard), dp_shard_cp =
    (dp_shard, cp) and dp_cp = (dp_replicate, dp_shard, cp) are asked for with `get_flat_mesh`.

    Args:
        parallelism: the degrees.
        world_size: number of ranks; by default those of the default process group.
        timeout_minutes: as for `create_device_meshes`.
        ranks: as for `create_device_meshes`.
        universe: as for `create_device_meshes`.

    Returns:
        The root mesh, and the mesh (ep_shard, ep) or None.

    Raises:
        ValueError: the degrees do not fit the ranks or each other, or world_size is not that of
            the process group.
    """
    ranks = _ranks_in(universe, ranks)
    spec, *_ = fsdp2_specs(parallelism, rank_count(world_ranks(world_size), ranks))
    mesh = _build(spec, timeout_minutes, ranks, universe)
    ep = _ep_sizes[mesh.universe] = degree(parallelism.ep_size, "ep_size")
    return mesh, create_moe_mesh(mesh, ep_size=ep) if ep > 1 else None


def fsdp2_specs(parallelism: ParallelismSizes, count: int) -> list[MeshSpec]:
    """What `create_fsdp2_device_mesh` makes: its root mesh, and that of the experts if ep > 1.

    Args:
        parallelism: the degrees.
        count: number of ranks.

    Raises:
        ValueError: the degrees do not fit the ranks or each other.
    """
    tp, pp = degree(parallelism.tp_size, "tp_size"), degree(parallelism.pp_size, "pp_size")
    cp, ep = degree(parallelism.cp_size, "cp_size"), degree(parallelism.ep_size, "ep_size")
    dp = data_parallel_size(parallelism.dp_size, count, tp_size=tp, cp_size=cp, pp_size=pp)
    replicas = degree(parallelism.dp_replicate_size, "dp_replicate_size")
    check_replicas(dp, replicas)
    if dp * cp * tp % ep:
        raise ValueError(
            f"ep_size={ep} does not divide the {dp * cp * tp} ranks of a pipeline stage: dp_size="
            f"{dp} * cp_size={cp} * tp_size={tp}. Choose ep_size among its divisors."
        )
    spec = MeshSpec(
        shape=(pp, replicas, dp // replicas, cp, tp),
        axes=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        flattened_axes={
            "dp": ("dp_replicate", "dp_shard"),
            "dp_shard_cp": ("dp_shard", "cp"),
            "dp_cp": ("dp_replicate", "dp_shard", "cp"),
        },
    )
    if ep == 1:
        return [spec]
    return [spec, _moe_spec(pp, dp * cp * tp, ep)]


def _moe_spec(stages: int, stage_size: int, ep_size: int) -> MeshSpec:
    return MeshSpec((stages, stage_size // ep_size, ep_size), ("pp", "ep_shard", "ep"))


def asked_ep_size(mesh: DeviceMesh) -> int:
    """The expert parallelism that `create_fsdp2_device_mesh` was asked for, of a mesh it made.

    Args:
        mesh: the root mesh, or one derived from it.
    """
    return _ep_sizes.get(mesh.universe, 1)


def create_moe_mesh(mesh: DeviceMesh, *, ep_size: int) -> DeviceMesh:
    """The mesh (ep_shard, ep) over all ranks of a pipeline stage, in the mesh's universe.

    Args:
        mesh: the root mesh; its first axis is pp, if it has one of that name.
        ep_size: number of ways the experts are split.

    Raises:
        ValueError: ep_size is no int above 0, or does not divide the ranks of a stage; or the mesh
            is not over all ranks of its universe.
    """
    if not is_degree(ep_size):
        raise ValueError(f"ep_size={ep_size!r}: expected an int above 0.")
    stages = mesh.size(0) if (mesh.mesh_dim_names or ("",))[0] == "pp" else 1
    stage_size = mesh.size() // stages
    if stage_size % ep_size or mesh.size() != mesh.universe.size:
        raise ValueError(
            f"ep_size={ep_size} must divide the {stage_size} ranks of a pipeline stage, "
            f"and the mesh of {mesh.size()} ranks must be the root of its universe of "
            f"{mesh.universe.size} ranks."
        )
    spec = _moe_spec(stages, stage_size, ep_size)
    experts = init_device_mesh(
        mesh.device_type, spec.shape, mesh_dim_names=spec.axes, universe=mesh.universe
    )
    return experts["ep_shard", "ep"]


def create_megatron_fsdp_device_mesh(
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
    universe: Universe | None = None,
) -> DeviceMesh:
    """The root mesh (dp, cp, tp), with the flattened axis dp_cp if cp > 1.

    Args:
        parallelism: the degrees, of which pp, ep and dp_replicate must be 1.
        world_size: number of ranks; by default those of the default process group.
        timeout_minutes: as for `create_device_meshes`.
        ranks: as for `create_device_meshes`.
        universe: as for `create_device_meshes`.

    Raises:
        ValueError: a degree that this strategy does not have; the degrees do not multiply out to
            the ranks, or world_size is not that of the process group.
    """
    refuse_degrees(parallelism, "Megatron-FSDP", ("dp_replicate_size", "pp_size", "ep_size"))
    tp, cp = degree(parallelism.tp_size, "tp_size"), degree(parallelism.cp_size, "cp_size")
    ranks = _ranks_in(universe, ranks)
    count = rank_count(world_ranks(world_size), ranks)
    dp = data_parallel_size(parallelism.dp_size, count, tp_size=tp, cp_size=cp)
    flattened = {"dp_cp": ("dp", "cp")} if cp > 1 else {}
    spec = MeshSpec((dp, cp, tp), ("dp", "cp", "tp"), flattened)
    return _build(spec, timeout_minutes, ranks, universe)


def _ranks_in(universe: Universe | None, ranks: Sequence[int] | None) -> Sequence[int] | None:
    return ranks if universe is None or ranks is not None else universe.rank_map.ranks().tolist()


def _build(
    spec: MeshSpec,
    timeout_minutes: float | None,
    ranks: Sequence[int] | None,
    universe: Universe | None,
) -> DeviceMesh:
    validate_mesh_spec(spec)
    timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
    mesh = init_device_mesh(
        *(_device_type(), spec.shape),
        mesh_dim_names=spec.axes,
        ranks=ranks,
        timeout=timeout,
        universe=universe,
    )
    register_flattened_axes(mesh, spec.flattened_axes)
    return mesh


def _device_type() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        return "cpu"
    return "cuda"
