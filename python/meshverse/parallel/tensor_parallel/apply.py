"""A tensor-parallel plan, applied to a model as a whole: checked first, then split in place.

Example:
    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    >>> apply_tp_plan(model, mesh["tp"], plan)  # doctest: +SKIP
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from meshverse.parallel.models.module_names import (
    is_in_other_stage,
    matching_modules,
    nearest_name,
    parent_name,
)
from meshverse.parallel.styles.local_styles import CheckedStyle, LocalParameters

from .hf_plan_gaps import has_local_output

__all__ = ["apply_tp_plan"]

_logger = logging.getLogger(__name__)

# What attention modules of transformers and of its relatives call the number of their heads.
_HEAD_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_heads",
    "n_head",
    "n_kv_heads",
)


def apply_tp_plan(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle],
    *,
    strict: bool = True,
) -> None:
    """Split a model in place over a mesh, as `parallelize_module` does, and keep it consistent.

    Beyond it, nothing is changed if anything in the plan does not fit the model; modules that keep
    the number of their heads get that of a rank's own; and parameters that are one object, such
    as tied embeddings, stay one.

    Args:
        model: whose parameters are whole; they become DTensors where the plan names them.
        tp_mesh: 1-D.
        plan: by module name, in which wildcards stand for one step; later entries win.
        strict: whether an entry for modules that the model has not is an error; else it is left
            out, with a warning.

    Raises:
        TypeError: a value of the plan is no parallel style.
        ValueError: an entry means no module, a style does not fit its module, sizes or heads do
            not divide by the number of ranks, or only some of the parameters that are one object
            would be split.
    """
    _check_styles(plan)
    styles = _styles_by_module(model, plan, strict)
    for name, style in styles.items():
        _check(name, model.get_submodule(name), style, tp_mesh.size())
    shared = list(_shared_parameters(model))
    for names in shared:
        _check_shared(model, names, styles)
    local_heads = list(_local_heads(model, styles, tp_mesh.size()))

    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), tp_mesh, style)
    for module, attribute, count in local_heads:
        setattr(module, attribute, count)
    for first, *others in shared:
        for name in others:
            owner, _, own_name = name.rpartition(".")
            model.get_submodule(owner).register_parameter(own_name, model.get_parameter(first))


def _check_styles(plan: Mapping[str, Any]) -> None:
    wrong = {key: style for key, style in plan.items() if not isinstance(style, ParallelStyle)}
    if wrong:
        raise TypeError(
            f"The tensor-parallel plan has {wrong}: expected parallel styles by module name. "
            "translate_to_torch_parallel_style makes one of the name that transformers gives it."
        )


def _styles_by_module(
    model: nn.Module, plan: Mapping[str, ParallelStyle], strict: bool
) -> dict[str, ParallelStyle]:
    names = {key: matching_modules(model, key) for key in plan}
    absent = [
        key for key, found in names.items() if not found and not is_in_other_stage(model, key)
    ]
    if absent and strict:
        nearest = {key: nearest_name(model, key) for key in absent}
        raise ValueError(
            f"{type(model).__name__} has no modules {absent}, which the plan names. "
            f"Nearest are {nearest}. Correct these entries or take them out; strict=False leaves "
            "them out with a warning."
        )
    if absent:
        _logger.warning(
            "%s has no modules %s: the entries of the tensor-parallel plan are left out.",
            type(model).__name__,
            absent,
        )
    return {name: plan[key] for key, found in names.items() for name in found}


def _check(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    for own_name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}.{own_name} is distributed already: {parameter.placements} on "
                f"{parameter.device_mesh}. Apply tensor parallelism once, before FSDP."
            )
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ValueError(
                f"{name}: {style} splits linear layers and embeddings, and this is a "
                f"{type(module).__name__}. Take the entry out of the plan, or name the layers "
                "inside the module."
            )
        _check_width(name, module, style, size)
    if isinstance(style, CheckedStyle):
        style.check(name, module, size)


def _check_width(
    name: str, module: nn.Linear | nn.Embedding, style: ParallelStyle, size: int
) -> None:
    """Local tensors carry no global size, so those that other layers see must be of one size."""
    if isinstance(module, nn.Embedding):
        width, what = module.embedding_dim, "output"
    else:
        width, what = module.out_features, "output"
    local = has_local_output(style)
    if isinstance(style, RowwiseParallel):
        local = style.input_layouts == (Shard(-1),)
        width, what = getattr(module, "in_features", size), "input"
    if local and width % size:
        raise ValueError(
            f"{name}: its {width} {what} features do not divide by the {size} ranks of tensor "
            "parallelism. Choose a number of ranks that divides them, or leave the layer out of "
            "the plan."
        )


def _local_heads(
    model: nn.Module, styles: Mapping[str, ParallelStyle], size: int
) -> Iterator[tuple[nn.Module, str, int]]:
    """The attributes that count heads of which a rank has a part, and its number of them."""
    regions = dict.fromkeys(
        parent_name(name) for name, style in styles.items() if has_local_output(style)
    )
    for region in regions:
        module = model.get_submodule(region)
        for attribute in _HEAD_COUNTS:
            count = getattr(module, attribute, None)
            if not isinstance(count, int):
                continue
            if count % size:
                raise ValueError(
                    f"{region}.{attribute}={count} does not divide by the {size} ranks of tensor "
                    "parallelism. Choose a number of ranks that divides the heads."
                )
            yield module, attribute, count // size
        yield from _local_width(module, size)


def _local_width(module: nn.Module, size: int) -> Iterator[tuple[nn.Module, str, int]]:
    """The width to which older attention modules join their heads again, under a name of its own.

    Where it is also the width of the model, it is read for nothing else in forward.
    """
    heads, features = getattr(module, "num_heads", None), getattr(module, "head_dim", None)
    if not isinstance(heads, int) or not isinstance(features, int):
        return
    for attribute in ("hidden_size", "embed_dim"):
        if getattr(module, attribute, None) == heads * features:
            yield module, attribute, heads * features // size


def _shared_parameters(model: nn.Module) -> Iterator[list[str]]:
    """The names of each parameter that several modules have, one for each module."""
    names: dict[int, dict[tuple[int, str], str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own_name = name.rpartition(".")
        place = id(model.get_submodule(owner)), own_name
        names.setdefault(id(parameter), {}).setdefault(place, name)
    yield from (list(each.values()) for each in names.values() if len(each) > 1)


def _check_shared(model: nn.Module, names: list[str], styles: Mapping[str, ParallelStyle]) -> None:
    placements = {name: _placement(model, name, styles) for name in names}
    if len(set(placements.values())) > 1:
        raise ValueError(
            f"{names} are one parameter, and the plan would split it in different ways: "
            f"{placements}. Give their modules styles that split it alike, such as row-wise for "
            "an embedding and column-wise for the head tied to it."
        )


def _placement(
    model: nn.Module, name: str, styles: Mapping[str, ParallelStyle]
) -> Placement | None:
    """What a plan makes of a parameter; None if it leaves it whole or does not say."""
    owner, _, own_name = name.rpartition(".")
    style, module = styles.get(owner), model.get_submodule(owner)
    if isinstance(style, LocalParameters):
        return style.placements_of(module).get(own_name)
    is_embedding = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        return Shard(1) if is_embedding else Shard(0)
    if isinstance(style, RowwiseParallel):
        if own_name == "bias":
            return Replicate()
        return Shard(0) if is_embedding else Shard(1)
    return None
