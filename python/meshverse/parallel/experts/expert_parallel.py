"""Whole experts handed out to the ranks of a mesh.

Example:
    >>> parallelize_module(  # doctest: +SKIP
    ...     model, moe_mesh["ep"], {"layers.*.mlp.experts": ExpertParallel()}
    ... )
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import one_hot

from meshverse.parallel.styles.local_styles import (
    CheckedStyle,
    hidden_parameters,
    split_parameters,
    sum_gradients,
)

from .dispatch import dispatch
from .exchange import exchange_rows, scale_gradient
from .routing import Routing, arguments_of, read_routing, takes_all_weights, weigh
from .rows import apply_experts
from .stacked import StackedExperts, check_parameters, describe, is_routed, own_gate

__all__ = ["ExpertParallel", "SameTokensExpertParallel"]


class Counted(Protocol):
    """What is asked of experts to send tokens to them."""

    @property
    def count(self) -> int:
        """Number of experts that have weights."""

    @property
    def hands_on(self) -> bool:
        """Whether experts beyond those hand tokens on as they are."""


class _WholeExperts(CheckedStyle):
    """What both ways to hand out experts have in common: rank r has the r-th part of them."""

    gradient_scale = 1.0

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module has stacked experts, in a number that divides."""
        experts = check_parameters(name, module, self)
        if experts.count % size:
            raise ValueError(
                f"{name}: its {experts.count} experts do not divide by the {size} ranks of expert "
                "parallelism. Choose a number of ranks that divides them."
            )

    def placements_of(self, module: nn.Module) -> Mapping[str, Placement]:
        """All parameters of the experts are split by experts."""
        experts = describe(module)
        return {} if experts is None else dict.fromkeys(experts.names, Shard(0))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        experts = check_parameters(type(module).__name__, module, self)
        placements = dict.fromkeys(experts.names, Shard(0))
        split_parameters(module, placements, device_mesh, self.src_data_rank)
        own: Any = module
        if isinstance(getattr(module, "num_experts", None), int):
            own.num_experts = experts.count // device_mesh.size()
        # Not closures: a copy of the module must run on its own parameters.
        own.forward = partial(_untraced_forward, module, self, experts, device_mesh)
        return module

    @abstractmethod
    def combine(
        self, routing: Routing, experts: StackedExperts, mesh: DeviceMesh, run: Any
    ) -> Tensor:
        """What the experts of all ranks make of tokens; `run(rows, local ids)` runs mine."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ExpertParallel(_WholeExperts):
    """Stacked experts handed out to ranks; each rank's tokens go to the experts and come back.

    For a module whose forward takes hidden states, each token's experts and their weights. No token
    is dropped, whatever the numbers. The gradients of experts are sums over the tokens of all ranks
    of the mesh, as those of one process are over its tokens.

    Args:
        same_tokens: 1-D mesh of the ranks that have the same tokens as this one, such as that of
            tensor parallelism: each then sends a part of them. None if every rank has its own.
        gradient_scale: what the gradients of the experts' parameters are multiplied by.
    """

    def __init__(self, same_tokens: DeviceMesh | None = None, gradient_scale: float = 1.0) -> None:
        super().__init__()
        self.same_tokens = same_tokens
        self.gradient_scale = gradient_scale

    def combine(self, routing: Routing, experts: Counted, mesh: DeviceMesh, run: Any) -> Tensor:
        """What the experts of all ranks make of this rank's tokens."""
        same = self.same_tokens
        send = partial(dispatch, count=experts.count, mesh=mesh, run=run, hands_on=experts.hands_on)
        if same is None or same.size() == 1:
            return send(routing)
        outputs = send(routing.share(partial(_slice, same)))
        shape = routing.hidden.shape
        sliced = DTensor.from_local(
            outputs.contiguous(), same, [Shard(0)], shape=shape, stride=(shape[1], 1)
        )
        return sliced.redistribute(placements=[Replicate()]).to_local().clone()


