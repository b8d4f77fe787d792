"""Application of a tensor-parallel plan: check it against a model, then split the model.

Example:
    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    >>> apply_tp_plan(model, mesh["tp"], plan)  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from inspect import getattr_static
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshverse.parallel.config import ExampleInputs, check_example_inputs
from meshverse.parallel.experts.stacked import StackedStyle, refuse_adapters
from meshverse.parallel.losses.split_logits import SplitLogits, accept_split_logits
from meshverse.parallel.models.modules import (
    BASE_LAYER,
    LORA_PAIR,
    adapted,
    is_in_other_stage,
    matching_modules,
    nearest_name,
    parent_name,
)
from meshverse.parallel.models.parameters import (
    keeping_attributes,
    second_holders,
    why_not_replaced,
    why_weight_is_not_split,
)
from meshverse.parallel.models.random_states import host_random_states, set_host_random_states
from meshverse.parallel.models.second_order import refuse_second_order
from meshverse.parallel.models.trials import leaves_in
from meshverse.parallel.styles.local_styles import (
    CheckedStyle,
    LocalParameters,
    Replicated,
    SharedKeyGradAllreduce,
)

from .equal_modules import style_key, style_text
from .hf_plan import declared_styles
from .regions import check_regions, has_local_output, regions, splits_activations
from .trial import has_hooks_inside, styles_inside, try_plan

_logger = logging.getLogger(__name__)
_FIRST, _SECOND = LORA_PAIR
# Other names of PEFT.
_ORIGINAL, _COPIES, _TOKENS = "original_module", "modules_to_save", "token_adapter"

# Attributes of modules in transformers and similar libraries: for the number of heads, for the
# features of one head, and for other numbers that are the same on all ranks.
_HEAD_COUNTS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head"),
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
)
_HEAD_FEATURES = ("head_dim", "head_size")
_NO_COUNTS = frozenset(
    {
        *("hidden_size", "embed_dim", "intermediate_size", "layer_idx", "num_key_value_groups"),
        *("q_lora_rank", "kv_lora_rank", "rotary_dim", "rotary_ndims", "gate_projection_size"),
        *("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("sliding_window", "sliding_window_pattern", "keep_window_size", "floor_scale", "mp_num"),
    }
)


def apply_tp_plan(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle],
    *,
    strict: bool = True,
    example_inputs: ExampleInputs | None = None,
) -> None:
    """Split a model in place over a mesh, as `parallelize_module` does, and keep it consistent.

    Differences from `parallelize_module`:

    - If an entry of the plan does not fit the model, nothing is changed.
    - Between a column-wise and a row-wise layer, each rank computes with its own heads or features.
      A parameter there without an entry is an error: the plan must say how its gradients add up.
    - Each different call of a module around split layers is tried: on random weights, the parts of
      all ranks must give the outputs and gradients of the whole module. Calls are those in a run of
      a copy of the model on `example_inputs`, token ids, or hidden states. A warning names modules
      that are not tried, with the reason, unless transformers' own plan for the model has the same
      styles there.
    - Attributes for the number of heads are set to the number on one rank. It is an error if other
      code of the model reads them in that run. An int attribute that may count heads under another
      name is an error, unless the plan names it in `LocalParameters`.
    - LoRA layers are split together with the layer that they adapt.
    - Models of transformers take `labels=` if the plan leaves their logits split, as DTensors.
    - Shared parameters, such as tied embeddings, are still shared afterwards.
    - Second-order gradients (`create_graph=True`) of the model's outputs, which would lack terms,
      raise RuntimeError.
    - All ranks of the mesh get the random states of its first rank, so that dropout is the same.

    Args:
        model: model whose parameters are not distributed yet; those that the plan names become
            DTensors. Give it the same values on all ranks, by the same seed or a checkpoint: only
            names, shapes and dtypes are checked.
        tp_mesh: 1-D mesh.
        plan: parallel styles by module name, the same on all ranks, in any order. A wildcard stands
            for one component of a name. If several entries match a module, the last one is used.
        strict: whether an entry that matches no module is an error; if not, it is ignored with a
            warning.
        example_inputs: arguments of the model's forward, of the same shapes on all ranks: a tuple
            of positional ones, or a mapping of keyword arguments. Give them for a model that does
            not run on token ids or hidden states alone.

    Raises:
        TypeError: a value of the plan is not a parallel style; or `example_inputs` is neither a
            tuple nor a mapping.
        ValueError: an entry matches no module, a style does not fit its module, a parameter or a
            number of heads between split layers has no entry, sizes or heads are not divisible by
            the number of ranks, modules that share a parameter, or parents that share a module,
            would split it differently, a module computes something else, or other gradients, with
            parts of its features, the model does not run on `example_inputs`, or ranks have
            different plans, models or shapes of inputs.
    """
    given: Mapping[str, Any] = plan
    _check_same_on_ranks(model, plan, tp_mesh, example_inputs)
    wrong = {key: each for key, each in given.items() if not isinstance(each, ParallelStyle)}
    if wrong:
        raise TypeError(
            f"The tensor-parallel plan has {wrong}: all values must be parallel styles. "
            "translate_to_torch_parallel_style() returns a style for transformers' name of it."
        )
    styles = _styles_by_module(model, plan, strict)
    _apply(model, tp_mesh, styles, example_inputs, is_guess=False)


def apply_guessed_plan(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle],
    *,
    example_inputs: ExampleInputs | None,
) -> None:
    """Split a model as `apply_tp_plan`, by a plan that neither the user nor the model gave.

    Raises:
        ValueError: as there, or a module with split activations was not compared with itself.
    """
    _check_same_on_ranks(model, plan, tp_mesh, example_inputs)
    styles = _styles_by_module(model, plan, strict=True)
    _apply(model, tp_mesh, styles, example_inputs, is_guess=True)


def _apply(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    planned: dict[str, ParallelStyle],
    example: ExampleInputs | None,
    *,
    is_guess: bool,
) -> None:
    styles = {
        own: own_style
        for name, style in planned.items()
        for own, own_style in _styles_inside(name, model.get_submodule(name), style).items()
    }
    own_names = _own_names(model, styles)
    for name, style in styles.items():
        places = (parent_name(name), *([name] if isinstance(style, LocalParameters) else []))
        if any(isinstance(model.get_submodule(each), nn.MultiheadAttention) for each in places):
            raise ValueError(
                f"{name} cannot be split by {style}: nn.MultiheadAttention uses the weights of all "
                "its layers itself. Write the attention with layers of its own for queries, keys "
                "and values, or remove it from the plan."
            )
        _check(name, model.get_submodule(name), style, tp_mesh.size())
    replaced = {id(each) for name in styles for each in model.get_submodule(name).parameters()}
    for name, where in second_holders(model).items():
        if id(model.get_parameter(name)) in replaced:
            raise ValueError(
                f"{name} cannot be split: {where}, and would not follow it. Share a parameter by "
                "registering it under both names (b.weight = a.weight), or pass it in a forward."
            )
    shared = _shared_parameters(model)
    for names in shared:
        placements = {name: _placement(model, name, styles) for name in names}
        if len(set(placements.values())) > 1:
            raise ValueError(
                f"{names} are one parameter, but the plan would split it in different ways: "
                f"{placements}. The styles of their modules must split it in the same way, such "
                "as row-wise for an embedding and column-wise for the head that is tied to it."
            )
    check_regions(model, planned)
    local_heads = list(_local_heads(model, planned, tp_mesh.size()))
    counts: dict[int, dict[str, int]] = {}
    for module, attribute, count in local_heads:
        counts.setdefault(id(module), {})[attribute] = count
    untried = try_plan(model, planned, counts, tp_mesh.size(), example)
    _report(model, planned, untried, local_heads, is_guess=is_guess)

    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    with keeping_attributes(model):
        for name in own_names:
            parallelize_module(model.get_submodule(name), tp_mesh, styles[name])
    refuse_second_order(model)
    for name in frozen:  # torch's SequenceParallel unfreezes them
        model.get_parameter(name).requires_grad_(False)
    for module, attribute, count in local_heads:
        setattr(module, attribute, count)
    for first, *others in shared:
        for owner, _, own_name in (name.rpartition(".") for name in others):
            model.get_submodule(owner).register_parameter(own_name, model.get_parameter(first))
    kept = [
        name
        for name, style in planned.items()
        if isinstance(style, ColwiseParallel) and not style.use_local_output
    ]
    accept_split_logits(model, [model.get_submodule(name) for name in kept])
    synchronize_random_state(tp_mesh)


def _check_same_on_ranks(
    model: nn.Module,
    plan: Mapping[str, ParallelStyle],
    tp_mesh: DeviceMesh,
    example: ExampleInputs | None,
) -> None:
    """Check that all ranks split the same layers in the same way: they communicate for each.

    This is before all other checks, which may raise on some ranks only.

    Raises:
        ValueError: a mismatch; it is raised on all of them.
    """
    entries = {  # by module: of several entries, the last one is used
        name: style for key, style in plan.items() for name in matching_modules(model, key) or [key]
    }
    lines = [f"{name} by {style_text(style)}" for name, style in sorted(entries.items())]
    lines += [
        f"{name} of shape {tuple(each.shape)}, {each.dtype}"
        for name, each in model.named_parameters()
    ]
    check_example_inputs(example)
    lines += [
        f"example input {number} of shape {tuple(each.shape)}, {each.dtype}"
        for number, each in enumerate(leaves_in(example))
        if isinstance(each, torch.Tensor)
    ]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest()
    own, group = int.from_bytes(digest, "little"), tp_mesh.get_group()
    extremes = torch.tensor([own, -own], device=tp_mesh.device_type)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.tolist()
    if largest == -smallest:
        return
    of_ranks: list[list[str]] = [[] for _ in range(tp_mesh.size())]
    dist.all_gather_object(of_ranks, lines, group=group)
    on_all = set(lines).intersection(*of_ranks)
    different = {
        f"rank {rank}": [line for line in its if line not in on_all][:4]
        for rank, its in zip(dist.get_process_group_ranks(group), of_ranks, strict=True)
    }
    raise ValueError(
        f"{type(model).__name__} cannot be split: the ranks of tensor parallelism have different "
        f"models, plans or example inputs. Only on some of them: {different}. Give all of them "
        "the same."
    )


def synchronize_random_state(mesh: DeviceMesh) -> None:
    """Set the random states of all ranks of a 1-D mesh to those of its first rank.

    These are torch's of the CPU and of the mesh's device, and those of Python's `random` and of
    NumPy's global functions. Between split layers, all ranks of tensor parallelism have the same
    activations, and must draw the same random numbers, such as for dropout. `apply_tp_plan` calls
    this. After you set a new seed, or some of the ranks drew numbers, call it again on all ranks.
    Seed your own generator objects identically on all ranks.

    Example:
        >>> torch.manual_seed(seed + rank)  # doctest: +SKIP
        >>> synchronize_random_state(mesh["tp"])  # doctest: +SKIP
    """
    kind = mesh.device_type
    for device in [torch] if kind == "cpu" else [torch, torch.get_device_module(kind)]:
        state = device.get_rng_state().to(kind)
        dist.broadcast(state, group=mesh.get_group(), group_src=0)
        device.set_rng_state(state.cpu())
    states = torch.tensor([*host_random_states()], dtype=torch.uint8, device=kind)
    size = torch.tensor([len(states)], device=kind)
    dist.broadcast(size, group=mesh.get_group(), group_src=0)
    states.resize_(int(size))
    dist.broadcast(states, group=mesh.get_group(), group_src=0)
    set_host_random_states(bytes(states.tolist()))


def _styles_by_module(
    model: nn.Module, plan: Mapping[str, ParallelStyle], strict: bool
) -> dict[str, ParallelStyle]:
    names = {key: matching_modules(model, key) for key in plan}
    absent = [key for key in names if not names[key] and not is_in_other_stage(model, key)]
    name = type(model).__name__
    if absent and strict:
        nearest = {key: nearest_name(model, key) for key in absent}
        raise ValueError(
            f"{name} has no modules {absent}, which the plan names. Similar names: {nearest}. "
            "Correct or remove these entries, or pass strict=False to ignore them with a warning."
        )
    if absent:
        _logger.warning("%s has no modules %s: the plan's entries are ignored.", name, absent)
    styles = {name: plan[key] for key, found in names.items() for name in found}
    # Ranks communicate for each module, so all in one order, whatever that of their plans is.
    in_order = (name for name, _ in model.named_modules(remove_duplicate=False))
    return {name: styles[name] for name in in_order if name in styles}


def _own_names(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> list[str]:
    """Return one name of each module that has a style, of which parents may share some.

    Raises:
        ValueError: a module has other styles under its other names; or its style splits
            activations, and a parent that shares it has no style for it.
    """
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    shared = [each for each in names.values() if len(each) > 1]
    doubled: set[str] = set()
    for each in shared:
        first, *others = [name for name in each if name in styles] or [""]
        parents = {id(model.get_submodule(parent_name(name))) for name in (first, *others)}
        lacking = [n for n in each if id(model.get_submodule(parent_name(n))) not in parents]
        keys = {style_key(styles[name]) for name in (first, *others) if name in styles}
        splits = first in styles and splits_activations(styles[first])
        if len(keys) > 1 or (splits and lacking):
            given = {name: styles.get(name) for name in each}
            raise ValueError(
                f"{each} are one module, for which the plan has the styles {given}. A module that "
                "several parents share is split once: give it the same style under each name."
            )
        doubled |= {*others}
    return [name for name in styles if name not in doubled]


def _keys(styles: Mapping[str, ParallelStyle]) -> dict[str, Hashable]:
    """Return what is equal for equal styles, but of experts, which may be handed out otherwise."""
    kept = {name: each for name, each in styles.items() if not isinstance(each, StackedStyle)}
    return {name: style_key(each) for name, each in kept.items()}


def _in_short(names: Sequence[str]) -> list[str]:
    """Return names of modules, with one pattern for those that differ by numbers only."""
    patterns: dict[str, list[str]] = {}
    for name in names:
        parts = ("*" if part.isdecimal() else part for part in name.split("."))
        patterns.setdefault(".".join(parts), []).append(name)
    return [
        f"{pattern} ({len(some)} modules)" if len(some) > 1 else some[0]
        for pattern, some in patterns.items()
    ]


def _report(
    model: nn.Module,
    styles: Mapping[str, ParallelStyle],
    untried: Mapping[str, str],
    local_heads: Iterable[tuple[nn.Module, str, int]],
    *,
    is_guess: bool,
) -> None:
    """Warn of modules that were not compared, or refuse them, unless transformers declares them.

    The warning also says which of their attributes get another value.

    Raises:
        ValueError: the plan is a guess.
    """
    if not untried:
        return
    declared = declared_styles(model)
    by_reason: dict[str, list[str]] = {}
    for region, reason in untried.items():
        given, own = (_keys(styles_inside(region, model, each)) for each in (styles, declared))
        if given != own or has_hooks_inside(model.get_submodule(region)):
            by_reason.setdefault(reason, []).append(region)
    shown = {reason: _in_short(names) for reason, names in by_reason.items()}
    if shown and is_guess:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan, and Llama's cannot be compared "
            f"with one process for all its modules, by reason: {shown}. If the model takes other "
            "inputs than token ids or hidden states alone, pass example_inputs=. If you know that "
            "the plan is right, give it as yours: "
            "tp_shard_plan='meshverse.parallel.llama_tp_plan'; or register a plan with "
            "register_tp_plan()."
        )
    if shown:
        inside = {
            id(each)
            for names in by_reason.values()
            for region in names
            for each in model.get_submodule(region).modules()
        }
        set_here = {
            (type(module).__name__, attribute, count)
            for module, attribute, count in local_heads
            if id(module) in inside
        }
        changes = ", ".join(f"{kind}.{name}={count}" for kind, name, count in sorted(set_here))
        _logger.warning(
            "%s: it was not tried whether ranks' parts of some modules give the same. By reason: "
            "%s. %sIf the model takes other inputs than token ids or hidden states alone, pass "
            "example_inputs=; or compare a loss and gradients with one process.",
            type(model).__name__,
            shown,
            f"Set in them, as counting the heads of one rank: {changes}. " if changes else "",
        )


def _check(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    for own_name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}.{own_name} is distributed already: {parameter.placements} on "
                f"{parameter.device_mesh}. Apply tensor parallelism once, before FSDP."
            )
        if (why := why_not_replaced(parameter)) is not None:
            raise ValueError(f"{name}.{own_name} {why}.")
    if (why := why_weight_is_not_split(module)) is not None:
        raise ValueError(
            f"{name} cannot be split by {style}: it {why}. Leave the setting out, or remove the "
            "embedding from the plan."
        )
    if isinstance(style, CheckedStyle):
        style.check(name, module, size)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(
            f"{name} is a {type(module).__name__}, but {style} can only split linear layers and "
            "embeddings. Remove it from the plan, or name the layers inside."
        )
    if "weight" not in module._parameters:
        names = [own_name for own_name, _ in module.named_parameters()]
        raise ValueError(
            f"{name}: {style} splits a weight, which {type(module).__name__} computes from "
            f"{names}. Remove its parametrization (with remove_parametrizations or "
            "remove_weight_norm of torch.nn.utils), or remove the layer from the plan."
        )
    # A local tensor does not have the global size, so other layers need equal sizes on all ranks.
    if isinstance(style, RowwiseParallel):
        local = style.input_layouts == (Shard(-1),)
        width, what = getattr(module, "in_features", size), "input"
    else:
        local, what = has_local_output(style), "output"
        width = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
    if local and width % size:
        raise ValueError(
            f"{name}: its {width} {what} features are not divisible by the {size} ranks of tensor "
            "parallelism, and must be. Use other sizes, or remove the layer from the plan."
        )


def heads_in(config: Any) -> dict[str, int]:
    """Return the numbers of heads in a config of transformers, by name; fewer come first."""
    names = ("num_key_value_heads", "num_attention_heads")
    return {name: n for name in names if isinstance(n := getattr(config, name, None), int) and n}


def fitting(counts: Mapping[str, int]) -> str:
    """Return the cure for numbers of heads that do not divide: the sizes that divide them all."""
    largest = math.gcd(*counts.values())
    sizes = [str(size) for size in range(1, largest + 1) if largest % size == 0]
    numbers = " and ".join(f"{name}={n}" for name, n in counts.items())
    return f"Use a tp_size that divides {numbers}: {' or '.join(sizes)}."


def _check_whole_heads(
    model: nn.Module, styles: Mapping[str, ParallelStyle], region: str, size: int
) -> None:
    """Raise ValueError if a projection to heads would be split within heads."""
    module = model.get_submodule(region)
    counts = heads_in(getattr(module, "config", None))
    features = [each for name in _HEAD_FEATURES if (each := _ints(module).get(name))]
    for name, each in module.named_modules(prefix=region):
        layer = adapted(each)
        if not isinstance(layer, nn.Linear) or not has_local_output(styles.get(name)):
            continue
        for heads in counts.values():
            if heads % size and layer.out_features in [heads * each for each in features]:
                raise ValueError(
                    f"{name} computes {heads} heads, which is not divisible by the {size} ranks of "
                    f"tensor parallelism, but each rank computes with whole heads. "
                    f"{fitting(counts)}"
                )


def _local_heads(
    model: nn.Module, styles: Mapping[str, ParallelStyle], size: int
) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield (module, attribute, new value) for each attribute that depends on a rank's heads."""
    split = {*regions(model, styles)}
    named = {name for name, style in styles.items() if isinstance(style, LocalParameters)}
    for region in sorted(split | named):
        module, own = model.get_submodule(region), styles.get(region)
        given = own.counts_of(module) if isinstance(own, LocalParameters) else {}
        ints = _ints(module)
        known = {name: ints[name] for name in _HEAD_COUNTS if region in split and name in ints}
        if region in split:
            _check_whole_heads(model, styles, region, size)
            _refuse_unknown_counts(model, region, styles, ints, given)
        counts = {name: count for name, count in ints.items() if given.get(name, name in known)}
        for attribute, count in counts.items():
            if count % size:
                raise ValueError(
                    f"{region}.{attribute}={count} is not divisible by the {size} ranks of tensor "
                    f"parallelism. {fitting(counts)}"
                )
            if isinstance(getattr_static(module, attribute), property):
                raise ValueError(
                    f"{region}.{attribute} is a property of {type(module).__name__}, and cannot "
                    "be set to the number of heads on one rank. Make it an attribute."
                )
            yield module, attribute, count // size
        heads, features = known.get("num_heads"), ints.get("head_dim")
        if heads and features:
            # The width of all heads together, to which older attention modules reshape. If it is
            # also the model's width, forward still reads it only for this purpose.
            for attribute in {"hidden_size", "embed_dim"} - given.keys():
                if ints.get(attribute) == heads * features:
                    yield module, attribute, heads * features // size


