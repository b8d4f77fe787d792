"""Names of modules in a plan: `*` and other wildcards stand for one step of a name.

Example:
    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    >>> matching_modules(model, "layers.*")
    ['layers.0', 'layers.1']
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from .stages import AbsentModule

__all__ = [
    "is_in_other_stage",
    "is_present",
    "matching_modules",
    "nearest_name",
    "parameter_of",
    "parent_name",
]


def matching_modules(model: nn.Module, pattern: str) -> list[str]:
    """The names of a model's modules that a plan's key means, in the model's order.

    Modules that another pipeline stage has are none of them.
    """
    found = _walk(model, pattern)[-1]
    return [name for name, module in found if not isinstance(module, AbsentModule)]


def is_in_other_stage(model: nn.Module, pattern: str) -> bool:
    """Whether a plan's key may mean something that another pipeline stage has."""
    return any(
        isinstance(module, AbsentModule) for found in _walk(model, pattern) for _, module in found
    )


def _walk(model: nn.Module, pattern: str) -> list[list[tuple[str, nn.Module]]]:
    """The modules that each step of a plan's key means, with their names."""
    steps = [[("", model)]]
    for token in pattern.split(".") if pattern else ():
        steps.append(
            [
                (f"{name}.{child_name}" if name else child_name, child)
                for name, module in steps[-1]
                for child_name, child in module.named_children()
                if fnmatchcase(child_name, token)
            ]
        )
    return steps


def parameter_of(model: nn.Module, pattern: str) -> nn.Parameter | None:
    """The first parameter that a plan's key means, if it means parameters and not modules."""
    owner, _, name = pattern.rpartition(".")
    for module_name in matching_modules(model, owner):
        parameter = model.get_submodule(module_name)._parameters.get(name)
        if parameter is not None:
            return parameter
    return None


def nearest_name(model: nn.Module, pattern: str) -> str | None:
    """The module's name that is spelled most like a plan's key, with `*` for numbers of layers."""
    names = dict.fromkeys(
        re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name, _ in model.named_modules()
    )
    return next(iter(get_close_matches(pattern, names, n=1, cutoff=0.0)), None)


def is_present(model: nn.Module, pattern: str) -> bool:
    """Whether a plan's key means anything in a model, module or parameter."""
    return bool(matching_modules(model, pattern)) or parameter_of(model, pattern) is not None


def parent_name(name: str) -> str:
    """The name, or pattern, of the module around one."""
    return name.rpartition(".")[0]
