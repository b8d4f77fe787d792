"""Trials: a module's own forward, run whole and as ranks would run it, on random weights.

A plan does not show what a forward does between a column-wise and a row-wise layer. It may need all
features or heads at once (a softmax over features, halves of packed gate and up), compute with a
number of heads, or use hidden states there whose gradient no layer sums. So the forward is run:
whole, and once for each rank. The outputs must be the same, and so must the buffers, tensors and
numbers that it leaves in attributes, and the gradients of the inputs and of the parameters outside
the split layers. No other tensors may get gradients: of one that is registered elsewhere, a rank
may have a part that no layer sums.

Modules run in training mode, but without dropout, which draws other numbers for fewer features.
No process communicates, nothing of the model is changed, and random states are as before.
What a forward changes elsewhere, such as a list in a global variable, stays changed.
Large weights are views of a few megabytes of random numbers, so that a trial needs memory for one
layer's weight at a time; of modules that compute the same, one is tried.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from meshverse._torch_compat.module_hooks import has_forward_hooks
from meshverse.parallel.config import ExampleInputs
from meshverse.parallel.models.leaves import in_words, other_leaves
from meshverse.parallel.models.modules import child_name
from meshverse.parallel.styles.local_styles import PackedColwiseParallel, PackedRowwiseParallel

from .calls import Inputs, hidden_states, run_model
from .emulated_ranks import (
    EmulatedRanks,
    RanAgainError,
    RowWiseCalls,
    backward,
    is_emulated,
    is_in_split_layer,
    placements_inside,
    relative_error,
)
from .equal_modules import Attribute, SameForm, add_to_forms, attributes_in, note_reads
from .hidden_weights import ReadWeightError
from .outputs import OUTPUT, Key, Outputs
from .random_copies import Other, RandomCopies
from .regions import closed_regions, regions

_Styles = dict[str, ParallelStyle]
_logger = logging.getLogger(__name__)
_LARGEST_ERROR = 1e-3  # relative; a wrong forward is off by far more, rounding by less
_SMALLEST = 1e-6  # norm of a tensor besides the output that may not be rounding alone
_FLOOR = 1e-2  # smaller gradients, relative to the largest, may be zero but for rounding

# Styles that make DTensors of all parameters.
_DISTRIBUTING = (
    *(ColwiseParallel, RowwiseParallel, SequenceParallel),
    *(PackedColwiseParallel, PackedRowwiseParallel),
)

_OF_OUTPUT = (
    "Its forward may need all features or heads at once, or compute with a number of heads, which "
    "is that of one rank. Let its layers give and take all features (output_layouts=Replicate() "
    "for the column-wise ones, input_layouts=Replicate() for the row-wise ones), keep what it "
    "computes from a number of heads in an attribute, name such numbers in LocalParameters, or "
    "remove its layers from the plan."
)
_OF_BUFFERS = (
    "A rank would keep what its own features or heads give. Compute it from what all ranks have, "
    "such as the module's input or output; let the layers around it give and take all features "
    "(output_layouts=Replicate(), input_layouts=Replicate()); or remove them from the plan."
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
_OF_WEIGHTS = (
    "A rank has only a part of it, in a DTensor. Compute with the layers' outputs, keep what is "
    "computed from whole weights in a buffer, or remove the layer from the plan."
)
_OF_READS = (
    "Other code would compute with a wrong number. Keep the number in an attribute of the module "
    "that reads it."
)
_OF_USES = (
    "Compute what it needs inside the module's own forward, from what all ranks have; let the "
    "layers give and take all features (output_layouts=Replicate(), input_layouts=Replicate()); "
    "or remove the module's layers from the plan."
)
_OF_OTHERS = (
    "Each rank may get a part of its gradient, which nothing sums. Register it in the module "
    "(self.name = parameter), with an entry in the plan, or remove the module's layers from the "
    "plan."
)
_OF_CHECKPOINTS = (
    "Do not checkpoint a part of this module inside its forward: checkpoint the call of the whole "
    "module, or use apply_activation_checkpointing()."
)


class _Untried(Exception):  # noqa: N818  (no error: the module is named in a warning)
    """A module's forward does not run on these inputs."""


def has_hooks_inside(module: nn.Module) -> bool:
    """Return whether modules inside a module have forward hooks."""
    return any(has_forward_hooks(each) for name, each in module.named_modules() if name)


