"""Choice of a model's tensor-parallel plan: passed, registered, its own, or Llama's."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

from meshverse.parallel.config import ExampleInputs, TPPlan
from meshverse.parallel.experts.expert_parallel import expert_modules
from meshverse.parallel.experts.stacked import StackedStyle
from meshverse.parallel.losses.split_logits import SplitLogits
from meshverse.parallel.models.modules import (
    adapted,
    child_name,
    import_class_from_path,
    is_present,
    layer_lists,
    matching_modules,
    parent_name,
)
from meshverse.parallel.styles.local_styles import GatherTokens, SplitTokens

from .apply import apply_guessed_plan, apply_tp_plan
from .gaps import fill_gaps
from .hf_plan import get_hf_tp_shard_plan, has_hf_plan

_logger = logging.getLogger(__name__)

_Plan = dict[str, ParallelStyle]
PlanFunction = Callable[[nn.Module, bool], _Plan]
_registered: dict[type[nn.Module], PlanFunction] = {}
_LLAMA = "For a model built like Llama, give tp_shard_plan='meshverse.parallel.llama_tp_plan'"
_QUERIES = "self_attn.q_proj"
_COLUMNS = (_QUERIES, "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")


def register_tp_plan(model_class: type[nn.Module], function: PlanFunction) -> None:
    """Register a tensor-parallel plan for models of a class.

    Args:
        model_class: class of the models; subclasses without a registered plan are included. A
            model that has a plan of its own may contain modules of this class.
        function: function that is called as `function(model, sequence_parallel)`, and returns the
            plan; {} splits nothing.

    Example:
        >>> register_tp_plan(MyModel, lambda model, _: {"up": ColwiseParallel()})  # doctest: +SKIP
    """
    _registered[model_class] = function


def apply_tensor_parallelism(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    tp_shard_plan: TPPlan | None = None,
    *,
    sequence_parallel: bool = False,
    split_logits: bool = False,
    handed_out: Collection[str] = (),
    example_inputs: ExampleInputs | None = None,
) -> None:
    """Split a model in place by a tensor-parallel plan.

    Args:
        model: model whose parameters are not distributed yet.
        tp_mesh: 1-D mesh.
        tp_shard_plan: the plan, its import path, or a function that returns it, called without
            arguments or with the model and `sequence_parallel`. By default the plan registered for
            the model's class; else the model's own plan, with the plans registered for modules in
            it in place of its entries for these; else Llama's plan, with a warning.
        sequence_parallel: whether activations between split layers are split by tokens.
        split_logits: whether the model's own plan and Llama's plan leave logits split in training
            mode, as DTensors. Other plans say this by their style of the head.
        handed_out: names of modules whose whole experts are, or will be, distributed over an
            experts' mesh. The plan's styles for experts are not applied to these modules.
        example_inputs: as in `apply_tp_plan`.

    Raises:
        TypeError: the plan or `example_inputs` is not of such a type.
        ValueError: the plan does not fit the model, or does not support sequence parallelism; or
            Llama's plan, which is a guess then, could not be compared with one process.
    """
    chosen = _choose(model, tp_shard_plan, sequence_parallel, split_logits)
    plan = _guess(model, sequence_parallel, split_logits) if chosen is None else chosen
    if any(map(_splits_tokens, plan.values())):
        _check_experts_get_all_tokens(model, plan)
    elif sequence_parallel:
        raise ValueError(
            f"sequence_parallel=True, and the plan for {type(model).__name__} splits no tokens: "
            f"{dict(plan)} must have SequenceParallel styles or layouts Shard(1). {_LLAMA}; for "
            "others, add these to the plan, or use sequence_parallel=False."
        )
    inside = tuple(f"{name}." for name in handed_out)

    def is_skipped(key: str, style: ParallelStyle) -> bool:
        found = matching_modules(model, key)
        if isinstance(style, StackedStyle):
            return set(found) <= set(handed_out)
        return bool(found) and all(name.startswith(inside) for name in found)

    if handed_out:
        plan = {key: style for key, style in plan.items() if not is_skipped(key, style)}
    apply = apply_guessed_plan if chosen is None else apply_tp_plan
    apply(model, tp_mesh, plan, example_inputs=example_inputs)


def _splits_tokens(style: ParallelStyle) -> bool:
    names = ("input_layouts", "output_layouts", "desired_output_layouts")
    given = [getattr(style, name, ()) for name in names]
    layouts = chain.from_iterable(each if isinstance(each, tuple) else [each] for each in given)
    shards = [each for each in layouts if isinstance(each, Shard)]
    return isinstance(style, SequenceParallel) or any(each.dim in (0, 1) for each in shards)


def _check_experts_get_all_tokens(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    gathering = (GatherTokens, PrepareModuleInput, PrepareModuleInputOutput)
    keys = [key for key, style in plan.items() if isinstance(style, gathering)]
    gathered = tuple(f"{name}." for key in keys for name in matching_modules(model, key))
    split = [name for name in expert_modules(model) if not f"{name}.".startswith(gathered)]
    if split:
        raise ValueError(
            f"The plan for {type(model).__name__} splits tokens over the ranks of tensor "
            f"parallelism, but the experts {split[:4]} must get all tokens: otherwise they and "
            "their routers get wrong gradients. Give the blocks around them GatherTokens() in the "
            "plan, or use sequence_parallel=False."
        )


def _choose(
    model: nn.Module, given: TPPlan | None, sequence_parallel: bool, split_logits: bool
) -> _Plan | None:
    """Return the plan that is given, registered or the model's own; None if there is none."""
    name = type(model).__name__
    found: Any = import_class_from_path(given) if isinstance(given, str) else given
    if given is not None:
        if found is llama_tp_plan:
            found = llama_tp_plan(model, sequence_parallel, split_logits=split_logits)
        elif callable(found):
            takes_model = bool(inspect.signature(found).parameters)
            found = found(model, sequence_parallel) if takes_model else found()
        if not isinstance(found, dict):
            raise TypeError(
                f"tp_shard_plan={given!r} gives {found!r}: it must be a dict of parallel styles by "
                "module name, its import path, or a function that returns it."
            )
        return found
    registered = dict(_registered_plans(model, sequence_parallel))
    inside: _Plan = {key: style for plan in registered.values() for key, style in plan.items()}
    if "" in registered or not has_hf_plan(model):
        return inside if registered else None
    if sequence_parallel:
        raise ValueError(
            f"sequence_parallel=True, but {name}'s own plan does not support it. {_LLAMA}; for "
            "others, give your own plan."
        )
    plan = get_hf_tp_shard_plan(model, split_logits=split_logits)
    if registered:
        plan = _without(model, plan, registered) | inside
    layers = [f"{layer}." for layer, _ in chain.from_iterable(layer_lists(model))]
    split = [each for key in plan for each in matching_modules(model, key)]
    if layers and not any(each.startswith(tuple(layers)) for each in split):
        raise ValueError(
            f"{name}'s own tensor-parallel plan splits none of its {len(layers)} layers: it names "
            f"{sorted(plan)}. Give your own plan as tp_shard_plan=, or use tp_size=1."
        )
    return plan


