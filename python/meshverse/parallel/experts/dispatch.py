"""Routing of tokens to experts: read from arguments, then done by all-to-all exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .trial import Part, PartOfExperts


class Routing(NamedTuple):
    """Tokens, and the experts that a router chose for each."""

    hidden: Tensor  # shape (tokens, features)
    expert_ids: Tensor  # shape (tokens, choices); ids among all experts of the module
    # Weights of the choices, of the same shape; None if the forward takes only rows.
    weights: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Routing:
        """Return this routing with each tensor replaced by `function(tensor)`."""
        return Routing(*(None if each is None else function(each) for each in self))  # type: ignore[arg-type]


class Choices(NamedTuple):
    """Rows to run experts on: one for each token and each expert chosen for it."""

    rows: Tensor  # shape (choices, features)
    expert_ids: Tensor  # shape (choices,); ids among the experts of a rank
    weights: Tensor | None  # shape (choices,); None if the forward takes only rows


Run = Callable[[Choices], Tensor]


def arguments_of(
    module: nn.Module, part: Part, arguments: tuple[Any, ...], keywords: Any
) -> tuple[Tensor, ...]:
    """Return all arguments of a call, in the order of the parameters of the module's forward.

    Raises:
        ValueError: they are not those with which the forward was tried.
    """
    bound = signature(type(module).forward).bind(module, *arguments, **keywords)
    names, values = list(bound.arguments)[1:], tuple(bound.arguments.values())[1:]
    shapes = [tuple(each.shape) if isinstance(each, Tensor) else each for each in values]
    count = {"rows": 1, "all": 2, "choices": 3}[part.form]
    if len(values) != count or not all(isinstance(each, Tensor) for each in values):
        raise ValueError(
            f"{type(module).__name__} was called with {dict(zip(names, shapes, strict=True))}, but "
            f"its parameters are split, for calls with {count} tensors. Call it with these only."
        )
    return values


def read_routing(part: PartOfExperts, values: tuple[Tensor, ...]) -> Routing:
    """Return the routing in the arguments of a module's forward, which all have two dims.

    The arguments are hidden states, each token's expert ids, and the router's weights. If the
    forward takes only rows, they are equally many for each expert.

    An id below 0 or above the last expert's belongs to no expert: it becomes that of the number of
    experts, with weight 0. Ids of identity experts are unchanged.
    """
    hidden, count = values[0], part.experts.count
    shapes = [tuple(each.shape) for each in values]
    if {len(each) for each in shapes} != {2} or len({each[0] for each in shapes}) > 1:
        raise ValueError(
            f"The experts are distributed, but were called with tensors of shapes {shapes}. Give "
            "hidden states of shape (tokens, features), and ids and weights of shape (tokens, "
            "choices): flatten them before the call."
        )
    if part.form == "rows":
        if hidden.size(0) % count:
            raise ValueError(
                f"The experts are distributed, but were called with {hidden.size(0)} rows, which "
                f"{count} experts cannot share: the forward takes equally many rows for each "
                "expert. Fill up each expert's rows with zeros to the same number."
            )
        ids = torch.arange(count, device=hidden.device)
        return Routing(hidden, ids.repeat_interleave(hidden.size(0) // count)[:, None], None)
    expert_ids, weights = values[1].long(), values[2]
    if part.counts_from_end:
        expert_ids = torch.where(expert_ids < 0, expert_ids + count, expert_ids)
    is_invalid = expert_ids < 0
    if not part.has_identity:
        is_invalid |= expert_ids >= count
    return Routing(
        hidden, expert_ids.masked_fill(is_invalid, count), weights.masked_fill(is_invalid, 0)
    )


def sum_choices(outputs: Tensor, routing: Routing) -> Tensor:
    """Return, for each token, the sum of its experts' outputs, shape (tokens, features)."""
    return outputs.view(*routing.expert_ids.shape, outputs.size(-1)).sum(1)


def dispatch(routing: Routing, part: PartOfExperts, mesh: DeviceMesh, run: Run) -> Tensor:
    """Return the outputs of all ranks' experts for this rank's tokens, shape (tokens, features).

    For each token and each expert chosen for it, one row is sent, with its weight. An all-to-all
    sends rows to the ranks of their experts, and another sends outputs back; no row is dropped. The
    host waits only for the numbers of rows. All ranks of the mesh call this, even a rank without
    tokens.

    Args:
        routing: routing of this rank's tokens.
        part: how the experts are run.
        mesh: 1-D mesh, whose rank r has the r-th part of the experts.
        run: function that returns the outputs of this rank's experts; there may be no rows.
    """
    ids, count, group = routing.expert_ids.reshape(-1), part.experts.count, mesh.get_group()
    order = ids.argsort(stable=True)
    # How often each expert is chosen. Not bincount, which waits for the device.
    counts = ids.new_zeros(count + 1, dtype=torch.long)
    counts.scatter_add_(0, ids.clamp(max=count), torch.ones_like(ids, dtype=torch.long))
    sent_counts = counts[:count].view(mesh.size(), -1)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts, group=group)
    sent, received = torch.stack([sent_counts.sum(1), received_counts.sum(1)]).tolist()

    local_ids = torch.arange(sent_counts.size(1), device=ids.device).repeat(mesh.size())
    local_ids = local_ids.repeat_interleave(received_counts.flatten(), output_size=sum(received))
    chosen = [routing.hidden[order // routing.expert_ids.size(-1)]]
    if routing.weights is not None:
        chosen.append(routing.weights.reshape(-1)[order])
    rows, *weights = exchange([each[: sum(sent)] for each in chosen], sent, received, group)
    outputs = run(Choices(rows, local_ids, weights[0] if weights else None))
    (own,) = exchange([outputs], received, sent, group)

    others, *their_weights = (each[sum(sent) :] for each in chosen)
    if part.has_identity:
        others = others * their_weights[0].unsqueeze(-1)
    else:
        others = torch.zeros_like(others)
    return sum_choices(torch.cat([own, others.to(own.dtype)])[order.argsort()], routing)


def exchange(
    tensors: Sequence[Tensor],
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
) -> tuple[Tensor, ...]:
    """Exchange rows with all ranks of a group by all-to-alls, which backward reverses.

    All ranks of the group call this.

    Args:
        tensors: tensors to send rows of, shape (sum of sent, ...), in the order of receiving ranks.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        group: the process group.

    Returns:
        For each tensor, the received rows, shape (sum of received, ...), in the order of sending
        ranks.
    """
    # One node for all tensors, so that backward has the same order of collectives on all ranks.
    apply: Any = _Exchange.apply
    return apply(list(sent), list(received), group, *tensors)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sent: list[int], received: list[int], group: dist.ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = (received, sent, group)
        return _exchanged(sent, received, group, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.back
        return None, None, None, *_exchanged(sent, received, group, gradients)


def _exchanged(
    sent: list[int], received: list[int], group: dist.ProcessGroup, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    results = []
    for rows in tensors:
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group)
        results.append(result)
    return tuple(results)
