"""Experts whose weights are stacked in 3-D tensors: their parameters, and the base of styles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from meshverse.parallel.models.modules import adapted
from meshverse.parallel.models.parameters import why_not_replaced
from meshverse.parallel.styles.local_styles import CheckedStyle, split_parameters

DOWN = "down_proj"  # the weight from an expert's inner features to its output
_COLUMNS = ("gate_up_proj", "gate_proj", "up_proj")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class StackedExperts:
    """Parameters of a module's experts."""

    count: int  # number of experts that have weights
    columns: tuple[str, ...]  # names of the weights from the input to the inner features
    biases: tuple[str, ...]  # names of the biases, of shape (experts, features)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters."""
        return (*self.columns, DOWN, *self.biases)


def describe(module: nn.Module) -> StackedExperts | None:
    """Return the parameters of a module's stacked experts; None if it has no such experts.

    Of DTensors, the global shapes count.
    """
    shapes = {name: each.shape for name, each in module.named_parameters(recurse=False)}
    columns = tuple(name for name in _COLUMNS if len(shapes.get(name, ())) == 3)
    if not columns or len(shapes.get(DOWN, ())) != 3:
        return None
    return StackedExperts(
        count=shapes[DOWN][0],
        columns=columns,
        biases=tuple(f"{name}_bias" for name in (*columns, DOWN) if f"{name}_bias" in shapes),
    )


def experts_inside(module: nn.Module) -> nn.Module:
    """Return the stacked experts inside PEFT's wrappers; another module is returned as it is."""
    inner = module
    while adapted(inner) is not inner:
        inner = adapted(inner)
    return module if describe(inner) is None else inner


def refuse_adapters(name: str, module: nn.Module) -> None:
    """Raise ValueError for stacked experts in PEFT's adapters of single parameters.

    They add to a parameter while forward runs, by matrices of all features of all experts.
    """
    inner = experts_inside(module)
    if inner is not module:
        raise ValueError(
            f"{name}: the experts {type(inner).__name__} are wrapped by PEFT's "
            f"{type(module).__name__}, whose adapters cannot be split with them. Merge these "
            "adapters, distribute whole experts with ep_size=, or leave experts out of "
            "target_parameters and of target_modules (of 'all-linear', too)."
        )


class StackedStyle(CheckedStyle, Generic[_Answer]):
    """Base of styles for modules that have stacked experts and no other parameters."""

    @abstractmethod
    def ask(self, name: str, module: nn.Module, size: int) -> _Answer:
        """Return how the module's own forward is run on a part; ValueError if it cannot be."""

    @abstractmethod
    def placements(self, module: nn.Module, answer: _Answer) -> Mapping[str, Placement]:
        """Return the placements of the module's parameters, by name."""

    @abstractmethod
    def run(self, module: Any, answer: _Answer, mesh: DeviceMesh, *inputs: Any, **more: Any) -> Any:
        """Run the module's forward with split parameters."""

    def described(self, name: str, module: nn.Module) -> StackedExperts:
        """Return the parameters of a module's stacked experts; ValueError for other modules."""
        refuse_adapters(name, module)
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
        for own in names:
            if (why := why_not_replaced(module.get_parameter(own))) is not None:
                raise ValueError(f"{name}.{own} {why}.")
        if "forward" in vars(module):
            raise ValueError(
                f"{name}: this {type(module).__name__} has a forward of its own, "
                f"{vars(module)['forward']}, and {self} would replace it. Split experts once, and "
                "change the forward of their class instead."
            )
        return experts

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module's own forward can be run on a part of its parameters."""
        self.ask(name, module, size)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        answer = self.ask(type(module).__name__, module, device_mesh.size())
        split_parameters(module, self.placements(module, answer), device_mesh, self.src_data_rank)
        # A partial, not a closure: deepcopy copies it, so that a copy runs its own forward.
        module.forward = partial(self.run, module, answer, device_mesh)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
