"""Styles that plans for transformers' models lack, by the names that its models use.

Without them, logits are right but gradients are wrong: between the column-wise projections and the
row-wise one that follows, each rank computes with its own heads or features. A norm of queries gets
a part of its gradient on each rank, and a parameter with a value for each head must be split.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshverse.parallel.models.modules import adapted, child_name, matching_modules, parent_name
from meshverse.parallel.styles.local_styles import (
    LocalParameters,
    Replicated,
    ReplicatedWithGradAllreduce,
    SharedKeyGradAllreduce,
)

from .regions import has_local_output

_Plan = dict[str, ParallelStyle]

# Modules on a rank's own heads or features; modules before the column-wise layer; parameters with a
# value for each head; and a layer that computes such values.
_ON_HEADS = ("q_norm", "k_norm", "v_norm", "q_layernorm", "k_layernorm", "act_fn")
_BEFORE = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer")
_PER_HEAD, _TO_HEADS = ("sinks", "A"), "dt_proj"


def fill_gaps(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return a plan for a model with transformers' names, with the styles that it lacks.

    Raises:
        ValueError: a norm needs all heads at once.
    """
    filled = {key: style for key, style in plan.items() if not _splits_latent(key, plan)}
    # Names (or patterns) of modules that contain layers which are split by heads or features.
    split = [parent_name(key) for key, style in filled.items() if has_local_output(style)]
    for region in dict.fromkeys(split):
        for name in matching_modules(model, region):
            inside = model.get_submodule(name)
            for own_name, child in inside.named_children():
                key = child_name(region, own_name)
                if style := _missing_style(own_name, child, inside, filled.get(key)):
                    filled[key] = style
            filled |= _per_head_styles(region, inside, filled)
            filled |= _sparse_styles(region, inside, filled)
    return filled


def _splits_latent(key: str, plan: _Plan) -> bool:
    """Return whether an entry splits the latent features of queries, which a norm needs whole."""
    region, _, name = key.rpartition(".")
    has_norm = name == "q_a_proj" and child_name(region, "q_b_proj") in plan
    return has_norm and has_local_output(plan[key])


def _missing_style(
    name: str, child: nn.Module, inside: nn.Module, given: ParallelStyle | None
) -> ParallelStyle | None:
    shapes = {own: each.shape for own, each in child.named_parameters()}
    if not shapes or not (given is None or isinstance(given, Replicated)):
        return None
    if name == "kv_a_proj_with_mqa":
        return SharedKeyGradAllreduce(getattr(inside, "qk_rope_head_dim", None))
    if name in _BEFORE:
        return Replicated()
    if name not in _ON_HEADS:
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


def _per_head_styles(region: str, inside: nn.Module, plan: _Plan) -> _Plan:
    """Return styles that split parameters with a value for each head: sinks, or gates in Doge."""
    own = [name for name in _PER_HEAD if inside._parameters.get(name) is not None]
    if not own:
        return {}
    styles: _Plan = (
        {} if region in plan else {region: LocalParameters(dict.fromkeys(own, Shard(0)))}
    )
    if isinstance(plan.get(key := child_name(region, _TO_HEADS)), RowwiseParallel):
        styles[key] = RowwiseParallel(output_layouts=Shard(-1))
    return styles


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
