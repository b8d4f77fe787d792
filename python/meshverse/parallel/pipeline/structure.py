"""Order in which a transformers model runs its layers, found by a run with stand-ins for them.

Copies of the model run: nothing of it is changed, and random states are as before. What a
forward changes elsewhere, such as a list in a global variable, stays changed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from meshverse._torch_compat.module_hooks import has_hooks, is_compiled
from meshverse.parallel.models.dropout import WithoutDropout
from meshverse.parallel.models.modules import AbsentModule, shallow_copy
from meshverse.parallel.models.random_states import same_random_state
from meshverse.parallel.models.trials import trial_copy

from .token_reads import TokenReads

_Module = TypeVar("_Module", bound=nn.Module)

_TOKENS = (2, 3)  # number of sequences, and of tokens in each
# Arguments that only add outputs, which stages do not return.
OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
_LAYER = ""  # event of a layer, among events that are names of children
_NOTHING = object()  # output of a layer besides its hidden states
# Exceptions that a model may raise when its layers are replaced.
_FROM_MODELS: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError)
_FROM_MODELS += (LookupError, RuntimeError, TypeError, ValueError)


class Structure(NamedTuple):
    """Names of the modules by which a model is split into stages."""

    inner: str  # name of the module that runs the layers; "" for the model itself
    layers: str  # name of the list of layers in the inner module
    n_layers: int
    # Children of the inner module with parameters, by whether they run before or after the layers.
    before: tuple[str, ...]
    after: tuple[str, ...]
    in_tuples: bool  # whether a layer returns a tuple that begins with the hidden states


def describe(model: nn.Module) -> Structure:
    """Return how a model runs its layers.

    Raises:
        ValueError: the model cannot be split into stages. It is unchanged then.
    """
    # Whatever the caller's mode: autograd shows the trials which tensors depend on which.
    with torch.inference_mode(mode=False), torch.enable_grad():
        return _describe(model)


def _describe(model: nn.Module) -> Structure:
    config: Any = getattr(model, "config", None)
    inner_name, layers = _find_layers(model, config)
    inner = model.get_submodule(inner_name)
    if layers is None:
        wrapped = _wrapped(model)
        reason = (
            f"it is a wrapper around {wrapped}, and only that model itself can be split. Give that "
            "model; to add LoRA layers to it, use peft.inject_adapter_in_model"
            if wrapped
            else f"{type(inner).__name__} has no list of as many layers as its config says, as "
            "language models of transformers have"
        )
    elif not (reason := _needs_all_layers(config) or _changed_object(model, inner)):
        trials = [_Trial(inner, layers, in_tuples=each) for each in (False, True)]
        for trial in trials:
            trial.reason = trial.run_all(model, inner_name)
            if not trial.reason:
                sides = trial.sides()
                if reason := trial.run_in_other_mode(model, inner_name):
                    mode = "evaluation" if inner.training else "training"
                    trial.reason = f"in {mode} mode, {reason}"
                    break
                return Structure(inner_name, layers, len(trial.probes), *sides, trial.in_tuples)
        # If layers must return the other form, a trial fails after the first layer. Report the
        # reason of the trial that ran more layers.
        reason = max(reversed(trials), key=lambda trial: trial.events.count(_LAYER)).reason
    raise ValueError(
        f"{type(model).__name__} cannot be split into pipeline stages: {reason}. Train it without "
        "pipeline parallelism (pp_size=1), or split it by hand with torch.distributed.pipelining."
    )


def _find_layers(model: nn.Module, config: Any) -> tuple[str, str | None]:
    """Return the name of the module that runs the decoder layers, and that of their list in it."""
    prefix = getattr(model, "base_model_prefix", "")
    children = {"": model, **dict(model.named_children())}
    count = getattr(config, "num_hidden_layers", None)
    for name in (prefix, "model", "") if config is not None else ():
        lists = {
            own: child
            for own, child in (children[name].named_children() if name in children else ())
            if isinstance(child, nn.ModuleList)
        }
        fitting = ["layers"] if "layers" in lists else [n for n in lists if len(lists[n]) == count]
        if fitting:
            return name, fitting[0]
    return prefix if prefix in children else "", None


def _wrapped(model: nn.Module) -> str:
    """Return words for the model with layers inside a wrapper: its type and name; else ""."""
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if name and config is not None and _find_layers(module, config)[1] is not None:
            return f"{type(module).__name__} at {name!r}"
    return ""


def _needs_all_layers(config: Any) -> str:
    """Return the reason why the config needs all layers in one process, in words; else ""."""
    if shared := getattr(config, "num_kv_shared_layers", None):
        return f"its last {shared} layers (num_kv_shared_layers) use the keys of earlier ones"
    if getattr(config, "output_router_logits", False):
        return "config.output_router_logits=True adds a loss over the routers of all layers"
    for name in ("layerdrop", "decoder_layerdrop"):
        if dropped := getattr(config, name, None):
            return f"config.{name}={dropped} leaves out layers at random. Set it to 0"
    return ""


def _changed_object(model: nn.Module, inner: nn.Module) -> str:
    """Return what was changed on the object and would be lost in stages, in words; else ""."""
    for module in (model, inner):
        name = type(module).__name__
        if "forward" in vars(module):
            return (
                f"the forward of its {name} was replaced on the object, and stages run the "
                "class's. Define it in a subclass"
            )
        if is_compiled(module):
            return f"its {name} is compiled, and would run all layers. Compile each stage instead"
        if has_hooks(module):
            return (
                f"its {name} has hooks around its forward, which in stages would get other "
                "inputs and outputs. Register hooks on the stages or on modules inside"
            )
    return ""


class _Trial:
    """Run of a model in which probes replace the layers and record their inputs.

    Args:
        inner: module that runs the layers; it is not changed.
        layers: name of the list of layers in it.
        in_tuples: whether the probes return tuples.

    Attributes:
        events: names of the children that ran, and `_LAYER` for each layer, in order.
        probes: the probes, in the order of the layers.
        reason: why the model cannot be split, in words; "" if it can.
        output: hidden states after the last run.
    """

    def __init__(self, inner: nn.Module, layers: str, *, in_tuples: bool) -> None:
        self.in_tuples = in_tuples
        self.reason = ""
        self.output: Any = None
        self._whole: Any = None  # the object with `output`
        self.events: list[str] = []
        listed = cast("nn.ModuleList", inner.get_submodule(layers))
        self.probes = [_Probe(layer, self.events, in_tuples) for layer in listed]
        self._layers = layers
        self._mode: bool | None = None  # whether it trains, if that is not the model's own mode
        self._device = next(inner.parameters()).device
        self._inner = shallow_copy(inner)
        self._inner._modules[layers] = nn.ModuleList()
        if self._device.type == "meta":  # models read values of masks, and meta tensors have none
            self._device = torch.device("cpu")
            self._inner = _without_memory(self._inner)
        self._tokens = torch.ones(_TOKENS, dtype=torch.int64, device=self._device)
        self._reads = TokenReads(self._tokens)

    def run_all(self, model: nn.Module, name: str) -> str:
        """Run all trials, and return the reason why the model cannot be split, in words; else "".

        Args:
            model: model with the inner module; it is not changed.
            name: name of the inner module in it; "" for the model itself.
        """
        return (
            self.run()
            or self.run_as_later_stage()
            or self.run_from_the_last_layer()
            or (self.run_around(model, name) if name else "")
        )

    def run_in_other_mode(self, model: nn.Module, name: str) -> str:
        """As `run_all`, in evaluation mode if the model is in training mode, or the other way."""
        other = self._again(set())
        other._mode = not self._inner.training
        if reason := other.run_all(model, name):
            return reason
        same = other.sides() == self.sides()
        return "" if same else "its parameters are used in another order"

    def run(self) -> str:
        """Run the trial, and return the reason why the model cannot be split, in words; else ""."""
        with self._reads:
            reason = self._run(input_ids=self._tokens)
        if reason:
            return f"it fails without its layers ({reason})"
        return next(self._objections(), "")

    def run_as_later_stage(self) -> str:
        """Run it as a later stage runs; return why its layers would get other arguments, or "".

        A later stage has no embedding, and gets hidden states instead of tokens.
        """
        hidden = torch.zeros_like(self.probes[0].hidden)
        before, after = self.sides()
        later = self._again({*before, *after})
        if reason := later._run(inputs_embeds=hidden):
            return f"it fails on hidden states, without its embedding ({reason})"
        for probe, given in zip(later.probes, self.probes, strict=True):
            if probe.hidden is None or probe.hidden.shape != hidden.shape:
                return "without its embedding, its layers get no hidden states of the same shape"
            if name := probe.first_difference(given):
                return f"its layers get another {name!r} without its embedding"
        return ""

    def run_from_the_last_layer(self) -> str:
        """Return why the last stage would need more than the output of the last layer, or ""."""
        before, _ = self.sides()
        last = self._again({*before})
        hidden = torch.zeros_like(self.probes[0].hidden).requires_grad_()
        for probe in last.probes[:-1]:
            probe.is_leaf = True
        if reason := last._run(inputs_embeds=hidden):
            return f"it fails on hidden states, without its embedding ({reason})"
        earlier = [hidden, *(probe.given for probe in last.probes[:-1])]
        if last.output.requires_grad and any(
            each is not None
            for each in torch.autograd.grad(last.output.sum(), earlier, allow_unused=True)
        ):
            return "its output depends on hidden states before those of its last layer"
        if not _are_equal(last.output, self.output):
            return "it does something else after its layers if it gets hidden states, not tokens"
        reads = self._reads.said()
        return reads and f"its {type(self._inner).__name__} {reads}"

    def run_around(self, model: nn.Module, name: str) -> str:
        """Return why what a model's own forward does around the layers cannot be in a last stage.

        Only the last stage runs it, on hidden states; the others run the inner module alone.

        Args:
            model: whose inner module was tried; it is not changed.
            name: name of the inner module in it.
        """
        outer = shallow_copy(model)
        outer._modules[name] = self._inner
        device = next(model.parameters()).device  # may be the meta device: a head is large
        whole = self._whole
        whole.last_hidden_state = _distinct_like(self.output).to(device)
        hidden, outputs = self.probes[0].hidden.detach(), []
        for key, given, own in (
            ("input_ids", self._tokens, self._tokens),
            ("inputs_embeds", hidden.to(device), hidden),
        ):
            calls: list[Any] = []
            instead = partial(_record_call, calls, whole)
            reason, output = self._run_outer(outer, name, instead, {key: given})
            if reason := reason or self._run_as_called(calls, given, own):
                return f"its own forward {reason}"
            outputs.append(output)
        if not _are_equal(*outputs):
            return "its own forward does something else if it gets hidden states, not tokens"
        return ""

    def _run_outer(
        self, outer: nn.Module, name: str, instead: Callable[..., Any], given: dict[str, Tensor]
    ) -> tuple[str, Any]:
        """Return why a model's own forward cannot be in a stage, in words or "", and its output.

        Args:
            outer: the model.
            name: name of the inner module in it.
            instead: function that is called as the inner module's forward.
            given: arguments of the model's forward.
        """
        with self._undisturbed(), torch.no_grad(), TokenReads(self._tokens) as reads:
            try:
                copied = self._copied(outer)
                self._with_probes(copied.get_submodule(name)).forward = instead
                output: Any = type(outer).forward(copied, **given, use_cache=False)
            except _FROM_MODELS as error:
                failure = f"fails on {next(iter(given))} alone ({type(error).__name__}: {error})"
                return reads.said() or failure, None
        logits = getattr(output, "logits", None)
        output = getattr(output, "last_hidden_state", None) if logits is None else logits
        if not isinstance(output, Tensor):
            return "returns neither logits nor last_hidden_state", None
        return reads.said(), output

    def _run_as_called(self, calls: list[Any], given: Tensor, own: Tensor) -> str:
        """Return what the inner module gets besides a model's argument, in words, or "".

        Args:
            calls: arguments and keywords of each call of the inner module.
            given: the model's argument.
            own: the same on the device of this trial.
        """
        name = type(self._inner).__name__
        if len(calls) != 1:
            return f"calls its {name} {len(calls)} times"
        tensors = [each for each in tree_leaves(calls[0]) if isinstance(each, Tensor)]
        if len(tensors) != 1 or tensors[0] is not given:
            return f"gives its {name} other tensors than it gets"
        arguments, keywords = tree_map(lambda each: own if each is given else each, calls[0])
        again = self._again(set())
        if reason := again._run(
            *arguments,
            **{k: v for k, v in keywords.items() if k not in OUTPUTS or v},
        ):
            return f"calls its {name} so that it fails without its layers ({reason})"
        for probe, alone in zip(again.probes, self.probes, strict=True):
            if different := probe.first_difference(alone):
                return f"gives its layers another {different!r} than its {name} alone"
        same = _are_equal(again.probes[0].hidden, self.probes[0].hidden)
        if given is self._tokens and not (same and _are_equal(again.output, self.output)):
            return f"gives its {name} other arguments than it gets"
        return ""

    def _again(self, idle: set[str]) -> _Trial:
        """Return a trial for another run, in which some children do nothing."""
        again = copy.copy(self)
        again.events = []
        again.probes = [probe.again(again.events) for probe in self.probes]
        again._inner = shallow_copy(self._inner)
        again._inner._modules.update({name: IdleModule() for name in idle})
        return again

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Run without dropout, and keep the random state of training."""
        with same_random_state(self._device), WithoutDropout():
            yield

    def _run(self, *arguments: Any, **keywords: Any) -> str:
        """Run the model; return the error that it raises, in words, or ""."""
        with self._undisturbed():
            try:
                inner = self._with_probes(self._copied(self._inner))
                for name, module in self._children(inner):
                    module.register_forward_hook(partial(_record, self.events, name))
                output: Any = inner(*arguments, **{"use_cache": False, **keywords})
            except _FROM_MODELS as error:
                return f"{type(error).__name__}: {error}"
        self._whole, self.output = output, getattr(output, "last_hidden_state", None)
        if not isinstance(self.output, Tensor):
            return f"{type(self._inner).__name__} returns no last_hidden_state"
        return ""

    def _copied(self, module: nn.Module) -> nn.Module:
        copied = trial_copy(module)
        return copied if self._mode is None else copied.train(self._mode)

    def _with_probes(self, inner: nn.Module) -> nn.Module:
        inner._modules[self._layers] = nn.ModuleList(self.probes)
        return inner

    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the children with parameters that run before the layers, and after them."""
        first = self.events.index(_LAYER)
        after = [each for each in self.events[first:] if each != _LAYER]
        return tuple(dict.fromkeys(self.events[:first])), tuple(dict.fromkeys(after))

    def _children(self, inner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules outside the layers that have parameters, with the child they are in."""
        for name, module in inner.named_modules():
            child = name.partition(".")[0]
            has_parameters = any(True for _ in module.parameters(recurse=False))
            if child not in ("", self._layers) and has_parameters:
                yield child, module

    def _objections(self) -> Iterator[str]:
        probes = self.probes
        calls, order = zip(*((probe.calls, probe.order) for probe in probes), strict=True)
        if {*calls} != {1} or [*order] != sorted(order):
            yield f"its layers do not run once each and in order; they ran {[*calls]} times"
            return
        if (shape := tuple(probes[0].hidden.shape))[:2] != _TOKENS:
            yield (
                f"the hidden states of {_TOKENS[0]} sequences of {_TOKENS[1]} tokens have the "
                f"shape {shape}"
            )
        if any(following.hidden is not probe.given for probe, following in pairwise(probes)):
            yield "the hidden states that its layers get are not the output of the layer before"
            return
        for probe in probes:
            yield from probe.objections(self._tokens)
        before, after = self.sides()
        last = len(self.events) - self.events[::-1].index(_LAYER)
        between = set(after) - set(self.events[last:])
        children = {name for name, _ in self._inner.named_parameters(recurse=False)}
        children |= {name for name, _ in self._children(self._inner)}
        unplaced = sorted(between | set(before) & set(after) | children - {*before, *after})
        if unplaced:
            yield (
                f"the parameters of {unplaced} in {type(self._inner).__name__} are used neither "
                "before all layers nor after them"
            )


