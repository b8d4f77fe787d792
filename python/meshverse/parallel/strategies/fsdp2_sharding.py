"""FSDP2 for the layers of a model: each item of its lists on its own.

Example:
    >>> apply_fsdp_sharding_recursively(model, mesh["dp"], None)  # doctest: +SKIP
"""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshverse.parallel.models.layers import layer_lists

__all__ = ["apply_fsdp_sharding_recursively", "check_can_be_sharded", "check_not_sharded"]


def apply_fsdp_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None = None,
    *,
    reshard_after_forward: bool | None = None,
    prefetch_depths: tuple[int, int] | None = None,
) -> None:
    """Shard every item of every ModuleList and ModuleDict of a module; the rest is the root's.

    Args:
        module: to search, which may be such a list; itself it is not sharded.
        mesh: 1-D to shard over, or 2-D (replicas, shards).
        mp_policy: of parameters, gradients and outputs; None for their own precision.
        offload_policy: where sharded parameters live; None for the mesh's device.
        reshard_after_forward: of the items; None for all but the last of a list, whose parameters
            are needed again at once in backward.
        prefetch_depths: how many items ahead to gather in backward and in forward; None to leave it
            to FSDP2.
    """
    settings: dict[str, Any] = {"mesh": mesh, "offload_policy": offload_policy}
    if mp_policy is not None:
        settings["mp_policy"] = mp_policy
    for named_items in layer_lists(module):
        items = [cast("FSDPModule", item) for _, item in named_items]
        for item in items:
            reshard = item is not items[-1]
            if reshard_after_forward is not None:
                reshard = reshard_after_forward
            fully_shard(cast("nn.Module", item), reshard_after_forward=reshard, **settings)
        if prefetch_depths is not None:
            _chain_prefetches(items, *prefetch_depths)


def check_not_sharded(model: nn.Module) -> None:
    """Check that neither a model nor one of its layers is sharded by FSDP2 already.

    Raises:
        ValueError: some are.
    """
    modules = [("", model), *chain.from_iterable(layer_lists(model))]
    sharded = [name or "itself" for name, module in modules if isinstance(module, FSDPModule)]
    if sharded:
        raise ValueError(
            f"{type(model).__name__} is sharded already: {sharded}. Parallelize a model once."
        )


def check_can_be_sharded(model: nn.Module, *, are_split: bool) -> None:
    """Check that FSDP2 takes a model's parameters, which it would only say in the middle of it.

    Args:
        model: not sharded yet.
        are_split: whether tensor parallelism comes first, which lays parameters in memory anew.

    Raises:
        ValueError: it does not.
    """
    for name, parameter in model.named_parameters():
        if parameter.layout != torch.strided:
            what = f"has the layout {parameter.layout}: give it a dense one"
        elif parameter.ndim == 0:
            what = "is a scalar: give it the shape (1,)"
        elif not (are_split or parameter.is_contiguous()):
            strides, shape = parameter.stride(), tuple(parameter.shape)
            what = f"has strides {strides} for shape {shape}: call contiguous()"
        else:
            continue
        raise ValueError(f"FSDP2 cannot shard {name!r}, which {what}.")
    layers_of: dict[int, tuple[str, nn.Module]] = {}
    for layer_name, layer in chain.from_iterable(layer_lists(model)):
        for name, parameter in layer.named_parameters():
            first_name, first = layers_of.setdefault(id(parameter), (layer_name, layer))
            if first is not layer:
                raise ValueError(
                    f"Layers {first_name!r} and {layer_name!r} share the parameter {name!r}, and "
                    "FSDP2 shards each layer on its own. Give each its own, or use one layer twice."
                )


def _chain_prefetches(items: list[FSDPModule], backward_depth: int, forward_depth: int) -> None:
    """Let each item gather the ones that follow it, in forward and in backward."""
    for place, item in enumerate(items):
        if following := items[place + 1 : place + 1 + forward_depth]:
            item.set_modules_to_forward_prefetch(following)
        if preceding := items[max(0, place - backward_depth) : place][::-1]:
            item.set_modules_to_backward_prefetch(preceding)
