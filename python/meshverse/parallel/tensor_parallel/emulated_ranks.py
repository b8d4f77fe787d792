"""Emulation of tensor parallelism on one process: a module's forward and backward on each rank.

Each rank's forward is run by itself, with the rank's own attributes and parameters. A split layer
is called once for all ranks, with the whole weight, as the layers are torch's to split: a
column-wise layer gives each rank its features, and a row-wise one gets those of all ranks. Backward
goes through the ranks' forwards from the last of these calls to the first. There, it does what
torch's styles do: the gradients of a column-wise layer's input are summed over the ranks, and each
rank gets the gradient of its own features from a row-wise layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshverse.parallel.models.modules import adapted, parent_name
from meshverse.parallel.styles.local_styles import (
    LocalParameters,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    Replicated,
    SharedKeyGradAllreduce,
)

from .hidden_weights import ReadWeightError, hide_parameters
from .outputs import OUTPUT, TO_NUMBERS, Outputs
from .regions import has_local_output

_COLUMN_WISE = (ColwiseParallel, PackedColwiseParallel)
_ROW_WISE = (RowwiseParallel, PackedRowwiseParallel)
_SPLIT = (*_COLUMN_WISE, *_ROW_WISE)


class NotReplicatedError(Exception):
    """Ranks have different values where tensor parallelism needs the same."""


class RanAgainError(Exception):
    """A split layer runs again in backward, as torch's checkpoint does."""


class _Split(Tensor):
    """A tensor of which a rank has a part, or that is computed from one: it is no number."""

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function in TO_NUMBERS:
            raise ReadWeightError
        of_tensors: Any = super().__torch_function__
        return of_tensors(function, kinds, arguments, keywords)


@dataclass
class _Stopped(Exception):  # noqa: N818  (no error: it ends the run of one rank)
    """A rank reached a row-wise layer, and the features of the other ranks are not known yet."""

    name: str
    features: Tensor


@dataclass
class _Call:
    """A call of a split layer, in which all ranks take part.

    Attributes:
        name: of the layer.
        given: input of the layer with the whole weight.
        outputs: of each rank, computed from the input.
        before: each rank's input, as its forward computed it.
        after: each rank's output, of which its forward goes on.
    """

    name: str
    style: ParallelStyle
    given: Tensor
    outputs: tuple[Tensor, ...]
    before: dict[int, Tensor] = field(default_factory=dict)
    after: dict[int, Tensor] = field(default_factory=dict)

    def take(self, rank: int, given: Tensor) -> Tensor:
        self.before[rank] = given
        after = self.after[rank] = with_own_gradient(self.outputs[rank].detach().requires_grad_())
        # A view: changed in place, it raises an error, as torch's local tensors do.
        return after.view_as(after)