class _Probe(AbsentModule):
    """Stand-in for a layer that records its arguments."""

    def __init__(self, layer: nn.Module, events: list[str], in_tuples: bool) -> None:
        super().__init__()
        copy_attributes(layer, self)
        self._events = events
        self._in_tuples = in_tuples
        self._names = list(inspect.signature(layer.forward).parameters)
        self.calls = self.order = 0
        self.is_leaf = False  # whether its output is to get a gradient
        self.hidden: Any = None
        self.given: Any = None
        self.others: list[tuple[str, Any]] = []

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        hidden = hidden_of(arguments, keywords)
        if not isinstance(hidden, Tensor):
            # Not a TypeError: some models catch it, and call the layer with fewer arguments.
            raise ValueError(f"a layer gets {type(hidden).__name__} as its hidden states")
        self.calls += 1
        self._events.append(_LAYER)
        self.order = len(self._events)
        self.hidden, self.given = hidden, _distinct_like(hidden).requires_grad_(self.is_leaf)
        self.others = list(zip(self._names, arguments, strict=False))[1:]
        self.others += [(name, each) for name, each in keywords.items() if name != "hidden_states"]
        return (self.given, _NOTHING) if self._in_tuples else self.given

    def again(self, events: list[str]) -> _Probe:
        """Return a probe of the same layer, for another run."""
        probe = copy.copy(self)
        probe._events, probe.calls, probe.hidden, probe.others = events, 0, None, []
        return probe

    def first_difference(self, other: _Probe) -> str:
        """Return the first argument, besides the hidden states, that the other has not; or ""."""
        mine, theirs = dict(self.others), dict(other.others)
        for name in {**mine, **theirs}:
            leaves = tree_leaves(mine.get(name)), tree_leaves(theirs.get(name))
            if len(leaves[0]) != len(leaves[1]) or not all(map(_are_equal, *leaves)):
                return name
        return ""

    def objections(self, tokens: Tensor) -> Iterator[str]:
        """Yield, in words, the arguments that only the stage of another layer would have."""
        for name, value in self.others:
            if isinstance(value, dict | list) and not value:
                yield f"its layers share data in their argument {name!r}"
            for each in tree_leaves(value):
                if each is _NOTHING:
                    yield f"its layers pass on more than hidden states ({name!r})"
                if each is tokens or (isinstance(each, Tensor) and each.requires_grad):
                    origin = "which is computed from the tokens before the first layer"
                    yield f"its layers get {name!r}, {origin}"


