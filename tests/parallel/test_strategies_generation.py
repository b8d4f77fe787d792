"""Split and sharded models in transformers' own callers: generate(), pipeline() and Trainer."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import VOCABULARY, make_model

from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    register_tp_plan,
)

_NEW, _PAD, _BOS = 6, 0, 1
_LLAMA_PLAN = "meshverse.parallel.llama_tp_plan"
_MESHES = {"tp": (2, {"tp_size": 2}), "fsdp2": (2, {}), "tp and fsdp2": (4, {"tp_size": 2})}
_WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "by tokens": {"sequence_parallel": True, "tp_shard_plan": _LLAMA_PLAN},
}


def split(model: nn.Module, sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    """Split a model over a mesh, which is returned."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(), **settings)
    return mesh


def make(family: str) -> Any:
    """A model in which no two tokens have logits so close that rounding could swap them."""
    model: Any = make_model(family).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.generation_config.pad_token_id = _PAD
    return model


def prompts() -> dict[str, Tensor]:
    """Prompts of several lengths, padded on the left."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, VOCABULARY, (4, 7), generator=generator)
    mask = torch.ones_like(tokens)
    for row, padding in enumerate((0, 3, 1, 5)):
        tokens[row, :padding], mask[row, :padding] = _PAD, 0
    return {"input_ids": tokens, "attention_mask": mask}


def tokens_of(model: Any, given: dict[str, Tensor], **settings: Any) -> Tensor:
    return model.generate(**given, do_sample=False, max_new_tokens=_NEW, **settings)


def generated(family: str, sizes: dict[str, int], settings: dict[str, Any]) -> list[str]:
    """Which ways to generate give other tokens than one process."""
    whole = make(family)
    model = copy.deepcopy(whole)
    data = get_flat_mesh(split(model, sizes, settings), "dp_cp")
    given = prompts()
    rows = slice(data.get_local_rank(), None, data.size())
    mine = {name: each[rows] for name, each in given.items()}
    expected = tokens_of(whole, given)
    # The end of one share comes before that of another: those that are done wait for all.
    end = int(expected[0, -3])
    ways: dict[str, dict[str, Any]] = {
        "cache": {},
        "no cache": {"use_cache": False},
        "static cache": {"cache_implementation": "static", "disable_compile": True},
        "end": {"eos_token_id": end},
    }
    wrong = []
    for name, way in ways.items():
        wanted, seen = tokens_of(whole, given, **way)[rows], tokens_of(model, mine, **way)
        length = min(wanted.size(1), seen.size(1))
        ends = wanted[:, length:].eq(_PAD).all()  # all rows of this share had ended
        if not torch.equal(seen[:, :length], wanted[:, :length]) or not ends:
            wrong.append(f"{name}: {seen.tolist()}, not {wanted.tolist()}")
    return wrong


_CASES = [
    (family, mesh, way)
    for family in ("llama", "gemma2", "qwen3")
    for mesh in _MESHES
    for way in _WAYS
    if way == "whole" or "tp" in mesh
]


@pytest.mark.parametrize(
    ("family", "mesh", "way"),
    in_tiers(_CASES, short=[("gemma2", "tp and fsdp2", "whole"), ("llama", "tp", "by tokens")]),
)
def test_greedy_tokens_equal_one_process(crew: Crew, family: str, mesh: str, way: str) -> None:
    ranks, sizes = _MESHES[mesh]
    for wrong in crew.run(generated, ranks, family, sizes, _WAYS[way]):
        assert not wrong, wrong
