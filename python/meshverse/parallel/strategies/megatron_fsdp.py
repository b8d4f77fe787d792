"""Megatron-FSDP over our meshes: tensor parallelism, then the package `megatron-fsdp`.

The package is optional: `pip install "meshverse[megatron]"`.

Example:
    >>> mesh = create_megatron_fsdp_device_mesh(  # doctest: +SKIP
    ...     ParallelismSizes(tp_size=2), world_size=16
    ... )
    >>> model, optimizer = megatron_fsdp_strategy_parallelize(  # doctest: +SKIP
    ...     model, mesh, optimizer, zero_dp_strategy=3
    ... )
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshverse import DeviceMesh
from meshverse.parallel.config import MegatronFSDPConfig, TPPlan
from meshverse.parallel.meshes.submesh import get_flat_mesh, get_submesh
from meshverse.parallel.models.checkpointing import apply_activation_checkpointing
from meshverse.parallel.tensor_parallel.choice import apply_tensor_parallelism, check_heads

from .megatron_arguments import (
    fully_shard_arguments,
    import_megatron_fsdp,
    training_device,
    unit_modules,
)
from .megatron_optimizer import (
    check_optimizer,
    first_step_without_effect,
    named_parameters,
    point_to_new_parameters,
    warn_of_lost_groups,
)
from .other_degrees import (
    refuse_experts,
    refuse_pipeline,
    refuse_replicas,
    refuse_uncovered,
    tell_of_context,
)

__all__ = [
    "MegatronFSDPManager",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
]


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tp_shard_plan: TPPlan | None = None,
    dp_shard_dim: str | None = None,
    tp_dim: str = "tp",
    reapply_trainability: Callable[[nn.Module], None] | None = None,
    **settings: Any,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Split a model by tensor parallelism and shard it with Megatron-FSDP.

    Args:
        model: to split in place and wrap.
        device_mesh: as `create_megatron_fsdp_device_mesh` makes it; its device type is where the
            model goes.
        optimizer: of the model's parameters; afterwards it has the sharded ones, in one group with
            the optimizer's default settings.
        tp_shard_plan: the tensor-parallel plan; by default chosen for the model.
        dp_shard_dim: axis to shard over; by default dp_cp where there is context parallelism,
            else dp.
        tp_dim: axis of tensor parallelism.
        reapply_trainability: called with the model when its parameters are split and not yet
            sharded, to say anew which of them are trained.
        settings: fields of `MegatronFSDPConfig`.

    Returns:
        The wrapped model and the optimizer. On one data-parallel rank, where there is nothing to
        shard, the model itself.

    Raises:
        ImportError: `megatron-fsdp` is not installed.
        KeyError: the mesh has not the axes.
        TypeError: a setting that is none.
        ValueError: the mesh has axes over which nothing is split here, such as those of pipeline
            stages, replicas or experts; a setting that the installed version does not know; the
            model has no unit
            modules, or not all parameters of the optimizer. The model is as it was then.
    """
    config = MegatronFSDPConfig(**settings)
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    check_optimizer(optimizer, names, model)
    shard_dim = dp_shard_dim or _default_shard_dim(device_mesh)
    tp_mesh = get_flat_mesh(device_mesh, tp_dim)
    _refuse_other_degrees(model, device_mesh, (get_flat_mesh(device_mesh, shard_dim), tp_mesh))
    tell_of_context(device_mesh)
    if get_flat_mesh(device_mesh, shard_dim).size() == 1:
        warnings.warn(
            f"The axis {shard_dim!r} has size 1: Megatron-FSDP has nothing to shard, and only "
            "tensor parallelism is applied.",
            stacklevel=2,
        )
        _split(model, tp_mesh, tp_shard_plan, config, reapply_trainability)
        point_to_new_parameters(optimizer, names, model)
        return model, optimizer

    package = import_megatron_fsdp()
    shard = package.fully_shard_model if optimizer is None else package.fully_shard
    arguments = {
        **fully_shard_arguments(config, shard, package),
        # Both axes as the mesh's own: the package slices by them, which torch refuses for
        # flattened axes.
        "device_mesh": get_submesh(device_mesh, (shard_dim, tp_dim)),
        "dp_shard_dim": shard_dim,
        "tp_dim": tp_dim,
        "fsdp_unit_modules": unit_modules(model, config.megatron_fsdp_unit_modules),
        "device": training_device(device_mesh),
    }
    _split(model, tp_mesh, tp_shard_plan, config, reapply_trainability)
    if optimizer is None:
        return shard(model, **arguments), None
    warn_of_lost_groups(optimizer)
    with first_step_without_effect(optimizer):
        wrapped, optimizer = shard(model, optimizer, **arguments)
    return wrapped, optimizer


nvfsdp_strategy_parallelize = megatron_fsdp_strategy_parallelize
"""The name that Megatron-FSDP's helper had when the package was called nvFSDP."""


class MegatronFSDPManager:
    """Applies a `MegatronFSDPConfig` to models.

    Args:
        config: the settings.
        device_mesh: as `create_device_meshes` makes it; None for one process.
    """

    def __init__(self, config: MegatronFSDPConfig, device_mesh: DeviceMesh | None) -> None:
        self.config = config
        self.device_mesh = device_mesh

    def parallelize(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        reapply_trainability: Callable[[nn.Module], None] | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """Split and shard a model, and the optimizer of its parameters.

        Returns:
            The wrapped model, or where there is nothing to split the model itself; the optimizer.

        Raises:
            As `megatron_fsdp_strategy_parallelize`.
        """
        if self.device_mesh is None or self.device_mesh.size() == 1:
            if self.config.activation_checkpointing:
                apply_activation_checkpointing(model, "full")
            if reapply_trainability is not None:
                reapply_trainability(model)
            return model, optimizer
        return megatron_fsdp_strategy_parallelize(
            model,
            self.device_mesh,
            optimizer,
            reapply_trainability=reapply_trainability,
            **self.config.to_dict(),
        )


def _split(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    plan: TPPlan | None,
    config: MegatronFSDPConfig,
    reapply_trainability: Callable[[nn.Module], None] | None,
) -> None:
    if tp_mesh.size() > 1:
        check_heads(model, tp_mesh.size())
        apply_tensor_parallelism(model, tp_mesh, plan)
    if config.activation_checkpointing:
        apply_activation_checkpointing(model, "full")
    if reapply_trainability is not None:
        reapply_trainability(model)


def _refuse_other_degrees(
    model: nn.Module, mesh: DeviceMesh, used: tuple[DeviceMesh, DeviceMesh]
) -> None:
    refuse_pipeline(model, mesh)
    refuse_replicas(mesh)
    refuse_experts(mesh)
    refuse_uncovered(mesh, used)


def _default_shard_dim(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ()
    return "dp_cp" if "cp" in names and mesh["cp"].size() > 1 else "dp"
