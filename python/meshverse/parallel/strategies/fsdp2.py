"""FSDP2 for a trainer: tensor parallelism, checkpointing and sharding, in the order they need.

Example:
    >>> config = FSDP2Config(sequence_parallel=True)  # doctest: +SKIP
    >>> meshes = create_device_meshes(  # doctest: +SKIP
    ...     config, ParallelismSizes(tp_size=2), world_size=8
    ... )
    >>> manager = FSDP2Manager(config, *meshes)  # doctest: +SKIP
    >>> model = manager.maybe_compile(manager.parallelize(model))  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from meshverse import DeviceMesh
from meshverse.parallel.config import FSDP2Config, TPPlan, default_mixed_precision
from meshverse.parallel.experts.expert_parallel import apply_expert_parallelism, check_experts
from meshverse.parallel.experts.sharding import choose_moe_mesh, shard_experts
from meshverse.parallel.meshes.degrees import degree
from meshverse.parallel.meshes.submesh import (
    check_covered,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    mesh_of_stage,
)
from meshverse.parallel.models.checkpointing import checkpointed_layers, prepare
from meshverse.parallel.models.modules import compile_layers, layer_lists
from meshverse.parallel.models.packed_sequences import (
    patch_is_packed_sequence,
    restore_is_packed_sequence,
)
from meshverse.parallel.tensor_parallel.choice import apply_tensor_parallelism, check_heads

_logger = logging.getLogger(__name__)
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
    cpu_offload: bool = False,
    tp_shard_plan: TPPlan | None = None,
    dp_replicate_mesh_name: str = "dp_replicate",
    dp_shard_cp_mesh_name: str = "dp_shard_cp",
    tp_mesh_name: str = "tp",
    dp_cp_mesh_name: str = "dp_cp",
    reapply_trainability: Callable[[nn.Module], None] | None = None,
    **settings: Any,
) -> _Model:
    """Split a model in place by tensor parallelism, then shard it with FSDP2.

    Args:
        model: on one device, the same on all ranks; with several pipeline stages, one of those
            that `pipeline_stages` made. It is returned, the same object.
        device_mesh: with the axes named below, as `create_fsdp2_device_mesh` makes it.
        moe_mesh: as `create_fsdp2_device_mesh` makes it: experts are handed out over its axis ep,
            and sharded over ep_shard.
        ep_size: expert parallelism, where moe_mesh is not given; the mesh is made then. By default
            what `create_fsdp2_device_mesh` was asked for; 1 for a model without experts on meshes
            that were made for some.
        param_dtype: of parameters, where mp_policy is not given.
        mp_policy: of parameters, gradients and outputs; by default gradients are reduced, and
            outputs given, in fp32. (`FSDP2Config` has outputs in bf16 by default.)
        offload_policy: where sharded parameters live.
        cpu_offload: sharded parameters live on the CPU, short for an offload_policy.
        tp_shard_plan: the tensor-parallel plan, its import path, or a function that gives it. By
            default the one registered for the model's class, else the model's own
            (`get_hf_tp_shard_plan`), else that of a Llama, with a warning.
        dp_replicate_mesh_name: axis of the replicas.
        dp_shard_cp_mesh_name: axis to shard over, flattened with context parallelism's.
        tp_mesh_name: axis of tensor parallelism.
        dp_cp_mesh_name: axis of all ranks that see different tokens, over which a training loop
            reduces its loss; it must be there.
        reapply_trainability: called with the model when its parameters are split and not yet
            sharded, to say anew which of them are trained.
        settings: the other fields of `FSDP2Config`, such as activation_checkpointing.

    Raises:
        KeyError: the mesh has not the axes.
        TypeError: the plan or its values have another type, or there is no such setting.
        ValueError: the meshes do not cover or fit the model, its heads or its experts; the plan
            does not fit the model; the model is sharded already, cannot be, or has no layers to
            checkpoint; a setting is refused. The model is as it was after any of these.
    """
    config = FSDP2Config(**settings)
    plan = tp_shard_plan if tp_shard_plan is not None else config.tp_plan
    fsdp_mesh = get_fsdp_dp_mesh(device_mesh, dp_replicate_mesh_name, dp_shard_cp_mesh_name)
    tp_mesh = get_flat_mesh(device_mesh, tp_mesh_name)
    get_flat_mesh(device_mesh, dp_cp_mesh_name)  # a training loop counts on it
    offload = offload_policy
    if cpu_offload and offload is None:
        # Memory is pinned for copies to a device: without one, torch cannot pin it.
        offload = CPUOffloadPolicy(pin_memory=device_mesh.device_type != "cpu")
    elif cpu_offload and not isinstance(offload, CPUOffloadPolicy):
        raise ValueError(f"cpu_offload=True and offload_policy={offload} contradict each other.")
    if config.activation_checkpointing:
        checkpointed_layers(model, config.activation_checkpointing_scope)
    device_mesh = mesh_of_stage(model, device_mesh, sequence_parallel=config.sequence_parallel)
    check_covered(device_mesh, (fsdp_mesh, tp_mesh))
    moe_mesh = choose_moe_mesh(device_mesh, moe_mesh, ep_size)
    experts = [] if moe_mesh is None else check_experts(model, moe_mesh["ep"].size())
    if not experts:  # of a model with experts, this stage has layers without
        moe_mesh = None
    check_can_be_sharded(model, are_split=tp_mesh.size() > 1)
    if config.patch_is_packed_sequence:
        patch_is_packed_sequence()
    if tp_mesh.size() > 1:
        check_heads(model, tp_mesh.size())
        apply_tensor_parallelism(
            model, tp_mesh, plan, sequence_parallel=config.sequence_parallel, handed_out=experts
        )
    if moe_mesh is not None:
        # FSDP2 averages their gradients over ep_shard. The rest it averages over fsdp_mesh,
        # all ranks with tokens of their own, and so must these be.
        scale = moe_mesh.size(0) / fsdp_mesh.size()
        apply_expert_parallelism(model, moe_mesh["ep"], same_tokens=tp_mesh, gradient_scale=scale)
    mode, scope = config.activation_checkpointing, config.activation_checkpointing_scope
    prepare(model, mode, scope, reapply_trainability)
    precision = mp_policy or replace(
        default_mixed_precision(), param_dtype=param_dtype, output_dtype=torch.float32
    )
    if moe_mesh is not None:
        shard_experts(
            model,
            experts,
            moe_mesh,
            replicas=get_flat_mesh(device_mesh, dp_replicate_mesh_name).size(),
            precision=precision,
            offload=offload,
            reshard_after_forward=config.reshard_after_forward is not False,
        )
    depths = (config.fsdp2_backward_prefetch_depth, config.fsdp2_forward_prefetch_depth)
    apply_fsdp_sharding_recursively(
        model,
        fsdp_mesh,
        # Outputs of modules between the layers and the root have the parameters' precision.
        replace(precision, output_dtype=precision.param_dtype or precision.output_dtype),
        offload,
        reshard_after_forward=config.reshard_after_forward,
        prefetch_depths=depths if config.enable_fsdp2_prefetch else None,
    )
    fully_shard(
        model,
        mesh=fsdp_mesh,
        reshard_after_forward=False,  # the root's parameters are needed first in backward
        mp_policy=precision,
        offload_policy=cast("Any", offload),  # None is the default, and its type another
    )
    if config.enable_compile:
        compile_layers(model)
    return model


class FSDP2Manager:
    """Applies an `FSDP2Config` to models: tensor parallelism, checkpointing, FSDP2, compile.

    Args:
        config: the settings.
        device_mesh: as `create_device_meshes` makes it; None for one process.
        moe_mesh: the experts' mesh, if `create_device_meshes` made one.
        ep_size: as for `fsdp2_strategy_parallelize`; where it makes a mesh, all ranks come here.
        packed_sequences: whether sequences are packed in training, so that transformers' check for
            them must stay whatever the config says.

    Attributes:
        moe_mesh: the experts' mesh, given or made; None without expert parallelism.

    Raises:
        ValueError: ep_size does not fit the ranks or moe_mesh, or the two meshes are not in one
            universe, where FSDP2 cannot combine them.
    """

    def __init__(
        self,
        config: FSDP2Config,
        device_mesh: DeviceMesh | None,
        moe_mesh: DeviceMesh | None = None,
        *,
        ep_size: int | None = None,
        packed_sequences: bool = False,
    ) -> None:
        self.config = config
        self.device_mesh = device_mesh
        self.packed_sequences = packed_sequences
        if device_mesh is not None:
            moe_mesh = choose_moe_mesh(device_mesh, moe_mesh, ep_size)
        elif moe_mesh is not None or degree(ep_size, "ep_size") > 1:
            raise ValueError(
                f"ep_size={ep_size} and {moe_mesh=} for one process, with device_mesh=None: give "
                "the mesh that create_device_meshes makes."
            )
        self.moe_mesh = moe_mesh

    def parallelize(
        self, model: _Model, reapply_trainability: Callable[[nn.Module], None] | None = None
    ) -> _Model:
        """Split and shard a model in place, and return it, as `fsdp2_strategy_parallelize` does.

        Where there is nothing to split, in a world of one, activation checkpointing is applied all
        the same, and the model keeps its precision.
        """
        patch = self.config.patch_is_packed_sequence and not self.packed_sequences
        config = replace(self.config, patch_is_packed_sequence=patch, enable_compile=False)
        if self.packed_sequences:
            restore_is_packed_sequence()
        if self.device_mesh is not None and self.device_mesh.size() > 1:
            return fsdp2_strategy_parallelize(
                model,
                self.device_mesh,
                moe_mesh=self.moe_mesh,
                ep_size=1 if self.moe_mesh is None else None,
                reapply_trainability=reapply_trainability,
                **config.to_dict(),
            )
        _logger.info("One process: nothing to split or shard.")
        if patch:
            patch_is_packed_sequence()
        mode, scope = config.activation_checkpointing, config.activation_checkpointing_scope
        prepare(model, mode, scope, reapply_trainability)
        return model

    def maybe_compile(self, model: _Model) -> _Model:
        """Compile each decoder layer of a model in place, if the config says so, and return it.

        Layers are the items of the outermost ModuleLists and ModuleDicts.
        """
        if self.config.enable_compile:
            compile_layers(model)
        return model


@contextlib.contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Iterator[None]:
    """Make all parameters that FSDP2 shards whole within the context, on all ranks.

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


