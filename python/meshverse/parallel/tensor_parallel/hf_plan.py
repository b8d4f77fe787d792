"""Translation of a Hugging Face model's own tensor-parallel plan into torch's styles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from meshverse.parallel.experts.expert_parallel import SameTokensExpertParallel
from meshverse.parallel.experts.features import ExpertFeaturesParallel
from meshverse.parallel.experts.stacked import describe, experts_inside
from meshverse.parallel.losses.split_logits import SplitLogits
from meshverse.parallel.models.modules import (
    child_name,
    is_present,
    matching_modules,
    parameter_of,
    parent_name,
)
from meshverse.parallel.styles.local_styles import (
    LocalParameters,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    Replicated,
    ReplicatedWithGradAllreduce,
    SharedKeyGradAllreduce,
)

from .gaps import fill_gaps

_Plan = dict[str, ParallelStyle]
_logger = logging.getLogger(__name__)
_GATHERED = ("colwise_gather_output", "colwise_rep")
# transformers' styles for partial sums: of a layer that computes one, of a module that passes it
# on, and of an outer module that sums them over the ranks.
_TERM, _PASSED_ON, _SUM = "local_rowwise", "local", "gather"
_ROUTER = "ep_router"

_GATHERED_COLUMNS = partial(ColwiseParallel, output_layouts=Replicate())
_SPLIT_ROWS = partial(RowwiseParallel, input_layouts=Replicate())
_SUMMED = partial(PrepareModuleOutput, output_layouts=Partial(), desired_output_layouts=Replicate())

# If transformers renamed a style, the older name follows the current one.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "local_colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # The output is one rank's term of a sum, which the module around the layer computes ("gather").
    "local_rowwise": partial(RowwiseParallel, output_layouts=Partial()),
    "all_reduce": _SUMMED,
    "gather": _SUMMED,
    "colwise_gather_output": _GATHERED_COLUMNS,
    "colwise_rep": _GATHERED_COLUMNS,
    "embedding_colwise": _GATHERED_COLUMNS,
    "rowwise_split_input": _SPLIT_ROWS,
    "rowwise_rep": _SPLIT_ROWS,
    "embedding_rowwise": _SPLIT_ROWS,
    "sequence_parallel": SequenceParallel,
    "packed_colwise": PackedColwiseParallel,
    "local_packed_colwise": PackedColwiseParallel,
    "packed_rowwise": PackedRowwiseParallel,
    "local_packed_rowwise": PackedRowwiseParallel,
    "replicated_with_grad_allreduce": ReplicatedWithGradAllreduce,
    "mla_kv_a_proj": SharedKeyGradAllreduce,
    "local_params": LocalParameters,
    "replicate": Replicated,
}

# transformers' styles for experts and the modules around them, all of which one style replaces.
EXPERT_STYLES = frozenset(
    {
        *("ep_dispatch_experts", "ep_router", "grouped_gemm", "local"),
        *("moe_identity_expert", "moe_tp_experts"),
    }
)


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Return a new torch style for the current or older name of a style in transformers' plans.

    Raises:
        TypeError: the style is not a string.
        ValueError: the name is unknown, or is that of a style that splits experts.
    """
    if not isinstance(style, str):
        raise TypeError(
            f"The parallel style {style!r} of type {type(style).__name__} must be a str, one of "
            f"{sorted(_STYLES)}."
        )
    if style not in _STYLES:
        problem = f"is unknown. It must be one of {sorted(_STYLES)}."
        if style in EXPERT_STYLES:
            problem = (
                "splits experts, for which torch has no style. Give the experts' module "
                "ExpertFeaturesParallel() or ExpertParallel() in your plan instead."
            )
        raise ValueError(f"The parallel style {style!r} {problem}")
    return _STYLES[style]()


