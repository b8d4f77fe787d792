"""Megatron-FSDP for a trainer: tensor parallelism, then sharding by the package `megatron-fsdp`.

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

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshverse import DeviceMesh
from meshverse.parallel.config import (
    ExampleInputs,
    MegatronFSDPConfig,
    TPPlan,
    check_example_inputs,
    check_plan,
    check_trainability,
    check_type,
)
from meshverse.parallel.meshes.create import requested_ep_size
from meshverse.parallel.meshes.submesh import (
    axis_size,
    check_class,
    check_covered,
    get_flat_mesh,
    get_submesh,
)
from meshverse.parallel.models.checkpointing import checkpointed_layers, prepare
from meshverse.parallel.models.modules import import_class_from_path
from meshverse.parallel.tensor_parallel.choice import apply_tensor_parallelism


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tp_shard_plan: TPPlan | None = None,
    dp_shard_dim: str | None = None,
    tp_dim: str = "tp",
    reapply_trainability: Callable[[nn.Module], None] | None = None,
    example_inputs: ExampleInputs | None = None,
    **settings: Any,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Split a model by tensor parallelism and shard it with Megatron-FSDP.

    Args:
        model: model to split in place and then wrap.
        device_mesh: mesh that `create_megatron_fsdp_device_mesh` returned; the model is moved to
            its device type.
        optimizer: optimizer of all of the model's parameters that require grad, without a state.
            Afterwards it has the sharded parameters, in one group with the optimizer's default
            settings.
        tp_shard_plan: tensor-parallel plan; by default one is chosen for the model.
        dp_shard_dim: axis to shard over; by default dp_cp with context parallelism, else dp.
        tp_dim: axis of tensor parallelism.
        reapply_trainability: function that sets requires_grad of the parameters again; called with
            the model after its parameters are split, and before they are sharded.
        example_inputs: arguments of the model's forward, as in `apply_tp_plan`.
        settings: fields of `MegatronFSDPConfig`.

    Returns:
        The wrapped model and the optimizer. If the axis to shard over has one rank, the model is
        not wrapped.

    Raises:
        ImportError: `megatron-fsdp` is not installed.
        KeyError: the mesh lacks an axis.
        TypeError: the mesh is not Meshverse's, another argument has a wrong type, or there is no
            such setting.
        ValueError: the mesh has axes over which this function splits nothing; the installed version
            does not support a setting; the model has no unit modules, or lacks parameters of the
            optimizer; or the optimizer lacks parameters to train, or has a state. The model is
            unchanged then.
    """
    config = MegatronFSDPConfig(**settings)
    check_class("device_mesh", device_mesh)
    check_type("optimizer", optimizer, torch.optim.Optimizer, None)
    check_plan("tp_shard_plan", tp_shard_plan)
    check_trainability(reapply_trainability)
    check_example_inputs(example_inputs)
    names = {id(each): name for name, each in model.named_parameters(remove_duplicate=False)}
    groups = [] if optimizer is None else optimizer.param_groups
    foreign = [each.shape for group in groups for each in group["params"] if id(each) not in names]
    if foreign:
        raise ValueError(
            f"The optimizer has {len(foreign)} parameters that {type(model).__name__} lacks, of "
            f"shapes {[tuple(shape) for shape in foreign]}. Create it from the model."
        )
    if optimizer is not None and optimizer.state:
        raise ValueError(
            f"The optimizer has the state of {len(optimizer.state)} parameters, which would be "
            "lost. Parallelize the model before the first step, and load a state afterwards."
        )
    shard_dim = dp_shard_dim or ("dp_cp" if axis_size(device_mesh, "cp") > 1 else "dp")
    shard_mesh, tp_mesh = get_flat_mesh(device_mesh, shard_dim), get_flat_mesh(device_mesh, tp_dim)
    sizes = {axis: axis_size(device_mesh, axis) for axis in ("pp", "dp_replicate")}
    for name, size in (sizes | {"ep_size": requested_ep_size(device_mesh)}).items():
        if size > 1:
            raise ValueError(
                f"Megatron-FSDP does not support {name}={size}. Create the mesh with "
                "create_megatron_fsdp_device_mesh, or use FSDP2."
            )
    check_covered(device_mesh, (shard_mesh, tp_mesh))
    if config.activation_checkpointing:
        checkpointed_layers(model, "all")
    package: Any = None
    arguments: dict[str, Any] = {}
    if shard_mesh.size() > 1:
        _check_trains_all(model, optimizer)
        package = _import_megatron_fsdp()
        shard = package.fully_shard_model if optimizer is None else package.fully_shard
        place = (torch.cuda.current_device(),) if device_mesh.device_type == "cuda" else ()
        arguments = {
            **fully_shard_arguments(config, shard, package),
            # A mesh with these two as native axes: the package slices the mesh, which torch
            # refuses for flattened axes.
            "device_mesh": get_submesh(device_mesh, (shard_dim, tp_dim)),
            "dp_shard_dim": shard_dim,
            "tp_dim": tp_dim,
            "fsdp_unit_modules": _unit_modules(model, config.megatron_fsdp_unit_modules),
            "device": torch.device(device_mesh.device_type, *place),
        }
    if tp_mesh.size() > 1:
        apply_tensor_parallelism(model, tp_mesh, tp_shard_plan, example_inputs=example_inputs)
    prepare(model, config.activation_checkpointing, "all", reapply_trainability)
    if package is None:
        warnings.warn(
            f"The axis {shard_dim!r} has size 1: Megatron-FSDP has nothing to shard, and only "
            "tensor parallelism is applied.",
            stacklevel=2,
        )
        current = dict(model.named_parameters(remove_duplicate=False))
        for group in groups:
            group["params"] = [current[names[id(old)]] for old in group["params"]]
        return model, optimizer
    if optimizer is None:
        return package.fully_shard_model(model, **arguments), None
    _warn_of_lost_groups(optimizer)
    with _first_step_without_effect(optimizer):
        wrapped, optimizer = package.fully_shard(model, optimizer, **arguments)
    return wrapped, optimizer


