"""The meshes that a strategy trains on.

Example:
    >>> mesh, moe_mesh = create_device_meshes(  # doctest: +SKIP
    ...     FSDP2Config(), ParallelismSizes(tp_size=2), world_size=16
    ... )
"""

from __future__ import annotations

from typing import overload

from typing_extensions import Unpack

from meshverse import DeviceMesh
from meshverse.parallel.config import DDPConfig, FSDP2Config, MegatronFSDPConfig

from .create import (
    MeshKwargs,
    create_fsdp2_device_mesh,
    create_megatron_fsdp_device_mesh,
    refuse_degrees,
    world_size_of,
)
from .degrees import ParallelismSizes, data_parallel_size


@overload
def create_device_meshes(
    strategy_config: FSDP2Config, parallelism: ParallelismSizes, **where: Unpack[MeshKwargs]
) -> tuple[DeviceMesh, DeviceMesh | None]: ...


@overload
def create_device_meshes(
    strategy_config: MegatronFSDPConfig, parallelism: ParallelismSizes, **where: Unpack[MeshKwargs]
) -> tuple[DeviceMesh, None]: ...


@overload
def create_device_meshes(
    strategy_config: DDPConfig, parallelism: ParallelismSizes, **where: Unpack[MeshKwargs]
) -> tuple[None, None]: ...


def create_device_meshes(
    strategy_config: FSDP2Config | MegatronFSDPConfig | DDPConfig,
    parallelism: ParallelismSizes,
    **where: Unpack[MeshKwargs],
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Create the meshes that a strategy trains on. All ranks of the world call this.

    Args:
        strategy_config: settings, whose type selects the strategy.
        parallelism: degrees of parallelism.
        where: four optional keywords.

            - `world_size`: number of ranks; by default the default process group's.
            - `timeout_minutes`: timeout of all process groups of the meshes and of meshes derived
              from them; by default the default group's.
            - `ranks`: global ranks of the mesh, whose last axis varies fastest; by default all
              ranks in order. Other ranks get a mesh without groups, which they can inspect.
            - `universe`: existing universe to create the meshes in, such as that of a mesh over all
              ranks of the job. The meshes are then in a part of it (`Universe.part`) over `ranks`.

    Returns:
        The mesh and the experts' mesh, in one universe; None for a mesh that the strategy does not
        use.

    Raises:
        ValueError: the strategy is unknown or does not support a degree, the degrees do not fit the
            number of ranks, or `world_size` is not the process group's. No mesh is created then.
    """
    if isinstance(strategy_config, FSDP2Config):
        return create_fsdp2_device_mesh(parallelism, **where)
    if isinstance(strategy_config, MegatronFSDPConfig):
        return create_megatron_fsdp_device_mesh(parallelism, **where), None
    config: object = strategy_config
    if not isinstance(config, DDPConfig):
        raise ValueError(
            f"Unknown strategy config {type(config).__name__}: it must be an FSDP2Config, "
            "MegatronFSDPConfig or DDPConfig."
        )
    names = ("dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size")
    refuse_degrees(parallelism, "DDP", names)
    for setting, value in where.items():
        if setting != "world_size" and value is not None:
            raise ValueError(
                f"{setting}={value!r}: DDP has no mesh. Give DistributedDataParallel a process "
                "group with this setting instead."
            )
    world_size, dp_size = where.get("world_size"), parallelism.dp_size
    if world_size is not None or dp_size not in (None, -1):
        data_parallel_size(dp_size, world_size_of(world_size))
    return None, None
