"""FSDP2 for a trainer: tensor parallelism, activation checkpointing, then sharding.

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
from collections.abc import Callable, Iterator, Sequence
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
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from meshverse import DeviceMesh
from meshverse.parallel.config import (
    ExampleInputs,
    FSDP2Config,
    TPPlan,
    check_example_inputs,
    check_plan,
    check_trainability,
    check_type,
)
from meshverse.parallel.experts.expert_parallel import apply_expert_parallelism, check_experts
from meshverse.parallel.experts.sharding import choose_moe_mesh, shard_experts
from meshverse.parallel.meshes.degrees import degree
from meshverse.parallel.meshes.submesh import (
    axis_size,
    check_class,
    check_covered,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    mesh_of_stage,
)
from meshverse.parallel.models.checkpointing import checkpointed_layers, prepare
from meshverse.parallel.models.modules import compile_layers, has_forward, layer_lists
from meshverse.parallel.models.packed_sequences import (
    check_none_is_packed,
    note_packed,
    patch_is_packed_sequence,
    restore_is_packed_sequence,
)
from meshverse.parallel.models.parameters import (
    keeping_attributes,
    second_holders,
    why_not_replaced,
    why_weight_is_not_split,
)
from meshverse.parallel.tensor_parallel.choice import apply_tensor_parallelism

from .added_parameters import check_no_parameters_are_added
from .context_parallel import refuse_short_windows
from .evaluations import reshard_after_evaluations
from .layer_outputs import check_outputs

_logger = logging.getLogger(__name__)
_REDUCE_UNUSED = "set_reduce_scatter_unused_params"  # method of FSDPModule
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
    example_inputs: ExampleInputs | None = None,
    **settings: Any,
) -> _Model:
    """Split a model in place by tensor parallelism, then shard it with FSDP2.

    Args:
        model: model on one device, the same on all ranks; with several pipeline stages, a stage
            that `pipeline_stages` returned. It is changed in place and returned.
        device_mesh: mesh with the axes named below, such as `create_fsdp2_device_mesh` returns.
        moe_mesh: the experts' mesh that `create_fsdp2_device_mesh` returned. Whole experts are
            distributed over its axis ep, and sharded over ep_shard.
        ep_size: degree of expert parallelism, for which an experts' mesh is created if `moe_mesh`
            is None. By default the degree that was passed to `create_fsdp2_device_mesh`. Pass 1 for
            a model without experts, if that degree was larger.
        param_dtype: dtype of parameters, if `mp_policy` is None; must not contradict `mp_policy`.
        mp_policy: precision of parameters, gradients and outputs. By default, gradients are reduced
            in fp32 and outputs are in fp32. (By default, `FSDP2Config` has outputs in bf16.)
        offload_policy: FSDP2's policy for the device that stores sharded parameters.
        cpu_offload: whether the CPU stores sharded parameters; short for an `offload_policy`.
        tp_shard_plan: tensor-parallel plan, its import path, or a function that returns it. By
            default the plan registered for the model's class; else the model's own plan
            (`get_hf_tp_shard_plan`); else Llama's plan, with a warning.
        dp_replicate_mesh_name: axis of the replicas.
        dp_shard_cp_mesh_name: axis to shard over, which includes context parallelism.
        tp_mesh_name: axis of tensor parallelism.
        dp_cp_mesh_name: axis over all ranks with different tokens, over which a training loop
            reduces its loss. It must exist.
        reapply_trainability: function that sets requires_grad of the parameters again; called with
            the model after its parameters are split, and before they are sharded.
        example_inputs: arguments of the model's forward, as in `apply_tp_plan`.
        settings: other fields of `FSDP2Config`, such as activation_checkpointing.

    Raises:
        KeyError: the mesh lacks an axis.
        TypeError: a mesh is not Meshverse's, another argument or a style in the plan has a wrong
            type, or there is no such setting.
        ValueError: the axes do not cover the mesh, or overlap; the model's heads or experts are not
            divisible by their axes; the plan does not fit the model; the model is already sharded,
            cannot be sharded, or has no layers to checkpoint or compile; or an argument has a wrong
            value, or contradicts another one. The model is unchanged then.
    """
    check_class("device_mesh", device_mesh)
    if moe_mesh is not None:
        check_class("moe_mesh", moe_mesh)
    check_type("param_dtype", param_dtype, torch.dtype, None)
    check_type("cpu_offload", cpu_offload, bool)
    check_plan("tp_shard_plan", tp_shard_plan)
    check_trainability(reapply_trainability)
    check_example_inputs(example_inputs)
    precision = mp_policy
    if precision is None:
        precision = MixedPrecisionPolicy(param_dtype, torch.float32, torch.float32)
    config = FSDP2Config(mp_policy=precision, offload_policy=offload_policy, **settings)
    if param_dtype not in (torch.bfloat16, precision.param_dtype):
        raise ValueError(f"param_dtype={param_dtype} contradicts {mp_policy=}: give only one.")
    if tp_shard_plan is not None and config.tp_plan not in (None, tp_shard_plan):
        raise ValueError(f"{tp_shard_plan=} contradicts tp_plan={config.tp_plan}: give only one.")
    plan = config.tp_plan if tp_shard_plan is None else tp_shard_plan
    fsdp_mesh = get_fsdp_dp_mesh(device_mesh, dp_replicate_mesh_name, dp_shard_cp_mesh_name)
    tp_mesh = get_flat_mesh(device_mesh, tp_mesh_name)
    get_flat_mesh(device_mesh, dp_cp_mesh_name)  # raises if the axis does not exist
    offload = offload_policy
    if cpu_offload and offload is None:
        # Pinned memory speeds up copies to a device; torch cannot pin memory without a device.
        offload = CPUOffloadPolicy(pin_memory=device_mesh.device_type != "cpu")
    elif cpu_offload and not isinstance(offload, CPUOffloadPolicy):
        raise ValueError(f"cpu_offload=True contradicts offload_policy={offload}: give only one.")
    _check_can_offload(offload)
    if config.reduce_unused_parameters and not hasattr(FSDPModule, _REDUCE_UNUSED):
        raise ValueError(
            "reduce_unused_parameters=True: FSDP2 of this torch cannot reduce gradients of unused "
            "parameters. Use torch 2.13 or newer, or let all ranks use the same parameters."
        )
    if config.enable_compile:
        _check_has_layers_to_compile(model)
    if config.patch_is_packed_sequence:
        check_none_is_packed()
    if config.activation_checkpointing:
        checkpointed_layers(model, config.activation_checkpointing_scope)
    device_mesh = mesh_of_stage(model, device_mesh, sequence_parallel=config.sequence_parallel)
    check_covered(device_mesh, (fsdp_mesh, tp_mesh))
    moe_mesh = choose_moe_mesh(device_mesh, moe_mesh, ep_size)
    check_can_be_sharded(model)
    _check_not_complex(model, precision)
    experts = [] if moe_mesh is None else check_experts(model, moe_mesh["ep"].size(), tp_mesh)
    if not experts:  # a stage without experts, of a model with experts
        moe_mesh = None
    if reapply_trainability is None:  # or else it may freeze some
        _check_one_dtype(model, experts)
    with keeping_attributes(model):
        if tp_mesh.size() > 1:
            apply_tensor_parallelism(
                model,
                tp_mesh,
                plan,
                sequence_parallel=config.sequence_parallel,
                split_logits=config.split_logits,
                handed_out=experts,
                example_inputs=example_inputs,
            )
        if moe_mesh is not None:
            apply_expert_parallelism(model, moe_mesh["ep"], same_tokens=tp_mesh)
        if config.patch_is_packed_sequence:  # behind what can be refused
            patch_is_packed_sequence()
        mode, scope = config.activation_checkpointing, config.activation_checkpointing_scope
        prepare(model, mode, scope, reapply_trainability)
        if moe_mesh is not None:
            shard_experts(
                model,
                experts,
                moe_mesh,
                replicas=get_flat_mesh(device_mesh, dp_replicate_mesh_name).size(),
                parts=fsdp_mesh.size(),
                precision=precision,
                offload=offload,
                reshard_after_forward=config.reshard_after_forward is not False,
            )
        depths = (config.fsdp2_backward_prefetch_depth, config.fsdp2_forward_prefetch_depth)
        apply_fsdp_sharding_recursively(
            model,
            fsdp_mesh,
            # Outputs of layers have the parameters' dtype; only the root's have output_dtype.
            replace(precision, output_dtype=precision.param_dtype),
            offload,
            reshard_after_forward=config.reshard_after_forward,
            prefetch_depths=depths if config.enable_fsdp2_prefetch else None,
        )
        fully_shard(
            model,
            mesh=fsdp_mesh,
            reshard_after_forward=False,  # backward needs the root's parameters first
            mp_policy=precision,
            offload_policy=cast("Any", offload),  # None is the default, though not in its type
        )
    if config.reduce_unused_parameters:
        getattr(model, _REDUCE_UNUSED)(True)  # not in all versions of torch
    reshard_after_evaluations(model, is_kept=config.reshard_after_forward is False)
    check_no_parameters_are_added(model)
    if axis_size(device_mesh, "cp") > 1:
        refuse_short_windows(model)
    check_outputs(model, {"": model, **dict(chain.from_iterable(layer_lists(model)))})
    if config.enable_compile:
        compile_layers(model, are_split=tp_mesh.size() > 1)
    return model


class FSDP2Manager:
    """Applies an `FSDP2Config` to models: tensor parallelism, checkpointing, FSDP2, compile.

    Args:
        config: settings of FSDP2.
        device_mesh: mesh that `create_device_meshes` returned; None for a single process.
        moe_mesh: experts' mesh, if `create_device_meshes` returned one.
        ep_size: as in `fsdp2_strategy_parallelize`. All ranks must construct the manager, because
            it may create the experts' mesh.
        packed_sequences: whether training uses packed sequences. If so, transformers' check for
            them is not replaced, even if the config says so.

    Attributes:
        moe_mesh: experts' mesh, passed or created; None without expert parallelism.

    Raises:
        TypeError: `config` is no `FSDP2Config`, or a mesh is not Meshverse's.
        ValueError: `ep_size` does not fit the number of ranks or `moe_mesh`; or the two meshes are
            not in one universe, so that FSDP2 cannot combine them.
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
        check_type("config", config, FSDP2Config)
        check_type("packed_sequences", packed_sequences, bool)
        self.config = config
        self.device_mesh = device_mesh
        self.packed_sequences = packed_sequences
        if device_mesh is not None:
            check_class("device_mesh", device_mesh)
            if moe_mesh is not None:
                check_class("moe_mesh", moe_mesh)
            moe_mesh = choose_moe_mesh(device_mesh, moe_mesh, ep_size)
        elif moe_mesh is not None or degree(ep_size, "ep_size") > 1:
            raise ValueError(
                f"ep_size={ep_size} and {moe_mesh=} need a mesh, but device_mesh=None. Give the "
                "mesh that create_device_meshes() returns."
            )
        self.moe_mesh = moe_mesh

    def parallelize(
        self,
        model: _Model,
        reapply_trainability: Callable[[nn.Module], None] | None = None,
        *,
        example_inputs: ExampleInputs | None = None,
    ) -> _Model:
        """Split and shard a model in place with `fsdp2_strategy_parallelize`, and return it.

        On one rank, nothing is split or sharded: only activation checkpointing and
        `reapply_trainability` are applied, and the model keeps its precision.
        """
        check_trainability(reapply_trainability)
        check_example_inputs(example_inputs)
        if self.config.enable_compile:  # in `maybe_compile`
            _check_has_layers_to_compile(model)
        patch = self.config.patch_is_packed_sequence and not self.packed_sequences
        config = replace(self.config, patch_is_packed_sequence=patch, enable_compile=False)
        if self.packed_sequences:
            restore_is_packed_sequence()
        if self.device_mesh is not None and self.device_mesh.size() > 1:
            fsdp2_strategy_parallelize(
                model,
                self.device_mesh,
                moe_mesh=self.moe_mesh,
                ep_size=1 if self.moe_mesh is None else None,
                reapply_trainability=reapply_trainability,
                example_inputs=example_inputs,
                **config.to_dict(),
            )
        else:
            _logger.info("One process: nothing to split or shard.")
            if patch:
                check_none_is_packed()
            mode, scope = config.activation_checkpointing, config.activation_checkpointing_scope
            prepare(model, mode, scope, reapply_trainability)
            if patch:  # behind what can be refused
                patch_is_packed_sequence()
        if self.packed_sequences:
            note_packed(model)
        return model

    def maybe_compile(self, model: _Model) -> _Model:
        """Compile each layer of a model in place, if the config says so, and return the model.

        Layers are the items of the outermost ModuleLists and ModuleDicts. ValueError if there are
        none.
        """
        if self.config.enable_compile:
            _check_has_layers_to_compile(model)
            mesh = self.device_mesh
            are_split = mesh is not None and get_flat_mesh(mesh, "tp").size() > 1
            compile_layers(model, are_split=are_split)
        return model


