"""Dropout under tensor parallelism, on ranks that were seeded differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

import hf_families

import meshverse
from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse.parallel import apply_tensor_parallelism, synchronize_random_state

# Dropout as a module and as a function, of embeddings, residuals and attention's weights.
FAMILIES: dict[str, dict[str, Any]] = {
    "phi": {"resid_pdrop": 0.4, "embd_pdrop": 0.3, "attention_dropout": 0.2},
    "gpt_neox": {"hidden_dropout": 0.4, "attention_dropout": 0.2},
}


def trained_once(family: str, seed_again: bool) -> list[Tensor]:
    """Logits and gradients that a rank sees; ranks are two and two of one tp group."""
    mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = hf_families.tiny_model(family, tied=False, **FAMILIES[family]).train()
    torch.manual_seed(torch.distributed.get_rank())
    apply_tensor_parallelism(model, mesh["tp"])
    if seed_again:
        torch.manual_seed(10 + torch.distributed.get_rank())
        synchronize_random_state(mesh["tp"])
    logits = hf_families.full(model(input_ids=hf_families.tokens(), use_cache=False).logits)
    (logits.sin().sum()).backward()
    gradients = [
        hf_families.full(each.grad) for each in model.parameters() if each.grad is not None
    ]
    return [logits.detach(), *gradients]


@pytest.mark.parametrize("seed_again", in_tiers([False, True], [True]))
@pytest.mark.parametrize("family", in_tiers(FAMILIES, list(FAMILIES)[:1]))
def test_ranks_with_the_same_tokens_drop_the_same(
    crew: Crew, family: str, seed_again: bool
) -> None:
    first, second, third, fourth = crew.run(trained_once, 4, family, seed_again)
    for one, other in ((first, second), (third, fourth)):
        assert all(map(torch.equal, one, other))
    assert not torch.equal(first[0], third[0])  # of other data, as their seeds were