def get_hf_tp_shard_plan(
    model: nn.Module, *, split_logits: bool = False
) -> dict[str, ParallelStyle]:
    """Return a transformers model's own plan, completed and in torch's styles.

    The plan is merged from the `_tp_plan` of the model's class, of the model and of its inner
    model; if names are equal, the last one is used. For a model in wrappers, such as PEFT's and
    those with a value head, it is the inner model's plan, with module names as seen from the
    wrapper. Entries for layers that the model lacks are left out. This function adds:

    - the input embedding, unless it is tied to a head that the plan does not split;
    - styles that sum the gradients of parameters inside attention that all heads share, if the plan
      lacks them, as in older transformers.

    Args:
        model: model of transformers, or a wrapper of one, that is not split yet.
        split_logits: whether logits that the model's own plan gathers stay split in training mode:
            a DTensor that is sharded on the last dim, for torch's `loss_parallel`.

    Returns:
        A parallel style for each module name, in which `*` stands for a layer's number.

    Raises:
        ValueError: the model has no plan of its own, or its plan has an unknown style or splits
            experts in an unknown way.

    Example:
        >>> get_hf_tp_shard_plan(llama)["model.layers.*.mlp.down_proj"]  # doctest: +SKIP
        RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Replicate(),), ...)
    """
    for _, module in _planned_modules(model):
        _warn_of_absent_experts(module)
    plan = _plan_of(model, split_logits=split_logits)
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan: it or a module in it must have a "
            "non-empty _tp_plan, as models of transformers do. Give your own plan as "
            "tp_shard_plan=, or register one with register_tp_plan()."
        )
    return plan


def _plan_of(model: nn.Module, *, split_logits: bool) -> _Plan:
    return {
        child_name(prefix, key): style
        for prefix, module in _planned_modules(model)
        for key, style in _completed_plan(module, split_logits).items()
    }


def has_hf_plan(model: nn.Module) -> bool:
    """Return whether a model, or a module in it, has a tensor-parallel plan from transformers."""
    return any(True for _ in _planned_modules(model))