@contextlib.contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Iterator[None]:
    """Unshard all parameters that FSDP2 shards, on all ranks, within the context.

    A first forward inside needs no all-gather, but reshards each layer after its use as usual,
    unless the layer has `reshard_after_forward=False`; one without gradients also reshards the rest
    of the model. Changes to parameters are lost, except those that a rank makes to its own shard.
    With tensor parallelism, parameters are still DTensors on the TP mesh: only the sharding of
    FSDP2 is undone.

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
    """Shard every item of every ModuleList and ModuleDict of a module, but not the module itself.

    Args:
        module: the module to search, which may be such a list.
        mesh: 1-D mesh (shards), or 2-D mesh (replicas, shards).
        mp_policy: precision of parameters, gradients and outputs; None to keep it.
        offload_policy: policy for the device that stores sharded parameters; None for the mesh's.
        reshard_after_forward: whether items are resharded after forward. None for all items but
            the last one of a list, whose parameters backward needs first.
        prefetch_depths: number of items to gather ahead explicitly, in backward and in forward.

    Raises:
        TypeError: a value has a wrong type.
        ValueError: an item is sharded already, or in two lists; or a value is wrong. The module is
            unchanged then.
    """
    backward, forward = prefetch_depths or (0, 0)
    FSDP2Config(  # checks the values
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
        fsdp2_backward_prefetch_depth=backward,
        fsdp2_forward_prefetch_depth=forward,
    )
    _check_can_offload(offload_policy)
    _check_layers(module)
    settings: dict[str, Any] = {"mesh": mesh, "offload_policy": offload_policy}
    if mp_policy is not None:
        settings["mp_policy"] = mp_policy
    for named_items in layer_lists(module):
        items = [cast("FSDPModule", item) for _, item in named_items]
        for item in items:
            reshard = item is not items[-1]
            if reshard_after_forward is not None:
                reshard = reshard_after_forward
            layer = cast("nn.Module", item)
            with keeping_attributes(layer):
                fully_shard(layer, reshard_after_forward=reshard, **settings)
        for index, item in enumerate(items):
            if following := items[index + 1 : index + 1 + forward]:
                item.set_modules_to_forward_prefetch(following)
            if preceding := items[max(0, index - backward) : index][::-1]:
                item.set_modules_to_backward_prefetch(preceding)


def _check_can_offload(policy: OffloadPolicy | None) -> None:
    if getattr(policy, "pin_memory", False) and not torch.accelerator.is_available():
        raise ValueError(
            f"offload_policy={policy}: torch pins memory only for an accelerator, and there is "
            "none. Use CPUOffloadPolicy(pin_memory=False)."
        )


def _check_has_layers_to_compile(model: nn.Module) -> None:
    layers = list(chain.from_iterable(layer_lists(model)))
    lacking = [name for name, layer in layers if not has_forward(layer)]
    if lacking or not layers:
        what = f"layers without a forward, {lacking[:4]}" if lacking else "no ModuleList of layers"
        raise ValueError(
            f"enable_compile=True would do nothing: {type(model).__name__} has {what}. Call the "
            "model's own compile() instead, and leave enable_compile out."
        )


def _check_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a model, with their names; ValueError if FSDP2 cannot shard one."""
    names: dict[int, str] = {}
    layers = list(chain.from_iterable(layer_lists(model)))
    for name, layer in layers:
        if isinstance(layer, FSDPModule):
            raise ValueError(
                f"{type(model).__name__} is sharded already, at {name!r}. Parallelize a model only "
                "once."
            )
        if not has_forward(layer):
            raise ValueError(
                f"FSDP2 cannot shard the layer {name!r} of {type(model).__name__}: a "
                f"{type(layer).__name__} has no forward, at which FSDP2 would gather it. Give it a "
                "forward that calls its parts."
            )
        if (first := names.setdefault(id(layer), name)) != name:
            raise ValueError(
                f"The layers {first!r} and {name!r} of {type(model).__name__} are one module in "
                "two lists, which FSDP2 would shard twice. Keep it in one list."
            )
    return layers


