"""Losses of models whose logits stay split over the ranks of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only


def accept_split_logits(model: nn.Module, heads: Collection[nn.Module]) -> None:
    """Let models of transformers compute the loss of `labels=` from logits that are DTensors.

    Args:
        model: model in which each module that has `loss_function`, as transformers' models do, and
            one of the heads for output embedding gets a loss function for DTensors.
        heads: layers whose outputs are DTensors.
    """
    for module in model.modules():
        # Not getattr(module): wrappers forward it to the model inside.
        if not hasattr(type(module), "loss_function"):
            continue
        head = module.get_output_embeddings()  # type: ignore[operator]
        if any(head is each for each in heads):
            module.loss_function = partial(_loss_of_split_logits, module.loss_function)


def _loss_of_split_logits(loss: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a loss function with all tensors as DTensors, and return its loss as a plain tensor."""
    given = (arguments, keywords)
    meshes: list[Any] = []
    tree_map_only(DTensor, lambda each: meshes.append(each.device_mesh), given)
    if not meshes:
        return loss(*arguments, **keywords)

    def replicated(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, meshes[0], [Replicate()], run_check=False)

    arguments, keywords = tree_map_only(Tensor, replicated, given)
    return tree_map_only(DTensor, DTensor.full_tensor, loss(*arguments, **keywords))
