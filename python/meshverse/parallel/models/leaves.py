"""Tensors that get gradients in a forward's backward, and are no inputs or parameters of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["in_words", "other_leaves"]


def other_leaves(outputs: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward of some outputs reaches, besides those that are known."""
    reached = [each for each in outputs if each.requires_grad]
    leaves = {id(each): each for each in reached if each.is_leaf}
    nodes = [each.grad_fn for each in reached if each.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            leaves[id(leaf)] = leaf
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        nodes += following
    own = {id(each) for each in known}
    return [each for each in leaves.values() if id(each) not in own]


def in_words(name: str, shape: torch.Size, dtype: torch.dtype) -> str:
    """Return what errors call such a leaf; its name in the model may be unknown: ""."""
    what = f"the parameter {name!r}" if name else "a tensor"
    return (
        f"{what} of shape {tuple(shape)} and {dtype}, which requires a gradient and is neither an "
        "input nor registered in the module"
    )
