"""Parallel styles for modules between a column-wise and a row-wise layer.

Between these layers, each rank computes with its own heads or features, in plain local tensors. A
tensor that is the same on all ranks, such as a norm's weight or a key that all heads share, gets a
gradient from this rank's heads only. These gradients must be summed over the ranks.

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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

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
from torch.utils._pytree import tree_map_only

from meshverse.parallel.models.parameters import keeping_attributes


def split_parameters(
    module: nn.Module,
    placements: Mapping[str, Placement],
    mesh: DeviceMesh,
    src_data_rank: int | None,
) -> None:
    """Turn parameters of a module into DTensors over a 1-D mesh, in place.

    Args:
        module: module that has the parameters, or whose submodules have them.
        placements: placement of each parameter to distribute, by name.
        mesh: 1-D mesh.
        src_data_rank: rank of the mesh whose values all ranks get; None for each rank's own values.
    """
    with keeping_attributes(module):
        for name, placement in placements.items():
            owner, _, own_name = name.rpartition(".")
            parameter = module.get_parameter(name)
            split = distribute_tensor(parameter, mesh, [placement], src_data_rank=src_data_rank)
            module.get_submodule(owner).register_parameter(
                own_name, nn.Parameter(split, requires_grad=parameter.requires_grad)
            )


@contextlib.contextmanager
def replaced_attributes(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Give a module's parameters and other attributes other values, within the context."""
    # An attribute of the instance hides the parameter, which is still registered.
    own = module.__dict__
    before = {name: own[name] for name in values if name in own}
    try:
        own.update(values)
        yield
    finally:
        for name in values:
            own.pop(name, None)
        own.update(before)