def _guess(model: nn.Module, sequence_parallel: bool, split_logits: bool) -> _Plan:
    plan = llama_tp_plan(model, sequence_parallel, split_logits=split_logits)
    _logger.warning(
        "%s has no tensor-parallel plan, so it is split by Llama's plan, at %s. If that is wrong, "
        "register a plan with register_tp_plan().",
        type(model).__name__,
        sorted(plan),
    )
    return plan


def _registered_plans(
    model: nn.Module, sequence_parallel: bool, name: str = ""
) -> Iterator[tuple[str, _Plan]]:
    """Yield the plans registered for the outermost modules of such classes, with their names.

    Raises:
        TypeError: a registered function returns no dict.
    """
    for model_class in type(model).__mro__:
        if (function := _registered.get(model_class)) is None:
            continue
        plan = function(model, sequence_parallel)
        if not isinstance(plan, dict):
            raise TypeError(
                f"The function registered for {model_class.__name__} by register_tp_plan() gives "
                f"{plan!r}: it must return a dict of parallel styles by module name, {{}} to split "
                "nothing."
            )
        yield name, {child_name(name, key): style for key, style in plan.items()}
        return
    for own_name, child in model.named_children() if _registered else ():
        yield from _registered_plans(child, sequence_parallel, child_name(name, own_name))


def _without(model: nn.Module, plan: _Plan, names: Collection[str]) -> _Plan:
    """Return a plan without its entries for some modules, and for those inside them."""
    found = {own: style for key, style in plan.items() for own in matching_modules(model, key)}
    inside = tuple(f"{name}." for name in names)
    return {own: style for own, style in found.items() if not f"{own}.".startswith(inside)}


