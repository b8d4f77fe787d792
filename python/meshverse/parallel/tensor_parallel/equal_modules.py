"""Equality of modules: those that compute the same, with other weights.

Two modules are equal if their trees have the same classes, shapes of parameters, buffers, styles
and plain attributes. Attributes of other types must be the same object. So modules that compute the
same may count as different, but not the other way round, with one exception: an int that is a
number in the module's name, as in "layers.3", is the number of its layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

_OF_EVERY_MODULE = vars(nn.Module()).keys()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Placement)


class EqualModules:
    """Modules of a model, each of which is different from all others."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, dict[str, nn.Module]] = {}

    def first(
        self,
        name: str,
        module: nn.Module,
        styles: Mapping[str, ParallelStyle],
        counts: Mapping[int, Mapping[str, int]],
    ) -> str:
        """Return the name of an equal module that was given before; else keep this one.

        Args:
            name: of the module in its model.
            module: to find, or to keep.
            styles: of the modules in it, by name.
            counts: attributes that a rank has with other values, by the id of their module.
        """
        known = self._by_key.setdefault(_key(name, module, styles, counts), {})
        for other_name, other in known.items():
            if _have_equal_buffers(module, other):
                return other_name
        known[name] = module
        return name


def _key(
    name: str,
    module: nn.Module,
    styles: Mapping[str, ParallelStyle],
    counts: Mapping[int, Mapping[str, int]],
) -> Hashable:
    layers = name.split(".")
    modules = [
        (
            own,
            type(each),
            _plain(_attributes(each), layers),
            _plain(dict(counts.get(id(each), {})), []),
            (type(style), _plain(vars(style), [])) if (style := styles.get(own)) else None,
        )
        for own, each in module.named_modules()
    ]
    first: dict[int, str] = {}  # of the names of a shared parameter
    parameters = [
        (own, first.setdefault(id(each), own), each.shape, each.dtype)
        for own, each in module.named_parameters(remove_duplicate=False)
    ]
    buffers = [(own, each.shape, each.dtype) for own, each in module.named_buffers()]
    return tuple(modules), tuple(parameters), tuple(buffers)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in vars(module).items() if name not in _OF_EVERY_MODULE}


def _plain(value: Any, layers: list[str]) -> Hashable:
    """Return a key that is equal for equal plain values, and for one object.

    Args:
        value: any.
        layers: parts of a module's name, of which an int may be one.
    """
    if type(value) is int and str(value) in layers:
        return "layer", layers.index(str(value))
    if isinstance(value, dict):
        return dict, tuple((_plain(key, []), _plain(each, layers)) for key, each in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(_plain(each, layers) for each in value)
    return type(value), value if isinstance(value, _PLAIN) else id(value)


def _have_equal_buffers(one: nn.Module, other: nn.Module) -> bool:
    """Whether the buffers, which have the same shapes, have the same values, if they have any."""
    pairs: list[tuple[Tensor, Tensor]] = [*zip(one.buffers(), other.buffers(), strict=True)]
    return all(
        first.is_meta == second.is_meta
        and (first.is_meta or (first.device == second.device and torch.equal(first, second)))
        for first, second in pairs
    )
