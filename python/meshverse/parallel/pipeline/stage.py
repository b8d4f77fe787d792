"""One stage of a model: the model itself, without what other stages have.

Example:
    >>> first = split_into_stages(model, 2, 0)  # doctest: +SKIP
    >>> last = split_into_stages(model, 2, 1)  # doctest: +SKIP
    >>> logits = last(first(tokens))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshverse.parallel.experts.choice import expert_modules
from meshverse.parallel.models.stages import StageOf, mark_as_stage, stage_of

from .copies import AbsentLayer, Idle, Passage, shallow_copy
from .layout import layers_of_stages
from .structure import Structure, describe

__all__ = ["check_keywords", "split_into_stages"]

_Model = TypeVar("_Model", bound=nn.Module)

# What a stage alone cannot give.
_REFUSED = (
    "labels",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "use_cache",
)


def split_into_stages(
    model: _Model,
    n_stages: int,
    index: int,
    *,
    layers_per_stage: Sequence[int] | None = None,
) -> _Model:
    """One of the stages of a language model of transformers.

    It is a model of the same class with some of the layers, under their own names; the first stage
    has the embedding too, the last one the norm and the head. `stage(inputs, **keywords)` takes
    tokens on the first stage and hidden states on the others, and gives hidden states, or on the
    last stage logits. Attention masks and position ids go to every stage as keywords. Tensor
    parallelism, FSDP2, activation checkpointing and torch.distributed.checkpoint take a stage as
    they take the model.

    Args:
        model: whole, on one device, before any parallelism. The stage shares its modules with
            it: do not use it afterwards.
        n_stages: how many there are.
        index: which of them.
        layers_per_stage: one number a stage; by default as even as can be.

    Raises:
        ValueError: the model cannot be split, with the reason; it is a stage, or distributed
            already; or the numbers do not fit its layers. The model is as it was.
    """
    _check_whole(model)
    structure = describe(model)
    ranges = layers_of_stages(structure.count, n_stages, layers_per_stage)
    if not 0 <= index < n_stages:
        raise ValueError(f"index={index!r}: the {n_stages} stages have the numbers from 0 on.")
    tied = _tied(model, structure, ranges)
    name = tied[index > 0] if tied and index in (0, n_stages - 1) and n_stages > 1 else None
    has_experts = bool(expert_modules(model))
    return _make(model, structure, StageOf(index, n_stages, ranges[index], name, has_experts))


def check_keywords(stage: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Check that a stage can take keywords.

    Raises:
        TypeError: some need all layers.
    """
    refused = [name for name in _REFUSED if keywords.get(name) is not None]
    if refused:
        raise TypeError(
            f"{type(stage).__name__} is a pipeline stage, and takes no {refused}: it has a part of "
            "the layers. Take the loss of the last stage's logits."
        )


def _check_whole(model: nn.Module) -> None:
    name = type(model).__name__
    if stage_of(model) is not None:
        raise ValueError(f"{name} is {stage_of(model)} already. Split the whole model.")
    if any(isinstance(each, DTensor) for each in model.parameters()):
        raise ValueError(
            f"{name} is distributed already. Split it into stages first, then apply tensor "
            "parallelism and FSDP2 to each stage."
        )


def _tied(
    model: nn.Module, structure: Structure, ranges: Sequence[range]
) -> tuple[str, str] | None:
    """The names of the parameter that the first and the last stage share, on either."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: tuple[str, str] | None = None
    for shared in names.values():
        owners = {_owner(name, structure, ranges): name for name in shared}
        if len(owners) == 1:
            continue
        ends = (owners.get(0), owners.get(len(ranges) - 1))
        if len(owners) > 2 or found or ends[0] is None or ends[1] is None:
            raise ValueError(
                f"{type(model).__name__} cannot be split into {len(ranges)} pipeline stages: "
                f"{shared} are one parameter, in stages {sorted(owners)}. Only an embedding and "
                "the head that is tied to it may be. Choose layers_per_stage so that the others "
                "are in one stage, or untie them."
            )
        found = (ends[0], ends[1])
    return found


def _owner(name: str, structure: Structure, ranges: Sequence[range]) -> int:
    """The stage that a parameter is in."""
    prefix = structure.inner + "." if structure.inner else ""
    if not name.startswith(prefix):
        return len(ranges) - 1
    child, _, rest = name[len(prefix) :].partition(".")
    if child == structure.layers:
        layer = int(rest.partition(".")[0])
        return next(stage for stage, layers in enumerate(ranges) if layer in layers)
    return 0 if child in structure.before else len(ranges) - 1


def _make(model: _Model, structure: Structure, own: StageOf) -> _Model:
    stage = shallow_copy(model)
    inner: nn.Module = stage
    if structure.inner:
        inner = shallow_copy(model.get_submodule(structure.inner))
        stage._modules[structure.inner] = inner
    passage = Passage(structure.in_tuples)
    layers = cast("nn.ModuleList", inner.get_submodule(structure.layers))
    inner._modules[structure.layers] = nn.ModuleList(
        layer
        if number in own.layers
        else AbsentLayer(layer, passage, is_before=number < own.layers.start)
        for number, layer in enumerate(layers)
    )
    for name in (() if own.is_first else structure.before) + (
        () if own.is_last else structure.after
    ):
        inner._modules[name] = Idle()
    if not own.is_last and structure.inner:
        for name in stage._modules:
            if name != structure.inner:
                stage._modules[name] = Idle()
    mark_as_stage(stage, own)
    # Not a closure: a copy of the stage must run its own layers.
    runs: Any = stage
    runs.forward = partial(_forward, stage, passage, structure.inner)
    return stage


def _forward(
    stage: nn.Module, passage: Passage, inner: str, inputs: Tensor, **keywords: Any
) -> Tensor:
    own = stage_of(stage)
    assert own is not None
    check_keywords(stage, keywords)
    if own.is_first:
        given = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}
    else:  # for its shape; the first layer of the stage gets the hidden states themselves
        given = {"inputs_embeds": inputs.new_zeros(()).expand(*inputs.shape[:2], inputs.size(-1))}
    runs = partial(type(stage).forward, stage) if own.is_last else stage.get_submodule(inner)
    if not own.is_last and not inner:
        runs = partial(type(stage).forward, stage)
    passage.received = inputs
    try:
        output: Any = runs(**given, use_cache=False, **keywords)
        passed_on = passage.passed_on
    finally:
        passage.clear()
    if own.is_last:
        logits = getattr(output, "logits", None)
        result: Tensor = output.last_hidden_state if logits is None else logits
        return result
    if not isinstance(passed_on, Tensor) or isinstance(passed_on, DTensor):
        raise ValueError(
            f"The hidden states that stage {own.index} of {type(stage).__name__} passes on are "
            f"{type(passed_on).__name__}: sequence parallelism across pipeline stages is not "
            "supported. Use sequence_parallel=False, or a plan that gathers between layers."
        )
    return passed_on
