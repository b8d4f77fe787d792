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

import contextlib
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshverse import DeviceMesh
from meshverse.parallel.config import MegatronFSDPConfig, TPPlan
from meshverse.parallel.meshes.submesh import get_flat_mesh, get_submesh
from meshverse.parallel.models.checkpointing import apply_activation_checkpointing
from meshverse.parallel.models.import_paths import import_class_from_path
from meshverse.parallel.tensor_parallel.choice import apply_tensor_parallelism, check_heads

__all__ = [
    "MegatronFSDPManager",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
]

_logger = logging.getLogger(__name__)


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tp_shard_plan: TPPlan | None = None,
    dp_shard_dim: str | None = None,
    tp_dim: str = "tp",
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
        settings: fields of `MegatronFSDPConfig`.

    Returns:
        The wrapped model and the optimizer. On one data-parallel rank, where there is nothing to
        shard, the model itself.

    Raises:
        ImportError: `megatron-fsdp` is not installed.
        KeyError: the mesh has not the axes.
        TypeError: a setting that is none.
        ValueError: a setting that the installed version does not know; the model has no unit
            modules, or not all parameters of the optimizer. The model is as it was then.
    """
    config = MegatronFSDPConfig(**settings)
    names = {id(parameter): name for name, parameter in _named_parameters(model)}
    _check_optimizer(optimizer, names, model)
    shard_dim = dp_shard_dim or _default_shard_dim(device_mesh)
    tp_mesh = get_flat_mesh(device_mesh, tp_dim)
    if get_flat_mesh(device_mesh, shard_dim).size() == 1:
        warnings.warn(
            f"The axis {shard_dim!r} has size 1: Megatron-FSDP has nothing to shard, and only "
            "tensor parallelism is applied.",
            stacklevel=2,
        )
        _split(model, tp_mesh, tp_shard_plan, config)
        _point_to_new_parameters(optimizer, names, model)
        return model, optimizer

    package = _import_package()
    shard = package.fully_shard_model if optimizer is None else package.fully_shard
    arguments = {
        **fully_shard_arguments(config, shard, package),
        # Both axes as the mesh's own: the package slices by them, which torch refuses for
        # flattened axes.
        "device_mesh": get_submesh(device_mesh, (shard_dim, tp_dim)),
        "dp_shard_dim": shard_dim,
        "tp_dim": tp_dim,
        "fsdp_unit_modules": _unit_modules(model, config.megatron_fsdp_unit_modules),
        "device": _device(device_mesh),
    }
    _split(model, tp_mesh, tp_shard_plan, config)
    if optimizer is None:
        return shard(model, **arguments), None
    _warn_of_lost_groups(optimizer)
    with _first_step_without_effect(optimizer):
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
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
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
            return model, optimizer
        return megatron_fsdp_strategy_parallelize(
            model, self.device_mesh, optimizer, **self.config.to_dict()
        )


def _split(
    model: nn.Module, tp_mesh: DeviceMesh, plan: TPPlan | None, config: MegatronFSDPConfig
) -> None:
    if tp_mesh.size() > 1:
        check_heads(model, tp_mesh.size())
        apply_tensor_parallelism(model, tp_mesh, plan)
    if config.activation_checkpointing:
        apply_activation_checkpointing(model, "full")


def fully_shard_arguments(
    config: MegatronFSDPConfig, shard: Callable[..., Any], package: ModuleType
) -> dict[str, Any]:
    """A config as arguments of the installed `megatron_fsdp.fully_shard`.

    Args:
        config: the settings.
        shard: the function, whose signature decides.
        package: `megatron_fsdp`.

    Raises:
        ValueError: a setting that is on, and not by default, has no argument.
    """
    known = inspect.signature(shard).parameters
    wanted = config.to_dict()
    for ours in ("megatron_fsdp_unit_modules", "activation_checkpointing"):
        del wanted[ours]
    wanted["init_model_with_meta_device"] = wanted.pop("init_fsdp_with_meta_device")
    arguments = {name: value for name, value in wanted.items() if name in known}
    if "mixed_precision_policy" in known:  # newer versions, in place of the two
        arguments["mixed_precision_policy"] = _mixed_precision(config, package)
        del wanted["grad_reduce_in_fp32"], wanted["preserve_fp32_weights"]
    defaults = MegatronFSDPConfig().to_dict()
    unknown = {name: value for name, value in wanted.items() if value and name not in known}
    changed = {name: value for name, value in unknown.items() if value != defaults.get(name)}
    if changed:
        raise ValueError(
            f"megatron-fsdp {package.__version__} has no argument for {changed}. Leave them at "
            "their defaults, or install a version that knows them."
        )
    if unknown:
        _logger.info("megatron-fsdp %s has no argument for %s.", package.__version__, unknown)
    return arguments


def _mixed_precision(config: MegatronFSDPConfig, package: ModuleType) -> Any:
    return package.MixedPrecisionPolicy(
        main_params_dtype=torch.float32 if config.preserve_fp32_weights else None,
        main_grads_dtype=torch.float32 if config.grad_reduce_in_fp32 else None,
        grad_comm_dtype=torch.float32 if config.grad_reduce_in_fp32 else None,
    )


def _import_package() -> ModuleType:
    try:
        return importlib.import_module("megatron_fsdp")
    except ImportError as error:
        raise ImportError(
            "Megatron-FSDP needs the package megatron-fsdp, which cannot be imported: "
            f"{error}. Install it with `pip install megatron-fsdp`, or `pip install "
            '"meshverse[megatron]"`.'
        ) from error


def _default_shard_dim(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ()
    return "dp_cp" if "cp" in names and mesh["cp"].size() > 1 else "dp"


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _unit_modules(
    model: nn.Module, asked: Sequence[str | type[nn.Module]] | None
) -> list[type[nn.Module]]:
    """Classes of the modules to shard one by one: as asked, else the model's `_no_split_modules`.

    Raises:
        ValueError: an import path leads nowhere, or the model has no such modules.
    """
    present = {type(module) for module in model.modules()}
    if asked is not None:
        units = [import_class_from_path(each) if isinstance(each, str) else each for each in asked]
        absent = [unit for unit in units if not any(issubclass(each, unit) for each in present)]
        if absent:
            raise ValueError(
                f"megatron_fsdp_unit_modules: {type(model).__name__} has no modules of {absent}. "
                "Give classes of its modules."
            )
        return units
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = {each for each in present if each.__name__ in names}
    if not found:
        raise ValueError(
            f"No unit modules for {type(model).__name__}: its _no_split_modules {sorted(names)} "
            "name none of its modules. Give their classes as megatron_fsdp_unit_modules."
        )
    return sorted(found, key=lambda cls: cls.__qualname__)


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _check_optimizer(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str], model: nn.Module
) -> None:
    """Check that an optimizer has parameters of the model only, by their ids.

    Raises:
        ValueError: it has others.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    foreign = [each.shape for group in groups for each in group["params"] if id(each) not in names]
    if foreign:
        raise ValueError(
            f"The optimizer has {len(foreign)} parameters that {type(model).__name__} has not, of "
            f"shapes {[tuple(shape) for shape in foreign]}. Make it of the model's parameters, "
            "before the model is split."
        )


