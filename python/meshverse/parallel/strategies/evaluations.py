"""Sharding a model again after forwards without gradients, which FSDP2 keeps for a backward."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshverse._torch_compat.held_groups import awaits_all_gather

__all__ = ["reshard_after_evaluations"]


def reshard_after_evaluations(model: nn.Module, *, is_kept: bool) -> None:
    """Reshard what FSDP2 keeps gathered, after each forward without gradients.

    Until then, `model.parameters()` are temporary tensors: an optimizer that is created with them
    trains nothing, `model.zero_grad()` and the clipping of gradients do not reach the shards, and
    the next forward uses the values from before the optimizer's step.

    Args:
        model: the root of what FSDP2 shards.
        is_kept: whether parameters shall stay gathered, such as for generation. They are resharded
            before the next forward with gradients then.
    """
    hooks = _Hooks(model, is_kept)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(hooks.after_forward)  # a layer may be called alone
    model.register_forward_pre_hook(hooks.before_model, prepend=True)


class _Hooks:
    def __init__(self, model: nn.Module, is_kept: bool) -> None:
        self._sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
        self._is_kept = is_kept
        self._was_evaluated = False  # since the last forward with gradients began

    def after_forward(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._was_evaluated = True
        if not self._is_kept:
            cast("FSDPModule", module).reshard()

    def before_model(self, _model: nn.Module, _arguments: Any) -> None:
        """Drop what is gathered, also what was prefetched for layers that did not run."""
        may_be_old = self._was_evaluated and torch.is_grad_enabled()
        if not may_be_old or torch.compiler.is_compiling():
            return
        self._was_evaluated = False
        for module in self._sharded:
            if awaits_all_gather(module):
                module.unshard()
            module.reshard()
