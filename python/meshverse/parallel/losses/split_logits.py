"""Logits that stay split over the ranks of tensor parallelism, and losses of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils._pytree import tree_flatten, tree_map_only

# What each of transformers' models has, and a user's own with one of them need not.
_OF_PRETRAINED = ("loss_function", "get_output_embeddings")


class SplitLogits(ColwiseParallel):
    """Style of a language model's head: its logits are split in training, and gathered in eval.

    Args:
        input_layouts: placement of the hidden states, if they are no DTensor.
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=Shard(-1), use_local_output=False
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(_gather_in_eval)
        return module


def _gather_in_eval(module: nn.Module, arguments: Any, output: DTensor) -> Tensor:
    return output if module.training else output.full_tensor()


def accept_split_logits(model: nn.Module, heads: Collection[nn.Module]) -> None:
    """Let models of transformers compute the loss of `labels=` from logits that are DTensors.

    Args:
        model: model, in which each module that has a `loss_function` and `get_output_embeddings`,
            as transformers' models do, and one of the heads for output embedding gets a loss
            function for DTensors. Other modules keep theirs.
        heads: layers whose outputs are DTensors.
    """
    for module in model.modules():
        # Not getattr(module): wrappers forward it to the model inside.
        if not all(hasattr(type(module), name) for name in _OF_PRETRAINED):
            continue
        pretrained: Any = module
        head = pretrained.get_output_embeddings()
        if any(head is each for each in heads):
            pretrained.loss_function = partial(loss_of_split_logits, pretrained.loss_function)


def loss_of_split_logits(loss: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Return the plain result of a loss function, of arguments some of which may be DTensors.

    If some are, the other tensors, which are the same on all ranks, become DTensors for the call.
    """
    given = (arguments, keywords)
    split = [each for each in tree_flatten(given)[0] if isinstance(each, DTensor)]
    if not split:
        return loss(*arguments, **keywords)

    def replicated(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, split[0].device_mesh, [Replicate()], run_check=False)

    arguments, keywords = tree_map_only(Tensor, replicated, given)
    return tree_map_only(DTensor, DTensor.full_tensor, loss(*arguments, **keywords))
