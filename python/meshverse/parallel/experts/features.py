"""Parallel style that splits stacked experts by their inner features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshverse.parallel.models.second_order import differentiable_once
from meshverse.parallel.styles.local_styles import replaced_attributes, sum_gradients

from .dispatch import arguments_of, exchange
from .stacked import DOWN, StackedStyle
from .trial import GATE, PartOfFeatures, ask_for_features

_DOWN_BIAS = f"{DOWN}_bias"
# transformers' implementations of experts that call `_apply_gate` between the two matrix products.
# `generate` may change from one to the other.
_WITH_GATE = ("grouped_mm", "batched_mm")


class ExpertFeaturesParallel(StackedStyle[PartOfFeatures]):
    """Style that gives each rank a part of the inner features of all stacked experts.

    The module's forward must take hidden states and, unless it takes equally many rows for each
    expert, each token's experts and the weights of these experts. It is run with this rank's
    features, so the outputs of parts must sum to that of all features: this is tried with random
    weights before anything is changed. Inputs must be the same on all ranks; outputs are summed
    over the ranks.

    Weights are split contiguously, so their full tensors are those of one process. If one weight
    has all gates first and then all other features, each rank needs gates and features of the same
    indices: ranks exchange half of this weight or, with transformers' implementations grouped_mm
    and batched_mm, half of its output, if the forward gives this output to `_apply_gate`: the trial
    shows whether it does.
    """

    def ask(self, name: str, module: nn.Module, size: int) -> PartOfFeatures:
        """Return how the module is run on a part of the features of its experts."""
        return ask_for_features(name, module, self.described(name, module), size)

    def placements(self, module: nn.Module, answer: PartOfFeatures) -> dict[str, Placement]:
        """Return placements that split each parameter by inner features."""
        experts = answer.experts
        placements: dict[str, Placement] = dict.fromkeys(experts.biases, Shard(1))
        placements |= dict.fromkeys(experts.columns, Shard(answer.columns_dim))
        placements[DOWN] = Shard(answer.down_dim)
        return placements | ({_DOWN_BIAS: Replicate()} if _DOWN_BIAS in experts.biases else {})

    def run(
        self, module: Any, answer: PartOfFeatures, mesh: DeviceMesh, *inputs: Any, **more: Any
    ) -> Any:
        """Run the module's own forward on this rank's features, and sum outputs over the ranks."""
        values = tuple(
            sum_gradients(each, mesh) if each.is_floating_point() else each
            for each in arguments_of(module, answer, inputs, more)
        )
        if answer.has_identity:  # in the sum over the ranks, their outputs count once
            hidden, ids, weights = values
            share = torch.where(ids >= answer.experts.count, 1 / mesh.size(), 1.0)
            values = (hidden, ids, weights * share.to(weights.dtype))
        local = {name: module._parameters[name].to_local() for name in answer.experts.names}
        if _DOWN_BIAS in local:  # it counts once, too
            local[_DOWN_BIAS] = sum_gradients(local[_DOWN_BIAS], mesh) / mesh.size()
        calls: list[Tensor] | None = None
        if answer.has_halves and mesh.size() > 1:
            if answer.has_gate and _implementation_of(module) in _WITH_GATE:
                calls = []
                local[GATE] = partial(_gate, mesh, getattr(module, GATE), calls)
            else:
                local |= _paired(mesh, answer, local)
        with replaced_attributes(module, {**local, **answer.numbers}):
            output = type(module).forward(module, *values)
        if calls is not None and len(calls) != 1:
            raise RuntimeError(
                f"The forward of {type(module).__name__} called {GATE} {len(calls)} times, but "
                "once in the trial before experts were split, so that this output is wrong. Change "
                "its forward, or transformers' experts_implementation, before they are split."
            )
        whole = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return differentiable_once(whole.redistribute(placements=[Replicate()]).to_local())


def _implementation_of(module: nn.Module) -> str | None:
    """Return the name of the implementation that transformers' config selects, or None."""
    name: str | None = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return name


def _paired(
    mesh: DeviceMesh, answer: PartOfFeatures, local: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return weights and biases with gates and other features of the same indices."""
    dims = dict.fromkeys(answer.experts.columns, answer.columns_dim)
    dims |= dict.fromkeys((name for name in answer.experts.biases if name != _DOWN_BIAS), 1)
    halves = _exchange_halves(mesh, [local[name].chunk(2, dim) for name, dim in dims.items()])
    return {
        name: torch.cat([*each], dim)
        for (name, dim), each in zip(dims.items(), halves, strict=True)
    }


def _gate(
    mesh: DeviceMesh, gate: Callable[[Tensor], Tensor], calls: list[Tensor], features: Tensor
) -> Tensor:
    """Apply the experts' own gate to this rank's part of the packed features."""
    calls.append(features)
    ((first, second),) = _exchange_halves(mesh, [features.chunk(2, dim=-1)])
    return gate(torch.cat([first, second], -1))


def _exchange_halves(mesh: DeviceMesh, halves: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the two halves of this rank, stacked, for each pair of halves.

    Packed features are all gates, then all other features, split contiguously over n ranks: the
    first ranks have only gates, the last ranks only other features. To apply the gate, a rank needs
    gates and features of the same indices. Divide gates and features into n parts each, 0 to 2n-1:
    rank r has the parts 2r and 2r+1, and gets r and n+r.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    targets = (2 * rank % size, (2 * rank + 1) % size)
    sent = [int(each in targets) for each in range(size)]
    received = [int(each in (rank // 2, (size + rank) // 2)) for each in range(size)]
    in_order = [pair if targets[0] < targets[1] else pair[::-1] for pair in halves]
    return exchange([torch.stack(pair) for pair in in_order], sent, received, mesh.get_group())
