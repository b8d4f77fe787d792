"""Hooks of modules, and whether they are compiled. torch has functions to set these only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import _common_utils

# Whether FSDP2 finds tensors in dataclasses of which torch.utils._pytree does not know. 2.11-2.15.
FSDP2_SEES_DATACLASSES = hasattr(_common_utils, "collect_grad_tensors")


def remove_forward_hooks(module: nn.Module) -> None:
    """Remove all hooks around the forward of a module, which is our own copy. 2.11-2.15."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks around a module's forward. 2.11-2.15."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks around its forward."""
    return bool(forward_hooks(module))


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks around its forward or backward. 2.11-2.15."""
    return has_forward_hooks(module) or bool(module._backward_hooks or module._backward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether `compile()` was called on a module; its shallow copies run it, too. 2.11-2.15."""
    return module._compiled_call_impl is not None


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks of its gradient. 2.11-2.15."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