def _ints(module: nn.Module) -> dict[str, int]:
    """Return the int attributes of a module and of its class, and known properties, by name."""
    found: dict[str, Any] = {name: getattr(module, name, None) for name in _HEAD_COUNTS}
    for each in reversed(type(module).__mro__):
        found |= {name: value for name, value in vars(each).items() if type(value) is int}
    return {name: value for name, value in (found | vars(module)).items() if type(value) is int}


def _refuse_unknown_counts(
    model: nn.Module,
    region: str,
    styles: Mapping[str, ParallelStyle],
    ints: Mapping[str, int],
    given: Mapping[str, bool],
) -> None:
    """Raise ValueError for an int attribute that may be the number of heads under another name.

    If the number of heads is not known, this is each number that divides the split features.
    """
    inside = {
        name: layer
        for name, each in model.get_submodule(region).named_modules(prefix=region)
        if isinstance(layer := adapted(each), nn.Linear)
    }
    split = {
        each.out_features for name, each in inside.items() if has_local_output(styles.get(name))
    }
    features = [ints[name] for name in _HEAD_FEATURES if ints.get(name)]
    heads = {ints[name] for name in _HEAD_COUNTS if name in ints}
    heads |= {width // each for width in split for each in features}
    heads = heads or {
        number
        for number in ints.values()
        if number > 0 and any(not width % number for width in split)
    }
    widths = {size for each in inside.values() for size in (each.in_features, each.out_features)}
    others = ints.keys() - {*_HEAD_COUNTS, *_HEAD_FEATURES, *_NO_COUNTS, *given}
    unknown = {
        name: ints[name]
        for name in sorted(others)
        if ints[name] in heads - {1, *widths} and str(ints[name]) not in region.split(".")
    }  # one in the region's name is its layer's number, and else the region's trial fails
    if unknown:
        raise ValueError(
            f"{unknown} of {region or type(model).__name__!r} may count heads, of which a rank has "
            f"only some. Add to the plan: {region!r}: LocalParameters({{name: Shard(0)}}) for a "
            "number of heads, LocalParameters({name: Replicate()}) for another number; or name "
            "the attribute num_heads or num_kv_heads."
        )


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    """Return, for each parameter that several modules share, its name in each module."""
    names: dict[int, dict[tuple[int, str], str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own_name = name.rpartition(".")
        place = id(model.get_submodule(owner)), own_name
        names.setdefault(id(parameter), {}).setdefault(place, name)
    return [list(each.values()) for each in names.values() if len(each) > 1]


def _placement(
    model: nn.Module, name: str, styles: Mapping[str, ParallelStyle]
) -> Placement | None:
    """Return the placement of a parameter under a plan; None if the plan does not split it."""
    owner, _, own_name = name.rpartition(".")
    style, module = styles.get(owner), model.get_submodule(owner)
    if isinstance(style, LocalParameters):
        return style.placements_of(module).get(own_name)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    is_row_wise = isinstance(style, RowwiseParallel)
    if is_row_wise and own_name == "bias":
        return Replicate()
    return Shard(int(is_row_wise != isinstance(module, nn.Embedding)))


def _styles_inside(name: str, module: nn.Module, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """Return the styles of a layer and of its adapters or copies, by name.

    LoRA adds the product of two matrices. In a column-wise layer, the first matrix is replicated
    and the second is column-wise. In a row-wise layer, the first is row-wise and the second is
    replicated.

    Raises:
        ValueError: the adapters cannot be split with the layer.
    """
    if saved := _saved_modules(module):
        return {f"{name}.{own}": style for own in saved}
    if _TOKENS in module._modules:
        raise ValueError(
            f"{name} ({type(module).__name__}) trains some tokens only, by PEFT's "
            f"trainable_token_indices, and cannot be split by {style}. Remove it from the plan, "
            "with a head or embedding that is tied to it; or give modules_to_save instead, to "
            "train all tokens."
        )
    if adapted(module) is module or isinstance(style, Replicated | SharedKeyGradAllreduce):
        return {name: style}  # these styles leave parameters as they are, and so adapters, too
    refuse_adapters(name, module)
    known = {
        f"{side}.{adapter}": child
        for side in (_FIRST, _SECOND)
        for adapter, child in getattr(module, side, nn.ModuleDict()).named_children()
    }
    others = [
        own
        for own, _ in module.named_parameters()
        if not own.startswith((f"{BASE_LAYER}.", *(f"{each}." for each in known)))
    ]
    others += [each for each, child in known.items() if not isinstance(child, nn.Linear)]
    layouts = _layouts(style)
    if others or layouts is None or not isinstance(adapted(module), nn.Linear):
        raise ValueError(
            f"{name} ({type(module).__name__}) cannot be split with its adapters by {style}: "
            f"{others or [*known]}. Adapters must be LoRA's pairs of linear layers, {_FIRST!r} and "
            f"{_SECOND!r}, on a linear layer. Merge the adapters, remove the layer from the plan, "
            "or use tp_size=1."
        )
    before, after = layouts
    pair: tuple[ParallelStyle | None, ParallelStyle | None] = (style, _of_tokens(after))
    if not isinstance(style, RowwiseParallel):
        pair = (_of_tokens(before), style)
    inside = {f"{name}.{own}": pair[not own.startswith(_FIRST)] for own in known}
    split = {own: own_style for own, own_style in inside.items() if own_style is not None}
    return {f"{name}.{BASE_LAYER}": style, **split}


def _saved_modules(module: nn.Module) -> list[str]:
    """Return the names of a layer and its trained copies, of which a wrapper runs one.

    PEFT's modules_to_save makes such wrappers.
    """
    copies = module._modules.get(_COPIES)
    if not isinstance(copies, nn.ModuleDict) or _ORIGINAL not in module._modules:
        return []
    return [_ORIGINAL, *(f"{_COPIES}.{name}" for name, _ in copies.named_children())]


def _layouts(style: ParallelStyle) -> tuple[Placement, Placement] | None:
    """Return a layer's input and output layouts; None if they are not possible with an adapter."""
    if type(style) not in (ColwiseParallel, RowwiseParallel, SplitLogits):
        return None
    (before,), (after,) = style.input_layouts, style.output_layouts  # type: ignore[attr-defined]
    # With partial sums, the second matrix would get only the gradient of this rank's term.
    return None if before.is_partial() or after.is_partial() else (before, after)


def _of_tokens(layout: Placement) -> ParallelStyle | None:
    """Return the style of a replicated matrix for its input layout; None if it needs no style."""
    return SequenceParallel(sequence_dim=layout.dim) if isinstance(layout, Shard) else None
