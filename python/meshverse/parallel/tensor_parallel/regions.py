"""Modules with split activations, in which a tensor-parallel plan must name each parameter.

From a column-wise layer whose output stays local to the row-wise layer that follows, each rank
computes with its own heads or features. A parameter in between that is the same on all ranks gets a
part of its gradient on each rank; one before the column-wise layer gets the whole. The module does
not show which is the case, so `check_regions` refuses a parameter that the plan does not name.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
)

from meshverse.parallel.models.modules import child_name, parent_name
from meshverse.parallel.styles.local_styles import (
    CheckedStyle,
    LocalParameters,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    Replicated,
    SplitTokens,
)

# Styles that move inputs and outputs, and say nothing of the parameters inside.
_MOVES = (PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, SplitTokens)


def has_local_output(style: ParallelStyle | None) -> bool:
    """Return whether a style leaves each rank with its own part of the output features."""
    if isinstance(style, PackedColwiseParallel):
        return True
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return False
    return style.use_local_output and _are_features(style.output_layouts)


def _has_local_input(style: ParallelStyle) -> bool:
    if isinstance(style, PackedRowwiseParallel):
        return True
    return isinstance(style, RowwiseParallel) and _are_features(style.input_layouts)


def splits_activations(style: ParallelStyle) -> bool:
    """Return whether a layer with a style gives, or takes, a rank's own part of the features."""
    return has_local_output(style) or _has_local_input(style)


def _are_features(layouts: tuple[Placement, ...]) -> bool:
    # Dims 0 and 1 are those of sequences and tokens.
    return any(isinstance(each, Shard) and each.dim not in (0, 1) for each in layouts)


def regions(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, str]:
    """Return the names of modules that contain split activations, each with what splits them.

    These are the modules around each column-wise layer, up to the first one that also has a
    row-wise layer, or to the model. A module's own split parameters may be used like those of a
    column-wise layer: if there is such a row-wise layer, what is around them counts, too.
    """
    rows = [name for name, style in styles.items() if _has_local_input(style)]
    found: dict[str, str] = {}
    for name, style in styles.items():
        around: list[str] = []
        if has_local_output(style) and name:
            around = _up_to_row_wise(parent_name(name), rows)
        elif isinstance(style, LocalParameters) and _splits_parameters(style, model, name):
            around = _up_to_row_wise(name, rows)
            if not _is_closed(around[-1], rows):
                continue
        for region in around:
            found.setdefault(region, name)
    return found


def _up_to_row_wise(name: str, rows: list[str]) -> list[str]:
    """Return a module and those around it, up to the first one with a row-wise layer."""
    around = [name]
    while around[-1] and not _is_closed(around[-1], rows):
        around.append(parent_name(around[-1]))
    return around


def _splits_parameters(style: LocalParameters, model: nn.Module, name: str) -> bool:
    placements = style.placements_of(model.get_submodule(name)).values()
    return any(isinstance(each, Shard) for each in placements)


def closed_regions(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> list[str]:
    """Return the names of modules in which activations are split, and are whole again after."""
    rows = [name for name, style in styles.items() if _has_local_input(style)]
    return [region for region in regions(model, styles) if _is_closed(region, rows)]


def _is_closed(region: str, rows: list[str]) -> bool:
    return any(row.startswith(child_name(region, "")) for row in rows)


def check_regions(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Check that a plan says how each parameter between split layers is used.

    Args:
        model: whole model.
        styles: the plan, by the names of modules.

    Raises:
        ValueError: a parameter has no entry, or one that sums whole gradients; or a module needs
            all features at once.
    """
    _refuse_sums_of_whole_gradients(model, styles)
    for region, column in regions(model, styles).items():
        inside = model.get_submodule(region)
        if getattr(inside, "activation_sparsity", 0):
            raise ValueError(
                f"{region!r} ({type(inside).__name__}) keeps the largest of all features, but "
                f"{column!r} gives a rank only some. Its projections must gather their output: "
                "ColwiseParallel(output_layouts=Replicate()), and RowwiseParallel("
                "input_layouts=Replicate()) for the layer after it."
            )
        names = [child_name(region, name) for name, _ in inside.named_parameters()]
        if unknown := [name for name in names if not _is_known(model, name, region, styles)]:
            raise ValueError(
                f"The plan has no entry for the parameters {unknown[:6]}, but {column!r} splits "
                f"activations in {region or type(model).__name__!r} over the ranks. If they work "
                "on a rank's own heads or features, give their module "
                "ReplicatedWithGradAllreduce(), which sums their gradients; if their input is the "
                "same on all ranks, Replicated(); if a module has several kinds of parameters, or "
                "is split itself, LocalParameters(placements, summed=names). If no row-wise layer "
                f"follows {column!r}, gather its output: output_layouts=Replicate()."
            )


def _refuse_sums_of_whole_gradients(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Raise ValueError for a parameter whose gradients are summed where all ranks have the same."""
    if any(map(_may_split_more, styles.values())):
        return
    split = {*regions(model, styles)}
    split |= {parent_name(name) for name, style in styles.items() if _has_local_input(style)}
    summed = [
        child_name(name, own)
        for name, style in styles.items()
        if isinstance(style, LocalParameters)
        and not any(each in ("", name) or name.startswith(f"{each}.") for each in split)
        for own in style.placements_of(model.get_submodule(name))
        if style.is_summed(own)
    ]
    if summed:
        raise ValueError(
            f"The plan sums the gradients of {summed[:6]} over the ranks, but splits no "
            "activations around them: each rank has the whole gradient there, and the sum is a "
            "multiple of it. Remove these entries; if they work on a rank's own heads or features, "
            "add entries for the layers that compute these."
        )


def _may_split_more(style: ParallelStyle) -> bool:
    """Return whether a style may split activations outside `regions`, such as by tokens."""
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        layouts = (*style.input_layouts, *style.output_layouts)
        return any(isinstance(each, Shard) and each.dim in (0, 1) for each in layouts)
    return not isinstance(style, CheckedStyle | Replicated)


def _is_known(
    model: nn.Module, parameter: str, region: str, styles: Mapping[str, ParallelStyle]
) -> bool:
    """Return whether the entry of a module inside the region says how a parameter is used."""
    owner, _, own_name = parameter.rpartition(".")
    style = styles.get(owner)
    if isinstance(style, LocalParameters) and own_name in style.placements_of(
        model.get_submodule(owner)
    ):
        return True
    while owner != region:
        style = styles.get(owner)
        if style is not None and not isinstance(style, (LocalParameters, *_MOVES)):
            return True
        owner = parent_name(owner)
    return False