class IdleModule(AbsentModule):
    """Stand-in for a module before or after the layers, whose output is not used."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the first argument."""
        return next(iter((*arguments, *keywords.values())))


def _record_call(calls: list[Any], output: Any, *arguments: Any, **keywords: Any) -> Any:
    calls.append((arguments, keywords))
    return output


def _distinct_like(hidden: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype, with another value at each place."""
    values = torch.linspace(-1, 1, hidden.numel(), device=hidden.device)
    return values.view(hidden.shape).to(hidden.dtype)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            return False
        # Parameters without values yet may be NaN.
        return one.is_meta or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    is_plain = isinstance(one, bool | int | float | str)
    return type(one) is type(other) and (not is_plain or one == other)


def _record(events: list[str], name: str, module: nn.Module, arguments: Any, output: Any) -> Any:
    """Record that a child ran, and mark its output by requires_grad."""
    events.append(name)
    if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
        return output.detach().requires_grad_()
    return output


def _without_memory(module: _Module) -> _Module:
    """Return a copy of a module on the meta device, with CPU tensors that are one expanded value.

    Parameters are ones, so that embedded tokens differ from zeros; buffers are zeros.
    """
    copied = copy.deepcopy(module)
    for each in copied.modules():
        for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if tensor is None:
                continue
            make = torch.ones if isinstance(tensor, nn.Parameter) else torch.zeros
            value = make((), dtype=tensor.dtype).expand(tensor.shape)
            if isinstance(tensor, nn.Parameter):
                each._parameters[name] = nn.Parameter(value, tensor.requires_grad)
            else:
                each._buffers[name] = value
    return copied


def hidden_of(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the hidden states among the arguments of a layer."""
    return arguments[0] if arguments else keywords["hidden_states"]


def copy_attributes(layer: nn.Module, other: nn.Module) -> None:
    """Copy the plain attributes of a layer, such as its type, because a model may read them.

    Modules within the layer are replaced by plain objects with the modules' plain attributes.
    """
    for name, value in _plain_attributes(layer).items():
        other.__dict__.setdefault(name, value)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for kind in reversed(type(module).__mro__):
        if issubclass(kind, nn.Module) and kind is not nn.Module:
            of_class = vars(kind).items()
            plain |= {k: v for k, v in of_class if isinstance(v, bool | int | float | str)}
    plain |= {k: v for k, v in vars(module).items() if k not in ("forward", "training")}
    children = module.named_children()
    inside = {name: SimpleNamespace(**_plain_attributes(child)) for name, child in children}
    return {name: value for name, value in plain.items() if name[0] != "_"} | inside
