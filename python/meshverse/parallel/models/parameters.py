"""Parameters that a strategy replaces by others: what may be lost when it does."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .trials import OF_EVERY_MODULE

__all__ = ["keeping_attributes", "second_holders", "why_weight_is_not_split"]


@contextlib.contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[None]:
    """Give parameters that replace others the Python attributes of those, within the context.

    Example: a program marks parameters by `parameter.no_weight_decay = True` for its optimizer.
    """
    named = model.named_parameters(remove_duplicate=False)
    attributes = {name: dict(vars(parameter)) for name, parameter in named}
    yield
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for attribute, value in attributes.get(name, {}).items():
            vars(parameter).setdefault(attribute, value)


class _Memory(NamedTuple):
    """The memory between the first and the last element of a tensor.

    Attributes:
        storage: address of its storage.
        start: first byte in the storage.
        stop: byte after the last one.
    """

    storage: int
    start: int
    stop: int


def _memory(tensor: Tensor) -> _Memory | None:
    """Return a tensor's memory; None if it has none of its own, as on the meta device."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    address = tensor.untyped_storage().data_ptr()
    if not address:
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    length = sum((size - 1) * stride for size, stride in pairs) + 1
    first, width = int(tensor.storage_offset()), tensor.element_size()
    return _Memory(address, first * width, (first + length) * width)


def second_holders(model: nn.Module) -> dict[str, str]:
    """Return, by name, each parameter whose memory is also held elsewhere in its model, and where.

    That is another parameter with the same memory, or a tensor in an attribute that is not
    registered. Whoever replaces the parameter leaves the other one as it was.
    """
    of_storage: dict[int, list[tuple[_Memory, str]]] = defaultdict(list)
    found: dict[str, str] = {}

    def others(tensor: Tensor) -> list[str]:
        if (mine := _memory(tensor)) is None:
            return []
        known = of_storage[mine.storage]
        return [name for its, name in known if its.start < mine.stop and mine.start < its.stop]

    for name, parameter in model.named_parameters():
        for other in others(parameter):
            found[name] = f"the parameter {other!r} has the same memory"
        if (memory := _memory(parameter)) is not None:
            of_storage[memory.storage].append((memory, name))
    for owner, module in model.named_modules():
        kind: Any = type(module)
        if kind.__setattr__ is not nn.Module.__setattr__:
            continue  # it notices itself, as nn.LSTM does
        for attribute, value in vars(module).items():
            # Before each forward, a hook of torch computes "weight" from "weight_orig".
            if attribute in OF_EVERY_MODULE or f"{attribute}_orig" in module._parameters:
                continue
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    where = f"{owner}.{attribute}" if owner else attribute
                    for name in others(leaf):
                        found[name] = (
                            f"the attribute {where!r} holds it too, without registering it"
                        )
    return found


def why_weight_is_not_split(module: nn.Module) -> str | None:
    """Return why the weight of an embedding cannot be split, or None."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    if module.max_norm is not None:
        return f"changes its weight in its forward (max_norm={module.max_norm}), on a copy"
    if module.sparse:
        return "gets a sparse gradient (sparse=True), which cannot be reduced"
    return None
