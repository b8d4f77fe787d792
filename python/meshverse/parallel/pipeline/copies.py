"""Copies of modules that share what is in them, and what a stage has in place of others' modules.

Example:
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> copy = shallow_copy(model)
    >>> copy._modules["0"] = None
    >>> model[0] is not None
    True
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshverse.parallel.models.stages import AbsentModule

__all__ = [
    "AbsentLayer",
    "Idle",
    "Passage",
    "copy_attributes",
    "hidden_of",
    "shallow_copy",
    "without_memory",
]

_Module = TypeVar("_Module", bound=nn.Module)
_PLAIN = (bool, int, float, str)
_TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


def shallow_copy(module: _Module) -> _Module:
    """A module with the same children, parameters and buffers, which may get others."""
    copied = copy.copy(module)
    for table in _TABLES:
        copied.__dict__[table] = copy.copy(module.__dict__[table])
    return copied


def without_memory(module: _Module) -> _Module:
    """A copy of a module on the meta device, whose tensors are zeros on the CPU of one element."""
    copied = copy.deepcopy(module)
    for each in copied.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = nn.Parameter(_zeros(parameter), parameter.requires_grad)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = _zeros(buffer)
    return copied


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def hidden_of(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The hidden states among what a layer is called with."""
    return arguments[0] if arguments else keywords["hidden_states"]


class Passage:
    """What goes into a stage's layers and comes out of them in the forward that is going on.

    Args:
        in_tuples: whether the model takes a layer's output out of a tuple.
    """

    def __init__(self, in_tuples: bool) -> None:
        self.in_tuples = in_tuples
        self.clear()

    def clear(self) -> None:
        """Forget both."""
        self.received: Tensor | None = None
        self.passed_on: Tensor | None = None


class AbsentLayer(AbsentModule):
    """A layer of another stage: hands on what the stage received, or notes what it passes on.

    Args:
        layer: that it stands for. Its plain attributes are here too: models ask layers for their
            kind.
        passage: of the stage.
        is_before: whether the layer is one of an earlier stage.
    """

    def __init__(self, layer: nn.Module, passage: Passage, *, is_before: bool) -> None:
        super().__init__()
        copy_attributes(layer, self)
        self._passage = passage
        self._is_before = is_before

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What stands for the layer's output."""
        passage = self._passage
        if not self._is_before and passage.passed_on is None:
            passage.passed_on = hidden_of(arguments, keywords)
        hidden = passage.received if self._is_before else passage.passed_on
        return (hidden, None) if passage.in_tuples else hidden


class Idle(AbsentModule):
    """Stands for a module before or after the layers, whose output nobody uses."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The first argument."""
        return next(iter((*arguments, *keywords.values())))


def copy_attributes(layer: nn.Module, other: nn.Module) -> None:
    """Give a module what a model may ask a layer for, such as its kind: all but what it computes.

    Modules within the layer become plain objects that have such attributes too.
    """
    for name, value in _plain_attributes(layer).items():
        other.__dict__.setdefault(name, value)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in ("forward", "training")
    }
    of_class = {
        name: value
        for kind in type(module).__mro__[::-1]
        if issubclass(kind, nn.Module) and kind is not nn.Module
        for name, value in vars(kind).items()
        if not name.startswith("_") and isinstance(value, _PLAIN)
    }
    inside = {
        name: SimpleNamespace(**_plain_attributes(child)) for name, child in module.named_children()
    }
    return {**of_class, **inside, **own}
