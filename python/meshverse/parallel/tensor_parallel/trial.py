"""Trials: a module's own forward, run whole and as ranks would run it, on random weights.

A plan does not show what a forward does between a column-wise and a row-wise layer. It may need all
features or heads at once (a softmax over features, halves of packed gate and up), compute with a
number of heads, or use hidden states there whose gradient no layer sums. So the forward is run:
whole, and once for each rank. The outputs must be the same, and so must the gradients of the inputs
and of the parameters outside the split layers.

Modules run in training mode, but without dropout, which draws other numbers for fewer features.
No process communicates, nothing of the model is changed, and torch's random state is as before.
Large weights are views of a few megabytes of random numbers, so that a trial needs memory for one
layer's weight at a time; of modules that compute the same, one is tried.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_leaves

from meshverse._torch_compat.module_hooks import has_forward_hooks
from meshverse.parallel.models.modules import child_name

from .emulated_ranks import (
    EmulatedRanks,
    RanAgainError,
    is_emulated,
    placements_inside,
    relative_error,
)
from .equal_modules import Attribute, SameForm, add_to_forms, attributes_in, note_reads
from .random_copies import RandomCopies
from .regions import closed_regions

_logger = logging.getLogger(__name__)
_SEQUENCES, _TOKENS = 2, 6
_LARGEST_ERROR = 1e-3  # relative; a wrong forward is off by far more, rounding by less
_SMALLEST = 1e-6  # norm of a tensor besides the output that may not be rounding alone
_FLOOR = 1e-2  # smaller gradients, relative to the largest, may be zero but for rounding

_OF_OUTPUT = (
    "Its forward may need all features or heads at once, or compute with a number of heads, which "
    "is that of one rank. Let its layers give and take all features (output_layouts=Replicate() "
    "for the column-wise ones, input_layouts=Replicate() for the row-wise ones), keep what it "
    "computes from a number of heads in an attribute, name such numbers in LocalParameters, or "
    "remove its layers from the plan."
)
_IN_PLACE = (
    "An output of a split layer must not be changed in place, as torch refuses it in training: "
    "change a copy."
)
_OF_GRADIENTS = (
    "Between a column-wise and a row-wise layer, a gradient is that of one rank's own features, "
    "and is summed over the ranks only in the column-wise layer and where an entry of the plan "
    "says so. Correct the entry of a parameter (ReplicatedWithGradAllreduce() or summed= if it "
    "works on a rank's own features, Replicated() or Replicate() if not); use hidden states there "
    "only through column-wise layers; or remove the module's layers from the plan."
)
_OF_CHECKPOINTS = (
    "Do not checkpoint a part of this module inside its forward: checkpoint the call of the whole "
    "module, or use apply_activation_checkpointing()."
)


class _Untried(Exception):  # noqa: N818  (no error: the module is named in a warning)
    """A module's forward does not run on these inputs."""


class _AllSeen(Exception):  # noqa: N818  (no error: it ends a run)
    """All modules whose inputs are wanted were run."""


@dataclass(frozen=True)
class _Inputs:
    """Arguments of a forward. Those tensors require gradients that do in the model."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def seen(cls, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> _Inputs:
        """Copy the arguments that a forward gets.

        Raises:
            Exception: an argument cannot be copied, such as a dict or cache of tensors that require
                gradients. These may be other modules' split activations, of which a rank has some.
        """
        names = {name: _copied(each, _copy_of) for name, each in keywords.items()}
        return cls(_copied(arguments, _copy_of), names)

    def run(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return a module's output, and the inputs that require gradients.

        The output is all tensors that the forward returns, or has put into attributes.
        """
        leaves = []

        def fresh(tensor: Tensor) -> Tensor:
            own = _copy_of(tensor)
            if not own.requires_grad:
                return own
            leaves.append(own)
            return own.clone()  # which may be changed in place

        arguments = _copied(self.arguments, fresh)
        keywords = {name: _copied(each, fresh) for name, each in self.keywords.items()}
        before = [*_stored(module)]
        returned = tree_leaves(module(*arguments, **keywords))
        stored = [each for each in _stored(module) if not any(each is old for old in before)]
        return [each for each in (*returned, *stored) if isinstance(each, Tensor)], leaves


