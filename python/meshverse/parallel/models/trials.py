"""Trials: copies of modules, so that nothing of a user's is changed, and what a forward keeps.

Example:
    >>> module = nn.BatchNorm1d(2)
    >>> copied = trial_copy(module)
    >>> _ = copied(torch.ones(3, 2))
    >>> int(copied.num_batches_tracked), int(module.num_batches_tracked)
    (1, 0)
    >>> copied.weight is module.weight
    True
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .modules import child_name

OF_EVERY_MODULE = vars(nn.Module()).keys()  # names of attributes
_Module = TypeVar("_Module", bound=nn.Module)


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield what is in a value: in lists, tuples, dicts, sets and dataclasses, also nested ones.

    A shape is one value.
    """
    waiting, known = [value], list[Any]()
    while waiting:
        for leaf in tree_leaves(waiting.pop(), is_leaf=lambda each: isinstance(each, torch.Size)):
            inside: list[Any] | None = None
            if isinstance(leaf, set | frozenset):
                inside = [*leaf]
            elif is_dataclass(leaf) and not isinstance(leaf, type):
                inside = [getattr(leaf, each.name, None) for each in fields(leaf)]
            if inside is None:
                yield leaf
            elif not any(each is leaf for each in known):
                known.append(leaf)
                waiting.append(inside)


def values_in(value: Any) -> Iterator[Tensor]:
    """Yield the dense tensors in a value, if they have values, and the numbers in it as tensors."""
    for leaf in leaves_in(value):
        if isinstance(leaf, Tensor):
            if leaf.layout is torch.strided and not leaf.is_meta:
                yield leaf
        elif isinstance(leaf, bool | int | float):
            yield torch.tensor(float(leaf), dtype=torch.float64, device="cpu")


def kept_by(module: nn.Module) -> dict[str, list[Tensor]]:
    """Return the tensors and numbers in a module's attributes, and in those of modules inside it.

    They are by the attributes' full names. Parameters and buffers are not among them.
    """
    return {
        child_name(own, name): kept
        for own, inside in module.named_modules()
        for name, value in vars(inside).items()
        if name not in OF_EVERY_MODULE and (kept := [*values_in(value)])
    }


def trial_copy(module: _Module) -> _Module:
    """Return a copy of a module that shares nothing with it but parameters.

    A forward of the copy changes no buffers and attributes of the module. Of what is neither in the
    module nor in its attributes, such as a list in a global variable, there is no copy.

    Raises:
        ValueError: an attribute cannot be copied.
    """
    memo: dict[int, Any] = {}
    for inside in module.modules():
        for each in leaves_in(vars(inside)):
            if isinstance(each, nn.Module):  # maybe not a registered one
                memo |= {id(own): own for own in each.parameters()}
            elif isinstance(each, nn.Parameter):
                memo[id(each)] = each
            elif isinstance(each, Tensor) and each.grad_fn is not None:  # torch does not copy these
                memo[id(each)] = each.detach().clone().requires_grad_()
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # attributes that cannot be copied raise anything
        raise ValueError(
            f"a trial cannot copy the attributes of {type(module).__name__}: {error}. Set what "
            "cannot be copied after the split"
        ) from error
