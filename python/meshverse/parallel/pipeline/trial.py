"""A run of a model in which its layers do nothing but look at what they get.

Example:
    >>> trial = Trial(model.model, "layers", in_tuples=False)  # doctest: +SKIP
    >>> trial.run(), trial.sides()  # doctest: +SKIP
    (True, (('embed_tokens',), ('norm',)))
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshverse.parallel.models.stages import AbsentModule

from .copies import copy_attributes, hidden_of, shallow_copy, without_memory

__all__ = ["Trial"]

_TOKENS = (2, 3)  # sequences, and tokens of each
_LAYER = ""  # among the names of children
_NOTHING = object()  # what a layer gives beside its hidden states
_FROM_MODELS = (  # what a model may raise that meets layers which are none
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Trial:
    """Runs a model with empty layers, and says what keeps it from being split.

    Args:
        inner: the module that runs the layers. It is not changed.
        layers: name of their list in it.
        in_tuples: whether the layers give their hidden states in a tuple.

    Attributes:
        reason: why the model cannot be split, after a run.
    """

    def __init__(self, inner: nn.Module, layers: str, *, in_tuples: bool) -> None:
        self.in_tuples = in_tuples
        self.reason = ""
        self._layers = layers
        self._events: list[str] = []
        self._probes = [
            _Probe(layer, self._events, in_tuples)
            for layer in cast("nn.ModuleList", inner.get_submodule(layers))
        ]
        self._device = next(inner.parameters()).device
        self._inner = shallow_copy(inner)
        self._inner._modules[layers] = nn.ModuleList()
        if self._device.type == "meta":  # models read masks, which cannot be read there
            self._device = torch.device("cpu")
            self._inner = without_memory(self._inner)
        self._inner._modules[layers] = nn.ModuleList(self._probes)

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self._probes)

    @property
    def layers_run(self) -> int:
        """How many layers have run."""
        return self._events.count(_LAYER)

    def run(self) -> bool:
        """Whether each layer gets just what the one before it gave, and nothing else is in between.

        Nothing in the model is changed.
        """
        tokens = torch.ones(_TOKENS, dtype=torch.int64, device=self._device)
        devices = [] if self._device.type == "cpu" else [self._device]
        with ExitStack() as context:
            context.enter_context(torch.enable_grad())
            # Dropout before the layers must not take from the random numbers of training.
            kind = self._device.type if devices else "cuda"
            context.enter_context(torch.random.fork_rng(devices, device_type=kind))
            for name, module in self._children():
                context.callback(module.register_forward_hook(_Note(name, self._events)).remove)
            try:
                output: Any = self._inner(input_ids=tokens, use_cache=False)
            except _FROM_MODELS as error:
                self.reason = f"its layers cannot be left out ({type(error).__name__}: {error})"
                return False
        if isinstance(getattr(output, "last_hidden_state", None), Tensor):
            self.reason = next(self._objections(tokens), "")
        else:
            self.reason = f"{type(self._inner).__name__} gives no last_hidden_state"
        return not self.reason

    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The children with parameters that run before the layers, and after them."""
        first = self._events.index(_LAYER)
        return (
            tuple(dict.fromkeys(self._events[:first])),
            tuple(dict.fromkeys(each for each in self._events[first:] if each != _LAYER)),
        )

    def _children(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules outside the layers that have parameters, by the child they are in."""
        for name, module in self._inner.named_modules():
            child = name.partition(".")[0]
            if (
                child not in ("", self._layers)
                and next(module.parameters(recurse=False), None) is not None
            ):
                yield child, module

    def _objections(self, tokens: Tensor) -> Iterator[str]:
        probes = self._probes
        calls = [probe.calls for probe in probes]
        places = [probe.place for probe in probes]
        if calls != [1] * len(probes) or places != sorted(places):
            yield f"its layers do not run once each, in their order, but {calls} times"
            return
        if tuple(probes[0].hidden.shape[:2]) != _TOKENS:
            yield (
                f"the hidden states of {_TOKENS[0]} sequences of {_TOKENS[1]} tokens have the "
                f"shape {tuple(probes[0].hidden.shape)}"
            )
        for probe, following in pairwise(probes):
            if following.hidden is not probe.given:
                yield "its layers do not get just what the layer before them gave"
                return
        for probe in probes:
            yield from probe.objections(tokens)
        yield from self._objections_to_children()

    def _objections_to_children(self) -> Iterator[str]:
        before, after = self.sides()
        last = len(self._events) - self._events[::-1].index(_LAYER)
        between = set(after) - set(self._events[last:])
        children = {name for name, _ in self._inner.named_parameters(recurse=False)}
        children |= {name for name, _ in self._children()}
        unplaced = sorted(between | set(before) & set(after) | children - {*before, *after})
        if unplaced:
            yield (
                f"the parameters of {unplaced} in {type(self._inner).__name__} are used neither "
                "before all layers nor after them"
            )


class _Probe(AbsentModule):
    """A layer that notes what it is called with."""

    def __init__(self, layer: nn.Module, events: list[str], in_tuples: bool) -> None:
        super().__init__()
        copy_attributes(layer, self)
        self._events = events
        self._in_tuples = in_tuples
        self._names = list(inspect.signature(layer.forward).parameters)
        self.calls = 0
        self.place = 0
        self.hidden: Any = None
        self.given: Any = None
        self.others: list[tuple[str, Any]] = []

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        hidden = hidden_of(arguments, keywords)
        if not isinstance(hidden, Tensor):
            # No TypeError: transformers 4 takes those for arguments too many, and tries again.
            raise ValueError(f"a layer gets {type(hidden).__name__} as its hidden states")
        self.calls += 1
        self._events.append(_LAYER)
        self.place = len(self._events)
        self.hidden, self.given = hidden, hidden.detach().clone()
        self.others = list(zip(self._names, arguments, strict=False))[1:]
        self.others += [(name, each) for name, each in keywords.items() if name != "hidden_states"]
        return (self.given, _NOTHING) if self._in_tuples else self.given

    def objections(self, tokens: Tensor) -> Iterator[str]:
        """What among the arguments only the stage of another layer has."""
        for name, value in self.others:
            if isinstance(value, dict | list) and not value:
                yield f"its layers share what they keep in their argument {name!r}"
            for each in tree_leaves(value):
                if each is _NOTHING:
                    yield f"its layers give each other more than hidden states ({name!r})"
                if each is tokens or (isinstance(each, Tensor) and each.requires_grad):
                    yield (
                        f"its layers get {name!r}, which is made from the tokens before the first "
                        "layer"
                    )


class _Note:
    """A forward hook that notes which child runs, and lets its output be told by its gradient."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name = name
        self._events = events

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        self._events.append(self._name)
        if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
            return output.detach().requires_grad_()
        return output
