"""The meshes that a strategy trains on, and what a strategy cannot do.

Example:
    >>> mesh, moe_mesh = create_device_meshes(  # doctest: +SKIP
    ...     FSDP2Config(), ParallelismSizes(tp_size=2), world_size=16
    ... )
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from meshverse import DeviceMesh, Universe
from meshverse.parallel.config import DDPConfig, FSDP2Config, MegatronFSDPConfig

from .create import create_fsdp2_device_mesh, create_megatron_fsdp_device_mesh
from .degrees import (
    ParallelismSizes,
    data_parallel_size,
    refuse_degrees,
    world_ranks,
)

__all__ = ["create_device_meshes"]

StrategyConfig = FSDP2Config | MegatronFSDPConfig | DDPConfig


@overload
def create_device_meshes(
    strategy_config: FSDP2Config,
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
    universe: Universe | None = None,
) -> tuple[DeviceMesh, DeviceMesh | None]: ...


@overload
def create_device_meshes(
    strategy_config: MegatronFSDPConfig,
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
    universe: Universe | None = None,
) -> tuple[DeviceMesh, None]: ...


@overload
def create_device_meshes(
    strategy_config: DDPConfig,
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
    universe: Universe | None = None,
) -> tuple[None, None]: ...


def create_device_meshes(
    strategy_config: StrategyConfig,
    parallelism: ParallelismSizes,
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
    universe: Universe | None = None,
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
        universe: to build the meshes in, such as that of a mesh over all ranks of the job; with
            `ranks`, they are a part of it (`Universe.part`).

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
            parallelism,
            world_size=world_size,
            timeout_minutes=timeout_minutes,
            ranks=ranks,
            universe=universe,
        )
    if isinstance(strategy_config, MegatronFSDPConfig):
        mesh = create_megatron_fsdp_device_mesh(
            parallelism,
            world_size=world_size,
            timeout_minutes=timeout_minutes,
            ranks=ranks,
            universe=universe,
        )
        return mesh, None
    if universe is not None:
        raise ValueError(
            f"universe={universe!r}: DDP has no mesh to build in it. Leave it unset, and give "
            "DistributedDataParallel a process group."
        )
    _check_ddp(parallelism, world_size, ranks, timeout_minutes)
    return None, None


def _check_ddp(
    parallelism: ParallelismSizes,
    world_size: int | None,
    ranks: Sequence[int] | None,
    timeout_minutes: float | None,
) -> None:
    """Check that what is asked for is what DDP does: train on all ranks of its process group."""
    if timeout_minutes is not None:
        raise ValueError(
            f"timeout_minutes={timeout_minutes!r}: DDP has no mesh whose groups would have it. "
            "Give it to init_process_group(timeout=...), and leave it unset here."
        )
    if ranks is not None:
        raise ValueError(
            f"ranks={ranks!r}: DDP has no mesh to place on them. Leave ranks unset, and give "
            "DistributedDataParallel a process group of these ranks."
        )
    if world_size is not None or parallelism.dp_size not in (None, -1):
        data_parallel_size(parallelism.dp_size, world_ranks(world_size), tp_size=1)


def _check_supported(config: StrategyConfig, parallelism: ParallelismSizes) -> None:
    strategies = {FSDP2Config: "FSDP2", MegatronFSDPConfig: "Megatron-FSDP", DDPConfig: "DDP"}
    known = (name for kind, name in strategies.items() if isinstance(config, kind))
    strategy = next(known, type(config).__name__)
    if strategy != "FSDP2":
        refuse_degrees(parallelism, strategy, ("dp_replicate_size",))
    if strategy not in strategies.values():
        expected = ", ".join(kind.__name__ for kind in strategies)
        raise ValueError(f"Unknown strategy config {strategy}: expected one of {expected}.")
    if strategy == "DDP":
        refuse_degrees(parallelism, strategy, ("tp_size", "pp_size", "cp_size", "ep_size"))
    if strategy == "Megatron-FSDP":
        refuse_degrees(parallelism, strategy, ("pp_size", "ep_size"))
