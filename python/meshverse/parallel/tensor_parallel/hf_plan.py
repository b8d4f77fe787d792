"""The tensor-parallel plan that a Hugging Face model carries, as torch's parallel styles.

Example:
    >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
    >>> plan = get_hf_tp_shard_plan(LlamaForCausalLM(LlamaConfig()))  # doctest: +SKIP
    >>> plan["model.layers.*.mlp.down_proj"]  # doctest: +SKIP
    RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Replicate(),), ...)
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from meshverse.parallel.experts.hf_experts import take_experts
from meshverse.parallel.models.module_names import is_present, matching_modules, parameter_of
from meshverse.parallel.styles.local_styles import LocalParameters, SharedKeyGradAllreduce

from .hf_plan_gaps import fill_gaps
from .hf_styles import EXPERT_STYLES, translate_to_torch_parallel_style

__all__ = ["get_hf_tp_shard_plan", "has_hf_plan"]

_logger = logging.getLogger(__name__)
_GATHERED = ("colwise_gather_output", "colwise_rep")


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """A model's own plan, completed so that tensor parallelism gives what one process gives.

    It is merged from the `_tp_plan` of the model's class, of the model and of its inner model;
    later ones win. Entries for layers that this model has not are left out. What is added:

    - the input embedding, unless it is tied to a head that the plan leaves whole;
    - styles for the parameters and shared keys inside attention whose gradients a rank has only
      for its own heads, where an older transformers' plan forgets them.

    The head gives its logits as a DTensor that is sharded on the last dim, where the plan gathers
    them: use `full_tensor()`, or `torch.distributed.tensor.parallel.loss_parallel`.

    Args:
        model: a causal language model of transformers, or one that has such plans.

    Returns:
        By module name, where `*` stands for a layer's number, a style of its own.

    Raises:
        ValueError: the model has no plan, or its plan has a style that is unknown or splits
            experts.
    """
    names = _merged_plan(model)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan: neither it nor its inner model "
            "has a _tp_plan that names its modules. Give a plan as tp_shard_plan."
        )
    present = {key: style for key, style in names.items() if is_present(model, key)}
    plan, present = take_experts(model, present)
    _check_expressible(model, names, present)
    _complete_embedding(model, present)
    for key, style in present.items():
        if parameter_of(model, key) is None:
            plan[key] = _style(model, key, style)
    _place_parameters(model, present, plan)
    return fill_gaps(model, plan)


def has_hf_plan(model: nn.Module) -> bool:
    """Whether a model, or its inner model, carries a tensor-parallel plan of transformers."""
    return bool(_merged_plan(model))


def _merged_plan(model: nn.Module) -> dict[str, str]:
    merged = dict(getattr(type(model), "_tp_plan", None) or {})
    merged |= getattr(model, "_tp_plan", None) or {}
    prefix, inner = _inner_model(model)
    inner_plan = getattr(inner, "_tp_plan", None) or {}
    if inner is not model:
        merged |= {f"{prefix}.{key}": style for key, style in inner_plan.items()}
    return merged


def _inner_model(model: nn.Module) -> tuple[str, nn.Module]:
    prefix = getattr(model, "base_model_prefix", "") or "model"
    inner = getattr(model, prefix, model)
    return (prefix, inner) if isinstance(inner, nn.Module) else ("", model)


def _check_expressible(model: nn.Module, names: dict[str, str], left: dict[str, str]) -> None:
    """Refuse entries that no style stands for; warn of such for layers that the model has not."""
    needed = {key: style for key, style in left.items() if style in EXPERT_STYLES}
    if needed:
        raise ValueError(
            f"The plan of {type(model).__name__} splits experts in a way that is not known for "
            f"these modules: {needed}. Give a plan without these entries as tp_shard_plan, which "
            "leaves the experts whole on every rank."
        )
    absent = {
        key: style
        for key, style in names.items()
        if style in EXPERT_STYLES and not is_present(model, key)
    }
    if absent:
        _logger.warning(
            "Left out of the plan of %s, for experts that it has not: %s.",
            type(model).__name__,
            absent,
        )


def _complete_embedding(model: nn.Module, names: dict[str, str]) -> None:
    """Let the input embedding be split like the head it is tied to, or on its own."""
    key, embedding = _named(model, "get_input_embeddings")
    head_key, head = _named(model, "get_output_embeddings")
    if key is None or not isinstance(embedding, nn.Embedding):
        return
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    whole = names.get(key) == "replicate" or any(embedding.children())  # (a norm inside)
    if whole:
        names.pop(key, None)
        if tied:
            names.pop(head_key or "", None)
        return
    if tied and head_key not in names:
        names.pop(key, None)  # the head would get a weight in part
    elif key not in names:
        names[key] = "embedding_rowwise"


def _named(model: nn.Module, getter: str) -> tuple[str | None, nn.Module | None]:
    module = getattr(model, getter, lambda: None)()
    name = next((name for name, each in model.named_modules() if each is module), None)
    return name, module


def _style(model: nn.Module, key: str, style: str) -> ParallelStyle:
    head, _ = _named(model, "get_output_embeddings")
    if key in (head, "lm_head") and style in _GATHERED:
        return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    translated = translate_to_torch_parallel_style(style)
    if isinstance(translated, SharedKeyGradAllreduce):
        translated.shared_size = getattr(_text_config(model), "qk_rope_head_dim", None)
    return translated


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _place_parameters(
    model: nn.Module, names: dict[str, str], plan: dict[str, ParallelStyle]
) -> None:
    """Bring entries that name a parameter to the modules that have it."""
    for key, style in names.items():
        parameter = parameter_of(model, key)
        placement = None if parameter is None else _placement(parameter, style)
        if placement is None:
            continue
        pattern, _, name = key.rpartition(".")
        for owner in _owners(model, pattern, name):
            local = plan.setdefault(owner, LocalParameters({}))
            if not isinstance(local, LocalParameters):
                raise ValueError(
                    f"The plan of {type(model).__name__} has {key!r}: {style!r} beside {owner!r}: "
                    f"{local}. Give a plan as tp_shard_plan with one style for the module."
                )
            local.placements[name] = placement


def _owners(model: nn.Module, pattern: str, name: str) -> list[str]:
    """The pattern, if all modules it means have the parameter; else those that have it."""
    modules = matching_modules(model, pattern)
    having = [
        each for each in modules if model.get_submodule(each)._parameters.get(name) is not None
    ]
    return [pattern] if len(having) == len(modules) else having


def _placement(parameter: nn.Parameter, style: str) -> Placement | None:
    """How a single parameter is split; None if it stays whole."""
    if style in ("sequence_parallel", "replicate"):
        return None
    dim = -1 if "rowwise" in style else -2
    return Shard(max(parameter.ndim + dim, 0))
