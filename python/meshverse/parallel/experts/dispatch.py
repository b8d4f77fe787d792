"""Tokens and their experts: read from a module's arguments, sent to the experts' ranks and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .stacked import StackedExperts


class Routing(NamedTuple):
    """Tokens and their experts."""

    hidden: Tensor  # shape (tokens, features)
    expert_ids: Tensor  # shape (tokens, choices), of all experts of the model
    # Of the choices, of the same shape; None where they are in `hidden` already.
    weights: Tensor | None

    def share(self, sliced: Callable[[Tensor], Tensor]) -> Routing:
        """Return the same with each tensor replaced by `sliced(tensor)`."""
        return Routing(*(None if each is None else sliced(each) for each in self))  # type: ignore[arg-type]


def arguments_of(module: nn.Module, arguments: tuple[Any, ...], keywords: Any) -> tuple[Any, ...]:
    """Return what a module's own forward is called with, in its order."""
    bound = signature(type(module).forward).bind(module, *arguments, **keywords)
    return tuple(bound.arguments.values())[1:]


def read_routing(experts: StackedExperts, values: tuple[Tensor, ...]) -> Routing:
    """Return the routing in the arguments of a module's forward.

    These are hidden states, each token's experts, and their weights. Or (in Llama 4) they are rows
    that have their weights already, as many for each expert; all but those routed are zeros.

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
    return Routing(hidden, expert_ids, weights.masked_fill(is_none, 0))


def weigh(routing: Routing, outputs: Tensor) -> Tensor:
    """Return the sum over each token's choices of what its experts gave, by their weights.

    Outputs have the shape (tokens * choices, features).
    """
    by_token = outputs.view(*routing.expert_ids.shape, outputs.size(-1))
    if routing.weights is not None:
        by_token = by_token * routing.weights.unsqueeze(-1)
    return by_token.sum(1).to(routing.hidden.dtype)


def dispatch(
    routing: Routing,
    experts: StackedExperts,
    mesh: DeviceMesh,
    run: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return what all ranks' experts make of this rank's tokens, of shape (tokens, features).

    Every choice of a token is a row that goes to the rank of its expert by an all-to-all, and comes
    back by another, whatever their numbers. The only thing the host waits for is how many go where.

    All ranks of the 1-D mesh call this, those without tokens too; rank r has the r-th part of the
    experts. `run(rows, local expert ids)` is what they make of rows, of which there may be none.
    """
    ids, count, group = routing.expert_ids.reshape(-1), experts.count, mesh.get_group()
    order = ids.argsort(stable=True)
    # How often each expert is chosen; without waiting, as bincount would.
    counts = ids.new_zeros(count + 1, dtype=torch.long)
    counts.scatter_add_(0, ids.clamp(max=count), torch.ones_like(ids, dtype=torch.long))
    sent_counts = counts[:count].view(mesh.size(), -1)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts, group=group)
    sent, received = torch.stack([sent_counts.sum(1), received_counts.sum(1)]).tolist()

    rows = routing.hidden[order // routing.expert_ids.size(-1)]
    own, handed_on = torch.split(rows, [sum(sent), rows.size(0) - sum(sent)])
    arrived = exchange_rows(own, sent, received, group)
    here = torch.arange(sent_counts.size(1), device=ids.device).repeat(mesh.size())
    here = here.repeat_interleave(received_counts.flatten(), output_size=sum(received))
    outputs = exchange_rows(run(arrived, here), received, sent, group)

    if not experts.hands_on:
        handed_on = torch.zeros_like(handed_on)
    outputs = torch.cat([outputs, handed_on.to(outputs.dtype)])
    return weigh(routing, outputs[order.argsort()])


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send consecutive rows to each rank of a group, and get theirs; gradients go the other way.

    All ranks of the group call this, with the number of rows for each rank and from each. Of rows
    of shape (sum of sent, ...) it makes (sum of received, ...), by the rank they come from.
    """
    apply: Any = _Exchange.apply
    return apply(rows, list(sent), list(received), group)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = (received, sent, group)
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.forward(ctx, gradient, *ctx.back), None, None, None
