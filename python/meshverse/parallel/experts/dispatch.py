"""Routing of tokens to experts: read from arguments, then done by all-to-all exchanges."""

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
    """Tokens, and the experts that a router chose for each."""

    hidden: Tensor  # shape (tokens, features)
    expert_ids: Tensor  # shape (tokens, choices); ids among all experts of the module
    # Weights of the choices, of the same shape; None if `hidden` is already multiplied by them.
    weights: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Routing:
        """Return this routing with each tensor replaced by `function(tensor)`."""
        return Routing(*(None if each is None else function(each) for each in self))  # type: ignore[arg-type]


def arguments_of(module: nn.Module, arguments: tuple[Any, ...], keywords: Any) -> tuple[Any, ...]:
    """Return all arguments of a call, in the order of the parameters of the module's forward."""
    bound = signature(type(module).forward).bind(module, *arguments, **keywords)
    return tuple(bound.arguments.values())[1:]


def read_routing(experts: StackedExperts, values: tuple[Tensor, ...]) -> Routing:
    """Return the routing in the arguments of a module's forward.

    The arguments are hidden states, each token's expert ids, and the router's weights. In Llama 4
    there is one argument: equally many rows for each expert, already multiplied by the router's
    weights; rows of tokens that were not routed to the expert are zeros.

    An id below 0 or above the last expert's belongs to no expert: it becomes `experts.count`, with
    weight 0. Ids of identity experts are unchanged.
    """
    hidden = values[0].flatten(0, -2)
    if len(values) == 1:
        count = hidden.size(0) // experts.count
        ids = torch.arange(experts.count, device=hidden.device).repeat_interleave(count)
        return Routing(hidden, ids[:, None], None)
    expert_ids, weights = values[1].long(), values[2]
    is_invalid = expert_ids < 0
    if not experts.has_identity:
        is_invalid |= expert_ids >= experts.count
    expert_ids = expert_ids.masked_fill(is_invalid, experts.count)
    return Routing(hidden, expert_ids, weights.masked_fill(is_invalid, 0))


def weigh(routing: Routing, outputs: Tensor) -> Tensor:
    """Return, for each token, the weighted sum of its experts' outputs.

    Args:
        routing: routing of the tokens.
        outputs: outputs of the experts, shape (tokens * choices, features).
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
    """Return the outputs of all ranks' experts for this rank's tokens, shape (tokens, features).

    For each token and each expert chosen for it, one row is sent. An all-to-all sends rows to the
    ranks of their experts, and another sends outputs back; no row is dropped. The host waits only
    for the numbers of rows. All ranks of the mesh call this, even a rank without tokens.

    Args:
        routing: routing of this rank's tokens.
        experts: description of the experts.
        mesh: 1-D mesh, whose rank r has the r-th part of the experts.
        run: function `run(rows, local expert ids)` that returns the outputs of this rank's experts;
            there may be no rows.
    """
    ids, count, group = routing.expert_ids.reshape(-1), experts.count, mesh.get_group()
    order = ids.argsort(stable=True)
    # How often each expert is chosen. Not bincount, which waits for the device.
    counts = ids.new_zeros(count + 1, dtype=torch.long)
    counts.scatter_add_(0, ids.clamp(max=count), torch.ones_like(ids, dtype=torch.long))
    sent_counts = counts[:count].view(mesh.size(), -1)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts, group=group)
    sent, received = torch.stack([sent_counts.sum(1), received_counts.sum(1)]).tolist()

    rows = routing.hidden[order // routing.expert_ids.size(-1)]
    routed, others = torch.split(rows, [sum(sent), rows.size(0) - sum(sent)])
    arrived = exchange_rows(routed, sent, received, group)
    local_ids = torch.arange(sent_counts.size(1), device=ids.device).repeat(mesh.size())
    local_ids = local_ids.repeat_interleave(received_counts.flatten(), output_size=sum(received))
    outputs = exchange_rows(run(arrived, local_ids), received, sent, group)

    if not experts.has_identity:
        others = torch.zeros_like(others)
    outputs = torch.cat([outputs, others.to(outputs.dtype)])
    return weigh(routing, outputs[order.argsort()])


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Exchange rows with all ranks of a group by an all-to-all, which backward reverses.

    All ranks of the group call this.

    Args:
        rows: rows to send, shape (sum of sent, ...), in the order of receiving ranks.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        group: the process group.

    Returns:
        The received rows, shape (sum of received, ...), in the order of sending ranks.
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
