"""Refusal of second-order gradients through what is split over ranks.

Example:
    >>> weight = torch.ones(2, requires_grad=True)
    >>> output = differentiable_once(weight.exp())
    >>> try:
    ...     torch.autograd.grad(output.sum(), weight, create_graph=True)
    ... except RuntimeError as error:
    ...     str(error).partition(",")[0]
    'create_graph=True'
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def differentiable_once(output: Tensor) -> Tensor:
    """Return a tensor, through which second-order gradients raise RuntimeError.

    They would lack terms: autograd records neither an all-to-all nor what DTensors do in backward.
    torch's `once_differentiable` would raise in a second `backward()`, and not in a second
    `torch.autograd.grad()`. So this raises in the first one, if it has `create_graph=True`.
    """
    # Compiled code refuses a second backward itself, unless the backend is torch's "eager".
    if output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(_refuse_second_order)  # type: ignore[no-untyped-call]
    return output


def refuse_second_order(module: nn.Module) -> None:
    """Let second-order gradients through a module's outputs raise, as `differentiable_once`."""
    module.register_forward_hook(_of_outputs, with_kwargs=True)


def _of_outputs(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
    given = {id(each) for each in tree_leaves((arguments, keywords))}
    for leaf in tree_leaves(output):
        inside = getattr(leaf, "__dict__", None)  # of a dataclass, or another object
        for each in [leaf] if isinstance(leaf, Tensor) else tree_leaves(inside):
            # The caller's own tensors, and leaves, have no gradients from this module.
            if isinstance(each, Tensor) and id(each) not in given and each.grad_fn is not None:
                differentiable_once(each)


def _refuse_second_order(gradient: Tensor) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "create_graph=True, but gradients go through layers or experts that are split over "
            "ranks, and second-order gradients would lack the terms of other ranks. Compute them "
            "on one process."
        )
