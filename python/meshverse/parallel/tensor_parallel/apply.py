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

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshverse.parallel.models.modules import (
    BASE_LAYER,
    adapted,
    is_in_other_stage,
    matching_modules,
    nearest_name,
    parent_name,
)
from meshverse.parallel.styles.local_styles import CheckedStyle, LocalParameters

from .gaps import fill_gaps, has_local_output

_logger = logging.getLogger(__name__)
_FIRST, _SECOND = "lora_A", "lora_B"  # PEFT's names, by which it also saves them

# Names of the number of heads in attention modules of transformers and of its relatives.
_HEAD_COUNTS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head"),
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
)


def apply_tp_plan(
    model: nn.Module, tp_mesh: DeviceMesh, plan: Mapping[str, ParallelStyle], *, strict: bool = True
) -> None:
    """Split a model in place over a mesh, as `parallelize_module` does, and keep it consistent.

    Beyond it, nothing is changed if anything in the plan does not fit the model; what works on a
    rank's own heads, such as norms of queries and keys, gets the style that sums its gradients
    where the plan leaves it out; modules that keep the number of their heads get that of a rank's
    own; LoRA layers are split with the layer that they adapt; parameters that are one object, such
    as tied embeddings, stay one; and all ranks of the mesh get the random state of its first rank,
    so that their dropout is the same.

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
    given: Mapping[str, Any] = plan
    wrong = {key: each for key, each in given.items() if not isinstance(each, ParallelStyle)}
    if wrong:
        raise TypeError(
            f"The tensor-parallel plan has {wrong}: expected parallel styles by module name. "
            "translate_to_torch_parallel_style makes one of the name that transformers gives it."
        )
    planned = fill_gaps(model, _styles_by_module(model, plan, strict))
    styles = {
        own: own_style
        for name, style in planned.items()
        for own, own_style in _styles_inside(name, model.get_submodule(name), style).items()
    }
    for name, style in styles.items():
        _check(name, model.get_submodule(name), style, tp_mesh.size())
    shared = _shared_parameters(model)
    for names in shared:
        placements = {name: _placement(model, name, styles) for name in names}
        if len(set(placements.values())) > 1:
            raise ValueError(
                f"{names} are one parameter, and the plan would split it in different ways: "
                f"{placements}. Give their modules styles that split it alike, such as row-wise "
                "for an embedding and column-wise for the head tied to it."
            )
    local_heads = list(_local_heads(model, planned, tp_mesh.size()))

    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), tp_mesh, style)
    for name in frozen:  # torch's SequenceParallel forgets that they are
        model.get_parameter(name).requires_grad_(False)
    for module, attribute, count in local_heads:
        setattr(module, attribute, count)
    for first, *others in shared:
        for owner, _, own_name in (name.rpartition(".") for name in others):
            model.get_submodule(owner).register_parameter(own_name, model.get_parameter(first))
    synchronize_random_state(tp_mesh)


def synchronize_random_state(mesh: DeviceMesh) -> None:
    """Give all ranks of a 1-D mesh the random state of its first rank, of the CPU and its device.

    Dropout between the layers that tensor parallelism splits works on activations that all its
    ranks have: they must draw the same numbers. `apply_tp_plan` calls it, as DTensor does on GPUs.
    Call it on all ranks again after seeding them anew.

    Example:
        >>> torch.manual_seed(seed + rank)  # doctest: +SKIP
        >>> synchronize_random_state(mesh["tp"])  # doctest: +SKIP
    """
    kind = mesh.device_type
    for device in [torch] if kind == "cpu" else [torch, torch.get_device_module(kind)]:
        state = device.get_rng_state().to(kind)
        dist.broadcast(state, group=mesh.get_group(), group_src=0)
        device.set_rng_state(state.cpu())


def _styles_by_module(
    model: nn.Module, plan: Mapping[str, ParallelStyle], strict: bool
) -> dict[str, ParallelStyle]:
    names = {key: matching_modules(model, key) for key in plan}
    absent = [key for key in names if not names[key] and not is_in_other_stage(model, key)]
    name = type(model).__name__
    if absent and strict:
        nearest = {key: nearest_name(model, key) for key in absent}
        raise ValueError(
            f"{name} has no modules {absent}, which the plan names. Nearest are {nearest}. Correct "
            "these entries or take them out; strict=False leaves them out with a warning."
        )
    if absent:
        _logger.warning("%s has no modules %s: the plan's entries are left out.", name, absent)
    return {name: plan[key] for key, found in names.items() for name in found}


def _check(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    for own_name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}.{own_name} is distributed already: {parameter.placements} on "
                f"{parameter.device_mesh}. Apply tensor parallelism once, before FSDP."
            )
    if isinstance(style, CheckedStyle):
        style.check(name, module, size)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(
            f"{name}: {style} splits linear layers and embeddings, and this is a "
            f"{type(module).__name__}. Take it out of the plan, or name the layers inside."
        )
    # Local tensors carry no global size, so those that other layers see must be of one size.
    if isinstance(style, RowwiseParallel):
        local = style.input_layouts == (Shard(-1),)
        width, what = getattr(module, "in_features", size), "input"
    else:
        local, what = has_local_output(style), "output"
        width = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
    if local and width % size:
        raise ValueError(
            f"{name}: its {width} {what} features do not divide by the {size} ranks of tensor "
            "parallelism. Choose a number that divides them, or take the layer out of the plan."
        )


def _local_heads(
    model: nn.Module, styles: Mapping[str, ParallelStyle], size: int
) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield the attributes that count heads of which a rank has a part, and its number of them."""
    split = [parent_name(name) for name, style in styles.items() if has_local_output(style)]
    for region in dict.fromkeys(split):
        module = model.get_submodule(region)
        counts = {name: getattr(module, name, None) for name in _HEAD_COUNTS}
        for attribute, count in counts.items():
            if not isinstance(count, int):
                continue
            if count % size:
                raise ValueError(
                    f"{region}.{attribute}={count} does not divide by the {size} ranks of tensor "
                    "parallelism. Choose a number of ranks that divides the heads."
                )
            yield module, attribute, count // size
        heads, features = counts["num_heads"], getattr(module, "head_dim", None)
        if isinstance(heads, int) and isinstance(features, int):
            # The width to which older attention modules join their heads again. Where it is also
            # the width of the model, it is read for nothing else in forward.
            for attribute in ("hidden_size", "embed_dim"):
                if getattr(module, attribute, None) == heads * features:
                    yield module, attribute, heads * features // size


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that several modules have, one for each module."""
    names: dict[int, dict[tuple[int, str], str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own_name = name.rpartition(".")
        place = id(model.get_submodule(owner)), own_name
        names.setdefault(id(parameter), {}).setdefault(place, name)
    return [list(each.values()) for each in names.values() if len(each) > 1]


def _placement(
    model: nn.Module, name: str, styles: Mapping[str, ParallelStyle]
) -> Placement | None:
    """Return what a plan makes of a parameter; None if it leaves it whole or does not say."""
    owner, _, own_name = name.rpartition(".")
    style, module = styles.get(owner), model.get_submodule(owner)
    if isinstance(style, LocalParameters):
        return style.placements_of(module).get(own_name)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    is_row_wise = isinstance(style, RowwiseParallel)
    if is_row_wise and own_name == "bias":
        return Replicate()
    return Shard(int(is_row_wise != isinstance(module, nn.Embedding)))


def _styles_inside(name: str, module: nn.Module, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """Return the styles of a layer's parts by name, if it is one with adapters; else its own.

    A LoRA layer's product is low-rank: of a column-wise layer, the first of its two matrices stays
    whole and the second is column-wise too; of a row-wise layer, the first is row-wise and the
    second whole.

    Raises:
        ValueError: adapters that cannot be split with the layer.
    """
    if adapted(module) is module:
        return {name: style}
    known = {
        f"{side}.{adapter}": child
        for side in (_FIRST, _SECOND)
        for adapter, child in getattr(module, side, nn.ModuleDict()).named_children()
    }
    others = [
        own
        for own, _ in module.named_parameters()
        if not own.startswith((f"{BASE_LAYER}.", *(f"{each}." for each in known)))
    ]
    others += [each for each, child in known.items() if not isinstance(child, nn.Linear)]
    layouts = _layouts(style)
    if others or layouts is None or not isinstance(adapted(module), nn.Linear):
        raise ValueError(
            f"{name} ({type(module).__name__}) cannot be split with its adapters by {style}: "
            f"{others or [*known]}. Only LoRA's pairs of linear layers {_FIRST!r} and {_SECOND!r} "
            "around a linear layer can. Merge the adapters, leave the layer out of the plan, or "
            "use tp_size=1."
        )
    before, after = layouts
    pair: tuple[ParallelStyle | None, ParallelStyle | None] = (style, _of_tokens(after))
    if not isinstance(style, RowwiseParallel):
        pair = (_of_tokens(before), style)
    inside = {f"{name}.{own}": pair[not own.startswith(_FIRST)] for own in known}
    split = {own: own_style for own, own_style in inside.items() if own_style is not None}
    return {f"{name}.{BASE_LAYER}": style, **split}


def _layouts(style: ParallelStyle) -> tuple[Placement, Placement] | None:
    """Return a layer's layouts before and after, if an adapter can have them."""
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return None
    (before,), (after,) = style.input_layouts, style.output_layouts  # type: ignore[attr-defined]
    # Of terms of a sum, the second matrix would get the gradient of its rank's term only.
    return None if before.is_partial() or after.is_partial() else (before, after)


def _of_tokens(layout: Placement) -> ParallelStyle | None:
    """Return the style of a whole matrix between layers that are split by tokens, or are not."""
    return SequenceParallel(sequence_dim=layout.dim) if isinstance(layout, Shard) else None