class MegatronFSDPManager:
    """Applies a `MegatronFSDPConfig` to models.

    Args:
        config: settings of Megatron-FSDP.
        device_mesh: mesh that `create_device_meshes` returned; None for a single process.

    Raises:
        TypeError: `config` is no `MegatronFSDPConfig`, or the mesh is not Meshverse's.
    """

    def __init__(self, config: MegatronFSDPConfig, device_mesh: DeviceMesh | None) -> None:
        check_type("config", config, MegatronFSDPConfig)
        if device_mesh is not None:
            check_class("device_mesh", device_mesh)
        self.config = config
        self.device_mesh = device_mesh

    def parallelize(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        reapply_trainability: Callable[[nn.Module], None] | None = None,
        *,
        example_inputs: ExampleInputs | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """Split and shard a model by `megatron_fsdp_strategy_parallelize`.

        On one rank, only activation checkpointing and `reapply_trainability` are applied.
        """
        check_trainability(reapply_trainability)
        check_example_inputs(example_inputs)
        if self.device_mesh is None or self.device_mesh.size() == 1:
            mode = self.config.activation_checkpointing
            prepare(model, mode, "all", reapply_trainability)
            return model, optimizer
        return megatron_fsdp_strategy_parallelize(
            model,
            self.device_mesh,
            optimizer,
            reapply_trainability=reapply_trainability,
            example_inputs=example_inputs,
            **self.config.to_dict(),
        )


def _import_megatron_fsdp() -> ModuleType:
    try:
        return importlib.import_module("megatron_fsdp")
    except ImportError as error:
        raise ImportError(
            f"megatron-fsdp cannot be imported: {error}. Install it with `pip install "
            'megatron-fsdp`, or `pip install "meshverse[megatron]"`.'
        ) from error


def fully_shard_arguments(
    config: MegatronFSDPConfig, shard: Callable[..., Any], package: ModuleType
) -> dict[str, Any]:
    """Return a config as arguments for the installed package.

    Args:
        config: settings to convert.
        shard: `fully_shard` or `fully_shard_model`; its signature has the known arguments.
        package: the module `megatron_fsdp`.

    Raises:
        ValueError: a setting is not its default, and the package has no argument for it.
    """
    known = inspect.signature(shard).parameters
    wanted, defaults = _settings_of(config), _settings_of(MegatronFSDPConfig())
    arguments = {name: value for name, value in wanted.items() if name in known}
    if "mixed_precision_policy" in known:  # newer versions have it instead of these two
        reduced = torch.float32 if wanted.pop("grad_reduce_in_fp32") else None
        kept = torch.float32 if wanted.pop("preserve_fp32_weights") else None
        arguments["mixed_precision_policy"] = package.MixedPrecisionPolicy(
            main_params_dtype=kept, main_grads_dtype=reduced, grad_comm_dtype=reduced
        )
    if "check_for_nan_in_grad" not in known:  # the package never checks, as False asks for
        del wanted["check_for_nan_in_grad"]
    changed = {name: value for name, value in wanted.items() if value != defaults[name]}
    unknown = {name: value for name, value in changed.items() if name not in known}
    if unknown:
        raise ValueError(
            f"megatron-fsdp {package.__version__} has no argument for {unknown}. Leave them at "
            "their defaults, or install a version that has them."
        )
    return arguments


def _settings_of(config: MegatronFSDPConfig) -> dict[str, Any]:
    """Return the settings that are arguments of the package, by their names there."""
    settings = config.to_dict()
    del settings["megatron_fsdp_unit_modules"], settings["activation_checkpointing"]
    settings["init_model_with_meta_device"] = settings.pop("init_fsdp_with_meta_device")
    return settings


def _unit_modules(
    model: nn.Module, given: Sequence[str | type[nn.Module]] | None
) -> list[type[nn.Module]]:
    """Return the classes of modules to shard one by one; by default `_no_split_modules`."""
    present = {type(module) for module in model.modules()}
    if given is None:
        names = getattr(model, "_no_split_modules", None) or ()
        units = [each for each in present if each.__name__ in names]
        absent = [] if units else [*names, "its _no_split_modules"]
    else:
        units = [import_class_from_path(each) if isinstance(each, str) else each for each in given]
        absent = [unit for unit in units if not any(issubclass(each, unit) for each in present)]
    if absent:
        raise ValueError(
            f"{type(model).__name__} has no modules of {absent}. megatron_fsdp_unit_modules must "
            "be classes of its modules."
        )
    return sorted(units, key=lambda cls: cls.__qualname__)


@contextlib.contextmanager
def _first_step_without_effect(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo the effects of an optimizer step, which megatron-fsdp runs to create the state.

    With zero gradients, this step would still decay weights, add their decay to moments, and count
    in Adam's bias correction. A state of zeros stays, as checkpoints are loaded into it; one that a
    first step may not begin with, such as NAdam's product, is created anew by the first step.
    """
    defaults: dict[str, Any] = optimizer.defaults
    settings = {name: defaults[name] for name in defaults if name in ("lr", "weight_decay")}
    defaults.update(dict.fromkeys(settings, 0.0))
    try:
        yield
    finally:
        defaults.update(settings)
    for group in optimizer.param_groups:
        group.update(settings)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0  # a tensor or a number
    values = [value for state in optimizer.state.values() for value in state.values()]
    # SGD dampens no gradient that it finds no buffer for.
    if defaults.get("dampening") or not all(map(_is_zero, values)):
        optimizer.state.clear()


def _is_zero(value: Any) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    return not (local.any() if isinstance(local, Tensor) else local)


def _check_trains_all(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that an optimizer has all parameters to train: megatron-fsdp gives it the others."""
    if optimizer is None:
        return
    given = {id(each) for group in optimizer.param_groups for each in group["params"]}
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    absent = [name for name, each in trained if id(each) not in given]
    if absent:
        raise ValueError(
            f"The optimizer lacks {len(absent)} parameters of {type(model).__name__} that require "
            f"grad, and megatron-fsdp would train them, too: {absent[:6]}. Freeze them with "
            "requires_grad_(False), or create the optimizer with them."
        )


def _warn_of_lost_groups(optimizer: torch.optim.Optimizer) -> None:
    """Warn if an optimizer has groups or settings that megatron-fsdp drops."""
    groups = optimizer.param_groups
    changed = [
        {name: group[name] for name, value in optimizer.defaults.items() if group[name] != value}
        for group in groups
    ]
    if len(groups) > 1 or any(changed):
        warnings.warn(
            f"megatron-fsdp puts all parameters into one group with the optimizer's defaults: the "
            f"settings {changed} of its {len(groups)} groups are lost. To keep them, do not pass "
            "the optimizer here; create it from the wrapped model's parameters, and call "
            "megatron_fsdp.fully_shard_optimizer.",
            stacklevel=3,
        )