def llama_tp_plan(
    model: nn.Module, sequence_parallel: bool = False, *, split_logits: bool = False
) -> dict[str, ParallelStyle]:
    """Return a plan for the modules of a model that have the names of Llama's modules.

    The plan includes norms of queries and keys. Blocks with experts are not split. With sequence
    parallelism, norms and residuals are split by tokens, blocks with experts get all tokens, and
    DTensors are passed between layers. Logits are gathered; with `split_logits`, they are a DTensor
    in training mode, sharded on the last dim.

    Raises:
        ValueError: the model has no such layers; a norm needs all heads at once; or, with sequence
            parallelism, the plan has no style for a module with parameters.
    """
    queries = f"layers.*.{_QUERIES}"
    around = (name for name, module in model.named_modules() if is_present(module, queries))
    if (owner := next(around, None)) is None:
        raise ValueError(
            f"{type(model).__name__} is not built like Llama: it has no {queries!r}. Give a plan "
            "as tp_shard_plan=."
        )
    prefix = child_name(owner, "")
    layers = f"{prefix}layers.*"
    columns = [name for name in _COLUMNS if is_present(model, f"{layers}.{name}")]
    tokens: dict[str, Any] = {"input_layouts": Shard(1)} if sequence_parallel else {}
    split: dict[str, Any] = (
        {"output_layouts": Shard(1), "use_local_output": False} if sequence_parallel else {}
    )
    gathered: dict[str, Any] = {"output_layouts": Replicate()}
    plan: dict[str, ParallelStyle] = {
        f"{prefix}embed_tokens": RowwiseParallel(input_layouts=Replicate())
    }
    for head in (child_name(owner, "lm_head"), child_name(parent_name(owner), "lm_head")):
        plan[head] = (
            SplitLogits(**tokens) if split_logits else ColwiseParallel(**tokens, **gathered)
        )
    plan |= {f"{layers}.{name}": ColwiseParallel(**tokens) for name in columns}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        if any(parent_name(column) == parent_name(name) for column in columns):
            plan[f"{layers}.{name}"] = RowwiseParallel(**split)
    plan = {key: style for key, style in plan.items() if is_present(model, key)}
    if sequence_parallel:
        # Not at the embedding: callers change its output, or pass it, as a plain tensor.
        plan[matching_modules(model, layers)[0]] = SplitTokens()
        plan |= _styles_of_tokens(model, prefix)
    plan = fill_gaps(model, plan)
    if sequence_parallel:
        _check_all_are_known(model, plan)
    return plan


def _styles_of_tokens(model: nn.Module, prefix: str) -> dict[str, ParallelStyle]:
    """Return styles of norms, and of blocks with experts, for sequence parallelism."""
    plan: dict[str, ParallelStyle] = {f"{prefix}norm": SequenceParallel()}
    for layer in matching_modules(model, f"{prefix}layers.*"):
        for name, child in model.get_submodule(layer).named_children():
            own = list(child.parameters())
            if own and all(each.ndim == 1 for each in own) and not any(child.children()):
                plan[f"{prefix}layers.*.{name}"] = SequenceParallel()
    depth = len(f"{prefix}layers.0.mlp".split("."))
    blocks = dict.fromkeys(".".join(name.split(".")[:depth]) for name in expert_modules(model))
    return plan | {name: GatherTokens() for name in blocks}


def _check_all_are_known(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    """Check that a sequence-parallel plan has a style for each module with parameters."""
    known = {name: style for key, style in plan.items() for name in matching_modules(model, key)}
    blocks = tuple(f"{name}." for name, each in known.items() if isinstance(each, GatherTokens))
    known = {name: each for name, each in known.items() if not isinstance(each, SplitTokens)}
    modules = {name: model.get_submodule(name) for name in known}
    adapters = tuple(f"{name}." for name, each in modules.items() if adapted(each) is not each)
    unknown = [
        name or "itself"
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and (name in known) == name.startswith(blocks)  # styled inside a block, or unstyled outside
        and not name.startswith(adapters)
    ]
    if unknown:
        raise ValueError(
            f"sequence_parallel=True, but the modules {unknown[:6]} of {type(model).__name__} are "
            "unlike Llama's, and must get all tokens. Use sequence_parallel=False, or give your "
            "own plan as tp_shard_plan=."
        )