def check_can_be_sharded(model: nn.Module) -> None:
    """Check that FSDP2 can shard a model, because FSDP2 itself would fail half-way.

    Raises:
        ValueError: FSDP2 cannot shard the model, or a part of it is distributed already.
    """
    if isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is sharded already. Parallelize it only once.")
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and not has_forward(model):
        raise ValueError(
            f"FSDP2 cannot shard a {type(model).__name__}, which has no forward. Give the module "
            "that calls its items."
        )
    layers = _check_layers(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            what = "has no shape yet: call the model once, so that its lazy modules get theirs"
        elif parameter.layout != torch.strided:
            what = f"has the layout {parameter.layout}: give it a dense one"
        elif parameter.ndim == 0:
            what = "is a scalar: give it the shape (1,)"
        elif isinstance(parameter, DTensor):
            what = f"is distributed already, over {parameter.device_mesh}: give a whole model"
        elif not parameter.is_contiguous():
            strides, shape = parameter.stride(), tuple(parameter.shape)
            what = f"has strides {strides} for shape {shape}: call contiguous()"
        elif (why := why_not_replaced(parameter)) is not None:
            what = why
        else:
            continue
        raise ValueError(f"FSDP2 cannot shard {name!r}, which {what}.")
    for name, module in model.named_modules():
        if (why := why_weight_is_not_split(module)) is not None:
            raise ValueError(
                f"FSDP2 cannot shard the embedding {name!r}, which {why}. Leave the setting out."
            )
    for name, where in second_holders(model).items():
        raise ValueError(
            f"FSDP2 cannot shard {name!r}: {where}, and would not follow it. Share a parameter by "
            "registering it under both names (b.weight = a.weight), or pass it in a forward."
        )
    words = {id(layer): f"layer {name!r}" for name, layer in layers}
    owners: dict[int, dict[int, str]] = {}  # of each parameter: layers; the model counts as one
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = module = model
        for part in name.split(".")[:-1]:
            module = getattr(module, part)
            owner = module if id(module) in words else owner
        sharing = owners.setdefault(id(parameter), {})
        sharing[id(owner)] = words.get(id(owner), f"{name!r} (in no layer)")
        if len(sharing) > 1:
            raise ValueError(
                f"The parameter {name!r} is shared by {' and '.join(sharing.values())}, but FSDP2 "
                "shards each layer separately. Give each its own parameter, use one layer twice, "
                "or pass the output of one module to the other's forward."
            )


def _check_not_complex(model: nn.Module, precision: MixedPrecisionPolicy) -> None:
    """Raise ValueError if FSDP2 is to convert complex parameters or gradients to a real dtype."""
    kept = (None, torch.complex64, torch.complex128)
    if precision.param_dtype in kept and precision.reduce_dtype in kept:
        return
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ValueError(
                f"{name!r} of {type(model).__name__} has the dtype {parameter.dtype}, which FSDP2 "
                f"cannot convert to param_dtype={precision.param_dtype}, or its gradient to "
                f"reduce_dtype={precision.reduce_dtype}. Pass mp_policy=MixedPrecisionPolicy()."
            )


def _check_one_dtype(model: nn.Module, experts: Sequence[str]) -> None:
    """Check that FSDP2 can reduce the gradients of each layer together.

    Raises:
        ValueError: a layer, or the rest of the model, has trainable parameters of several dtypes.
    """
    layers = {id(layer): name for name, layer in chain.from_iterable(layer_lists(model))}
    apart = {id(model.get_submodule(name)) for name in experts}
    found: dict[str, dict[torch.dtype, str]] = {}

    def walk(module: nn.Module, prefix: str, layer: str) -> None:
        layer = layers.get(id(module), layer)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                found.setdefault(layer, {}).setdefault(parameter.dtype, prefix + name)
        for name, child in module.named_children():
            if id(child) not in apart:
                walk(child, f"{prefix}{name}.", layer)

    walk(model, "", "")
    for layer, names in found.items():
        if len(names) > 1:
            where = f"layer {layer!r}" if layer else "rest, outside of its layers,"
            found_in = ", ".join(f"{kind} ({name!r})" for kind, name in names.items())
            raise ValueError(
                f"FSDP2 cannot shard {type(model).__name__}: its {where} has trainable parameters "
                f"of several dtypes, {found_in}. Their gradients are reduced together: give them "
                "one dtype, or freeze some first."
            )