def _stored(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that are attributes of modules, and neither parameters nor buffers."""
    for inside in module.modules():
        yield from (each for each in vars(inside).values() if isinstance(each, Tensor))


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copied(value: Any, copy_of: Callable[[Tensor], Tensor]) -> Any:
    """Copy arguments, with a function that copies the tensors among them."""
    if isinstance(value, Tensor):
        return copy_of(value)
    if type(value) in (tuple, list):
        return type(value)(_copied(each, copy_of) for each in value)
    return copy.deepcopy(value)


def try_plan(
    model: nn.Module,
    styles: Mapping[str, ParallelStyle],
    counts: Mapping[int, Mapping[str, int]],
    size: int,
) -> list[str]:
    """Compare each module that contains split activations with itself, split over ranks.

    Modules are tried whose styles can be emulated, on inputs that they get from the model, which is
    run on token ids and on hidden states of shape (sequences, tokens, features) up to these
    modules; those that it does not reach are run on such hidden states themselves.

    Args:
        model: model that is not split yet.
        styles: the plan, by the names of modules.
        counts: attributes that a rank has with other values, by the id of their module.
        size: number of ranks.

    Returns:
        Names of the modules that could not be tried.

    Raises:
        ValueError: a module gives other outputs or gradients with its parts.
    """
    trials: dict[str, _Trial] = {}
    forms: dict[Hashable, list[SameForm]] = {}
    untried = set()
    for region in closed_regions(styles):
        module = model.get_submodule(region)
        inside = {
            name: styles[own]
            for name, _ in module.named_modules()
            if (own := child_name(region, name) if name else region) in styles
        }
        if any(has_forward_hooks(each) for name, each in module.named_modules() if name):
            untried.add(region)  # with its hooks; without them, it is tried
        if all(is_emulated(module.get_submodule(name), style) for name, style in inside.items()):
            trials[region] = _Trial(region, module, inside, counts, size)
            add_to_forms(forms, region, module, inside, counts)
        else:
            untried.add(region)
    while chosen := {
        region: form for some in forms.values() for form in some for region in form.to_run()
    }:
        inputs = _inputs_in(model, chosen)
        for region, form in chosen.items():
            trial = trials[region]
            try:
                trial.check(inputs.get(region))
            except _Untried as reason:
                _logger.info("%s was not tried: %s", region or type(model).__name__, reason)
                form.has_run(region, attributes_in(trial.module))
                untried |= {*form.equal_to(region)}
            else:
                form.has_run(region, () if form.is_alone() else trial.read(inputs.get(region)))
    return [region for region in closed_regions(styles) if region in untried]


def _inputs_in(model: nn.Module, wanted: Collection[str]) -> dict[str, _Inputs]:
    """Return the inputs that modules get in a run of the whole model, of those that it reaches."""
    seen: dict[str, _Inputs | None] = {}
    copies = RandomCopies(model)
    try:
        copied = copies.copy(model)
    except Exception:  # noqa: BLE001  (attributes that cannot be copied raise anything)
        return {}

    def watch(name: str) -> None:
        begun: list[_Inputs | None] = []

        def before(module: nn.Module, arguments: Any, keywords: Any) -> None:
            try:
                begun.append(_Inputs.seen(arguments, keywords))
            except Exception as error:  # noqa: BLE001  (what cannot be copied raises anything)
                _logger.info("%s gets arguments that cannot be copied: %s", name, error)
                begun.append(None)

        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            seen.setdefault(name, begun[-1])
            if len(seen) == len(wanted):
                raise _AllSeen

        inside = copied.get_submodule(name)
        inside.register_forward_pre_hook(before, with_kwargs=True)
        inside.register_forward_hook(after)

    for name in wanted:
        watch(name)
    takes = inspect.signature(type(model).forward).parameters
    keywords = {"use_cache": False} if "use_cache" in takes else {}
    for given in _candidates(copies, model):
        try:
            with copies.undisturbed():
                copied(given, **keywords)
        except _AllSeen:  # noqa: PERF203
            break
        except Exception as error:  # noqa: BLE001  (a forward raises anything)
            _logger.debug("%s on %s: %s", type(model).__name__, tuple(given.shape), error)
    return {name: each for name, each in seen.items() if each is not None}


def _candidates(copies: RandomCopies, model: nn.Module) -> Iterator[Tensor]:
    """Yield inputs that a model's forward may take: token ids, hidden states of each width."""
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    if tables:
        ids = torch.arange(_SEQUENCES * _TOKENS, device=copies.device)
        ids %= min(each.num_embeddings for each in tables)
        yield ids.reshape(_SEQUENCES, _TOKENS)
    for given in _hidden_states(copies, model):
        yield from given.arguments


def _hidden_states(copies: RandomCopies, module: nn.Module) -> Iterator[_Inputs]:
    layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
    for width in dict.fromkeys(each.in_features for each in layers):
        yield _Inputs((copies.random(_SEQUENCES, _TOKENS, width).requires_grad_(),), {})


class _Trial:
    """A module between whose layers activations are split, and its styles by name inside it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        styles: Mapping[str, ParallelStyle],
        counts: Mapping[int, Mapping[str, int]],
        size: int,
    ) -> None:
        self._name = name or type(module).__name__
        self.module, self._styles, self._size = module, styles, size
        self._counts = {
            own: counts[id(each)] for own, each in module.named_modules() if id(each) in counts
        }

    def check(self, inputs: _Inputs | None) -> None:
        """Check that ranks' parts give the outputs and gradients of the whole.

        Args:
            inputs: that the forward gets in the model, if they are known.

        Raises:
            ValueError: they do not.
            _Untried: the forward does not run on the inputs, or needs others than hidden states.
        """
        if problem := self._problem(inputs, lambda whole: None):
            raise ValueError(
                f"{self._name!r} ({type(self.module).__name__}) computes something else with "
                f"{self._size} ranks' parts of its features than with all of them (tried with "
                f"random weights): {problem}"
            )

    def read(self, inputs: _Inputs | None) -> Collection[Attribute]:
        """Return the attributes that the forward reads; all, if that cannot be seen."""
        read: list[set[Attribute]] = []
        try:
            problem = self._problem(inputs, lambda whole: read.append(note_reads(whole)))
        except Exception as error:  # noqa: BLE001  (of a compiled forward, or of a subclass)
            problem = repr(error)
        if problem:
            _logger.info("it is not known what %s reads: %s", self._name, problem)
            return attributes_in(self.module)
        return read[0]

    def _problem(self, inputs: _Inputs | None, prepare: Callable[[nn.Module], None]) -> str:
        """Return what is different with a rank's parts, and what to do; "" if nothing is.

        Raises:
            _Untried: as `check`.
        """
        copies = RandomCopies(self.module)
        try:
            whole = copies.copy(self.module)
        except Exception as error:  # attributes that cannot be copied raise anything
            raise _Untried(f"it cannot be copied: {error!r}") from error
        prepare(whole)
        outside = placements_inside(whole, self._styles)
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_(name in outside)
        reasons = []
        for given in [inputs] if inputs else _hidden_states(copies, whole):
            try:
                with copies.undisturbed():
                    return self._compare(copies, whole, given)
            except _Untried as reason:  # noqa: PERF203
                reasons.append(str(reason))
        raise _Untried("; ".join(reasons))

    def _compare(self, copies: RandomCopies, whole: nn.Module, inputs: _Inputs) -> str:
        expected, gradient, known = self._run_whole(copies, whole, inputs)
        ranks = EmulatedRanks(whole, self._styles, self._counts, self._size)
        leaves: dict[int, list[Tensor]] = {}  # by rank
        others: dict[int, list[Tensor]] = {}

        def forward(rank: int, module: nn.Module) -> Tensor:
            with copies.same_random_state():
                (output, *others[rank]), leaves[rank] = inputs.run(module)
            return output

        try:
            outputs = ranks.run(forward)
        except Exception as failure:  # noqa: BLE001  (a forward raises anything)
            return f"a rank raises {type(failure).__name__}: {failure} {_IN_PLACE} {_OF_OUTPUT}"
        error = max(relative_error(each, expected[0]) for each in outputs)
        if not error < _LARGEST_ERROR:  # NaN, too
            return f"the relative error of the output is {error:.2g}. {_OF_OUTPUT}"
        error = max(_error_of_others(each, expected[1:]) for each in others.values())
        if not error < _LARGEST_ERROR:
            return (
                "it returns, or keeps in an attribute, another tensor besides its output, whose "
                f"relative error is {error:.2g}. {_OF_OUTPUT}"
            )
        try:
            ranks.backward(outputs, gradient)
        except RanAgainError as failure:
            return f"{failure}. {_OF_CHECKPOINTS}"
        except Exception as failure:  # noqa: BLE001
            return f"{type(failure).__name__}: {failure} {_OF_GRADIENTS}"
        found = {f"{name!r}": each for name, each in ranks.gradients().items()}
        for number in range(len(leaves[0])):
            found[_input(number)] = [own[number].grad for own in leaves.values()]
        name, error = _worst_gradient(known, found)
        if not error < _LARGEST_ERROR:
            return f"the relative error of the gradient of {name} is {error:.2g}. {_OF_GRADIENTS}"
        return ""

    def _run_whole(
        self, copies: RandomCopies, whole: nn.Module, inputs: _Inputs
    ) -> tuple[list[Tensor], Tensor, dict[str, Tensor | None]]:
        """Return the output, the gradient that its first tensor is given, and gradients by name.

        Raises:
            _Untried: the forward does not run on the inputs.
        """
        shared: dict[int, Any] = {id(each): each for each in whole.parameters()}
        try:
            with copies.same_random_state():
                output, leaves = inputs.run(copy.deepcopy(whole, shared))
        except Exception as error:  # a forward raises anything
            raise _Untried(repr(error)) from error
        if not output or not output[0].isfinite().all():
            raise _Untried(f"its output is {output[:1]}")
        gradient = copies.random(*output[0].shape)
        if output[0].requires_grad:
            torch.autograd.backward([output[0]], [gradient])
        known = {f"{name!r}": each.grad for name, each in whole.named_parameters()}
        known |= {_input(number): each.grad for number, each in enumerate(leaves)}
        for parameter in whole.parameters():
            parameter.grad = None
        return [each.detach() for each in output], gradient, known


def _error_of_others(seen: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of tensors; those of a rank's own features do not count.

    These have other shapes, as attention weights of fewer heads.
    """
    return max(
        (
            relative_error(own, whole, _SMALLEST)
            for own, whole in zip(seen, expected, strict=False)
            if own.shape == whole.shape and whole.isfinite().all()
        ),
        default=0.0,
    )


def _input(number: int) -> str:
    return f"input {number}"


def _worst_gradient(
    known: Mapping[str, Tensor | None], found: Mapping[str, list[Tensor | None]]
) -> tuple[str, float]:
    """Return the name and relative error of the gradient that is most wrong on any rank."""
    finite = {
        name: each for name, each in known.items() if each is not None and each.isfinite().all()
    }
    sizes = {name: each.numel() ** 0.5 for name, each in finite.items()}
    largest = max((float(each.norm()) / sizes[name] for name, each in finite.items()), default=0.0)
    errors = {
        name: max(
            relative_error(each, expected, _FLOOR * largest * sizes[name]) for each in found[name]
        )
        for name, expected in finite.items()
    }
    return max(errors.items(), key=lambda item: item[1], default=("", 0.0))
