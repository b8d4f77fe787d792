"""Calls of modules inside a model, as seen in a run of a copy of the model on random weights.

Two calls of equal modules compute the same if they have one key: the same structure of arguments,
the same plain values, the same values of tensors without gradients, such as masks, and the same
shapes of tensors with gradients, which are activations. Other objects are never the same.

The run is for the sake of the arguments: of large layers, whose weights it would take long to read,
it computes stand-ins of the same shape.
"""

from __future__ import annotations

import copy
import logging
import math
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from meshverse.parallel.config import ExampleInputs
from meshverse.parallel.experts.stacked import describe
from meshverse.parallel.models.modules import parent_name

from .emulated_ranks import with_own_gradient
from .equal_modules import PLAIN, Attribute, note_reads_outside
from .hidden_weights import ReadWeightError, hide_parameters_outside
from .outputs import Key, Outputs, UsesOfOtherOutputs, outputs_of
from .random_copies import LARGE, RandomCopies

_logger = logging.getLogger(__name__)
_SEQUENCES, _TOKENS = 2, 6


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward. Those tensors require gradients that do in the model."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def seen(cls, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Inputs:
        """Copy the arguments that a forward gets.

        Raises:
            Exception: an argument cannot be copied, such as a dict or cache of tensors that require
                gradients. These may be other modules' split activations, of which a rank has some.
        """
        names = {name: _copied(each, _copy_of) for name, each in keywords.items()}
        return cls(_copied(arguments, _copy_of), names)

    @property
    def key(self) -> Hashable:
        """Key that is equal for calls which compute the same with equal modules."""
        return _key(self.arguments), _key(self.keywords)

    def run(self, module: nn.Module) -> tuple[Outputs, list[Tensor]]:
        """Return a module's output, and the inputs that require gradients.

        The output is all tensors and numbers that the forward returns, or leaves in attributes.
        """
        leaves = []

        def fresh(tensor: Tensor) -> Tensor:
            own = _copy_of(tensor)
            if not own.requires_grad:
                return own
            leaves.append(with_own_gradient(own))
            return own.clone()  # which may be changed in place

        arguments = _copied(self.arguments, fresh)
        keywords = {name: _copied(each, fresh) for name, each in self.keywords.items()}
        outputs = outputs_of(module, module(*arguments, **keywords))
        for key, each in outputs.items():
            if key[0] and each.grad_fn is None:
                outputs[key] = each.detach()  # it had no gradient before the forward, either
        return outputs, leaves


Calls = dict[Hashable, Inputs | None]  # the first ones, by key; None if they cannot be copied


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copied(value: Any, copy_of: Callable[[Tensor], Tensor]) -> Any:
    """Copy arguments, with a function that copies the tensors among them."""
    if isinstance(value, Tensor):
        return copy_of(value)
    if type(value) in (tuple, list):
        return type(value)(_copied(each, copy_of) for each in value)
    return copy.deepcopy(value)


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        values = None if value.requires_grad else tuple(value.flatten().tolist())
        return type(value), value.shape, value.dtype, value.device, values
    if isinstance(value, dict):
        return dict, tuple((key, _key(each)) for key, each in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_key, value))
    is_plain = isinstance(value, (*PLAIN, type, types.FunctionType, types.BuiltinFunctionType))
    return (type(value), value) if is_plain else object()


class RunOfModel(NamedTuple):
    """Calls and reads in runs of a model.

    Attributes:
        calls: of modules, by name.
        known: the modules whose calls are all known: called in a run that came to its end.
        read: the first split layer whose parameters were read outside it, with what was read.
        outside: attributes, of those given, that runs which came to their end read outside the
            forwards given.
        used: what modules left besides their outputs, and other code of the model computed with,
            by name.
    """

    calls: dict[str, Calls]
    known: set[str]
    read: dict[str, str]
    outside: set[Attribute]
    used: Mapping[str, Collection[Key]]


