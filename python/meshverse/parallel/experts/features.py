"""Stacked experts split by their inner features over a tensor-parallel mesh.

Every rank has a share of every expert, and works on all tokens.

Example:
    >>> plan["model.layers.*.mlp.experts"] = ExpertFeaturesParallel()  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshverse.parallel.styles.local_styles import (
    CheckedStyle,
    hidden_parameters,
    split_parameters,
    sum_gradients,
)

from .exchange import pair_features
from .routing import arguments_of, read_routing
from .rows import apply_experts, untraced_routed
from .stacked import StackedExperts, check_parameters, describe, is_routed, own_gate

__all__ = ["ExpertFeaturesParallel"]

# Ways of transformers to run experts that call `_apply_gate` between the products.
_WITH_GATE = ("grouped_mm", "batched_mm")


class ExpertFeaturesParallel(CheckedStyle):
    """Stacked experts of which each rank has a share of the inner features.

    For a module whose forward takes hidden states and, where it routes itself, each token's experts
    and their weights; the same on all ranks. Weights are split as they lie, so that their full
    tensors are those of one process. Where one weight gives gates and features, one half after the
    other, ranks exchange half of what it gives: each then has gates and features that belong
    together. The outputs are summed over the ranks.
    """

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module has stacked experts whose features divide."""
        experts = check_parameters(name, module, self)
        if experts.width % size:
            raise ValueError(
                f"{name}: the {experts.width} inner features of its experts do not divide by the "
                f"{size} ranks of tensor parallelism. Choose a number of ranks that divides them, "
                "or leave the experts out of the plan."
            )
        has_gate = hasattr(module, "act_fn") or hasattr(type(module), "_apply_gate")
        if getattr(module, "has_post_expert_norm", False) or not has_gate:
            raise ValueError(
                f"{name}: {type(module).__name__} normalizes what each expert gives, which needs "
                "all features at once, or does not say how gates and features lie. Split it over "
                "an expert mesh, with ExpertParallel."
            )

    def placements_of(self, module: nn.Module) -> Mapping[str, Placement]:
        """The placement of each parameter, by name."""
        experts = describe(module)
        return {} if experts is None else _placements(experts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        experts = check_parameters(type(module).__name__, module, self)
        split_parameters(module, _placements(experts), device_mesh, self.src_data_rank)
        # Not closures: a copy of the module must run on its own parameters.
        module.forward = partial(_forward, module, experts, device_mesh)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _placements(experts: StackedExperts) -> dict[str, Placement]:
    placements: dict[str, Placement] = dict.fromkeys(experts.columns, Shard(experts.column_dim))
    placements[experts.down] = Shard(experts.down_dim)
    placements |= dict.fromkeys(experts.column_biases, Shard(1))
    if experts.down_bias is not None:
        placements[experts.down_bias] = Replicate()
    return placements


def _forward(
    module: Any, experts: StackedExperts, mesh: DeviceMesh, *arguments: Any, **keywords: Any
) -> Any:
    """The module's own forward on this rank's features, between sums over the ranks."""

    def shared(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return sum_gradients(value, mesh)
        return value

    arguments = tuple(map(shared, arguments))
    keywords = {name: shared(value) for name, value in keywords.items()}
    hidden = _local_parameters(module, experts, mesh)
    with hidden_parameters(module, hidden):
        output = _run(module, experts, mesh, arguments, keywords)
    whole = DTensor.from_local(output, mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[Replicate()]).to_local()


def _local_parameters(
    module: nn.Module, experts: StackedExperts, mesh: DeviceMesh
) -> dict[str, Tensor]:
    local: dict[str, Tensor] = {}
    for name in experts.names:
        parameter: Any = module._parameters[name]  # a DTensor
        local[name] = parameter.to_local()
    if experts.down_bias is not None:  # each rank adds its part of it
        local[experts.down_bias] = sum_gradients(local[experts.down_bias], mesh) / mesh.size()
    return local


def _run(
    module: Any,
    experts: StackedExperts,
    mesh: DeviceMesh,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Tensor:
    own = type(module).forward
    if not experts.packed:
        return own(module, *arguments, **keywords)  # type: ignore[no-any-return]
    gate = partial(_gate, mesh)
    values = arguments_of(module, arguments, keywords)
    if len(values) == 1:  # rows, as many for each expert
        (rows,) = values
        counts = [rows.size(0) // experts.count] * experts.count
        return apply_experts(module, experts, rows, counts, gate)
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if is_routed(module) and implementation in _WITH_GATE:
        module.__dict__["_apply_gate"] = partial(gate, module)
        try:
            return own(module, *values)  # type: ignore[no-any-return]
        finally:
            del module.__dict__["_apply_gate"]
    routing = read_routing(module, experts, values)
    return untraced_routed(module, experts, routing, gate, identity_share=1 / mesh.size())  # type: ignore[no-any-return]


def _gate(mesh: DeviceMesh, module: Any, features: Tensor) -> Tensor:
    return own_gate(module, pair_features(features, mesh))
