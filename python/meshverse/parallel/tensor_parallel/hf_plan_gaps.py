"""What the plans of transformers forget or get wrong, inside layers that are split by heads.

Between column-wise projections and the row-wise one that closes them, in attention or an MLP, a
rank works on its own heads or features. A parameter used there as a whole is the same on all ranks,
but its gradient is a rank's share of a sum; one that has a value for each head must be split; and
what needs all features at once cannot be split at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshverse.parallel.models.module_names import matching_modules, parent_name
from meshverse.parallel.styles.local_styles import (
    LocalParameters,
    ReplicatedWithGradAllreduce,
    SharedKeyGradAllreduce,
)

__all__ = ["fill_gaps", "has_local_output"]

# Norms of queries, keys and values, and activations with weights. Not the norms of a latent.
_INSIDE = re.compile(r"(q|k|v|qk|query|key|value)_(layer)?norm|act_fn|act")


def has_local_output(style: ParallelStyle) -> bool:
    """Whether a style leaves a rank with its own share of the output features."""
    return (
        isinstance(style, ColwiseParallel)
        and style.output_layouts == (Shard(-1),)
        and style.use_local_output
    )


def fill_gaps(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """The plan, so that tensor parallelism computes what one process computes.

    Raises:
        ValueError: a norm needs all heads at once.
    """
    filled = {key: style for key, style in plan.items() if not _splits_latent(key, plan)}
    for region in _regions(filled):
        for name in matching_modules(model, region):
            inside = model.get_submodule(name)
            for added in (_missing_styles, _per_head_styles, _sparse_styles):
                filled |= added(region, inside, filled)
    return filled


def _regions(plan: dict[str, ParallelStyle]) -> list[str]:
    """Names, or patterns, of the modules whose inside is split by heads or features."""
    return list(dict.fromkeys(parent_name(key) for key in plan if has_local_output(plan[key])))


def _splits_latent(key: str, plan: dict[str, ParallelStyle]) -> bool:
    """Whether an entry splits the queries' latent, whose norm needs all of it on every rank."""
    region, _, name = key.rpartition(".")
    return name == "q_a_proj" and f"{region}.q_b_proj" in plan and has_local_output(plan[key])


def _missing_styles(
    region: str, inside: nn.Module, plan: dict[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Styles of the submodules that have parameters whose gradients are partial."""
    return {
        f"{region}.{name}": style
        for name, child in inside.named_children()
        if f"{region}.{name}" not in plan and (style := _missing_style(name, child, inside))
    }


def _missing_style(name: str, child: nn.Module, inside: nn.Module) -> ParallelStyle | None:
    if name == "kv_a_proj_with_mqa" and isinstance(child, nn.Linear):
        return SharedKeyGradAllreduce(getattr(inside, "qk_rope_head_dim", None))
    shapes = {own_name: each.shape for own_name, each in child.named_parameters(recurse=False)}
    if not _INSIDE.fullmatch(name) or not shapes:
        return None
    if all(len(shape) == 2 for shape in shapes.values()):  # (heads, features of a head)
        return LocalParameters({own_name: Shard(0) for own_name in shapes})
    widths = {each.out_features for each in inside.children() if isinstance(each, nn.Linear)}
    for shape in shapes.values():
        if shape.numel() in widths and shape.numel() != getattr(inside, "head_dim", None):
            raise ValueError(
                f"{name!r} of {type(inside).__name__} normalizes {shape.numel()} features, those "
                "of all heads, of which a rank has a part. Give a plan as tp_shard_plan whose "
                "projections gather their output."
            )
    return ReplicatedWithGradAllreduce()


def _per_head_styles(
    region: str, inside: nn.Module, plan: dict[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Styles that split by heads what has one value for each key-value head (in Doge)."""
    heads = _key_value_heads(inside)
    single = [
        f"{region}.{name}"
        for name, child in inside.named_children()
        if isinstance(child, nn.Linear) and child.out_features == heads
    ]
    styles: dict[str, ParallelStyle] = {
        key: RowwiseParallel(output_layouts=Shard(-1))
        for key in single
        if isinstance(plan.get(key), RowwiseParallel)
    }
    own = [name for name, each in inside.named_parameters(recurse=False) if each.shape == (heads,)]
    if styles and own and region not in plan:
        styles[region] = LocalParameters({name: Shard(0) for name in own})
    return styles


def _key_value_heads(inside: nn.Module) -> int | None:
    head_dim = getattr(inside, "head_dim", None)
    keys = getattr(inside, "k_proj", None)
    if not isinstance(keys, nn.Linear) or not head_dim:
        return None
    return keys.out_features // int(head_dim)


def _sparse_styles(
    region: str, inside: nn.Module, plan: dict[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Styles that gather the features of an MLP that keeps the largest of them (in Gemma 3n)."""
    if not getattr(inside, "activation_sparsity", 0):
        return {}
    return dict(_gathered(region, plan))


def _gathered(region: str, plan: dict[str, ParallelStyle]) -> Iterator[tuple[str, ParallelStyle]]:
    for key, style in plan.items():
        if parent_name(key) != region:
            continue
        if has_local_output(style):
            yield key, ColwiseParallel(output_layouts=Replicate())
        elif isinstance(style, RowwiseParallel):
            yield key, RowwiseParallel(input_layouts=Replicate())
