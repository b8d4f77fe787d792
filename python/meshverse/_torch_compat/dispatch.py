"""Operators as dispatch modes see them: what they write, and which memory tensors use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from .private_names import c_extension, guards, python_dispatch

DispatchMode: Any = python_dispatch.TorchDispatchMode
"""Base class of modes that run each operator. Its module is private, its name is not."""


def is_traced() -> bool:
    """Whether torch.compile traces the code that calls this."""
    return guards.TracingContext.try_get() is not None


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument or result of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def written_by(
    operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments that it may write.

    Schemas say which, but c10d's operators do not declare what they write and higher-order
    operators have no schema: these may write all.
    """
    written = _written_arguments(operator)
    if written is None:
        yield from tensors_in(arguments)
        yield from tensors_in(keywords)
        return
    for place, name in written:
        value = arguments[place] if place < len(arguments) else keywords.get(name)
        yield from tensors_in(value)


@cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...] | None:
    """Return places and names of the arguments that an operator writes; None for any."""
    schema = getattr(operator, "_schema", None)
    if schema is None or operator.namespace == "c10d":
        return None
    return tuple(
        (place, each.name)
        for place, each in enumerate(schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


def argument_of(
    operator: Any, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Any:
    """Return the value of an operator's argument in a call; None if it has no such argument."""
    for place, each in enumerate(operator._schema.arguments):
        if each.name == name:
            given = arguments[place] if place < len(arguments) else each.default_value
            return keywords.get(name, given)
    return None


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors in memory that a tensor consists of: itself, or parts of a subclass."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from plain_tensors(getattr(tensor, name))
    elif tensor.layout is torch.strided:  # others have no storage
        yield tensor


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor inside a dispatch mode, so that it keeps sharing its version.

    Modes run below the layer that shares versions, where `detach` would start a new one.
    """
    key = c_extension.DispatchKey.ADInplaceOrView
    with c_extension._SetExcludeDispatchKeyGuard(key, False):
        return tensor.detach()


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or a view of it, was changed in place."""
    return tensor._version
