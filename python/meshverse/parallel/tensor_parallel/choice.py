"""Which tensor-parallel plan a model gets: given, registered, its own, or that of a Llama.

Example:
    >>> register_tp_plan(  # doctest: +SKIP
    ...     MyModel, lambda model, sequence_parallel: {"up": ColwiseParallel(), ...}
    ... )
    >>> apply_tensor_parallelism(my_model, mesh["tp"])  # doctest: +SKIP
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from meshverse.parallel.config import TPPlan
from meshverse.parallel.experts.expert_parallel import SameTokensExpertParallel
from meshverse.parallel.experts.features import ExpertFeaturesParallel
from meshverse.parallel.models.import_paths import import_class_from_path
from meshverse.parallel.models.module_names import is_present, matching_modules

from .apply import apply_tp_plan
from .hf_plan import get_hf_tp_shard_plan, has_hf_plan

__all__ = ["apply_tensor_parallelism", "check_heads", "llama_tp_plan", "register_tp_plan"]

_logger = logging.getLogger(__name__)

PlanFunction = Callable[[nn.Module, bool], dict[str, ParallelStyle]]
_registered: dict[type[nn.Module], PlanFunction] = {}


def register_tp_plan(model_class: type[nn.Module], function: PlanFunction) -> None:
    """Say which plan the models of a class get, where none is given.

    Args:
        model_class: also for classes derived from it that have none of their own.
        function: called as `function(model, sequence_parallel)`; gives the plan.
    """
    _registered[model_class] = function


def apply_tensor_parallelism(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    tp_shard_plan: TPPlan | None = None,
    *,
    sequence_parallel: bool = False,
    handed_out: Collection[str] = (),
) -> None:
    """Split a model in place by the plan that is given, or chosen for it.

    Args:
        model: whose parameters are whole.
        tp_mesh: 1-D.
        tp_shard_plan: the plan; or its import path; or a function of nothing, or of the model and
            sequence_parallel, that gives it. None for the one registered for the model's
            class, else the model's own, else that of a Llama, with a warning.
        sequence_parallel: whether what is between the split layers is split by tokens.
        handed_out: names of modules whose experts are, or will be, handed out whole to ranks of an
            expert mesh. A plan's styles of experts leave these alone.

    Raises:
        TypeError: the plan is none of these.
        ValueError: the plan does not fit the model, or does not know of sequence parallelism.
    """
    plan = _choose(model, tp_shard_plan, sequence_parallel)
    if handed_out:
        plan = {
            key: style
            for key, style in plan.items()
            if not _is_of_experts(model, key, style, handed_out)
        }
    apply_tp_plan(model, tp_mesh, plan)


def _is_of_experts(
    model: nn.Module, key: str, style: ParallelStyle, handed_out: Collection[str]
) -> bool:
    """Whether an entry of a plan is only for experts that are handed out, or for parts of these."""
    found = matching_modules(model, key)
    if isinstance(style, ExpertFeaturesParallel | SameTokensExpertParallel):
        return set(found) <= set(handed_out)
    inside = tuple(f"{name}." for name in handed_out)
    return bool(found) and all(name.startswith(inside) for name in found)


def _choose(
    model: nn.Module, given: TPPlan | None, sequence_parallel: bool
) -> dict[str, ParallelStyle]:
    if given is not None:
        return _resolve(model, given, sequence_parallel)
    for model_class in type(model).__mro__:
        if model_class in _registered:
            return _registered[model_class](model, sequence_parallel)
    if has_hf_plan(model):
        if sequence_parallel:
            raise ValueError(
                f"sequence_parallel=True: the plan that {type(model).__name__} carries does not "
                "know of it. For a model built like Llama, give "
                "tp_shard_plan='meshverse.parallel.tp_choice.llama_tp_plan'; else a plan of yours."
            )
        return get_hf_tp_shard_plan(model)
    plan = llama_tp_plan(model, sequence_parallel)
    _logger.warning(
        "No tensor-parallel plan is known for %s: split like a Llama, at %s. Register one with "
        "register_tp_plan if the model is built otherwise.",
        type(model).__name__,
        sorted(plan),
    )
    return plan


def _resolve(model: nn.Module, given: TPPlan, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    plan: Any = import_class_from_path(given) if isinstance(given, str) else given
    if callable(plan):
        plan = plan(model, sequence_parallel) if inspect.signature(plan).parameters else plan()
    if not isinstance(plan, dict):
        raise TypeError(
            f"tp_shard_plan={given!r} gives {plan!r}: expected a dictionary of parallel styles by "
            "module name, its import path, or a function that gives it."
        )
    return plan


def check_heads(model: nn.Module, tp_size: int) -> None:
    """Check that the heads which a model's config counts divide by the size of TP.

    Raises:
        ValueError: they do not.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for name in ("num_key_value_heads", "num_attention_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % tp_size:
            raise ValueError(
                f"{name}={heads} of {type(model).__name__} does not divide by tp_size={tp_size}. "
                "Choose a tp_size that divides both the attention and the key-value heads."
            )


def llama_tp_plan(model: nn.Module, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """The plan for a model built like Llama, as far as the model has such modules.

    Args:
        model: with its layers at `model.layers` or `layers`.
        sequence_parallel: whether norms and residuals are split by tokens; what passes between the
            layers are DTensors then.

    Raises:
        ValueError: the model has no such layers.
    """
    inner = _sequence_parallel_plan() if sequence_parallel else _plain_plan()
    prefix = "model." if is_present(model, "model.layers") else ""
    plan = {prefix + key: style for key, style in inner.items()}
    tokens = {"input_layouts": Shard(1)} if sequence_parallel else {}
    plan["lm_head"] = ColwiseParallel(**tokens, output_layouts=Shard(-1), use_local_output=False)
    found = {key: style for key, style in plan.items() if is_present(model, key)}
    if f"{prefix}layers.*.self_attn.q_proj" not in found:
        raise ValueError(
            f"{type(model).__name__} is not built like Llama: it has no "
            f"'{prefix}layers.*.self_attn.q_proj'. Give a plan as tp_shard_plan."
        )
    return found


def _plain_plan() -> dict[str, ParallelStyle]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        "layers.*.mlp.down_proj": RowwiseParallel(),
    }
    for name in (*columns, "mlp.gate_proj", "mlp.up_proj"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    return plan


def _sequence_parallel_plan() -> dict[str, ParallelStyle]:
    tokens = Shard(1)
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=tokens, use_local_output=False
        ),
        "norm": SequenceParallel(),
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        plan[f"layers.*.{name}"] = SequenceParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=tokens, use_local_output=False)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    for name in (*columns, "mlp.gate_proj", "mlp.up_proj"):
        plan[f"layers.*.{name}"] = ColwiseParallel(input_layouts=tokens)
    return plan
