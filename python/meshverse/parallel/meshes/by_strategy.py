"""The meshes that a strategy trains on, and what a strategy cannot do.

Example:
    >>> mesh, moe_mesh = create_device_meshes(  # doctest: +SKIP
    ...     FSDP2Config(), ParallelismSizes(tp_size=2), world_size=16
    ... )
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from meshverse import DeviceMesh
from meshverse.parallel.config import DDPConfig, FSDP2Config, MegatronFSDPConfig

from .create import create_fsdp2_device_mesh, create_megatron_fsdp_device_mesh
from .degrees import ParallelismSizes, degree

__all__ = ["create_device_meshes"]

StrategyConfig = FSDP2Config | MegatronFSDPConfig | DDPConfig

_FEATURES = {
    "tp_size": "tensor parallelism",
    "pp_size": "pipeline parallelism",
    "cp_size": "context parallelism",
    "ep_size": "expert parallelism",
}


@overload
def create_device_meshes(
    strategy_config: FSDP2Config,
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[DeviceMesh, DeviceMesh | None]: ...


@overload
def create_device_meshes(
    strategy_config: MegatronFSDPConfig,
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[DeviceMesh, None]: ...


@overload
def create_device_meshes(
    strategy_config: DDPConfig,
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[None, None]: ...


def create_device_meshes(
    strategy_config: StrategyConfig,
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The meshes that a strategy trains on. All ranks of the world call this.

    Args:
        strategy_config: which strategy; its fields are not read.
        parallelism: the degrees.
        world_size: number of ranks.
        timeout_minutes: of the operations of every group made here or derived later, in minutes;
            by default the default group's.
        ranks: global ranks to place the mesh on, its last axis varying fastest; by default all
            ranks of the world in order. Other ranks get a mesh to hold and inspect, without groups.

    Returns:
        The mesh, and the mesh of the experts in the same universe; None for what the strategy
        does not use.

    Raises:
        ValueError: the strategy is unknown or does not support a parallelism asked for, the degrees
            do not fit the ranks, or world_size is not that of the process group. Nothing has been
            created then.
    """
    _check_supported(strategy_config, parallelism)
    if isinstance(strategy_config, FSDP2Config):
        return create_fsdp2_device_mesh(
            parallelism, world_size=world_size, timeout_minutes=timeout_minutes, ranks=ranks
        )
    if isinstance(strategy_config, MegatronFSDPConfig):
        mesh = create_megatron_fsdp_device_mesh(
            parallelism, world_size=world_size, timeout_minutes=timeout_minutes, ranks=ranks
        )
        return mesh, None
    return None, None


def _check_supported(config: StrategyConfig, parallelism: ParallelismSizes) -> None:
    strategies = {FSDP2Config: "FSDP2", MegatronFSDPConfig: "Megatron-FSDP", DDPConfig: "DDP"}
    known = (name for kind, name in strategies.items() if isinstance(config, kind))
    strategy = next(known, type(config).__name__)
    replicas = degree(parallelism.dp_replicate_size, "dp_replicate_size")
    if replicas > 1 and strategy != "FSDP2":
        raise ValueError(
            f"{strategy} does not support replicas of shards: dp_replicate_size={replicas}. Use "
            "FSDP2Config for it, or leave dp_replicate_size unset."
        )
    if strategy not in strategies.values():
        expected = ", ".join(kind.__name__ for kind in strategies)
        raise ValueError(f"Unknown strategy config {strategy}: expected one of {expected}.")
    unsupported = {"Megatron-FSDP": ("pp_size", "ep_size"), "DDP": tuple(_FEATURES)}
    for name in unsupported.get(strategy, ()):
        size = degree(getattr(parallelism, name), name)
        if size > 1:
            raise ValueError(
                f"{strategy} does not support {_FEATURES[name]}: {name}={size}. Set it to 1, or "
                "use FSDP2Config."
            )
