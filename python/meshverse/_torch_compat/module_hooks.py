"""Hooks of modules. torch has functions to add them, and none to remove those of others."""

from __future__ import annotations

from torch import nn


def remove_forward_hooks(module: nn.Module) -> None:
    """Remove all hooks around the forward of a module, which is our own copy. 2.11-2.15."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks around its forward. 2.11-2.15."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks of its gradient. 2.11-2.15."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
