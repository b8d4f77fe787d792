"""What all trials need: copies of modules, and random states, so that nothing of a user's changes.

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
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["leaves_in", "same_random_state", "trial_copy"]

_Module = TypeVar("_Module", bound=nn.Module)


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield what is in a value: in lists, tuples, dicts, sets and dataclasses, also nested ones."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, set | frozenset):
            yield from leaves_in([*leaf])
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves_in([getattr(leaf, each.name) for each in fields(leaf)])
        else:
            yield leaf


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


def same_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Set torch's random states of the CPU and of a device back on leaving."""
    kind = device.type
    return torch.random.fork_rng([] if kind == "cpu" else [device], device_type=kind)
