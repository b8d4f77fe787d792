"""Stacked experts split by their inner features: each rank has a share of every expert."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshverse.parallel.styles.local_styles import hidden_parameters, sum_gradients

from .dispatch import arguments_of, exchange_rows, read_routing, weigh
from .stacked import DOWN, StackedExperts, StackedStyle, apply_experts, implementation_of, own_gate

_DOWN_BIAS = f"{DOWN}_bias"
# Ways of transformers to run experts that call `_apply_gate` between the products.
_WITH_GATE = ("grouped_mm", "batched_mm")


class ExpertFeaturesParallel(StackedStyle):
    """Stacked experts of which each rank has a share of the inner features.

    For a module whose forward takes hidden states and, where it routes itself, each token's experts
    and their weights; the same on all ranks. Weights are split as they lie, so that their full
    tensors are those of one process. Where one weight gives gates and features, one half after the
    other, ranks exchange half of what it gives: each then has gates and features that belong
    together. The outputs are summed over the ranks.
    """

    def run(
        self, module: Any, experts: StackedExperts, mesh: DeviceMesh, *inputs: Any, **more: Any
    ) -> Any:
        """Run the module's own forward on this rank's features, between sums over the ranks."""

        def shared(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return sum_gradients(value, mesh) if is_float else value

        inputs, more = tuple(map(shared, inputs)), {name: shared(more[name]) for name in more}
        local = {name: module._parameters[name].to_local() for name in experts.names}
        if _DOWN_BIAS in local:  # each rank adds its part of it
            local[_DOWN_BIAS] = sum_gradients(local[_DOWN_BIAS], mesh) / mesh.size()
        with hidden_parameters(module, local):
            output = _run(module, experts, mesh, inputs, more)
        whole = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local()

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module has stacked experts whose features divide."""
        experts = self.described(name, module)
        if experts.width % size:
            raise ValueError(
                f"{name}: the {experts.width} inner features of its experts do not divide by the "
                f"{size} ranks of tensor parallelism. Choose a number of ranks that divides them."
            )
        has_gate = hasattr(module, "act_fn") or hasattr(type(module), "_apply_gate")
        if getattr(module, "has_post_expert_norm", False) or not has_gate:
            raise ValueError(
                f"{name}: {type(module).__name__} normalizes what each expert gives, or does not "
                "say how gates and features lie. Split it over an expert mesh, with ExpertParallel."
            )

    def placements(self, experts: StackedExperts) -> dict[str, Placement]:
        """Return the placement of each parameter: split by inner features, wherever they lie."""
        columns, down = (2, 1) if experts.transposed else (1, 2)
        placements: dict[str, Placement] = dict.fromkeys(experts.columns, Shard(columns))
        placements |= {DOWN: Shard(down), **dict.fromkeys(experts.biases, Shard(1))}
        return placements | ({_DOWN_BIAS: Replicate()} if _DOWN_BIAS in experts.biases else {})


def _run(
    module: Any, experts: StackedExperts, mesh: DeviceMesh, inputs: Any, more: dict[str, Any]
) -> Tensor:
    own = type(module).forward
    if not experts.packed:
        return own(module, *inputs, **more)  # type: ignore[no-any-return]
    gate = partial(_gate, mesh)
    values = arguments_of(module, inputs, more)
    if len(values) == 1:  # rows, as many for each expert
        (rows,) = values
        counts = [rows.size(0) // experts.count] * experts.count
        return apply_experts(module, experts, rows, counts, gate)
    if implementation_of(module) in _WITH_GATE:
        with hidden_parameters(module, {"_apply_gate": partial(gate, module)}):
            return own(module, *values)  # type: ignore[no-any-return]
    return _run_routed(module, experts, mesh, values)  # type: ignore[no-any-return]


# Traced, each new number of rows of an expert would compile anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_routed(
    module: Any, experts: StackedExperts, mesh: DeviceMesh, values: tuple[Tensor, ...]
) -> Tensor:
    routing = read_routing(experts, values)
    ids = routing.expert_ids.reshape(-1)
    order = ids.argsort(stable=True)
    rows = routing.hidden[order // routing.expert_ids.size(-1)]
    counts = torch.bincount(ids, minlength=experts.count).tolist()
    gate, share = partial(_gate, mesh), 1 / mesh.size()
    outputs = apply_experts(module, experts, rows, counts, gate, identity_share=share)
    return weigh(routing, outputs[order.argsort()])


def _gate(mesh: DeviceMesh, module: Any, features: Tensor) -> Tensor:
    """Return what the experts' gate makes of features, of which each rank has consecutive ones.

    A weight that gives gates and features, one half after the other, is split as it lies: of n
    ranks the first have gates only, the last features only. An expert needs both for the same
    places. In units of a half's n-th part, rank r has the parts 2r and 2r+1, and needs r and n+r.
    """
    size, rank, count = mesh.size(), mesh.get_local_rank(), features.size(0)
    if size == 1:
        return own_gate(module, features)
    first, second = features.chunk(2, dim=-1)
    to_first, to_second = 2 * rank % size, (2 * rank + 1) % size
    if to_first > to_second:
        first, second = second, first
    sent = [count * (target in (to_first, to_second)) for target in range(size)]
    received = [count * (source in (rank // 2, (size + rank) // 2)) for source in range(size)]
    halves = exchange_rows(torch.cat([first, second]), sent, received, mesh.get_group())
    paired = torch.cat(halves.chunk(2), dim=-1) if count else halves.new_empty(features.shape)
    return own_gate(module, paired)
