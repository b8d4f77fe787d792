"""Pipeline stages: models of the same class as the whole model, with some of its layers.

Example:
    >>> [list(layers) for layers in layers_of_stages(5, 2)]
    [[0, 1, 2], [3, 4]]
    >>> first = split_into_stages(model, 2, 0)  # doctest: +SKIP
    >>> last = split_into_stages(model, 2, 1)  # doctest: +SKIP
    >>> logits = last(first(tokens))  # doctest: +SKIP
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from meshverse.parallel.experts.expert_parallel import expert_modules
from meshverse.parallel.meshes.degrees import is_degree
from meshverse.parallel.models.modules import (
    AbsentModule,
    StageOf,
    child_name,
    mark_as_stage,
    shallow_copy,
    stage_of,
)
from meshverse.parallel.models.shared_objects import SharedObjects

from .structure import OUTPUTS, IdleModule, Structure, copy_attributes, describe, hidden_of

_Model = TypeVar("_Model", bound=nn.Module)

# Arguments of a forward that need all layers, or that a stage itself passes.
_REFUSED = (
    *("labels", "logits_to_keep", "past_key_values", "use_cache", "input_ids", "inputs_embeds"),
    *OUTPUTS,
)


def layers_of_stages(
    n_layers: int, n_stages: int, layers_per_stage: Sequence[int] | None = None
) -> list[range]:
    """Return the layers of every stage, in order.

    By default the numbers of layers are as equal as possible; the first stages have one layer more.

    Raises:
        ValueError: there are more stages than layers, or `layers_per_stage` does not add up to
            `n_layers`.
    """
    if not is_degree(n_stages):
        raise ValueError(f"n_stages={n_stages!r} must be an int above 0.")
    if layers_per_stage is None:
        if n_stages > n_layers:
            raise ValueError(
                f"{n_stages} stages for {n_layers} layers: every stage must have at least one "
                "layer. Use fewer pipeline stages, or fewer virtual stages per rank."
            )
        fewest, n_larger = divmod(n_layers, n_stages)
        layers_per_stage = [fewest + (stage < n_larger) for stage in range(n_stages)]
    counts = list(layers_per_stage)
    if len(counts) != n_stages or not all(map(is_degree, counts)) or sum(counts) != n_layers:
        raise ValueError(
            f"layers_per_stage={tuple(counts)} for {n_stages} stages and {n_layers} layers: it "
            "must have an int above 0 for each stage, and add up to the number of layers."
        )
    return [range(*each) for each in pairwise(accumulate(counts, initial=0))]


def split_into_stages(
    model: _Model, n_stages: int, index: int, *, layers_per_stage: Sequence[int] | None = None
) -> _Model:
    """Return one pipeline stage of a language model from transformers.

    The stage is a model of the same class that has some of the layers, under the same names. The
    first stage also has the embedding, and the last stage the norm and the head. `stage(inputs,
    **keywords)` takes tokens on the first stage and hidden states on others; it returns logits on
    the last stage and hidden states on others. Pass attention masks and position ids to every stage
    as keywords. Tensor parallelism, FSDP2, activation checkpointing and
    torch.distributed.checkpoint work on a stage as on the whole model.

    Args:
        model: the whole model, on one device, before any parallelism. The stage shares its modules:
            do not use the model afterwards.
        n_stages: number of stages.
        index: index of the stage to return, from 0.
        layers_per_stage: number of layers of each stage; by default as equal as possible.

    Raises:
        ValueError: the model cannot be split, is already a stage, or is already distributed; or
            the numbers do not fit its layers. The model is unchanged then. A model cannot be split
            if it reads its tokens besides embedding them, if its own forward gives its inner module
            other arguments than it gets, if it leaves out layers at random, or if it was compiled,
            got hooks around its forward, or another forward on the object.
    """
    name = type(model).__name__
    if stage_of(model) is not None:
        raise ValueError(f"{name} is a stage already, {stage_of(model)}. Split the whole model.")
    if any(isinstance(each, DTensor) for each in model.parameters()):
        raise ValueError(
            f"{name} is distributed already. Split it into stages first, then apply tensor "
            "parallelism and FSDP2 to each stage."
        )
    structure = describe(model)
    ranges = layers_of_stages(structure.n_layers, n_stages, layers_per_stage)
    if not 0 <= index < n_stages:
        raise ValueError(f"index={index!r} must be the index of a stage, 0 to {n_stages - 1}.")
    tied = _tied(model, structure, ranges).get(index)
    has_experts = bool(expert_modules(model))
    own = StageOf(index, n_stages, ranges[index], structure.inner, tied, has_experts)
    return _make(model, structure, own)


def check_keywords(stage: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that some stage could not use, the same on all stages.

    Of keywords that need all layers or that a stage itself passes, the value does not matter: some
    stages would raise for None, while the others wait for them.
    """
    name = type(stage).__name__
    if refused := [each for each in _REFUSED if each in keywords]:
        raise TypeError(
            f"{name} is a pipeline stage, and takes no {refused}: they need all layers of the "
            "model, or are set by the stage. Leave them out, pass tokens or embeddings as inputs, "
            "and compute the loss from the last stage's logits."
        )
    if shared := [each for each, value in keywords.items() if not _is_data(value)]:
        raise TypeError(
            f"{name} is a pipeline stage, and takes no {shared}: their values are "
            f"{[type(keywords[each]).__name__ for each in shared]}. Stages and microbatches would "
            "share such an object, as a cache. Give tensors, BlockMasks, numbers, texts, or "
            "lists, tuples and dicts of them."
        )