def _slice(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    """This rank's part of what is the same on all ranks; its gradient covers all parts."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


class SameTokensExpertParallel(_WholeExperts):
    """Stacked experts handed out to ranks that all have the same tokens.

    Each rank runs its experts on the tokens that chose them, and the outputs are summed over the
    ranks: no token changes ranks.
    """

    def combine(
        self, routing: Routing, experts: StackedExperts, mesh: DeviceMesh, run: Any
    ) -> Tensor:
        """The sum over the ranks of what their experts make of the tokens."""
        shared = routing.share(partial(_shared, mesh))
        local = experts.count // mesh.size()
        first = mesh.get_local_rank() * local
        mine = (routing.expert_ids >= first) & (routing.expert_ids < first + local)
        flat = mine.reshape(-1).nonzero().squeeze(-1)
        rows = shared.hidden[flat // mine.size(-1)]
        given = run(rows, routing.expert_ids.reshape(-1)[flat] - first)
        outputs = given.new_zeros((mine.numel(), given.size(-1))).index_copy(0, flat, given)
        term = DTensor.from_local(weigh(shared, outputs), mesh, [Partial()], run_check=False)
        total = term.redistribute(placements=[Replicate()]).to_local()
        if not experts.hands_on:
            return total
        handed_on = (routing.expert_ids >= experts.count).reshape(-1, 1)
        return total + weigh(
            routing, routing.hidden.repeat_interleave(mine.size(-1), 0) * handed_on
        )


def _shared(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    return sum_gradients(tensor, mesh) if tensor.is_floating_point() else tensor


def _forward(
    module: Any,
    style: _WholeExperts,
    experts: StackedExperts,
    mesh: DeviceMesh,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    values = arguments_of(module, arguments, keywords)
    local = {name: _own_experts(module, name, experts, mesh) for name in experts.names}
    with hidden_parameters(module, local):
        run = partial(_run, module, experts, style.gradient_scale)
        if len(values) == 1:
            return _combine_rows(style, read_routing(module, experts, values), experts, mesh, run)
        output = style.combine(read_routing(module, experts, values), experts, mesh, run)
    # No view where it can be: FSDP2 loses its hold on a view that is changed in place.
    return output if output.shape == values[0].shape else output.view_as(values[0])


# Traced, each new number of rows that change ranks would compile anew. Dense layers stay traced.
_untraced: Any = torch.compiler.disable
_untraced_forward = _untraced(_forward)


def _own_experts(module: nn.Module, name: str, experts: StackedExperts, mesh: DeviceMesh) -> Tensor:
    """The rows of a parameter that are of this rank's experts.

    LongCat's weights have rows for its identity experts too. An even split then gives a rank rows
    of other ranks' experts, so ranks exchange rows first.
    """
    parameter: Any = module._parameters[name]  # a DTensor
    held: Tensor = parameter.to_local()
    held_by_all: int = parameter.size(0)
    if held_by_all == experts.count:
        return held
    size, rank = mesh.size(), mesh.get_local_rank()
    chunk, own = -(-held_by_all // size), experts.count // size

    def overlap(holder: int, owner: int) -> int:
        last = min((holder + 1) * chunk, (owner + 1) * own)
        return max(0, last - max(holder * chunk, owner * own))

    sent = [overlap(rank, owner) for owner in range(size)]
    received = [overlap(holder, rank) for holder in range(size)]
    return exchange_rows(held[: sum(sent)], sent, received, mesh.get_group())


def _combine_rows(
    style: _WholeExperts, routing: Routing, experts: StackedExperts, mesh: DeviceMesh, run: Any
) -> Tensor:
    """As `combine`, of rows that have their weights: those not routed are zeros, and stay so."""
    routed = routing.hidden.detach().any(-1).nonzero().squeeze(-1)
    output = style.combine(routing.share(lambda each: each[routed]), experts, mesh, run)
    return torch.zeros_like(routing.hidden).index_copy(0, routed, output)


def _run(
    module: Any, experts: StackedExperts, gradient_scale: float, rows: Tensor, ids: Tensor
) -> Tensor:
    """What this rank's experts make of rows, with gradients scaled for parameters only."""
    if gradient_scale == 1:
        return _run_local(module, experts, rows, ids)
    output = _run_local(module, experts, scale_gradient(rows, 1 / gradient_scale), ids)
    return scale_gradient(output, gradient_scale)


def _run_local(module: Any, experts: StackedExperts, rows: Tensor, ids: Tensor) -> Tensor:
    """What this rank's experts make of rows, by transformers' fast ways where they are on."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    local = getattr(module, experts.down).size(0)
    if takes_all_weights(module):
        chosen = one_hot(ids, local).to(rows.dtype)
        output: Tensor = type(module).forward(module, rows[None], ids[:, None], chosen)
        return output[0]
    if is_routed(module) and implementation not in (None, "eager") and rows.size(0):
        unit = torch.ones_like(ids, dtype=rows.dtype)
        return type(module).forward(module, rows, ids[:, None], unit[:, None])  # type: ignore[no-any-return]
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=local).tolist()
    return apply_experts(module, experts, rows[order], counts, own_gate)[order.argsort()]
