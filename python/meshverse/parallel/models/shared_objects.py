"""Objects that several layers refer to, and whether a forward changes them.

Example:
    >>> layers = {str(number): nn.Identity() for number in range(2)}
    >>> layers["0"].box = layers["1"].box = {}
    >>> shared = SharedObjects({name: layer} for name, layer in layers.items())
    >>> before = shared.contents()
    >>> layers["1"].box["value"] = torch.ones(2)
    >>> shared.changed_since(before)
    "the dict '0.box'"
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from meshverse._torch_compat.dispatch import version_of

from .modules import child_name
from .trials import OF_EVERY_MODULE

_CONTAINERS = (dict, list, tuple, set, deque)
_PLAIN = {bool, int, float, str, type(None)}
# Their objects, such as loggers and meshes, fill caches of their own.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "meshverse"}


class SharedObjects:
    """Objects that modules of several groups of layers have as attributes, and what is in these.

    Objects are containers, and instances of classes of users and libraries such as a config. A
    change deeper inside them is not seen. Modules, and what can be called, are not among them.

    Args:
        groups: layers of each group, by name.
    """

    def __init__(self, groups: Iterable[Mapping[str, nn.Module]]) -> None:
        first, self._objects = dict[int, Any](), dict[str, Any]()
        for layers in groups:
            own = dict[int, Any]()
            for name, each in _objects_of(layers):
                own.setdefault(id(each), (name, each))
            self._objects |= {name: each for key, (name, each) in first.items() if key in own}
            first = own | first

    def contents(self) -> list[list[Any]]:
        """Return what is in each object now."""
        return [_contents(each) for each in self._objects.values()]

    def changed_since(self, before: list[list[Any]]) -> str:
        """Return type and name of an object with other contents than before, in words; or ""."""
        for (name, each), earlier in zip(self._objects.items(), before, strict=True):
            now = _contents(each)
            if len(now) != len(earlier) or not all(map(_are_same, now, earlier)):
                return f"the {type(each).__name__} {name!r}"
        return ""

    def graph_left_in(self, before: list[list[Any]]) -> str:
        """Return an object as `changed_since`, in which there is a new tensor with gradients.

        Not what was appended to a list, such as losses that the program sums: layers rarely read
        it. A counter or a cache does not change gradients.
        """
        for (name, each), earlier in zip(self._objects.items(), before, strict=True):
            if isinstance(each, list | set | deque | tuple):
                continue
            old = {*map(id, earlier)}
            for one in _contents(each):
                if isinstance(one, torch.Tensor) and one.requires_grad and id(one) not in old:
                    return f"the {type(each).__name__} {name!r}"
        return ""


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which do not say."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _objects_of(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the objects in attributes of modules, and those in these, with their names."""
    for prefix, layer in layers.items():
        for inside, module in layer.named_modules(prefix=prefix):
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE and _is_object(value):
                    whole = child_name(inside, name)
                    yield whole, value
                    yield from (
                        (f"{whole}.{key}", each) for key, each in _items(value) if _is_object(each)
                    )


def _is_object(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return True
    if not hasattr(value, "__dict__") or callable(value):  # modules can be called
        return False
    library = type(value).__module__.partition(".")[0]
    return library not in _LIBRARIES or isinstance(value, SimpleNamespace)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    table = value if isinstance(value, _CONTAINERS) else vars(value)
    return table.items() if isinstance(table, dict) else enumerate(table)


def _contents(value: Any) -> list[Any]:
    table = value if isinstance(value, _CONTAINERS) else vars(value)
    items = [*table, *table.values()] if isinstance(table, dict) else [*table]
    others = [each for each in items if type(each) not in _PLAIN]  # isinstance() is slower
    return items + [tensor_version(each) for each in others if isinstance(each, torch.Tensor)]


def _are_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in _PLAIN and type(one) is type(other) and one == other)
