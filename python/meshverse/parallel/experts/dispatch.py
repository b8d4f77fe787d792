"""Tokens sent to the ranks that have their experts, and brought back.

Example:
    >>> outputs = dispatch(routing, 8, mesh["ep"], run, hands_on=False)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .exchange import exchange_rows
from .routing import Routing, weigh

__all__ = ["dispatch"]

LocalExperts = Callable[[Tensor, Tensor], Tensor]


def dispatch(
    routing: Routing, count: int, mesh: DeviceMesh, run: LocalExperts, *, hands_on: bool
) -> Tensor:
    """What all ranks' experts make of this rank's tokens.

    Every choice of a token is a row that goes to the rank of its expert by an all-to-all, and comes
    back by another, whatever their numbers. The only thing the host waits for is how many go where.

    Args:
        routing: of this rank's own tokens.
        count: number of experts in all; rank r has those from r * count / ranks on.
        mesh: 1-D; all of its ranks call this, those without tokens too.
        run: what this rank's experts make of rows, called as `run(rows, local expert ids)`, also
            without any rows.
        hands_on: whether experts beyond `count` hand a token on as it is, and not give zeros.

    Returns:
        Shape (tokens, features).
    """
    ids = routing.expert_ids.reshape(-1)
    order = ids.argsort(stable=True)
    sent_counts = _counts(ids, count).view(mesh.size(), -1)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts, group=mesh.get_group())
    sent, received = torch.stack([sent_counts.sum(1), received_counts.sum(1)]).tolist()

    rows = routing.hidden[order // routing.expert_ids.size(-1)]
    own, handed_on = torch.split(rows, [sum(sent), rows.size(0) - sum(sent)])
    arrived = exchange_rows(own, sent, received, mesh.get_group())
    here = torch.arange(sent_counts.size(1), device=ids.device).repeat(mesh.size())
    here = here.repeat_interleave(received_counts.flatten(), output_size=sum(received))
    outputs = exchange_rows(run(arrived, here), received, sent, mesh.get_group())

    if not hands_on:
        handed_on = torch.zeros_like(handed_on)
    outputs = torch.cat([outputs, handed_on.to(outputs.dtype)])
    return weigh(routing, outputs[order.argsort()])


def _counts(ids: Tensor, count: int) -> Tensor:
    """How often each of `count` experts is chosen; without waiting, as bincount would."""
    counts = ids.new_zeros(count + 1, dtype=torch.long)
    counts.scatter_add_(0, ids.clamp(max=count), torch.ones_like(ids, dtype=torch.long))
    return counts[:count]
