"""Parallel styles beside torch's: for what lies between a column-wise and a row-wise layer.

There, every rank works on its own heads or features with plain local tensors. What is the same on
all ranks (a norm's weight, a key that all heads share) has there a gradient that covers this
rank's share only, and the shares must be summed.

Example:
    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> plan = {
    ...     "q_proj": ColwiseParallel(),
    ...     "q_norm": ReplicatedWithGradAllreduce(),
    ...     "o_proj": RowwiseParallel(),
    ... }
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

__all__ = [
    "CheckedStyle",
    "LocalParameters",
    "PackedColwiseParallel",
    "PackedRowwiseParallel",
    "ReplicatedWithGradAllreduce",
    "SharedKeyGradAllreduce",
]


def split_parameters(
    module: nn.Module,
    placements: Mapping[str, Placement],
    mesh: DeviceMesh,
    src_data_rank: int | None,
) -> None:
    """Make DTensors of a module's parameters, in place.

    Args:
        module: that has them.
        placements: by name of the parameter, which may be one of a submodule.
        mesh: 1-D.
        src_data_rank: whose values all ranks take; None if each keeps its own.
    """
    for name, placement in placements.items():
        owner, _, own_name = name.rpartition(".")
        parameter = module.get_parameter(name)
        split = distribute_tensor(parameter, mesh, [placement], src_data_rank=src_data_rank)
        module.get_submodule(owner).register_parameter(
            own_name, nn.Parameter(split, requires_grad=parameter.requires_grad)
        )


@contextlib.contextmanager
def hidden_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """In the block, a module has these tensors in place of its parameters of the same names."""
    # An attribute of the instance hides the parameter, which stays registered all the while.
    module.__dict__.update(tensors)
    try:
        yield
    finally:
        for name in tensors:
            module.__dict__.pop(name, None)


def sum_gradients(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor itself, equal on all ranks; its gradient is summed over the mesh in backward.

    Args:
        tensor: local, the same on all ranks.
        mesh: 1-D.
    """
    replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