def sum_gradients(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that is the same on all ranks; backward sums its gradient over the mesh."""
    replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


class CheckedStyle(ParallelStyle):
    """A parallel style that checks a module before it is applied."""

    @abstractmethod
    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that a module, which is not distributed yet, can be split over `size` ranks.

        Raises:
            ValueError: this style cannot be applied to the module.
        """


class LocalParameters(CheckedStyle):
    """Style that turns a module's own parameters into DTensors; forward uses their local tensors.

    Use it for parameters that are not a layer's: `Shard(0)` for attention sinks, which have a value
    for each head; `summed` for a temperature that all heads share; `Replicate()` for a parameter
    that works on values that are the same on all ranks, so that each rank's gradient is whole.
    Other parameters and submodules are unchanged.

    Args:
        placements: placement of each of the module's own parameters to distribute, by name. An int
            attribute may be named as well: with `Shard(0)` it counts heads, and becomes the number
            on one rank; with `Replicate()` it stays.
        summed: names of own parameters that work on a rank's own heads or features: they are
            replicated, and their gradients are summed over the ranks.

    Raises:
        TypeError: a placement is neither `Shard` nor `Replicate`, or `summed` is a str.
        ValueError: a name is in both.

    Example:
        >>> LocalParameters({"sinks": Shard(0), "heads": Shard(0)}, summed=["temperature"])
        LocalParameters({'sinks': Shard(dim=0), 'heads': Shard(dim=0), 'temperature': 'summed'})
    """

    def __init__(
        self, placements: Mapping[str, Placement] | None = None, *, summed: Collection[str] = ()
    ) -> None:
        if isinstance(summed, str):
            raise TypeError(f"summed={summed!r} is a str, expected a list of parameters' names.")
        self.placements = dict(placements or {})
        self.summed = tuple(summed)
        if both := [name for name in self.summed if name in self.placements]:
            raise ValueError(f"{both} have a placement and are in summed=. Name each of them once.")
        if wrong := {
            name: each
            for name, each in self.placements.items()
            if type(each) not in (Shard, Replicate)
        }:
            raise TypeError(
                f"LocalParameters has the placements {wrong}: each must be Shard(dim) or "
                "Replicate(). If the gradients of a parameter that all ranks have must be summed, "
                "name it in summed= instead."
            )

    def placements_of(self, module: nn.Module) -> Mapping[str, Placement]:
        """Return the placement of each parameter that becomes a DTensor, by name."""
        counts = self.counts_of(module)
        given = {name: each for name, each in self.placements.items() if name not in counts}
        return given | dict.fromkeys(self.summed, Replicate())

    def counts_of(self, module: nn.Module) -> dict[str, bool]:
        """Return, for each int attribute that is named, whether it counts heads."""
        ints = {name for name in self.placements if type(getattr(module, name, None)) is int}
        return {name: each.is_shard() for name, each in self.placements.items() if name in ints}

    def is_summed(self, name: str) -> bool:
        """Return whether the gradient of a parameter, which is replicated, is summed."""
        return name in self.summed

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module has the parameters, with sizes divisible by the number of ranks."""
        own = dict(module.named_parameters(recurse=False))
        for own_name, placement in self.placements_of(module).items():
            if own_name not in own:
                raise ValueError(
                    f"{name!r} has no parameter {own_name!r} of its own, only {[*own]}. Correct "
                    "the name in LocalParameters."
                )
            if not isinstance(placement, Shard):
                continue
            shape = own[own_name].shape
            if not -len(shape) <= placement.dim < len(shape):
                raise ValueError(
                    f"{name}.{own_name}: {placement} names no dim of its shape {tuple(shape)}. "
                    "Correct the dim in LocalParameters."
                )
            if (n := shape[placement.dim]) % size:
                raise ValueError(
                    f"{name}.{own_name}: size {n} of dim {placement.dim} is not divisible by the "
                    f"{size} ranks of tensor parallelism. Use a number of ranks that divides it."
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = self.placements_of(module)
        split_parameters(module, names, device_mesh, self.src_data_rank)
        # Not hooks: what runs forward again, as activation checkpointing does, needs them, too. A
        # partial, not a closure: deepcopy copies it, so that a copy runs its own forward.
        module.forward = partial(self._run, module, module.forward, tuple(names))
        return module

    def _run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        names: tuple[str, ...],
        /,
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        local = {name: self._local(name, _distributed(module, name)) for name in names}
        with replaced_attributes(module, local):
            return forward(*arguments, **keywords)

    def _local(self, name: str, parameter: DTensor) -> Tensor:
        local = parameter.to_local()
        return sum_gradients(local, parameter.device_mesh) if self.is_summed(name) else local

    def __repr__(self) -> str:
        shown = self.placements | dict.fromkeys(self.summed, "summed")
        return f"{type(self).__name__}({shown or ''})"


def _distributed(module: nn.Module, name: str) -> DTensor:
    """Return a parameter, also while torch's DistributedDataParallel has it in an attribute."""
    parameter = module._parameters.get(name)
    return cast("DTensor", getattr(module, name) if parameter is None else parameter)


class ReplicatedWithGradAllreduce(LocalParameters):
    """Style of a module that works on local heads: replicates its parameters, sums their gradients.

    Use it, for example, for norms of queries and keys in attention: without the sum, a rank's
    gradient would be that of its own heads.
    """

    def placements_of(self, module: nn.Module) -> Mapping[str, Placement]:
        """Return placements that replicate all of the module's own parameters."""
        return {name: Replicate() for name, _ in module.named_parameters(recurse=False)}

    def is_summed(self, name: str) -> bool:
        """Return True: all gradients are summed."""
        return True


class Replicated(ParallelStyle):
    """Style of a module whose input is the same on all ranks, amid modules that are split.

    Each rank has the module whole, and computes its whole gradient, such as for the norm of a
    latent before a column-wise layer. The style changes nothing: it says so to `apply_tp_plan`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass(eq=False)
class SharedKeyGradAllreduce(CheckedStyle):
    """Style of a layer whose last output features are shared by all heads: sums their gradient.

    In multi-head latent attention, the projection to the latent also computes the rotary part of
    the key, which all heads share: its gradient is the sum over all ranks' heads. The features
    before it go to a column-wise layer, which sums their gradient itself.

    Args:
        shared_size: number of these last features, `qk_rope_head_dim` in the model's config. It
            must be set before the style is applied; `get_hf_tp_shard_plan` sets it.
    """

    shared_size: int | None = None

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the number of shared features is known."""
        if not self.shared_size:
            raise ValueError(
                f"{name}: {self} needs the number of last output features that all heads share. "
                "Pass the model's qk_rope_head_dim as shared_size."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        shared_size = cast("int", self.shared_size)

        def sum_shared(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            own, shared = output[..., :-shared_size], output[..., -shared_size:]
            return torch.cat([own, sum_gradients(shared, device_mesh)], dim=-1)

        module.register_forward_hook(sum_shared)
        return module


@dataclass(eq=False)
class GatherTokens(ParallelStyle):
    """Style of a module that needs all tokens on every rank, amid modules split by tokens.

    Use it for modules that sequence parallelism cannot split, such as a router with its experts.
    The output, or the first of several outputs, must have the shape of the hidden states; it is
    split by tokens again.

    Args:
        dim: dimension of the tokens in the hidden states.
    """

    dim: int = 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = [Shard(self.dim)]

        def gather(module: nn.Module, arguments: Any, keywords: Any) -> Any:
            # All ranks compute the same with it, so each rank gets the whole gradient.
            return tree_map_only(DTensor, DTensor.full_tensor, (arguments, keywords))

        def split_again(module: nn.Module, arguments: Any, output: Any) -> Any:
            first, *others = output if isinstance(output, tuple) else (output,)
            whole = DTensor.from_local(first, device_mesh, [Replicate()], run_check=False)
            tokens = whole.redistribute(placements=split)
            return (tokens, *others) if isinstance(output, tuple) else tokens

        module.register_forward_pre_hook(gather, with_kwargs=True)
        module.register_forward_hook(split_again)
        return module


@dataclass(eq=False)
class SplitTokens(ParallelStyle):
    """Style of a first layer amid modules split by tokens: splits hidden states that are whole.

    The hidden states, the first argument or `hidden_states`, may come from the embedding or from
    the caller (`inputs_embeds`); they must be the same on all ranks.

    Args:
        dim: dimension of the tokens in the hidden states.
    """

    dim: int = 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(module: nn.Module, arguments: Any, keywords: Any) -> Any:
            given = arguments[0] if arguments else keywords["hidden_states"]
            if isinstance(given, DTensor):
                return None
            whole = DTensor.from_local(given, device_mesh, [Replicate()], run_check=False)
            tokens = whole.redistribute(placements=[Shard(self.dim)])
            if arguments:
                return (tokens, *arguments[1:]), keywords
            return arguments, {**keywords, "hidden_states": tokens}

        module.register_forward_pre_hook(split, with_kwargs=True)
        return module


@dataclass(eq=False)
class _PackedParallel(CheckedStyle):
    """Style of a linear layer that packs several equal parts.

    Args:
        parts: number of parts.
    """

    parts: int = 2
    _features: ClassVar[str]  # name of the attribute with the number of packed features

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module is linear, and that each part is divisible by `size`."""
        is_linear = isinstance(module, nn.Linear)
        if not is_linear or getattr(module, self._features) % (self.parts * size):
            raise ValueError(
                f"{name}: {self} needs a linear layer whose {self._features} is a multiple of "
                f"{self.parts} parts * {size} ranks of tensor parallelism, but this is {module}."
            )


class PackedColwiseParallel(_PackedParallel):
    """Column-wise style for a linear layer that packs several equal parts, such as gate and up.

    A rank's output has this rank's features of each part. The weight is split into contiguous rows,
    so its full tensor is that of one process. The output is gathered, and each rank selects its
    features; this costs one all-gather more than separate layers.
    """

    _features = "out_features"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inner = ColwiseParallel()
        inner.src_data_rank = self.src_data_rank
        inner._apply(module, device_mesh)
        module.register_forward_hook(partial(self._pick, device_mesh))
        return module

    def _pick(self, mesh: DeviceMesh, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        whole = _gathered(output, mesh).to_local(grad_placements=[Partial()])
        by_rank = whole.reshape(*whole.shape[:-1], self.parts, mesh.size(), -1)
        return by_rank.select(-2, mesh.get_local_rank()).flatten(-2)


class PackedRowwiseParallel(_PackedParallel):
    """Row-wise style for a linear layer whose input has this rank's features of several parts.

    It is the counterpart of `PackedColwiseParallel`. The input is gathered, and its features are
    reordered as in one process.
    """

    _features = "in_features"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._unpack, device_mesh))
        inner = RowwiseParallel(input_layouts=Replicate())
        inner.src_data_rank = self.src_data_rank
        return inner._apply(module, device_mesh)

    def _unpack(self, mesh: DeviceMesh, module: nn.Module, arguments: tuple[Tensor, ...]) -> Any:
        # The row-wise layer gives every rank the whole gradient of its replicated input.
        whole = _gathered(arguments[0], mesh).to_local()
        by_rank = whole.reshape(*whole.shape[:-1], mesh.size(), self.parts, -1)
        return by_rank.transpose(-3, -2).flatten(-3), *arguments[1:]


def _gathered(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return all ranks' features, gathered along the last dim."""
    sharded = DTensor.from_local(tensor, mesh, [Shard(-1)], run_check=False)
    return sharded.redistribute(placements=[Replicate()])