def check_names(stage: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that a forward of the model has no parameter for.

    All ranks compare with both forwards: the inner module's, which all stages run, and the
    model's own, which only the last stage runs.
    """
    own = cast("StageOf", stage_of(stage))
    if not keywords:
        return
    for module in (stage, stage.get_submodule(own.inner)):
        known = inspect.signature(type(module).forward).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in known):
            continue
        if unknown := sorted({*keywords} - {each.name for each in known}):
            raise TypeError(
                f"{unknown} are no parameters of {type(module).__name__}.forward, which a stage "
                "of the pipeline runs. Leave them out."
            )


def _is_data(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_data, value))
    return value is None or isinstance(value, Tensor | BlockMask | bool | int | float | str)


def _tied(model: nn.Module, structure: Structure, ranges: Sequence[range]) -> dict[int, str]:
    """Return the name of the parameter that the first and last stage share, by stage, if any."""
    prefix, last = structure.inner + "." if structure.inner else "", len(ranges) - 1

    def stage_with(name: str) -> int:
        child, _, rest = name[len(prefix) :].partition(".")
        if not name.startswith(prefix):
            return last
        if child == structure.layers:
            layer = int(rest.partition(".")[0])
            return next(stage for stage, layers in enumerate(ranges) if layer in layers)
        return 0 if child in structure.before else last

    names = defaultdict[int, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    found: dict[int, str] = {}
    for shared in names.values():
        owners = {stage_with(name): name for name in shared}
        if len(owners) == 1:
            continue
        if found or {*owners} != {0, last}:
            raise ValueError(
                f"{type(model).__name__} cannot be split into {len(ranges)} pipeline stages: "
                f"{shared} are one parameter, in stages {sorted(owners)}. Stages may share only "
                "an embedding that is tied to the head. Choose layers_per_stage so that these are "
                "in one stage, or untie them."
            )
        found = owners
    return found


@dataclass(eq=False)
class _Passage:
    """Hidden states that enter and leave a stage's layers during a forward."""

    in_tuples: bool  # whether the model expects a layer's output in a tuple
    n_absent: int  # number of layers in other stages
    shared: SharedObjects  # those of this stage's layers and of others
    n_called: int = 0  # number of calls of these
    received: Tensor | None = None
    passed_on: Tensor | None = None
    before: list[list[Any]] | None = None  # contents of `shared`, before the stage's layers

    def begin(self) -> None:
        """Note what is in the objects that layers of other stages refer to, too."""
        if not torch.compiler.is_dynamo_compiling():
            self.before = self.shared.contents()

    def check(self) -> None:
        """Raise RuntimeError if the stage's layers changed such an object."""
        if self.before is None:
            return
        changed, self.before = self.shared.changed_since(self.before), None
        if changed:
            raise RuntimeError(
                f"A layer changes {changed}, to which layers of other pipeline stages refer. Each "
                "stage has its own copy of it, for several microbatches: what a layer leaves there "
                "does not reach the others. Pass it on in the hidden states, or train without "
                "pipeline parallelism (pp_size=1)."
            )


class _AbsentLayer(AbsentModule):
    """Stand-in for a layer of another stage: it returns the input, or records the output."""

    def __init__(self, layer: nn.Module, passage: _Passage, *, is_before: bool) -> None:
        super().__init__()
        copy_attributes(layer, self)
        self._passage = passage
        self._is_before = is_before

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the stage's input or output, in the form of a layer's output."""
        passage = self._passage
        passage.n_called += 1
        if self._is_before:
            passage.begin()
        elif passage.passed_on is None:
            passage.check()
            passage.passed_on = hidden_of(arguments, keywords)
        hidden = passage.received if self._is_before else passage.passed_on
        return (hidden, None) if passage.in_tuples else hidden


def _make(model: _Model, structure: Structure, own: StageOf) -> _Model:
    stage = shallow_copy(model)
    inner: nn.Module = stage
    if structure.inner:
        inner = shallow_copy(model.get_submodule(structure.inner))
        stage._modules[structure.inner] = inner
    layers = cast("nn.ModuleList", inner.get_submodule(structure.layers))
    prefix = child_name(structure.inner, structure.layers)
    sides: tuple[dict[str, nn.Module], ...] = ({}, {})  # own layers, and those of other stages
    for number, layer in enumerate(layers):
        sides[number not in own.layers][f"{prefix}.{number}"] = layer
    passage = _Passage(
        structure.in_tuples, structure.n_layers - len(own.layers), SharedObjects(sides)
    )
    inner._modules[structure.layers] = nn.ModuleList(
        layer
        if number in own.layers
        else _AbsentLayer(layer, passage, is_before=number < own.layers.start)
        for number, layer in enumerate(layers)
    )
    idle = (*(() if own.is_first else structure.before), *(() if own.is_last else structure.after))
    inner._modules.update({name: IdleModule() for name in idle})
    if not own.is_last and structure.inner:
        others = {name: IdleModule() for name in stage._modules if name != structure.inner}
        stage._modules.update(others)
        # Of use to the last stage alone: checkpoints must not find untrained copies of them here.
        stage._parameters.update(dict.fromkeys(stage._parameters))
        stage._buffers.update(dict.fromkeys(stage._buffers))
    mark_as_stage(stage, own)
    # A partial, not a closure: deepcopy copies it, so that a copied stage runs its own layers.
    stage.forward = partial(_forward, stage, passage)
    return stage


def _forward(stage: nn.Module, passage: _Passage, inputs: Tensor, **keywords: Any) -> Tensor:
    own = cast("StageOf", stage_of(stage))
    check_keywords(stage, keywords)
    if own.is_first:
        given = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}
    else:  # only the shape is used: the stage's first layer gets the hidden states
        given = {"inputs_embeds": inputs.new_zeros(()).expand(*inputs.shape[:2], inputs.size(-1))}
    runs: Any = partial(type(stage).forward, stage)
    if own.inner and not own.is_last:
        runs = stage.get_submodule(own.inner)
    passage.received, passage.n_called = inputs, 0
    passage.begin()
    try:
        output: Any = runs(**given, use_cache=False, **keywords)
        passage.check()
        passed_on = passage.passed_on
    finally:
        passage.received = passage.passed_on = passage.before = None
    if passage.n_called != passage.n_absent:
        raise RuntimeError(
            f"{type(stage).__name__} called layers of other stages {passage.n_called} times, and "
            f"has {passage.n_absent} of them: in a pipeline, a model must run each layer once in "
            "each forward. Turn off what leaves out or repeats layers."
        )
    if own.is_last:
        logits = getattr(output, "logits", None)
        return output.last_hidden_state if logits is None else logits  # type: ignore[no-any-return]
    if not isinstance(passed_on, Tensor) or isinstance(passed_on, DTensor):
        raise ValueError(
            f"The hidden states that stage {own.index} of {type(stage).__name__} passes on are "
            f"a {type(passed_on).__name__}, and must be a plain tensor: sequence parallelism "
            "across stages is not supported. Use sequence_parallel=False, or a plan that gathers "
            "between layers."
        )
    return passed_on