class RowWiseCalls:
    """The calls of row-wise layers in a run of a whole module.

    Args:
        module: the module, which is run once.
        styles: the plan, by the names of modules in it.

    Attributes:
        outputs: the name of each layer and its output, in the order of the calls.
    """

    def __init__(self, module: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
        self.outputs: list[tuple[str, Tensor]] = []
        for name, style in styles.items():
            if isinstance(style, _ROW_WISE):
                module.get_submodule(name).register_forward_hook(partial(self._note, name))

    def _note(self, name: str, layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        self.outputs.append((name, output))
        return output.clone()  # which the forward may change in place

    def backward(self, given: list[Tensor]) -> None:
        """Accumulate the gradients of all inputs and parameters, given those of the outputs."""
        pairs = [
            (output, gradient)
            for (_, output), gradient in zip(self.outputs, given, strict=False)
            if output.requires_grad
        ]
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, gradients)


def is_emulated(module: nn.Module, style: ParallelStyle) -> bool:
    """Return whether a module with a style can be emulated."""
    layer = adapted(module)
    if type(style) is ColwiseParallel:
        is_plain = style.input_layouts == (Replicate(),) and has_local_output(style)
        return is_plain and isinstance(layer, nn.Linear | nn.Embedding)
    if type(style) is RowwiseParallel:
        layouts = style.input_layouts, style.output_layouts
        return layouts == ((Shard(-1),), (Replicate(),)) and isinstance(layer, nn.Linear)
    if isinstance(style, PackedColwiseParallel | PackedRowwiseParallel):
        return isinstance(layer, nn.Linear)
    return isinstance(style, LocalParameters | Replicated | SharedKeyGradAllreduce)


def placements_inside(
    module: nn.Module, styles: Mapping[str, ParallelStyle]
) -> dict[str, Placement]:
    """Return how each parameter outside split layers is placed; Partial if gradients are summed."""
    found: dict[str, Placement] = {}
    for name, _ in module.named_parameters():
        owner, _, own_name = name.rpartition(".")
        style = styles.get(owner)
        if isinstance(style, LocalParameters):
            placement = style.placements_of(module.get_submodule(owner)).get(own_name)
            if placement is not None:
                found[name] = Partial() if style.is_summed(own_name) else placement
                continue
        if not is_in_split_layer(name, styles):
            found[name] = Replicate()
    return found


def is_in_split_layer(name: str, styles: Mapping[str, ParallelStyle]) -> bool:
    """Return whether a parameter or buffer belongs to a column-wise or row-wise layer."""
    owner = parent_name(name)
    while owner and owner not in styles:
        owner = parent_name(owner)
    return isinstance(styles.get(owner), _SPLIT)


class EmulatedRanks:
    """The ranks of tensor parallelism, each with its own part of a module.

    Args:
        whole: module with all parameters.
        styles: the plan, by the names of modules in it.
        counts: attributes that a rank has with other values, by the names of modules in it.
        size: number of ranks.
    """

    def __init__(
        self,
        whole: nn.Module,
        styles: Mapping[str, ParallelStyle],
        counts: Mapping[str, Mapping[str, int]],
        size: int,
    ) -> None:
        self._whole, self._styles, self._counts, self._size = whole, styles, counts, size
        self._calls: list[_Call] = []
        self._n_calls = 0  # of the rank that runs
        self._is_backward = False
        self._placements = placements_inside(whole, styles)
        self._parameters: list[dict[str, Tensor]] = []  # outside split layers; by rank

    def run(self, forward: Callable[[int, nn.Module], Outputs]) -> list[Outputs]:
        """Return each rank's output, of one or more tensors.

        Args:
            forward: function that gives a rank's number and its module inputs, and returns the
                output. It may be called several times for a rank.

        Raises:
            NotReplicatedError: the ranks call different layers, or with different inputs.
            ReadWeightError: a forward reads a split layer's parameter itself.
        """
        while True:  # all ranks run up to the next row-wise layer
            outputs, stopped = [], []
            self._parameters = []
            for rank in range(self._size):
                self._n_calls = 0
                module = self._part(rank)
                try:
                    outputs.append(forward(rank, module))
                except _Stopped as each:
                    stopped.append(each)
                else:
                    if self._n_calls < len(self._calls):
                        name = self._calls[self._n_calls].name
                        raise NotReplicatedError(f"A rank calls {name!r}, and another does not.")
            if not stopped:
                return outputs
            names = {each.name for each in stopped}
            if outputs or len(names) > 1:
                raise NotReplicatedError(f"Some ranks call {sorted(names)}, and others do not.")
            self._add_row_wise(stopped[0].name, [each.features for each in stopped])

    def backward(self, outputs: list[Outputs], given: Outputs) -> None:
        """Accumulate the gradients of all inputs and parameters.

        Args:
            outputs: each rank's.
            given: the gradients of some tensors of an output, which are the same on all ranks.

        Raises:
            NotReplicatedError: ranks have different gradients of a row-wise layer's output.
            RanAgainError: a layer runs in backward.
        """
        self._is_backward = True
        for output in outputs:
            backward(output, given)
        self._backward_through_calls()

    def backward_from_row_wise(self, given: list[Tensor]) -> None:
        """Accumulate the gradients again, given only those of the row-wise layers' outputs.

        Args:
            given: gradient of the output of each call, the same on all ranks.

        Raises:
            NotReplicatedError: as `backward`.
        """
        for own in self._parameters:
            for parameter in own.values():
                parameter.grad = None
        for call in self._calls:
            for after in call.after.values():
                after.grad = None
        for call, gradient in zip(self._row_wise_calls(), given, strict=True):
            for after in call.after.values():
                after.grad = gradient.clone()
        self._backward_through_calls()

    def _row_wise_calls(self) -> list[_Call]:
        return [call for call in self._calls if isinstance(call.style, _ROW_WISE)]

    def _backward_through_calls(self) -> None:
        for call in reversed(self._calls):
            each = range(self._size)
            if all(call.after[rank].grad is None for rank in each):
                continue
            seen = [
                torch.zeros_like(after) if after.grad is None else after.grad
                for after in map(call.after.__getitem__, each)
            ]
            for before, its in zip(
                map(call.before.__getitem__, each), self._gradients(call, seen), strict=True
            ):
                if its is not None:
                    backward({OUTPUT: before}, {OUTPUT: its})

    def row_wise_outputs(self) -> list[tuple[str, Tensor]]:
        """Return the name and the output of each row-wise layer, in the order of the calls."""
        return [(call.name, call.outputs[0]) for call in self._row_wise_calls()]

    def gradients(self) -> dict[str, list[Tensor | None]]:
        """Return, by name, each rank's gradient of the parameters outside split layers.

        It is what the rank has after torch's styles summed it. Of a parameter that is split, there
        is one gradient, of all ranks' parts.
        """
        found: dict[str, list[Tensor | None]] = {}
        for name, placement in self._placements.items():
            seen = [each[name].grad for each in self._parameters]
            known = [each for each in seen if each is not None]
            if not known:
                found[name] = [None]
            elif placement.is_partial():
                found[name] = [torch.stack(known).sum(0)]
            elif isinstance(placement, Shard):
                parts = [
                    torch.zeros_like(each[name]) if its is None else its
                    for each, its in zip(self._parameters, seen, strict=True)
                ]
                found[name] = [torch.cat(parts, placement.dim)]
            else:
                found[name] = [*seen]
        return found

    def _part(self, rank: int) -> nn.Module:
        """Return the module that a rank has."""
        memo: dict[int, Any] = {id(each): each for each in self._whole.parameters()}
        own: dict[str, Tensor] = {}
        for name, placement in self._placements.items():
            parameter = self._whole.get_parameter(name)
            values = parameter.detach()
            if isinstance(placement, Shard):
                values = values.chunk(self._size, placement.dim)[rank]
            own[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            if parameter.requires_grad:
                with_own_gradient(own[name])
            memo[id(parameter)] = own[name]
        module = copy.deepcopy(self._whole, memo)
        self._parameters.append(own)
        for name, counts in self._counts.items():
            for attribute, value in counts.items():
                setattr(module.get_submodule(name), attribute, value)
        for name, style in self._styles.items():
            inside = module.get_submodule(name)
            if isinstance(style, _SPLIT):
                hide_parameters(inside, name)
            if isinstance(style, _COLUMN_WISE):
                inside.forward = partial(self._column_wise, rank, name)
            elif isinstance(style, _ROW_WISE):
                inside.forward = partial(self._row_wise, rank, name)
            elif isinstance(style, SharedKeyGradAllreduce):
                inside.register_forward_hook(partial(self._sum_shared, rank, name, style))
        return module

    def _next(self, name: str, given: Tensor) -> _Call | None:
        """Return the next call of the rank that runs, if it is known."""
        if self._is_backward:
            raise RanAgainError(f"{name!r} runs again in backward")
        self._n_calls += 1
        if self._n_calls > len(self._calls):
            return None
        call = self._calls[self._n_calls - 1]
        if call.name != name:
            raise NotReplicatedError(f"A rank calls {name!r}, and another one {call.name!r}.")
        if not isinstance(call.style, _ROW_WISE) and relative_error(given, call.given) > 1e-3:
            raise NotReplicatedError(f"Ranks give {name!r} different inputs.")
        return call

    def _column_wise(self, rank: int, name: str, given: Tensor) -> Tensor:
        call = self._next(name, given)
        if call is None:
            style, layer = self._styles[name], self._whole.get_submodule(name)
            own = _leaf(given)
            parts = style.parts if isinstance(style, PackedColwiseParallel) else 1
            whole = _called(layer, name, own, is_row_wise=False)
            features = whole.reshape(*whole.shape[:-1], parts, self._size, -1).unbind(-2)
            call = _Call(name, style, own, tuple(each.flatten(-2) for each in features))
            self._calls.append(call)
        return call.take(rank, given)

    def _row_wise(self, rank: int, name: str, given: Tensor) -> Tensor:
        call = self._next(name, given)
        if call is None:
            raise _Stopped(name, given)
        return call.take(rank, given)

    def _add_row_wise(self, name: str, features: list[Tensor]) -> None:
        style, layer = self._styles[name], self._whole.get_submodule(name)
        own = _leaf(torch.stack(features, -2))  # (..., ranks, features)
        parts = style.parts if isinstance(style, PackedRowwiseParallel) else 1
        whole = own.reshape(*own.shape[:-1], parts, -1).transpose(-3, -2).flatten(-3)
        output = _called(layer, name, whole, is_row_wise=True)
        self._calls.append(_Call(name, style, own, (output,) * self._size))

    def _sum_shared(
        self,
        rank: int,
        name: str,
        style: SharedKeyGradAllreduce,
        module: nn.Module,
        arguments: Any,
        output: Tensor,
    ) -> Tensor:
        n_shared = style.shared_size or 0
        own, shared = output[..., :-n_shared], output[..., -n_shared:]
        call = self._next(name, shared)
        if call is None:
            call = _Call(name, style, shared.detach(), (shared.detach(),) * self._size)
            self._calls.append(call)
        return torch.cat([own, call.take(rank, shared)], dim=-1)

    def _gradients(self, call: _Call, given: list[Tensor]) -> list[Tensor | None]:
        """Return the gradient of each rank's input, given those of their outputs."""
        if isinstance(call.style, SharedKeyGradAllreduce):
            return [torch.stack(given).sum(0)] * self._size
        if not call.outputs[0].requires_grad or not call.given.requires_grad:
            return [None] * self._size
        if isinstance(call.style, _COLUMN_WISE):
            return [
                *torch.autograd.grad(call.outputs, call.given, given, retain_graph=True)
            ] * self._size
        if any(relative_error(each, given[0]) > 1e-3 for each in given):
            raise NotReplicatedError(
                f"Ranks have different gradients of the output of {call.name!r}."
            )
        (gradient,) = torch.autograd.grad(call.outputs[0], call.given, given[0], retain_graph=True)
        return [*gradient.unbind(-2)]


def relative_error(seen: Tensor | None, expected: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference, relative to that of the expected tensor.

    Args:
        seen: tensor; infinite if it is None or has another shape.
        expected: tensor.
        floor: the least norm that differences are relative to.
    """
    if seen is None or seen.shape != expected.shape:
        return float("inf")
    seen, expected = (
        each.detach() if each.is_complex() else each.detach().float() for each in (seen, expected)
    )
    difference = float((seen - expected).norm())
    return difference and difference / max(float(expected.norm()), floor, 1e-30)


def _called(layer: nn.Module, name: str, given: Tensor, *, is_row_wise: bool) -> Tensor:
    """Return the output of a split layer.

    Raises:
        ReadWeightError: it has a forward of its own that reads a number of what is split.
    """
    inner = adapted(layer)
    if getattr(inner.forward, "__func__", None) in (nn.Linear.forward, nn.Embedding.forward):
        return layer(given)  # type: ignore[no-any-return]
    own = {id(each) for each in ([inner.weight] if is_row_wise else inner.parameters())}
    split: dict[str, Tensor] = {
        each: parameter.as_subclass(_Split)
        for each, parameter in layer.named_parameters()
        if id(parameter) in own
    }
    try:
        output: Tensor = torch.func.functional_call(
            layer, split, (given.as_subclass(_Split) if is_row_wise else given,)
        )
    except ReadWeightError as error:
        raise ReadWeightError(f"{name!r} reads a number of its weight or input.") from error
    return output.as_subclass(Tensor)


def with_own_gradient(leaf: Tensor) -> Tensor:
    """Return a tensor whose gradient shares no memory with others from now on.

    The gradient of a view is a view of another gradient. Where backward is called several times,
    torch would add to both of them in place.
    """
    leaf.register_hook(torch.clone)  # type: ignore[no-untyped-call]
    return leaf


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def backward(tensors: Outputs, given: Outputs) -> None:
    """Accumulate gradients, given those of some of the tensors."""
    wanted = [n for n in given if tensors[n].requires_grad]
    if wanted:  # segments before them may be shared with other calls
        torch.autograd.backward(
            [tensors[n] for n in wanted], [given[n] for n in wanted], retain_graph=True
        )
