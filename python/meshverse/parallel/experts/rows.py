"""Experts at work on rows that lie expert by expert.

transformers has fast ways to run experts, where a module says how its weights lie. This is for the
modules, and the moments, that they do not serve: one product for each expert.

Example:
    >>> apply_experts(experts, rows, [2, 0, 5], own_gate)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .routing import Routing, weigh
from .stacked import StackedExperts

__all__ = ["apply_experts", "apply_routed", "untraced_routed"]

Gate = Callable[[Any, Tensor], Tensor]


def apply_experts(
    module: Any,
    experts: StackedExperts,
    rows: Tensor,
    counts: Sequence[int],
    gate: Gate,
    *,
    identity_share: float = 1.0,
) -> Tensor:
    """What a module's experts make of rows, without the weights of a router.

    Args:
        module: with stacked experts, whose parameters are local tensors.
        experts: its description, with the number of experts that are here.
        rows: shape (sum of counts, features), those of the first expert first.
        counts: number of rows of each expert. Those beyond the experts that have weights are of
            experts that hand their rows on, or of no expert, which gives zeros.
        gate: called once as `gate(module, features)` between the products.
        identity_share: the part of what is handed on that is this rank's to give.
    """
    count = experts.count
    own, handed_on = torch.split(rows, [sum(counts[:count]), sum(counts[count:])])
    inner = _products(module, own, counts[:count], experts.columns[-1], experts.transposed)
    outer = _products(module, gate(module, inner), counts[:count], experts.down, experts.transposed)
    if not handed_on.size(0):
        return outer
    if experts.hands_on:
        return torch.cat([outer, module.identity_expert(handed_on) * identity_share])
    return torch.cat([outer, torch.zeros_like(handed_on)])


def _products(
    module: Any, rows: Tensor, counts: Sequence[int], name: str, transposed: bool
) -> Tensor:
    weights, biases = getattr(module, name), getattr(module, f"{name}_bias", None)
    products = []
    for number, part in enumerate(torch.split(rows, list(counts))):
        # Without rows, an expert still has a gradient, of zeros.
        product = part @ (weights[number] if transposed else weights[number].mT)
        products.append(product if biases is None else product + biases[number])
    return torch.cat(products)


def apply_routed(
    module: Any,
    experts: StackedExperts,
    routing: Routing,
    gate: Gate,
    *,
    identity_share: float = 1.0,
) -> Tensor:
    """What a module's experts make of tokens, weighted and summed.

    Args:
        module: as for `apply_experts`.
        experts: its description.
        routing: of the tokens.
        gate: as for `apply_experts`.
        identity_share: as for `apply_experts`.
    """
    ids = routing.expert_ids.reshape(-1)
    order = ids.argsort(stable=True)
    rows = routing.hidden[order // routing.expert_ids.size(-1)]
    counts = torch.bincount(ids, minlength=experts.count).tolist()
    outputs = apply_experts(module, experts, rows, counts, gate, identity_share=identity_share)
    return weigh(routing, outputs[order.argsort()])


# Traced, each new number of rows of an expert would compile anew.
_untraced: Any = torch.compiler.disable
untraced_routed = _untraced(apply_routed)