def styles_inside(region: str, model: nn.Module, styles: Mapping[str, ParallelStyle]) -> _Styles:
    """Return the styles of a module and of those inside it, by their names in it.

    Args:
        region: name of the module.
        model: model that has it.
        styles: the plan, by the names of modules in the model.
    """
    return {
        name: styles[own]
        for name, _ in model.get_submodule(region).named_modules()
        if (own := child_name(region, name) if name else region) in styles
    }


def try_plan(
    model: nn.Module,
    styles: Mapping[str, ParallelStyle],
    counts: Mapping[int, Mapping[str, int]],
    size: int,
    example: ExampleInputs | None,
) -> dict[str, str]:
    """Compare each module that contains split activations with itself, split over ranks.

    Modules are tried whose styles can be emulated, on the arguments of each of their calls in a run
    of the model; those that it does not reach are run on hidden states.

    Args:
        model: model that is not split yet.
        styles: the plan, by the names of modules.
        counts: attributes that a rank has with other values, by the id of their module.
        size: number of ranks.
        example: arguments of the model on which it is run first, or None.

    Returns:
        Why a module was not tried, or not as the model calls it; or that it is a split layer whose
        parameters other code reads. By name.

    Raises:
        ValueError: a module gives other outputs or gradients with its parts; other code reads an
            attribute that a rank has with another value, or computes with what a module has of a
            rank's own features; or the model does not run on the example.
    """
    names = {id(each): name for name, each in model.named_parameters()}
    trials: dict[str, _Trial] = {}
    problems: dict[str, str] = {}
    for region in closed_regions(model, styles):
        module = model.get_submodule(region)
        inside = styles_inside(region, model, styles)
        if has_hooks_inside(module):
            problems[region] = "it has hooks, without which it is tried"
        if all(is_emulated(module.get_submodule(name), style) for name, style in inside.items()):
            trials[region] = _Trial(region, module, inside, counts, size, names)
        else:
            problems[region] = "layers in it have styles or layouts that a trial does not know"
    split = [name for name, style in styles.items() if isinstance(style, _DISTRIBUTING)]
    changed = {name: counts[id(m)] for name, m in model.named_modules() if id(m) in counts}
    forwards = {*regions(model, styles)}
    calls, known, read, outside, used = run_model(model, trials, split, changed, forwards, example)
    if outside:
        seen = {child_name(*each): changed[each[0]][each[1]] for each in sorted(outside)}
        raise ValueError(
            f"{type(model).__name__} cannot be split over {size} ranks: {[*seen]} would become "
            f"those of one rank, {seen}, and are read outside the forward of their module. "
            f"{_OF_READS}"
        )
    problems |= {name: f"{what} {_OF_WEIGHTS}" for name, what in read.items()}
    forms: dict[tuple[Hashable, Hashable], list[SameForm]] = {}  # by call, and by form
    for region, trial in trials.items():
        own = calls.setdefault(region, {None: None})
        if region not in known:
            inputs = "token ids or hidden states" if example is None else "the example inputs"
            problems.setdefault(region, f"no run of the model on {inputs} calls it")
        elif None in own:
            problems.setdefault(region, "it gets arguments that cannot be copied")
        for call in own:
            add_to_forms(forms, call, region, trial.module, trial.styles, counts)
    for (call, _), some in forms.items():
        for form in some:
            while chosen := form.to_run():
                for region in chosen:
                    its = calls[region][call]
                    for each, reason in _try(trials[region], form, region, its):
                        problems.setdefault(each, reason)
                    for each in form.equal_to(region):
                        trials[region].check_uses(each, used.get(each, ()))
    return {
        name: problems[name] for name in (*closed_regions(model, styles), *read) if name in problems
    }


def _try(
    trial: _Trial, form: SameForm, region: str, inputs: Inputs | None
) -> Iterator[tuple[str, str]]:
    """Try a module, and yield those that were not tried, with the reason, as it could not be."""
    try:
        trial.check(inputs)
    except _Untried as error:
        _logger.info("%s was not tried: %s", region or type(trial.module).__name__, error)
        form.has_run(region, attributes_in(trial.module))
        for each in form.equal_to(region):
            yield each, f"its forward does not run by itself: {error}"
    else:
        form.has_run(region, () if form.is_alone() else trial.read(inputs))


