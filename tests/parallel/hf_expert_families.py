"""Families with experts, handed out to ranks: trained with FSDP2, against one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from hf_families import (
    FLOAT32_ONLY,
    Outcome,
    families,
    full,
    in_float64,
    is_tied,
    largest_error,
    run,
    tiny_model,
    tokens,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
)

# Each form of experts that transformers has, and what may go with it.
REPRESENTATIVES = (
    "aria_text",
    "deepseek_v3",
    "dots1",
    "gpt_oss",
    "inkling_text",
    "llama4_text",
    "longcat_flash",
    "mixtral",
    "nemotron_h",
    "qwen3_moe",
)


@cache
def expert_families() -> tuple[str, ...]:
    """The model types with a plan whose tiny models have experts."""
    with_plan = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _has_expert_plan(name)}
    return tuple(name for name in sorted(with_plan.union(families())) if _has_experts(name))


def _has_expert_plan(family: str) -> bool:
    return bool(getattr(CONFIG_MAPPING[family], "base_model_ep_plan", None))


def _has_experts(family: str) -> bool:
    names = (name for name, _ in tiny_model(family, tied=False).named_modules())
    return any(re.fullmatch(r"(.*\.)?experts", name) for name in names)


def compare_sharded(family: str, tied: bool, sizes: Mapping[str, int]) -> Outcome:
    """Train a family's tiny model on a share of a batch for each rank, and one process on all.

    Args:
        family: the model type.
        tied: whether the head is to have the embedding's weight.
        sizes: the degrees, by their names in `ParallelismSizes`.
    """
    whole = tiny_model(family, tied=tied)
    split = copy.deepcopy(whole)
    try:
        _shard(split, sizes)
    except ValueError as error:
        return Outcome(str(error))
    outcome = Outcome(
        was_tied=is_tied(whole),
        tied=is_tied(split),
        split=sum(_is_handed_out(each) for each in split.parameters()),
        parameters=len(list(split.parameters())),
    )
    error, worst = _largest_error_of_shares(split, whole, sizes, floor=1e-2)
    outcome = replace(outcome, error=error, worst=worst)
    if family in FLOAT32_ONLY:
        return outcome
    whole = in_float64(tiny_model(family, tied=tied))
    split = copy.deepcopy(whole)
    _shard(split, sizes)
    error, worst = _largest_error_of_shares(split, whole, sizes, floor=1e-4)
    return replace(outcome, precise_error=error, precise_worst=worst)


def auxiliary_loss(family: str, sizes: Mapping[str, int]) -> tuple[float, float, str]:
    """The loss of routers that a family adds to its own, and the largest error of all gradients.

    It is no sum over tokens: all ranks have the whole batch.
    """
    losses, seen = [], []
    for sharded in (False, True):
        model = tiny_model(family, tied=False, output_router_logits=True, router_aux_loss_coef=5.0)
        if sharded:
            _shard(model, sizes)
        output = model(input_ids=tokens(), labels=tokens(), use_cache=False)
        output.loss.backward()
        losses.append(full(output.aux_loss).item())
        seen.append({name: full(each.grad) for name, each in model.named_parameters()})
    error, worst = largest_error(seen[1] | {"logits": None}, seen[0] | {"logits": None}, 1e-2)
    return abs(losses[1] - losses[0]), error, worst


def _shard(model: nn.Module, sizes: Mapping[str, int]) -> None:
    mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    exact = MixedPrecisionPolicy()
    fsdp2_strategy_parallelize(model, mesh, moe_mesh=moe_mesh, mp_policy=exact)


def _is_handed_out(parameter: nn.Parameter) -> bool:
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return mesh is not None and "ep" in (mesh.mesh_dim_names or ())


def _largest_error_of_shares(
    split: nn.Module, whole: nn.Module, sizes: Mapping[str, int], floor: float
) -> tuple[float, str]:
    parts = dist.get_world_size() // sizes.get("tp_size", 1)
    mine = dist.get_rank() // sizes.get("tp_size", 1)
    every = tokens().reshape(4, -1)
    expected = run(whole, every)
    # Gradients are averages over the ranks, and `run` sums.
    seen = run(split, every.chunk(parts)[mine], scale=parts, row=mine * 4 // parts)
    logits = expected["logits"]
    assert logits is not None
    expected["logits"] = logits.chunk(parts)[mine]
    for name, gradient in seen.items():
        # An expert of a list that no token chooses has no gradient in one process.
        if ".experts." in name and gradient is not None and expected[name] is None:
            expected[name] = torch.zeros_like(gradient)
    return largest_error(seen, expected, floor)