def apply_fsdp_sharding_recursively(
    module: nn.Module,
    mesh: StockDeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None = None,
    *,
    reshard_after_forward: bool | None = None,
    prefetch_depths: tuple[int, int] | None = None,
) -> None:
    """Shard every item of every ModuleList and ModuleDict of a module; the rest is the root's.

    Args:
        module: to search, which may be such a list; itself it is not sharded.
        mesh: 1-D to shard over, or 2-D (replicas, shards).
        mp_policy: of parameters, gradients and outputs; None for their own precision.
        offload_policy: where sharded parameters live; None for the mesh's device.
        reshard_after_forward: of the items; None for all but the last of a list, whose parameters
            are needed again at once in backward.
        prefetch_depths: how many items ahead to gather explicitly in backward and in forward.
    """
    settings: dict[str, Any] = {"mesh": mesh, "offload_policy": offload_policy}
    if mp_policy is not None:
        settings["mp_policy"] = mp_policy
    for named_items in layer_lists(module):
        items = [cast("FSDPModule", item) for _, item in named_items]
        for item in items:
            reshard = item is not items[-1]
            if reshard_after_forward is not None:
                reshard = reshard_after_forward
            fully_shard(cast("nn.Module", item), reshard_after_forward=reshard, **settings)
        backward, forward = prefetch_depths or (0, 0)
        for place, item in enumerate(items):
            if following := items[place + 1 : place + 1 + forward]:
                item.set_modules_to_forward_prefetch(following)
            if preceding := items[max(0, place - backward) : place][::-1]:
                item.set_modules_to_backward_prefetch(preceding)