class _Trial:
    """A module between whose layers activations are split, and its styles by name inside it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        styles: Mapping[str, ParallelStyle],
        counts: Mapping[int, Mapping[str, int]],
        size: int,
        names: Mapping[int, str],
    ) -> None:
        self._name, self._names = name or type(module).__name__, names
        self.module, self.styles, self._size = module, styles, size
        self._counts = {
            own: counts[id(each)] for own, each in module.named_modules() if id(each) in counts
        }
        self._of_ranks: set[Key] = set()  # what has another shape on ranks, besides the output

    def check(self, inputs: Inputs | None) -> None:
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

    def check_uses(self, name: str, used: Collection[Key]) -> None:
        """Check that no other code computes with what is that of a rank's own features.

        Args:
            name: of a module that is equal to this one.
            used: what it leaves besides its output, and other code of the model computes with.

        Raises:
            ValueError: there is such a tensor.
        """
        for key in self._of_ranks.intersection(used):
            how = f"keeps in its attribute {key[0]!r}" if key[0] else "returns"
            raise ValueError(
                f"{name!r} ({type(self.module).__name__}) {how} a tensor besides its output, of "
                f"which each of {self._size} ranks has its own features or heads only, and other "
                f"code of the model computes with it. {_OF_USES}"
            )

    def read(self, inputs: Inputs | None) -> Collection[Attribute]:
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

    def _problem(self, inputs: Inputs | None, prepare: Callable[[nn.Module], None]) -> str:
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
        outside = placements_inside(whole, self.styles)
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_(name in outside)
        reasons = []
        for given in [inputs] if inputs else hidden_states(copies, whole):
            try:
                with copies.undisturbed():
                    return self._compare(copies, whole, given)
            except _Untried as reason:  # noqa: PERF203
                reasons.append(str(reason))
        raise _Untried("; ".join(reasons))

    def _compare(self, copies: RandomCopies, whole: nn.Module, inputs: Inputs) -> str:
        expected, inputs_of_whole, kept, calls = self._run_whole(copies, whole, inputs)
        for leaf in other_leaves(expected.values(), [*whole.parameters(), *inputs_of_whole]):
            return f"its forward uses {self._in_words(leaf, copies)}. {_OF_OTHERS}"
        ranks = EmulatedRanks(whole, self.styles, self._counts, self._size)
        leaves: dict[int, list[Tensor]] = {}  # by rank
        buffers: dict[int, dict[str, Tensor]] = {}

        def forward(rank: int, module: nn.Module) -> Outputs:
            with copies.same_random_state():
                output, leaves[rank] = inputs.run(module)
            buffers[rank] = self._buffers(module)
            return output

        try:
            outputs = ranks.run(forward)
        except ReadWeightError as failure:
            return f"{failure} {_OF_WEIGHTS}"
        except Exception as failure:  # noqa: BLE001  (a forward raises anything)
            return f"a rank raises {type(failure).__name__}: {failure} {_IN_PLACE} {_OF_OUTPUT}"
        error = max(relative_error(each.get(OUTPUT), expected[OUTPUT]) for each in outputs)
        if not error < _LARGEST_ERROR:  # NaN, too
            return f"the relative error of the output is {error:.2g}. {_OF_OUTPUT}"
        if problem := _worst_output(calls.outputs, ranks.row_wise_outputs()):
            return f"{problem}. {_OF_OUTPUT}"
        others = self._same_on_ranks(outputs, expected)
        self._of_ranks |= {key for key in expected if not _has_shape(outputs, expected, key)}
        for key in others:
            error = max(relative_error(each[key], expected[key], _SMALLEST) for each in outputs)
            if not error < _LARGEST_ERROR:
                how = f"keeps in its attribute {key[0]!r}" if key[0] else "returns"
                return (
                    f"it {how} another tensor or number besides its output, whose relative error "
                    f"is {error:.2g}. {_OF_OUTPUT}"
                )
        for seen in buffers.values():
            for name in sorted(kept.keys() | seen.keys()):
                if not _are_equal(seen.get(name), kept.get(name)):
                    return f"its forward leaves other values in the buffer {name!r}. {_OF_BUFFERS}"
        given = {key: copies.random(*expected[key].shape) for key in (OUTPUT, *others)}
        # Then without what goes around the split layers: of a layer whose output is scaled down,
        # that would hide an error.
        inside = [copies.random(*each.shape) for _, each in calls.outputs]
        for of_whole, of_ranks in (
            (partial(backward, expected, given), partial(ranks.backward, outputs, given)),
            (partial(calls.backward, inside), partial(ranks.backward_from_row_wise, inside)),
        ):
            try:
                of_whole()
            except Exception as failure:  # a backward raises anything
                raise _Untried(f"its backward raises {failure!r}") from failure
            try:
                of_ranks()
            except RanAgainError as failure:
                return f"{failure}. {_OF_CHECKPOINTS}"
            except Exception as failure:  # noqa: BLE001
                return f"{type(failure).__name__}: {failure} {_OF_GRADIENTS}"
            name, error = self._worst(whole, inputs_of_whole, ranks, leaves)
            if not error < _LARGEST_ERROR:
                return (
                    f"the relative error of the gradient of {name} is {error:.2g}. {_OF_GRADIENTS}"
                )
        return ""

    @staticmethod
    def _worst(
        whole: nn.Module,
        inputs_of_whole: list[Tensor],
        ranks: EmulatedRanks,
        leaves: Mapping[int, list[Tensor]],
    ) -> tuple[str, float]:
        """Return which gradient is most wrong, and its relative error; forget all gradients."""
        known = {f"{name!r}": each.grad for name, each in whole.named_parameters()}
        known |= {_input(number): each.grad for number, each in enumerate(inputs_of_whole)}
        found = {f"{name!r}": each for name, each in ranks.gradients().items()}
        for number in range(len(leaves[0])):
            found[_input(number)] = [own[number].grad for own in leaves.values()]
        of_ranks = (each for own in leaves.values() for each in own)
        for each in (*whole.parameters(), *inputs_of_whole, *of_ranks):
            each.grad = None
        return _worst_gradient(known, found)

    def _run_whole(
        self, copies: RandomCopies, whole: nn.Module, inputs: Inputs
    ) -> tuple[Outputs, list[Tensor], dict[str, Tensor], RowWiseCalls]:
        """Return the output, the inputs that require gradients, the buffers, and the calls inside.

        Raises:
            _Untried: the forward does not run on the inputs.
        """
        others = (each.copied for each in copies.others)
        shared: dict[int, Any] = {id(each): each for each in (*whole.parameters(), *others)}
        try:
            with copies.same_random_state():
                module = copy.deepcopy(whole, shared)
                calls = RowWiseCalls(module, self.styles)
                output, leaves = inputs.run(module)
        except Exception as error:  # a forward raises anything
            raise _Untried(repr(error)) from error
        first = output.get(OUTPUT)
        if first is None or not first.isfinite().all():
            raise _Untried(f"its output is {first}")
        return output, leaves, self._buffers(module), calls

    def _same_on_ranks(self, outputs: list[Outputs], expected: Outputs) -> list[Key]:
        """Return which values besides the output must be the same on all ranks.

        Those of a rank's own features need not: they have other shapes, as attention weights of
        fewer heads. Nor need numbers of heads, which the plan changes, or what is in split layers.
        """
        counts = {child_name(own, each) for own, some in self._counts.items() for each in some}
        return [
            key
            for key, wanted in expected.items()
            if key != OUTPUT
            and key[0] not in counts
            and not is_in_split_layer(key[0], self.styles)
            and _has_shape(outputs, expected, key)
            and wanted.isfinite().all()
        ]

    def _in_words(self, leaf: Tensor, copies: RandomCopies) -> str:
        itself = Other(leaf, id(leaf), leaf.dtype)  # such as of a closure, which is not copied
        other = next((each for each in copies.others if each.copied is leaf), itself)
        return in_words(self._names.get(other.original, ""), leaf.shape, other.dtype)

    def _buffers(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the dense buffers outside split layers, whose own buffers torch distributes."""
        return {
            name: each
            for name, each in module.named_buffers()
            if each.layout is torch.strided and not is_in_split_layer(name, self.styles)
        }


def _has_shape(outputs: list[Outputs], expected: Outputs, key: Key) -> bool:
    """Return whether a value has the expected shape on all ranks."""
    return all(key in each and each[key].shape == expected[key].shape for each in outputs)


def _are_equal(seen: Tensor | None, expected: Tensor | None) -> bool:
    if seen is None or expected is None:
        return False
    finite, wanted = (each.detach().nan_to_num(0.0, 0.0, 0.0) for each in (seen, expected))
    return torch.equal(finite, wanted) or (
        relative_error(finite, wanted, _SMALLEST) < _LARGEST_ERROR
    )


def _worst_output(
    expected: Sequence[tuple[str, Tensor]], found: Sequence[tuple[str, Tensor]]
) -> str:
    """Return which row-wise layer gives something else on ranks, in words; "" if none does.

    Its output may be scaled down so far that the module's output hides its error.
    """
    if [name for name, _ in expected] != [name for name, _ in found]:
        return "ranks call its row-wise layers in another order"
    for (name, wanted), (_, seen) in zip(expected, found, strict=True):
        error = relative_error(seen, wanted, _SMALLEST)
        if not error < _LARGEST_ERROR:
            return f"the relative error of the output of {name!r} is {error:.2g}"
    return ""


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