def run_model(
    model: nn.Module,
    wanted: Collection[str],
    split: Collection[str],
    attributes: Mapping[str, Collection[str]],
    forwards: Collection[str],
    example: ExampleInputs | None,
) -> RunOfModel:
    """Run a copy of a model, to see how it calls modules and reads parameters and attributes.

    The model is run on the example, if there is one, on token ids, and on hidden states of shape
    (sequences, tokens, features), up to a run that reaches all modules. If its forward takes an
    `attention_mask`, it is run again with one that hides a token, as for padding.

    Args:
        model: the model.
        wanted: names of the modules whose calls are noted.
        split: names of the layers whose parameters ranks have in DTensors.
        attributes: names of the attributes of modules that a rank has with other values, by module.
        forwards: names of the modules whose forwards may read such attributes of modules in them.
        example: arguments of the model, if the user gave them.

    Raises:
        ValueError: the copy does not run on the example.
    """
    copies = RandomCopies(model)
    try:
        copied = copies.copy(model)
        _use_stand_ins(copied, copies)
        _use_no_caches(copied)
        reads = note_reads_outside(copied, attributes, forwards)
    except Exception:  # noqa: BLE001  (attributes that cannot be copied raise anything)
        return RunOfModel({}, set(), {}, set(), {})
    outside: set[Attribute] = set()
    used: dict[str, set[Key]] = {}
    now: dict[str, Calls] = {}
    uses = UsesOfOtherOutputs()
    for name in wanted:
        _watch(copied.get_submodule(name), name, now, uses)
    hidden: dict[str, Callable[[], None]] = {}
    layers = {id(copied.get_submodule(name)) for name in split}
    for name, module in copied.named_modules():
        if id(module) in layers and not _is_inside(name, hidden):
            hidden[name] = hide_parameters_outside(module, name)
    read: dict[str, str] = {}
    found: dict[str, Calls] = {}
    partly: dict[str, Calls] = {}
    forward: Any = getattr(type(model), "forward", None)  # a scripted module has none
    takes_mask = callable(forward) and "attention_mask" in signature(forward).parameters

    def run(*given: Any, **keywords: Any) -> Exception | None:
        """Note the calls of a run; return the error that ended it, or None."""
        now.clear()
        reads.clear()
        uses.forget()
        try:
            with copies.undisturbed(), uses:
                copied(*given, **keywords)
        except ReadWeightError as error:
            read[error.layer] = str(error)
            for show in hidden.values():
                show()
            return run(*given, **keywords)
        except Exception as error:  # noqa: BLE001  (a forward raises anything)
            return error
        outside.update(reads)
        for name, keys in uses.used.items():
            used.setdefault(name, set()).update(keys)
        return None

    if example is not None:
        arguments, keywords = _for_copy(example, copies)
        if error := run(*arguments, **keywords):
            raise ValueError(
                f"{type(model).__name__}, in a copy with random weights in float32, raises "
                f"{error!r} on example_inputs. Give arguments that its forward takes."
            ) from error
        found = {**now}
    for given in _candidates(copies, model):
        if len(found) == len(wanted):
            break
        if error := run(given):
            _logger.debug("%s on %s: %s", type(model).__name__, tuple(given.shape), error)
            partly = {**now, **partly}
            continue
        found = {**now, **found}
        if takes_mask:
            mask = torch.ones(given.shape[:2], dtype=torch.int64, device=given.device)
            mask[0, -1] = 0
            if run(given, attention_mask=mask) is None:
                for name, own in now.items():
                    found[name] = {**own, **found.get(name, {})}
    return RunOfModel({**partly, **found}, {*found}, read, outside, used)


def _for_copy(
    example: ExampleInputs, copies: RandomCopies
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy arguments of a model for its copy: on that device, and in float32."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        dtype = torch.float32 if leaf.is_floating_point() else leaf.dtype
        return _copy_of(leaf.to(copies.device, dtype))

    if isinstance(example, tuple):
        return tree_map(copied, example), {}
    return (), tree_map(copied, {**example})


def _is_inside(name: str, names: Collection[str]) -> bool:
    """Return whether a module is in one of others, by their names."""
    while name := parent_name(name):
        if name in names:
            return True
    return False


def _watch(module: nn.Module, name: str, calls: dict[str, Calls], uses: UsesOfOtherOutputs) -> None:
    """Note a module's calls that come to their end, and uses of what these leave."""
    begun: list[tuple[Hashable, Inputs | None]] = []

    def before(module: nn.Module, arguments: Any, keywords: Any) -> None:
        uses.begin(name)
        try:
            inputs = Inputs.seen(arguments, keywords)
            begun.append((inputs.key, inputs))
        except Exception as error:  # noqa: BLE001  (what cannot be copied raises anything)
            _logger.info("%s gets arguments that cannot be copied: %s", name, error)
            begun.append((None, None))

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        calls.setdefault(name, {}).setdefault(*begun.pop())
        uses.end(name, outputs_of(module, output))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _use_stand_ins(model: nn.Module, copies: RandomCopies) -> None:
    """Let large linear layers and stacked experts compute something cheap of the same shape."""
    for each in model.modules():
        if sum(own.numel() for own in each.parameters(recurse=False)) < LARGE:
            continue
        if describe(each) is not None:
            each.forward = _of_experts
        elif isinstance(each, nn.Linear) and type(each).forward is nn.Linear.forward:
            each.forward = partial(_of_linear, copies.random(each.out_features))  # type: ignore[method-assign]


def _use_no_caches(model: nn.Module) -> None:
    """Let transformers' models create no caches, of which later layers would get earlier ones'."""
    for each in model.modules():
        config: Any = vars(each).get("config")
        if isinstance(getattr(config, "use_cache", None), bool):
            config.use_cache = False


def _of_linear(weights: Tensor, given: Tensor) -> Tensor:
    mean: Tensor = given.mean(-1, keepdim=True)
    return mean * weights * math.sqrt(given.size(-1))


def _of_experts(*arguments: Any, **keywords: Any) -> Any:
    hidden, *_ = (*arguments, *keywords.values())
    return hidden * 0.5


def _candidates(copies: RandomCopies, model: nn.Module) -> Iterator[Tensor]:
    """Yield inputs that a model's forward may take: token ids, hidden states of each width."""
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    if tables:
        ids = torch.arange(_SEQUENCES * _TOKENS, device=copies.device)
        ids %= min(each.num_embeddings for each in tables)
        yield ids.reshape(_SEQUENCES, _TOKENS)
    for given in hidden_states(copies, model):
        yield from given.arguments


def hidden_states(copies: RandomCopies, module: nn.Module) -> Iterator[Inputs]:
    """Yield hidden states of each width that a linear layer in a module takes."""
    layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
    for width in dict.fromkeys(each.in_features for each in layers):
        yield Inputs((copies.random(_SEQUENCES, _TOKENS, width).requires_grad_(),), {})
