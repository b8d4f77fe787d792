"""The optimizer of a model that Megatron-FSDP shards: checked, kept, and warned of.

Example:
    >>> model = nn.Linear(2, 2)
    >>> names = {id(parameter): name for name, parameter in named_parameters(model)}
    >>> check_optimizer(torch.optim.SGD(model.parameters()), names, model)
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import nn

__all__ = [
    "check_optimizer",
    "first_step_without_effect",
    "named_parameters",
    "point_to_new_parameters",
    "warn_of_lost_groups",
]


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters under all their names: one that several modules share comes once for each."""
    return list(model.named_parameters(remove_duplicate=False))


def check_optimizer(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str], model: nn.Module
) -> None:
    """Check that an optimizer has parameters of the model only, by their ids.

    Raises:
        ValueError: it has others.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    foreign = [each.shape for group in groups for each in group["params"] if id(each) not in names]
    if foreign:
        raise ValueError(
            f"The optimizer has {len(foreign)} parameters that {type(model).__name__} has not, of "
            f"shapes {[tuple(shape) for shape in foreign]}. Make it of the model's parameters, "
            "before the model is split."
        )


def point_to_new_parameters(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str], model: nn.Module
) -> None:
    """Give the optimizer the parameters that have taken the place of those it was made with.

    Args:
        optimizer: to change.
        names: of the model's former parameters, by id.
        model: with the new ones.
    """
    if optimizer is None:
        return
    current = dict(named_parameters(model))
    for group in optimizer.param_groups:
        group["params"] = [current[names[id(old)]] for old in group["params"]]


@contextlib.contextmanager
def first_step_without_effect(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo the step that megatron-fsdp takes with zero gradients to have the optimizer's state.

    It would decay the weights, and count as the first step in Adam's correction of its averages.
    """
    learning_rate = optimizer.defaults["lr"]
    optimizer.defaults["lr"] = 0.0
    try:
        yield
    finally:
        optimizer.defaults["lr"] = learning_rate
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0  # a tensor or a number


def warn_of_lost_groups(optimizer: torch.optim.Optimizer) -> None:
    """Warn where an optimizer has groups or settings that megatron-fsdp gives up."""
    groups = optimizer.param_groups
    changed = [
        {name: group[name] for name, value in optimizer.defaults.items() if group[name] != value}
        for group in groups
    ]
    if len(groups) > 1 or any(changed):
        warnings.warn(
            f"megatron-fsdp puts all parameters into one group with the optimizer's defaults: the "
            f"settings {changed} of its {len(groups)} groups are lost. To keep them, leave the "
            "optimizer out here, make it of the wrapped model's parameters, and call "
            "megatron_fsdp.fully_shard_optimizer.",
            stacklevel=3,
        )