def declared_styles(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the styles of a model's modules under its own plan; none if it has none, or errs."""
    try:
        plan = _plan_of(model, split_logits=False)
    except ValueError:
        return {}
    return {name: style for key, style in plan.items() for name in matching_modules(model, key)}


def _planned_modules(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that have a plan, with their names; wrappers have none."""
    if _merged_plan(model):
        yield name, model
        return
    for own_name, child in model.named_children():
        yield from _planned_modules(child, child_name(name, own_name))


def _merged_plan(model: nn.Module) -> dict[str, str]:
    def own_plan(module: nn.Module) -> dict[str, str]:
        # Not getattr(module): wrappers forward it to the model inside.
        of_class, own = getattr(type(module), "_tp_plan", None), vars(module).get("_tp_plan")
        return {**(of_class or {}), **(own or {})}

    plan = own_plan(model)
    if not plan and not hasattr(type(model), "get_input_embeddings"):
        return {}  # a wrapper without access to the embedding: the inner model has the plan
    prefix = getattr(model, "base_model_prefix", "") or "model"
    inner = model._modules.get(prefix)
    inside = {} if inner is None else own_plan(inner)
    return plan | {f"{prefix}.{key}": style for key, style in inside.items()}


def _completed_plan(model: nn.Module, split_logits: bool) -> dict[str, ParallelStyle]:
    name, names = type(model).__name__, _merged_plan(model)
    present = {key: style for key, style in names.items() if is_present(model, key)}
    plan, present = _take_experts(model, present)
    needed = {key: style for key, style in present.items() if style in EXPERT_STYLES}
    if needed:
        raise ValueError(
            f"The plan of {name} splits experts of an unknown structure, with these entries: "
            f"{needed}. Give a plan without them as tp_shard_plan=; then each rank has these "
            "experts as a whole."
        )
    _complete_embedding(model, present)
    parameters = {key: parameter_of(model, key) for key in present}
    plan |= {
        key: _style(model, key, style, split_logits)
        for key, style in present.items()
        if parameters[key] is None
    }
    for key, parameter in parameters.items():
        if parameter is not None and present[key] not in ("sequence_parallel", "replicate"):
            dim = max(parameter.ndim + (-1 if "rowwise" in present[key] else -2), 0)
            _place_parameter(model, key, Shard(dim), plan)
    return fill_gaps(model, plan)


def _warn_of_absent_experts(model: nn.Module) -> None:
    experts = {key: each for key, each in _merged_plan(model).items() if each in EXPERT_STYLES}
    absent = {key: style for key, style in experts.items() if not is_present(model, key)}
    if absent:
        name = type(model).__name__
        _logger.warning("The plan of %s has entries for experts that it lacks: %s.", name, absent)


def _complete_embedding(model: nn.Module, names: dict[str, str]) -> None:
    """Add a style for the input embedding, unless it is tied to a head that is not split."""
    key, embedding = _named(model, "get_input_embeddings")
    head_key, head = _named(model, "get_output_embeddings")
    if not key or not isinstance(embedding, nn.Embedding):
        return
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    if names.get(key) == "replicate" or any(embedding.children()):  # whole, or with a norm inside
        names.pop(key, None)
        if tied:
            names.pop(head_key, None)
    elif tied and head_key not in names:
        names.pop(key, None)  # else the head, which is not split, would get a split weight
    else:
        names.setdefault(key, "embedding_rowwise")


def _named(model: nn.Module, getter: str) -> tuple[str, nn.Module | None]:
    module = getattr(model, getter, lambda: None)()
    return next((name for name, each in model.named_modules() if each is module), ""), module


def _style(model: nn.Module, key: str, style: str, split_logits: bool) -> ParallelStyle:
    head, _ = _named(model, "get_output_embeddings")
    if split_logits and key in (head, "lm_head") and style in _GATHERED:
        return SplitLogits()
    translated = translate_to_torch_parallel_style(style)
    if isinstance(translated, SharedKeyGradAllreduce):
        config: Any = getattr(model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        translated.shared_size = getattr(config, "qk_rope_head_dim", None)
    return translated


def _place_parameter(
    model: nn.Module, key: str, placement: Shard, plan: dict[str, ParallelStyle]
) -> None:
    """Turn a plan's entry for a parameter into a style for the modules that have the parameter."""
    pattern, _, name = key.rpartition(".")
    modules = matching_modules(model, pattern)
    tables = {each: model.get_submodule(each)._parameters for each in modules}
    having = [each for each in modules if tables[each].get(name) is not None]
    for owner in [pattern] if len(having) == len(modules) else having:
        local = plan.setdefault(owner, LocalParameters({}))
        if not isinstance(local, LocalParameters):
            raise ValueError(
                f"The plan of {type(model).__name__} has two styles for one module: in {key!r} "
                f"and, as {local}, in {owner!r}. Give a plan with one of them as tp_shard_plan=."
            )
        local.placements[name] = placement


def _take_experts(
    model: nn.Module, names: dict[str, str]
) -> tuple[dict[str, ParallelStyle], dict[str, str]]:
    """Return styles for a model's experts, and the remaining entries of its plan.

    transformers' plan has entries for the experts' module, for each of its weights, and for modules
    around it. One style for the experts' module replaces all of them.
    """
    styles: dict[str, ParallelStyle] = {}
    names = _sum_at_once(names)
    for key in dict.fromkeys(owner for own in names for owner in (own, parent_name(own))):
        found = matching_modules(model, key) if key else []
        modules = [experts_inside(model.get_submodule(name)) for name in found]
        if not any(describe(module) is not None for module in modules):
            continue
        whole = any(_is_of(own, key) and names[own] == "grouped_gemm" for own in names)
        styles[key] = SameTokensExpertParallel() if whole else ExpertFeaturesParallel()
        names = {own: style for own, style in names.items() if not _is_of(own, key)}
        inputs = [*signature(type(modules[0]).forward).parameters][1:]
        if len(inputs) == 1:  # its input is routed already, as in Llama 4
            beside = [own for own in names if _is_of(own, parent_name(key))]
            styles |= {own: _OwnOutput() for own in beside if names[own] == "rowwise"}
    routers = _ROUTER if styles else ""  # the new styles need no style on the router
    left = {own: style for own, style in names.items() if own not in styles and style != routers}
    return styles, left


class _OwnOutput(RowwiseParallel):
    """Row-wise style whose output is a copy, which the module around it may change in place."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda module, arguments, output: output.clone())
        return module


def _is_of(key: str, owner: str) -> bool:
    return key == owner or key.startswith(f"{owner}.")


def _sum_at_once(names: dict[str, str]) -> dict[str, str]:
    """Return the plan with partial sums replaced: each layer sums its output over the ranks.

    With partial sums, a router's weights would get only the gradient of one rank's term.
    """
    terms = [key for key, style in names.items() if style == _TERM]
    outer = [key for key, style in names.items() if style == _SUM]
    sums = [key for key in outer if any(_is_of(term, key) for term in terms)]
    return {
        key: "rowwise" if key in terms and any(_is_of(key, owner) for owner in sums) else style
        for key, style in names.items()
        if key not in sums and style != _PASSED_ON
    }
