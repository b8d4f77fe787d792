"""Experts whose weights are stacked in tensors with one expert after the other.

Example:
    >>> describe(mixtral.model.layers[0].mlp.experts)  # doctest: +SKIP
    StackedExperts(count=8, columns=('gate_up_proj',), down='down_proj', ...)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["StackedExperts", "check_parameters", "describe", "is_routed", "own_gate"]

_DOWN = "down_proj"
_PACKED = "gate_up_proj"
_COLUMNS = (_PACKED, "gate_proj", "up_proj")


@dataclass(frozen=True)
class StackedExperts:
    """How a module keeps the weights of its experts.

    Attributes:
        count: number of experts that have weights.
        columns: names of the weights that give an expert's inner features.
        down: name of the weight that takes them back.
        column_biases: names of the biases of `columns`, of shape (experts, features).
        down_bias: name of the bias of `down`, or None.
        width: number of inner features of an expert.
        transposed: whether a weight is (experts, inputs, outputs), and not (experts, outputs,
            inputs) as in a linear layer.
        packed: whether `columns` is one weight that gives all gates first and then all other
            features. Without it, gates and features take turns, or come from weights of their own.
        hands_on: whether experts beyond those that have weights hand tokens on as they are.
    """

    count: int
    columns: tuple[str, ...]
    down: str
    column_biases: tuple[str, ...]
    down_bias: str | None
    width: int
    transposed: bool
    packed: bool
    hands_on: bool

    @property
    def column_dim(self) -> int:
        """The dim of the inner features in the weights of `columns`."""
        return 2 if self.transposed else 1

    @property
    def down_dim(self) -> int:
        """The dim of the inner features in the weight of `down`."""
        return 1 if self.transposed else 2

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters."""
        biases = () if self.down_bias is None else (self.down_bias,)
        return (*self.columns, self.down, *self.column_biases, *biases)


def describe(module: nn.Module) -> StackedExperts | None:
    """How a module keeps its experts; None if it has no stacked ones.

    Parameters that are DTensors are described by their global shapes.
    """
    shapes = {name: each.shape for name, each in module.named_parameters(recurse=False)}
    columns = tuple(name for name in _COLUMNS if len(shapes.get(name, ())) == 3)
    if not columns or len(shapes.get(_DOWN, ())) != 3:
        return None
    up, down = shapes[columns[-1]], shapes[_DOWN]
    transposed = _is_transposed(module, up, down)
    width = down[1] if transposed else down[2]
    features = up[2] if transposed else up[1]
    return StackedExperts(
        count=down[0],
        columns=columns,
        down=_DOWN,
        column_biases=tuple(f"{name}_bias" for name in columns if f"{name}_bias" in shapes),
        down_bias=f"{_DOWN}_bias" if f"{_DOWN}_bias" in shapes else None,
        width=width,
        transposed=transposed,
        packed=features == 2 * width and bool(getattr(module, "is_concatenated", True)),
        hands_on=hasattr(module, "identity_expert"),
    )


def _is_transposed(module: nn.Module, up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    flag = getattr(module, "is_transposed", None)  # transformers' own word, since version 5
    if isinstance(flag, bool):
        return flag
    return up[1] == down[2] and up[2] % down[1] == 0 and up[2] != down[1]


def check_parameters(name: str, module: nn.Module, style: object) -> StackedExperts:
    """How a module keeps its experts, which are all that it has parameters for.

    Args:
        name: of the module, for the message.
        module: with whole parameters.
        style: which is to be applied, for the message.

    Raises:
        ValueError: it has no stacked experts, or other parameters besides.
    """
    experts = describe(module)
    others = [
        own for own, _ in module.named_parameters() if not experts or own not in experts.names
    ]
    if experts is None or others:
        raise ValueError(
            f"{name}: {style} is for experts whose weights are stacked, in 3-D parameters such as "
            f"'gate_up_proj' and 'down_proj', and nothing else; this is a {type(module).__name__} "
            f"with {others[:6]} besides. Leave it out of the plan, or name the module inside it."
        )
    return experts


def is_routed(module: nn.Module) -> bool:
    """Whether transformers lets a module's experts run by one of several implementations.

    Their forward takes hidden states, each token's experts, and the weights of these.
    """
    return isinstance(getattr(module, "is_concatenated", None), bool)


def own_gate(module: Any, features: Tensor) -> Tensor:
    """What a module's experts make of the features before the last product."""
    if hasattr(type(module), "_apply_gate") and getattr(module, "has_gate", True):
        activated: Tensor = type(module)._apply_gate(module, features)
        return activated
    experts = describe(module)
    if experts is not None and experts.packed:
        gate, up = features.chunk(2, dim=-1)
        return module.act_fn(gate) * up  # type: ignore[no-any-return]
    return module.act_fn(features)  # type: ignore[no-any-return]
