"""Losses that models of transformers compute from `labels=`, and their gradients.

Split over ranks, with gathered and with split logits, they are those of one process.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

pytest.importorskip("transformers", reason="transformers is not installed")

import hf_families
from tiny_models import BOUND, VOCABULARY, batch, full, make_model

from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
)

_LLAMA_PLAN = "meshverse.parallel.llama_tp_plan"


def labels_of(tokens: Tensor) -> Tensor:
    """The tokens, without those that a padded or masked batch does not predict."""
    labels = tokens.clone()
    labels[0, :2], labels[1, -1], labels[3] = -100, -100, -100
    return labels


def run(model: nn.Module, tokens: Tensor, keywords: dict[str, Any]) -> dict[str, Tensor]:
    """The loss and, after backward, the gradients, as full tensors."""
    output = model(input_ids=tokens, use_cache=False, **keywords)
    assert not isinstance(output.loss, DTensor)
    output.loss.backward()
    gradients = {name: full(each.grad) for name, each in model.named_parameters()}
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **gradients}


def error_of(
    family: str, sizes: dict[str, int], is_parallel: bool, by_count: bool, settings: dict[str, Any]
) -> float:
    """The largest relative error; all ranks have the same batch."""
    whole = make_model(family).double()
    model = copy.deepcopy(whole)
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(), **settings)
    tokens = batch(0)
    keywords: dict[str, Any] = {"labels": labels_of(tokens)}
    if by_count:
        keywords["num_items_in_batch"] = torch.tensor(7)
    expected = run(whole, tokens, keywords)
    with loss_parallel() if is_parallel else contextlib.nullcontext():
        seen = run(model, tokens, keywords)
    is_split = sizes.get("tp_size", 1) > 1 and settings.get("split_logits", False)
    assert isinstance(seen["logits"], DTensor) == is_split
    if is_split:
        assert seen["logits"].to_local().size(-1) == VOCABULARY // sizes["tp_size"]
    seen["logits"] = full(seen["logits"])
    error, _ = hf_families.largest_error(seen, expected, floor=1e-2)
    return error


def errors_of(cases: list[tuple[Any, ...]]) -> list[float]:
    return [error_of(*case) for case in cases]


_SPLIT = {"split_logits": True}
_TOKENS = {"sequence_parallel": True, "tp_shard_plan": _LLAMA_PLAN}
# Settings, and whether loss_parallel is on.
_WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "gathered": ({}, False),
    "gathered, in loss_parallel": ({}, True),
    "split": (_SPLIT, False),
    "split, in loss_parallel": (_SPLIT, True),
    "by tokens": (_TOKENS, False),
    "by tokens, split": (_TOKENS | _SPLIT, False),
    "by tokens, split, in loss_parallel": (_TOKENS | _SPLIT, True),
}


@pytest.mark.long
@pytest.mark.parametrize("family", in_tiers(["llama", "gemma2", "qwen3"], ["gemma2"], []))
def test_of_tensor_parallelism(crew: Crew, family: str) -> None:
    cases = [
        (family, {"tp_size": 2}, is_parallel, by_count, settings)
        for settings, is_parallel in _WAYS.values()
        for by_count in (False, True)
    ]
    for errors in crew.run(errors_of, 2, cases):
        assert all(error < BOUND for error in errors), errors


@pytest.mark.parametrize("way", in_tiers(_WAYS, short=("split, in loss_parallel",)))
def test_of_tensor_parallelism_and_fsdp2(crew: Crew, way: str) -> None:
    settings, is_parallel = _WAYS[way]
    for error in crew.run(error_of, 4, "llama", {"tp_size": 2}, is_parallel, False, settings):
        assert error < BOUND
