"""Tensor parallelism and FSDP2 for a model, in the order in which they must be applied.

Example:
    >>> from meshverse.parallel import ParallelismSizes, create_fsdp2_device_mesh
    >>> mesh, _ = create_fsdp2_device_mesh(  # doctest: +SKIP
    ...     ParallelismSizes(tp_size=2), world_size=4
    ... )
    >>> model = fsdp2_strategy_parallelize(model, mesh)  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from meshverse import DeviceMesh
from meshverse.parallel.config import (
    CheckpointingMode,
    CheckpointingScope,
    TPPlan,
    check_checkpointing,
    checkpointing_parts,
    default_mixed_precision,
)
from meshverse.parallel.experts.choice import apply_expert_parallelism, check_experts
from meshverse.parallel.experts.sharding import choose_moe_mesh, shard_experts
from meshverse.parallel.meshes.submesh import get_flat_mesh, get_fsdp_dp_mesh
from meshverse.parallel.models.checkpointing import apply_activation_checkpointing
from meshverse.parallel.models.compiling import compile_layers, warn_of_async_tensor_parallel
from meshverse.parallel.tensor_parallel.choice import apply_tensor_parallelism, check_heads

from .fsdp2_sharding import (
    apply_fsdp_sharding_recursively,
    check_can_be_sharded,
    check_not_sharded,
)
from .other_degrees import (
    mesh_of_stage,
    refuse_split_sequences,
    refuse_uncovered,
    tell_of_context,
)

__all__ = ["fsdp2_strategy_parallelize", "unshard_fsdp2_model"]

_Model = TypeVar("_Model", bound=nn.Module)


def fsdp2_strategy_parallelize(
    model: _Model,
    device_mesh: DeviceMesh,
    *,
    moe_mesh: DeviceMesh | None = None,
    ep_size: int | None = None,
    param_dtype: torch.dtype = torch.bfloat16,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    sequence_parallel: bool = False,
    activation_checkpointing: CheckpointingMode = False,
    activation_checkpointing_scope: CheckpointingScope = "all",
    cpu_offload: bool = False,
    tp_shard_plan: TPPlan | None = None,
    dp_replicate_mesh_name: str = "dp_replicate",
    dp_shard_cp_mesh_name: str = "dp_shard_cp",
    tp_mesh_name: str = "tp",
    dp_cp_mesh_name: str = "dp_cp",
    reshard_after_forward: bool | None = None,
    enable_fsdp2_prefetch: bool = False,
    fsdp2_backward_prefetch_depth: int = 2,
    fsdp2_forward_prefetch_depth: int = 1,
    enable_compile: bool = False,
    enable_async_tensor_parallel: bool = False,
    reapply_trainability: Callable[[nn.Module], None] | None = None,
) -> _Model:
    """Split a model in place by tensor parallelism, then shard it with FSDP2.

    Args:
        model: on one device, the same on all ranks; with several pipeline stages, one of those
            that `pipeline_stages` made.
        device_mesh: with the axes named below, as `create_fsdp2_device_mesh` makes it.
        moe_mesh: with the axes (ep_shard, ep) over the same ranks, as `create_fsdp2_device_mesh`
            makes it: experts are handed out over ep, and sharded over ep_shard.
        ep_size: expert parallelism, where moe_mesh is not given; the mesh is made then. By default
            what `create_fsdp2_device_mesh` was asked for; 1 for a model without experts on meshes
            that were made for some.
        param_dtype: of parameters and outputs, where mp_policy is not given.
        mp_policy: of parameters, gradients and outputs; by default gradients are reduced in fp32.
        offload_policy: where sharded parameters live.
        sequence_parallel: whether what is between the split layers is split by tokens; for plans
            that know of it.
        activation_checkpointing: of every layer (True or "full"), or of all but its matrix products
            ("selective").
        activation_checkpointing_scope: parts of the model; see `FSDP2Config`.
        cpu_offload: sharded parameters live on the CPU, short for an offload_policy.
        tp_shard_plan: the tensor-parallel plan, its import path, or a function that gives it. By
            default the one registered for the model's class, else the model's own
            (`get_hf_tp_shard_plan`), else that of a Llama, with a warning.
        dp_replicate_mesh_name: axis of the replicas.
        dp_shard_cp_mesh_name: axis to shard over, flattened with context parallelism's.
        tp_mesh_name: axis of tensor parallelism.
        dp_cp_mesh_name: axis of all ranks that see different tokens, over which a training loop
            reduces its loss; it must be there, and nothing is done with it here.
        reshard_after_forward: of the layers; None for all but the last of each list.
        enable_fsdp2_prefetch: whether layers say which to gather ahead.
        fsdp2_backward_prefetch_depth: how many layers ahead in backward.
        fsdp2_forward_prefetch_depth: how many layers ahead in forward.
        enable_compile: whether to compile each layer, as `FSDP2Manager.maybe_compile` does.
        enable_async_tensor_parallel: without effect; see `FSDP2Config`.
        reapply_trainability: called with the model when its parameters are split and not yet
            sharded, to say anew which of them are trained.

    Returns:
        The same model object.

    Raises:
        KeyError: the mesh has not the axes.
        TypeError: the plan is none, or has values that are no parallel styles.
        ValueError: the mesh has several pipeline stages and the model is none, or another axis over
            which nothing is split; the experts' mesh does not go with it; heads do not divide by
            the size of tensor parallelism, there are no experts to hand out or their number does
            not divide, the plan does not fit the model, the model is sharded already, FSDP2 cannot
            shard one of its parameters, a setting of activation checkpointing is unknown, or both
            cpu_offload and another offload_policy are asked for. The model is as it was after any
            of these.
    """
    fsdp_mesh = get_fsdp_dp_mesh(device_mesh, dp_replicate_mesh_name, dp_shard_cp_mesh_name)
    tp_mesh = get_flat_mesh(device_mesh, tp_mesh_name)
    get_flat_mesh(device_mesh, dp_cp_mesh_name)  # a training loop counts on it
    offload = _offload_policy(offload_policy, cpu_offload, device_mesh.device_type)
    check_checkpointing(activation_checkpointing)
    checkpointing_parts(activation_checkpointing_scope)
    check_not_sharded(model)
    device_mesh = mesh_of_stage(model, device_mesh)
    refuse_split_sequences(model, sequence_parallel=sequence_parallel)
    refuse_uncovered(device_mesh, (fsdp_mesh, tp_mesh))
    tell_of_context(device_mesh)

    moe_mesh = choose_moe_mesh(device_mesh, moe_mesh, ep_size)
    ep_mesh = None if moe_mesh is None else moe_mesh["ep"]
    experts = [] if ep_mesh is None else check_experts(model, ep_mesh.size())
    if not experts:  # of a model with experts, this stage has layers without
        moe_mesh = ep_mesh = None
    check_can_be_sharded(model, are_split=tp_mesh.size() > 1)
    if tp_mesh.size() > 1:
        check_heads(model, tp_mesh.size())
        apply_tensor_parallelism(
            model,
            tp_mesh,
            tp_shard_plan,
            sequence_parallel=sequence_parallel,
            handed_out=experts,
        )
    if moe_mesh is not None and ep_mesh is not None:
        # FSDP2 averages their gradients over ep_shard. The rest it averages over fsdp_mesh,
        # all ranks with tokens of their own, and so must these be.
        scale = moe_mesh.size(0) / fsdp_mesh.size()
        apply_expert_parallelism(model, ep_mesh, same_tokens=tp_mesh, gradient_scale=scale)
    if activation_checkpointing:
        apply_activation_checkpointing(
            model, activation_checkpointing, activation_checkpointing_scope
        )
    if reapply_trainability is not None:
        reapply_trainability(model)
    precision = mp_policy or replace(
        default_mixed_precision(), param_dtype=param_dtype, output_dtype=param_dtype
    )
    if moe_mesh is not None:
        shard_experts(
            model,
            experts,
            moe_mesh,
            replicas=get_flat_mesh(device_mesh, dp_replicate_mesh_name).size(),
            precision=precision,
            offload=offload,
            reshard_after_forward=reshard_after_forward is not False,
        )
    prefetch = (fsdp2_backward_prefetch_depth, fsdp2_forward_prefetch_depth)
    apply_fsdp_sharding_recursively(
        model,
        fsdp_mesh,
        precision,
        offload,
        reshard_after_forward=reshard_after_forward,
        prefetch_depths=prefetch if enable_fsdp2_prefetch else None,
    )
    settings: dict[str, Any] = {"mp_policy": precision, "offload_policy": offload}
    # The root's parameters are needed first in backward: gathering them again would be for nothing.
    fully_shard(model, mesh=fsdp_mesh, reshard_after_forward=False, **settings)
    if enable_async_tensor_parallel:
        warn_of_async_tensor_parallel()
    if enable_compile:
        compile_layers(model)
    return model


def _offload_policy(
    policy: OffloadPolicy | None, cpu_offload: bool, device_type: str
) -> OffloadPolicy | None:
    if not cpu_offload:
        return policy
    if policy is not None and not isinstance(policy, CPUOffloadPolicy):
        raise ValueError(
            f"cpu_offload=True and offload_policy={policy}: they contradict each other. Give one."
        )
    # Memory is pinned for copies to a device: without one, torch cannot pin it.
    return policy or CPUOffloadPolicy(pin_memory=device_type != "cpu")


@contextlib.contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Iterator[None]:
    """Within the context, all parameters that FSDP2 shards are whole, on all ranks.

    A forward gathers nothing then, but leaves its layers sharded, as it does anywhere, unless they
    have `reshard_after_forward=False`. Changes made to parameters are lost, except where a rank
    changes its own part. With tensor parallelism they are whole along the sharded axis only, and
    still DTensors on the TP mesh.

    Example:
        >>> with unshard_fsdp2_model(model):  # doctest: +SKIP
        ...     norm = model.lm_head.weight.norm()
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module in sharded:
            module.unshard()
        yield
    finally:
        for module in sharded:
            module.reshard()
