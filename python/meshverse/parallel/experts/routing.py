"""Which tokens go to which experts, whatever form a module is told it in.

Example:
    >>> routing = read_routing(module, experts, values)  # doctest: +SKIP
    >>> routing.hidden.shape, routing.expert_ids.shape  # doctest: +SKIP
    (torch.Size([96, 32]), torch.Size([96, 2]))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .stacked import StackedExperts, is_routed

__all__ = ["Routing", "arguments_of", "read_routing", "takes_all_weights", "weigh"]


@dataclass(frozen=True)
class Routing:
    """Tokens and their experts.

    Attributes:
        hidden: shape (tokens, features).
        expert_ids: shape (tokens, choices), of all experts of the model.
        weights: of the choices, of the same shape; None where they are in `hidden` already.
    """

    hidden: Tensor
    expert_ids: Tensor
    weights: Tensor | None

    def share(self, sliced: Any) -> Routing:
        """The same with each tensor replaced by `sliced(tensor)`."""
        weights = None if self.weights is None else sliced(self.weights)
        return replace(
            self, hidden=sliced(self.hidden), expert_ids=sliced(self.expert_ids), weights=weights
        )


def arguments_of(module: nn.Module, arguments: tuple[Any, ...], keywords: Any) -> tuple[Any, ...]:
    """What a module's own forward is called with, in its order."""
    bound = signature(type(module).forward).bind(module, *arguments, **keywords)
    return tuple(bound.arguments.values())[1:]


def takes_all_weights(module: nn.Module) -> bool:
    """Whether a module is told a weight for every expert (GPT-OSS of transformers 4)."""
    return not is_routed(module) and "routing_weights" in signature(type(module).forward).parameters


def read_routing(module: nn.Module, experts: StackedExperts, values: tuple[Tensor, ...]) -> Routing:
    """The routing in the arguments of a module's forward.

    These are hidden states, each token's experts, and their weights: as many as the experts, or (in
    GPT-OSS of transformers 4) one for every expert of the model. Or (in Llama 4) they are rows that
    have their weights already, as many for each expert, of which all but those routed are zeros.

    An id below 0 or beyond the experts is of no expert: it becomes the number of experts that have
    weights, with weight 0.
    """
    hidden = values[0].flatten(0, -2)
    if len(values) == 1:
        count = hidden.size(0) // experts.count
        ids = torch.arange(experts.count, device=hidden.device).repeat_interleave(count)
        return Routing(hidden, ids[:, None], None)
    expert_ids, weights = values[1].long(), values[2]
    is_none = expert_ids < 0
    if not experts.hands_on:
        is_none |= expert_ids >= experts.count
    expert_ids = expert_ids.masked_fill(is_none, experts.count)
    if takes_all_weights(module):
        weights = weights.gather(1, expert_ids.clamp(max=weights.size(1) - 1))
    return Routing(hidden, expert_ids, weights.masked_fill(is_none, 0))


def weigh(routing: Routing, outputs: Tensor) -> Tensor:
    """The sum over each token's choices of what its experts gave, by their weights.

    Args:
        routing: of shape (tokens, choices).
        outputs: shape (tokens * choices, features).
    """
    by_token = outputs.view(*routing.expert_ids.shape, outputs.size(-1))
    if routing.weights is not None:
        by_token = by_token * routing.weights.unsqueeze(-1)
    total: Tensor = by_token.sum(1)
    return total.to(routing.hidden.dtype)
