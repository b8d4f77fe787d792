"""The layers of a model: what is sharded, checkpointed and compiled one by one.

Example:
    >>> model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    >>> [name for name, _ in next(layer_lists(model))]
    ['0.0', '0.1']
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["layer_lists"]

_LISTS = (nn.ModuleList, nn.ModuleDict)


def layer_lists(module: nn.Module, prefix: str = "") -> Iterator[list[tuple[str, nn.Module]]]:
    """The outermost ModuleLists and ModuleDicts in a module: their items, with their names.

    A list of lists has no forward of its own to work around: its inner lists are meant.
    """
    for name, child in module.named_children():
        items = [
            (f"{prefix}{name}.{item_name}", item) for item_name, item in child.named_children()
        ]
        if isinstance(child, _LISTS) and not any(isinstance(item, _LISTS) for _, item in items):
            yield items
        else:
            yield from layer_lists(child, f"{prefix}{name}.")
