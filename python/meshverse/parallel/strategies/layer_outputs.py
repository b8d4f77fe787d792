"""Outputs in which FSDP2 finds no tensor, so that it would not see the backward of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshverse._torch_compat.module_hooks import FSDP2_SEES_DATACLASSES

__all__ = ["check_outputs"]


def check_outputs(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Have sharded layers raise TypeError if FSDP2 cannot find the tensors in their outputs.

    FSDP2 gathers a layer's parameters, and reduces their gradients, from hooks on its outputs. It
    looks for them in containers, but not in objects of a program's own classes. The parameters
    would get no gradients, without an error.

    Args:
        model: model that has the layers.
        layers: layers that FSDP2 shards, by name.
    """
    for name, layer in layers.items():
        what = f"the layer {name!r} of {type(model).__name__}" if name else type(model).__name__
        layer.register_forward_hook(_Check(what))


class _Check:
    """A forward hook that checks outputs until one is right."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_done = False

    def __call__(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        if self._is_done or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        seen, unseen = list[Tensor](), list[Tensor]()
        for leaf in _leaves(output):
            if isinstance(leaf, Tensor):
                seen.append(leaf)
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
                unseen += [each for each in tree_leaves(vars(leaf)) if isinstance(each, Tensor)]
        if any(each.requires_grad for each in seen):
            self._is_done = True
        elif any(each.requires_grad for each in unseen):
            last = "dicts and dataclasses" if FSDP2_SEES_DATACLASSES else "and dicts"
            raise TypeError(
                f"FSDP2 finds no tensor in the output of {self._what}, a {type(output).__name__}. "
                f"In this version of torch, it looks only into tuples, lists, {last}. So the "
                "parameters would get no gradients. Return one of these."
            )


def _leaves(output: Any) -> Iterator[Any]:
    """Yield what FSDP2 finds in an output."""
    for leaf in tree_leaves(output):
        is_dataclass = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
        if is_dataclass and FSDP2_SEES_DATACLASSES:
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf
