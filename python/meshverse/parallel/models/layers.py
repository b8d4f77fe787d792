"""The layers of a model: what is sharded, checkpointed and compiled one by one.

Example:
    >>> model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    >>> [name for name, _ in next(layer_lists(model))]
    ['0.0', '0.1']
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .stages import AbsentModule

__all__ = ["layer_lists"]

_LISTS = (nn.ModuleList, nn.ModuleDict)


def layer_lists(module: nn.Module, prefix: str = "") -> Iterator[list[tuple[str, nn.Module]]]:
    """The outermost ModuleLists and ModuleDicts of a module: their items, with their names.

    The module may be such a list itself. In a list of lists, whose items have no forward, the inner
    lists are meant. Layers that another pipeline stage has are left out.
    """
    children = [
        (name, child)
        for name, child in module.named_children()
        if not isinstance(child, AbsentModule)
    ]
    if isinstance(module, _LISTS) and not any(isinstance(child, _LISTS) for _, child in children):
        yield [(prefix + name, child) for name, child in children]
        return
    for name, child in children:
        yield from layer_lists(child, f"{prefix}{name}.")
