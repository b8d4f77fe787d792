"""Styles that tensor-parallel plans lack, for modules between split layers.

Plans from transformers and from users often lack the styles that `fill_gaps` adds. Without them,
logits are right but gradients are wrong. In attention or an MLP, between the column-wise
projections and the row-wise one that follows, each rank computes with its own heads or features:

- A parameter that is the same on all ranks gets a part of its gradient on each rank: the gradients
  must be summed over the ranks.
- A parameter with a value for each head must be split.
- A module that needs all features at once cannot be split.
"""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshverse.parallel.models.modules import (
    adapted,
    child_name,
    matching_modules,
    parent_name,
)
from meshverse.parallel.styles.local_styles import (
    LocalParameters,
    ReplicatedWithGradAllreduce,
    SharedKeyGradAllreduce,
)

_Plan = dict[str, ParallelStyle]

# Names of norms of queries, keys and values, and of activations with weights. Norms of a latent do
# not match.
_HEADS = "(q|k|v|qk|query|key|value)"
_NORM = "(layer|rms)?_?(norm|ln)"
_INSIDE = re.compile(rf"{_HEADS}_?{_NORM}|{_NORM}_?{_HEADS}|act_fn|act")


def has_local_output(style: ParallelStyle) -> bool:
    """Return whether a style leaves each rank with its own part of the output features."""
    return (
        isinstance(style, ColwiseParallel)
        and style.output_layouts == (Shard(-1),)
        and style.use_local_output
    )


def fill_gaps(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return the plan with added styles, so that results are those of one process.

    Raises:
        ValueError: a norm needs all heads at once; or a parameter has the size of one head, and it
            is not known whether it is used only with a rank's own heads.
    """
    filled = {key: style for key, style in plan.items() if not _splits_latent(key, plan)}
    # Names (or patterns) of modules that contain layers which are split by heads or features.
    split = [parent_name(key) for key, style in filled.items() if has_local_output(style)]
    for region in dict.fromkeys(split):
        for name in matching_modules(model, region):
            inside = model.get_submodule(name)
            for added in (_missing_styles, _per_head_styles, _sparse_styles):
                filled |= added(region, inside, filled)
            _refuse_unknown(region, inside, filled)
    return filled


def _splits_latent(key: str, plan: _Plan) -> bool:
    """Return whether an entry splits the latent features of queries, which a norm needs whole."""
    region, _, name = key.rpartition(".")
    has_norm = name == "q_a_proj" and child_name(region, "q_b_proj") in plan
    return has_norm and has_local_output(plan[key])


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in module.named_parameters(recurse=False)}


def _missing_styles(region: str, inside: nn.Module, plan: _Plan) -> _Plan:
    """Return styles for submodules whose parameters would get partial gradients."""
    styles: _Plan = {}
    for name, child in inside.named_children():
        given = plan.get(key := child_name(region, name))
        own = given.placements.values() if type(given) is LocalParameters else [Shard(0)]
        if all(each.is_replicate() for each in own):
            given = None  # this style does not sum the parameters' gradients
        if given is None and (style := _missing_style(name, child, inside)):
            styles[key] = style
    return styles


def _missing_style(name: str, child: nn.Module, inside: nn.Module) -> ParallelStyle | None:
    if name == "kv_a_proj_with_mqa" and isinstance(adapted(child), nn.Linear):
        return SharedKeyGradAllreduce(getattr(inside, "qk_rope_head_dim", None))
    shapes = _shapes(child)
    if not _INSIDE.fullmatch(name) or not shapes:
        return None
    if all(len(shape) == 2 for shape in shapes.values()):  # (heads, features of a head)
        return LocalParameters(dict.fromkeys(shapes, Shard(0)))
    layers = map(adapted, inside.children())
    widths = {each.out_features for each in layers if isinstance(each, nn.Linear)}
    for shape in shapes.values():
        if shape.numel() in widths and shape.numel() != getattr(inside, "head_dim", None):
            raise ValueError(
                f"{name!r} of {type(inside).__name__} normalizes {shape.numel()} features, those "
                "of all heads, but a rank has only some heads. Give a plan as tp_shard_plan= in "
                "which the projections gather their output."
            )
    return ReplicatedWithGradAllreduce()


def _refuse_unknown(region: str, inside: nn.Module, plan: _Plan) -> None:
    """Raise ValueError for a parameter with the size of one head for which there is no style.

    If it is used with a rank's own heads, each rank has a part of its gradient; otherwise, each has
    the whole gradient. The shape does not show which is the case.
    """
    features = getattr(inside, "head_dim", None)
    if not isinstance(features, int):
        return
    for name, child in [("", inside), *inside.named_children()]:
        key = child_name(region, name) if name else region
        if key in plan or (any(child.children()) and child is not inside):
            continue
        shapes = _shapes(child)
        found = [own for own, shape in shapes.items() if shape == (features,)]
        if found and (child is inside or len(found) == len(shapes)):
            raise ValueError(
                f"{found} of {key!r} ({type(child).__name__}) have the {features} features of one "
                "head, between projections that are split by heads, and the plan has no entry for "
                f"{key!r}. Give it ReplicatedWithGradAllreduce() if it works on a rank's own "
                "heads, so that its gradients are summed; or LocalParameters({}) if its input is "
                "the same on all ranks."
            )


def _per_head_styles(region: str, inside: nn.Module, plan: _Plan) -> _Plan:
    """Return styles that split parameters with a value for each head: sinks, or gates in Doge."""
    heads = _heads(inside, "k_proj")
    styles: _Plan = {
        key: RowwiseParallel(output_layouts=Shard(-1))
        for name, child in inside.named_children()
        if isinstance(layer := adapted(child), nn.Linear)
        and layer.out_features == heads
        and isinstance(plan.get(key := child_name(region, name)), RowwiseParallel)
    }
    heads = heads if styles else _heads(inside, "q_proj")
    if not styles and heads == getattr(inside, "head_dim", None):
        heads = None  # as many heads as features: the shape does not show what a parameter is for
    own = [name for name, shape in _shapes(inside).items() if shape == (heads,)]
    if own and region not in plan:
        styles[region] = LocalParameters(dict.fromkeys(own, Shard(0)))
    return styles


def _heads(inside: nn.Module, projection: str) -> int | None:
    head_dim, layer = getattr(inside, "head_dim", None), inside._modules.get(projection)
    layer = None if layer is None else adapted(layer)
    if not isinstance(layer, nn.Linear) or not head_dim:
        return None
    return layer.out_features // int(head_dim)


def _sparse_styles(region: str, inside: nn.Module, plan: _Plan) -> _Plan:
    """Return styles that gather an MLP's features, if it keeps only the largest ones (Gemma 3n)."""
    styles: _Plan = {}
    own = [key for key in plan if parent_name(key) == region]
    for key in own if getattr(inside, "activation_sparsity", 0) else ():
        if has_local_output(plan[key]):
            styles[key] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(plan[key], RowwiseParallel):
            styles[key] = RowwiseParallel(input_layouts=Replicate())
    return styles