def check_can_be_sharded(model: nn.Module, *, are_split: bool) -> None:
    """Check that FSDP2 can shard a model, which it would only say in the middle of it.

    Args:
        model: which neither itself nor in one of its layers is sharded yet.
        are_split: whether tensor parallelism comes first, which lays parameters in memory anew.

    Raises:
        ValueError: it cannot.
    """
    modules = [("itself", model), *chain.from_iterable(layer_lists(model))]
    sharded = [name for name, module in modules if isinstance(module, FSDPModule)]
    if sharded:
        raise ValueError(
            f"{type(model).__name__} is sharded already: {sharded}. Parallelize a model once."
        )
    for name, parameter in model.named_parameters():
        if parameter.layout != torch.strided:
            what = f"has the layout {parameter.layout}: give it a dense one"
        elif parameter.ndim == 0:
            what = "is a scalar: give it the shape (1,)"
        elif not (are_split or parameter.is_contiguous()):
            strides, shape = parameter.stride(), tuple(parameter.shape)
            what = f"has strides {strides} for shape {shape}: call contiguous()"
        else:
            continue
        raise ValueError(f"FSDP2 cannot shard {name!r}, which {what}.")
    layers_with: dict[int, dict[int, str]] = {}  # by module, the names of layers by their id
    for layer_name, layer in modules[1:]:
        for module in layer.modules():
            layers_with.setdefault(id(module), {})[id(layer)] = f"layer {layer_name!r}"
    owners: dict[int, dict[int, str]] = {}  # by parameter, the layers that have it; or the root
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = model.get_submodule(name.rpartition(".")[0])
        sharing = owners.setdefault(id(parameter), {})
        sharing |= layers_with.get(id(module), {id(model): f"{name!r} (in no layer)"})
        if len(sharing) > 1:
            raise ValueError(
                f"The parameter {name!r} is shared by {' and '.join(sharing.values())}, and FSDP2 "
                "shards each layer on its own. Give each its own, use one layer twice, or let a "
                "layer's forward get what the other module computes."
            )