def gather_features(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """All ranks' features, from my share of the last dim; gradients are summed over the mesh."""
    sharded = DTensor.from_local(tensor, mesh, [Shard(-1)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class CheckedStyle(ParallelStyle):
    """A style that can tell beforehand whether a module can have it."""

    @abstractmethod
    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check a module that is to be split, and change nothing.

        Args:
            name: of the module, for the message.
            module: with whole parameters.
            size: number of ranks.

        Raises:
            ValueError: the module cannot have this style.
        """


class LocalParameters(CheckedStyle):
    """Parameters become DTensors, and the module's forward works on their local tensors.

    For a parameter that has no layer of its own, such as attention sinks: one value for each head,
    of which a rank needs those of its heads. Other parameters and submodules are left alone.

    Args:
        placements: by name of the module's own parameter.
    """

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        super().__init__()
        self.placements = dict(placements)

    def placements_of(self, module: nn.Module) -> Mapping[str, Placement]:
        """The placement of each parameter of a module that becomes a DTensor, by name."""
        return self.placements

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module has the parameters, in sizes that divide."""
        own = dict(module.named_parameters(recurse=False))
        for own_name, placement in self.placements_of(module).items():
            if own_name not in own:
                raise ValueError(
                    f"{name!r} has no parameter {own_name!r} of its own: it has {[*own]}."
                )
            if isinstance(placement, Shard) and own[own_name].size(placement.dim) % size:
                raise ValueError(
                    f"{name}.{own_name}: size {own[own_name].size(placement.dim)} of dim "
                    f"{placement.dim} does not divide by the {size} ranks of tensor parallelism. "
                    "Choose a number of ranks that divides it."
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = self.placements_of(module)
        split_parameters(module, placements, device_mesh, self.src_data_rank)
        _forward_on(module, list(placements), self._local)
        return module

    def _local(self, parameter: DTensor) -> Tensor:
        return parameter.to_local()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.placements})"


class ReplicatedWithGradAllreduce(LocalParameters):
    """A module on local heads with the same parameters on all ranks; their gradients are summed.

    Such as the norm of queries and keys in attention: a rank's gradient is that of its heads.
    """

    def __init__(self) -> None:
        super().__init__({})

    def placements_of(self, module: nn.Module) -> Mapping[str, Placement]:
        """All of the module's own parameters are replicated."""
        return {name: Replicate() for name, _ in module.named_parameters(recurse=False)}

    def _local(self, parameter: DTensor) -> Tensor:
        return sum_gradients(parameter.to_local(), parameter.device_mesh)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _forward_on(module: nn.Module, names: list[str], local: Callable[[DTensor], Tensor]) -> None:
    """Let a module's forward see local tensors in place of its parameters of these names."""

    # An attribute of the instance hides the parameter, which stays registered all the while.
    def hide(module: nn.Module, arguments: Any) -> None:
        for name in names:
            module.__dict__[name] = local(cast("DTensor", module._parameters[name]))

    def show(module: nn.Module, arguments: Any, output: Any) -> None:
        for name in names:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(hide)
    module.register_forward_hook(show, always_call=True)


class SharedKeyGradAllreduce(CheckedStyle):
    """A layer whose last output features are used by every head as they are, on all ranks.

    In multi-head latent attention, the projection to the latent also gives the rotary part of the
    key, which all heads share: its gradient is the sum over all ranks' heads. The features before
    it go to a column-wise layer, which sums their gradient itself.

    Args:
        shared_size: number of these last features; None if it is the `qk_rope_head_dim` that
            `get_hf_tp_shard_plan` finds in the model's config.
    """

    def __init__(self, shared_size: int | None = None) -> None:
        super().__init__()
        self.shared_size = shared_size

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the number of shared features is known."""
        if not self.shared_size:
            raise ValueError(
                f"{name}: of how many of its last output features every head has a copy is not "
                f"known, {self}. Give shared_size, the model's qk_rope_head_dim."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        shared_size = cast("int", self.shared_size)

        def sum_shared(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            own, shared = output[..., :-shared_size], output[..., -shared_size:]
            return torch.cat([own, sum_gradients(shared, device_mesh)], dim=-1)

        module.register_forward_hook(sum_shared)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shared_size={self.shared_size})"


class _PackedParallel(CheckedStyle):
    """What both packed styles have in common.

    Args:
        parts: number of parts.
    """

    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.parts = parts

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module is linear, and each of its parts divides."""
        width = self._width(module) if isinstance(module, nn.Linear) else None
        if width is None or width % (self.parts * size):
            raise ValueError(
                f"{name}: {self} needs a linear layer whose features are {self.parts} equal parts "
                f"that divide by the {size} ranks of tensor parallelism, and this is {module}."
            )

    @abstractmethod
    def _width(self, module: nn.Linear) -> int: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}(parts={self.parts})"


class PackedColwiseParallel(_PackedParallel):
    """A column-wise linear layer of several equal parts in one, such as gate and up.

    A rank's output has its share of each part. The weight is split as it lies, into contiguous
    rows, so that its full tensor is that of one process: the output is gathered and picked from,
    which costs an all-gather more than separate layers.

    Args:
        parts: number of layers in one.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inner = ColwiseParallel()
        inner.src_data_rank = self.src_data_rank
        inner._apply(module, device_mesh)
        module.register_forward_hook(partial(self._pick, device_mesh))
        return module

    def _width(self, module: nn.Linear) -> int:
        return module.out_features

    def _pick(self, mesh: DeviceMesh, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        features = gather_features(output, mesh)
        by_rank = features.reshape(*features.shape[:-1], self.parts, mesh.size(), -1)
        return by_rank.select(-2, mesh.get_local_rank()).flatten(-2)


class PackedRowwiseParallel(_PackedParallel):
    """A row-wise linear layer whose input has this rank's share of several equal parts.

    The counterpart of `PackedColwiseParallel`: the input is gathered and put in the order of one
    process.

    Args:
        parts: number of parts in the input.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._unpack, device_mesh))
        inner = RowwiseParallel(input_layouts=Replicate())
        inner.src_data_rank = self.src_data_rank
        return inner._apply(module, device_mesh)

    def _width(self, module: nn.Linear) -> int:
        return module.in_features

    def _unpack(self, mesh: DeviceMesh, module: nn.Module, arguments: tuple[Tensor, ...]) -> Any:
        sharded = DTensor.from_local(arguments[0], mesh, [Shard(-1)], run_check=False)
        # The row-wise layer gives every rank the whole gradient of its replicated input.
        features = sharded.redistribute(placements=[Replicate()]).to_local()
        by_rank = features.reshape(*features.shape[:-1], mesh.size(), self.parts, -1)
        return by_rank.transpose(-3, -2).flatten(-3), *arguments[1:]