def _point_to_new_parameters(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str], model: nn.Module
) -> None:
    """Give the optimizer the parameters that have taken the place of those it was made with.

    Args:
        optimizer: to change.
        names: of the model's former parameters, by id.
        model: with the new ones.
    """
    if optimizer is None:
        return
    current = dict(_named_parameters(model))
    for group in optimizer.param_groups:
        group["params"] = [current[names[id(old)]] for old in group["params"]]


@contextlib.contextmanager
def _first_step_without_effect(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo the step that megatron-fsdp takes with zero gradients to have the optimizer's state.

    It would decay the weights, and count as the first step in Adam's correction of its averages.
    """
    learning_rate = optimizer.defaults["lr"]
    optimizer.defaults["lr"] = 0.0
    try:
        yield
    finally:
        optimizer.defaults["lr"] = learning_rate
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0  # a tensor or a number


def _warn_of_lost_groups(optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    changed = [
        {name: group[name] for name, value in optimizer.defaults.items() if group[name] != value}
        for group in groups
    ]
    if len(groups) > 1 or any(changed):
        warnings.warn(
            f"megatron-fsdp puts all parameters into one group with the optimizer's defaults: the "
            f"settings {changed} of its {len(groups)} groups are lost. To keep them, leave the "
            "optimizer out here, make it of the wrapped model's parameters, and call "
            "megatron_fsdp.fully_shard_optimizer.",
            stacklevel=3,
        )
