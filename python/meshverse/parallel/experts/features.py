"""Parallel style that splits stacked experts by their inner features."""

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
# transformers' implementations of experts that call `_apply_gate` between the two matrix products.
_WITH_GATE = ("grouped_mm", "batched_mm")


class ExpertFeaturesParallel(StackedStyle):
    """Style that gives each rank a part of the inner features of all stacked experts.

    The module's forward must take hidden states and, unless they are routed already, each token's
    experts and the weights of these experts. Inputs must be the same on all ranks; outputs are
    summed over the ranks. Weights are split contiguously, so their full tensors are those of one
    process. If one weight has all gates first and then all other features, ranks exchange half of
    its output: each rank needs gates and features of the same indices.
    """

    def run(
        self, module: Any, experts: StackedExperts, mesh: DeviceMesh, *inputs: Any, **more: Any
    ) -> Any:
        """Run the module's own forward on this rank's features, and sum outputs over the ranks."""

        def with_summed_gradient(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return sum_gradients(value, mesh) if is_float else value

        inputs = tuple(map(with_summed_gradient, inputs))
        more = {name: with_summed_gradient(value) for name, value in more.items()}
        local = {name: module._parameters[name].to_local() for name in experts.names}
        if _DOWN_BIAS in local:  # in the sum over the ranks, it counts once
            local[_DOWN_BIAS] = sum_gradients(local[_DOWN_BIAS], mesh) / mesh.size()
        with hidden_parameters(module, local):
            output = _run(module, experts, mesh, inputs, more)
        whole = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local()

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module has stacked experts with inner features divisible by `size`."""
        experts = self.described(name, module)
        if experts.width % size:
            raise ValueError(
                f"{name}: the {experts.width} inner features of its experts are not divisible by "
                f"the {size} ranks of tensor parallelism. Use a number of ranks that divides them."
            )
        has_gate = hasattr(module, "act_fn") or hasattr(type(module), "_apply_gate")
        if getattr(module, "has_post_expert_norm", False) or not has_gate:
            raise ValueError(
                f"{name}: {type(module).__name__} normalizes each expert's output, or has neither "
                "act_fn nor _apply_gate. Distribute whole experts over an experts' mesh instead, "
                "with ExpertParallel()."
            )

    def placements(self, experts: StackedExperts) -> dict[str, Placement]:
        """Return placements that split each parameter by inner features."""
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
    if len(values) == 1:  # rows, equally many for each expert
        (rows,) = values
        counts = [rows.size(0) // experts.count] * experts.count
        return apply_experts(module, experts, rows, counts, gate)
    if implementation_of(module) in _WITH_GATE:
        with hidden_parameters(module, {"_apply_gate": partial(gate, module)}):
            return own(module, *values)  # type: ignore[no-any-return]
    return _run_routed(module, experts, mesh, values)  # type: ignore[no-any-return]


# Not traced: each new number of rows of an expert would recompile.
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
    """Apply the experts' gate to this rank's part of the packed features.

    The packed features are all gates, then all other features, split contiguously over n ranks: the
    first ranks have only gates, the last ranks only other features. To apply the gate, a rank needs
    gates and features of the same indices. Divide gates and features into n parts each, 0 to 2n-1:
    rank r has the parts 2r and 2r+1, and gets r and n+r.
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
