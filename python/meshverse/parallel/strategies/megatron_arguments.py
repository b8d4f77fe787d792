"""What the installed package `megatron-fsdp` is told, of a config and of a model.

Example:
    >>> package = import_megatron_fsdp()  # doctest: +SKIP
    >>> fully_shard_arguments(  # doctest: +SKIP
    ...     MegatronFSDPConfig(zero_dp_strategy=2), package.fully_shard, package
    ... )["zero_dp_strategy"]
    2
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshverse import DeviceMesh
from meshverse.parallel.config import MegatronFSDPConfig
from meshverse.parallel.models.import_paths import import_class_from_path

__all__ = ["fully_shard_arguments", "import_megatron_fsdp", "training_device", "unit_modules"]

_logger = logging.getLogger(__name__)


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


def import_megatron_fsdp() -> ModuleType:
    """The package; ImportError with the cure where it is not installed."""
    try:
        return importlib.import_module("megatron_fsdp")
    except ImportError as error:
        raise ImportError(
            "Megatron-FSDP needs the package megatron-fsdp, which cannot be imported: "
            f"{error}. Install it with `pip install megatron-fsdp`, or `pip install "
            '"meshverse[megatron]"`.'
        ) from error


def training_device(mesh: DeviceMesh) -> torch.device:
    """Where this process's part of a model on the mesh belongs."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def unit_modules(
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
