"""Experts whose weights are stacked in 3-D tensors: their layout and computation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from meshverse.parallel.styles.local_styles import CheckedStyle, split_parameters

DOWN = "down_proj"  # the weight from an expert's inner features to its output
_COLUMNS = ("gate_up_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class StackedExperts:
    """Layout of the weights of a module's experts."""

    count: int  # number of experts that have weights
    width: int  # number of inner features of an expert
    columns: tuple[str, ...]  # names of the weights from the input to the inner features
    biases: tuple[str, ...]  # names of the biases, of shape (experts, features)
    # Whether a weight is (experts, inputs, outputs), and not (experts, outputs, inputs) as in a
    # linear layer.
    transposed: bool
    # Whether `columns` is one weight with all gates first and then all other features. Otherwise
    # gates and features alternate, or have separate weights.
    packed: bool
    has_identity: bool  # whether ids from `count` on are identity experts, which return their input
    # Whether transformers has several implementations of the module. Its forward then takes hidden
    # states, each token's experts, and the router's weights.
    is_routed: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters."""
        return (*self.columns, DOWN, *self.biases)


def describe(module: nn.Module) -> StackedExperts | None:
    """Return the layout of a module's stacked experts; None if it has no such experts.

    Of DTensors, the global shapes count.
    """
    shapes = {name: each.shape for name, each in module.named_parameters(recurse=False)}
    columns = tuple(name for name in _COLUMNS if len(shapes.get(name, ())) == 3)
    if not columns or len(shapes.get(DOWN, ())) != 3:
        return None
    up, down = shapes[columns[-1]], shapes[DOWN]
    transposed = getattr(module, "is_transposed", None)  # transformers' name
    if not isinstance(transposed, bool):
        transposed = up[1] == down[2] and up[2] % down[1] == 0 and up[2] != down[1]
    width, features = (down[1], up[2]) if transposed else (down[2], up[1])
    return StackedExperts(
        count=down[0],
        width=width,
        columns=columns,
        biases=tuple(f"{name}_bias" for name in (*columns, DOWN) if f"{name}_bias" in shapes),
        transposed=transposed,
        packed=features == 2 * width and bool(getattr(module, "is_concatenated", True)),
        has_identity=hasattr(module, "identity_expert"),
        is_routed=_is_routed(module),
    )


class StackedStyle(CheckedStyle):
    """Base of styles for modules that have stacked experts and no other parameters."""

    @abstractmethod
    def placements(self, experts: StackedExperts) -> Mapping[str, Placement]:
        """Return the placements of the parameters, by name."""

    @abstractmethod
    def run(
        self, module: Any, experts: StackedExperts, mesh: DeviceMesh, *inputs: Any, **more: Any
    ) -> Any:
        """Run the module's forward with split parameters."""

    def described(self, name: str, module: nn.Module) -> StackedExperts:
        """Return the layout of a module's stacked experts; ValueError for any other module."""
        experts = describe(module)
        names = experts.names if experts else ()
        others = [own for own, _ in module.named_parameters() if own not in names]
        if experts is None or others:
            raise ValueError(
                f"{name}: {self} needs a module with experts whose weights are stacked in 3-D "
                "parameters such as 'gate_up_proj', and without other parameters. This is a "
                f"{type(module).__name__} with {others[:6]}. Remove it from the plan, or name the "
                "experts' module inside it."
            )
        return experts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        experts = self.described(type(module).__name__, module)
        split_parameters(module, self.placements(experts), device_mesh, self.src_data_rank)
        # A partial, not a closure: deepcopy copies it, so that a copy runs its own forward.
        module.forward = partial(self.run, module, experts, device_mesh)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _is_routed(module: nn.Module) -> bool:
    return isinstance(getattr(module, "is_concatenated", None), bool)


def implementation_of(module: nn.Module) -> str | None:
    """Return the name of the implementation that transformers' config selects, or None."""
    name: str | None = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return name if _is_routed(module) else None


def own_gate(module: Any, features: Tensor) -> Tensor:
    """Apply a module's gate to the inner features, before the down projection."""
    if hasattr(type(module), "_apply_gate") and getattr(module, "has_gate", True):
        return type(module)._apply_gate(module, features)  # type: ignore[no-any-return]
    experts = describe(module)
    is_packed = experts is not None and experts.packed
    gate, *up = features.chunk(2, dim=-1) if is_packed else (features,)
    activated: Tensor = module.act_fn(gate)
    return activated * up[0] if up else activated


def apply_experts(
    module: Any,
    experts: StackedExperts,
    rows: Tensor,
    counts: Sequence[int],
    gate: Callable[[Any, Tensor], Tensor],
    *,
    identity_share: float = 1.0,
) -> Tensor:
    """Return the experts' outputs for rows sorted by expert, without applying routing weights.

    Computes one matrix product per expert, for cases that transformers' faster implementations do
    not support.

    Args:
        module: the experts' module, with local tensors as parameters.
        experts: layout of the module's experts.
        rows: input rows, shape (sum of counts, features), sorted by expert.
        counts: number of rows of each expert. Counts after the first `experts.count` are those of
            identity experts, which return their rows, or of no expert, for which outputs are zeros.
        gate: function that is called once, as `gate(module, features)`, between the products.
        identity_share: factor on the outputs of identity experts, for ranks that sum their outputs.
    """
    count = experts.count
    own, others = torch.split(rows, [sum(counts[:count]), sum(counts[count:])])

    def products(rows: Tensor, name: str) -> Tensor:
        weights, biases = getattr(module, name), getattr(module, f"{name}_bias", None)
        given = []
        for number, part in enumerate(torch.split(rows, list(counts[:count]))):
            # Computed even without rows, so that the expert gets a gradient, of zeros.
            product = part @ (weights[number] if experts.transposed else weights[number].mT)
            given.append(product if biases is None else product + biases[number])
        return torch.cat(given)

    outer = products(gate(module, products(own, experts.columns[-1])), DOWN)
    if not others.size(0):
        return outer
    identity = module.identity_expert(others) * identity_share if experts.has_identity else None
    return torch.cat([outer, torch.zeros_like(others) if identity is None else identity])
