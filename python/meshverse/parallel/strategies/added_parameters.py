"""Parameters that a program adds to a model after FSDP2 has sharded it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["check_no_parameters_are_added"]


def check_no_parameters_are_added(model: nn.Module) -> None:
    """Have a sharded model raise RuntimeError if trainable parameters were added to it, as by LoRA.

    FSDP2 does not know them, so each rank would train its own ones on its own tokens. They are
    looked for before the first forward with gradients.
    """
    model.register_forward_pre_hook(_Check(model), prepend=True)


class _Check:
    """A hook that runs before a forward."""

    def __init__(self, model: nn.Module) -> None:
        # FSDP2 keeps these modules, so that no other one has the id of one of them.
        self._known = {
            (id(owner), own)
            for owner in model.modules()
            for own, _ in owner.named_parameters(recurse=False)
        }
        self._is_done = False

    def __call__(self, model: nn.Module, _: Any) -> None:
        if self._is_done or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for name, owner in model.named_modules():
            for own, parameter in owner.named_parameters(recurse=False):
                # A DTensor is one that the program has distributed itself.
                is_added = (id(owner), own) not in self._known and not isinstance(
                    parameter, DTensor
                )
                if is_added and parameter.requires_grad:
                    raise RuntimeError(
                        f"{f'{name}.{own}'.lstrip('.')!r} was added after {type(model).__name__} "
                        "was sharded, so FSDP2 does not know it: each rank would train its own "
                        "values. Add parameters, such as those of LoRA, before you shard the model."
                    )
        self._is_done = True
