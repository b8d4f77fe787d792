"""Activation checkpointing of models with several parts, and what is refused beforehand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

import hf_families
import transformers

from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    ParallelismSizes,
    apply_activation_checkpointing,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
)

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_IMAGE = 95
_OF_QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
PIXELS = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def llava() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlavaConfig(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=_IMAGE,
        image_seq_length=4,
    )
    return transformers.LlavaForConditionalGeneration(config), {"pixel_values": PIXELS}


def gemma3() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.Gemma3Config(
        text_config={**_TEXT, "sliding_window": 4},
        vision_config={**_VISION, "model_type": "siglip_vision_model"},
        image_token_index=_IMAGE,
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config), {"pixel_values": PIXELS}


def mistral3() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral"},
        vision_config={**_VISION, "model_type": "pixtral", "head_dim": 8},
        image_token_index=_IMAGE,
        spatial_merge_size=1,
    )
    return transformers.Mistral3ForConditionalGeneration(config), {
        "pixel_values": PIXELS,
        "image_sizes": torch.tensor([[16, 16]] * 2),
    }


def qwen2_5_vl() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _ROPE},
        vision_config={**_OF_QWEN, "out_hidden_size": 32, "patch_size": 8, "window_size": 16},
        image_token_id=_IMAGE,
    )
    # Two images of 4 x 4 patches, of which 2 x 2 make a token.
    pixels = torch.rand(32, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(0))
    grid = torch.tensor([[1, 4, 4]] * 2)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), {
        "pixel_values": pixels,
        "image_grid_thw": grid,
    }


MODELS = [llava, gemma3, mistral3, qwen2_5_vl]


def run(model: nn.Module, images: dict[str, Any], steps: int = 2) -> dict[str, torch.Tensor]:
    """Gradients after some steps without an optimizer, by name."""
    tokens = torch.arange(2 * 10).reshape(2, 10) % 90 + 1
    tokens[:, 2:6] = _IMAGE
    for _ in range(steps):
        outputs = model(input_ids=tokens, **images)
        assert outputs.past_key_values is None  # a cache would be filled again in backward
        outputs.logits.sin().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


_CASES = {
    (make, mode, scope): f"{make.__name__}-{mode}-{scope}"
    for make in MODELS
    for mode in ("full", "selective")
    for scope in ("all", "language", "vision")
}
# A part of each of two models.
_SHORT = [
    (llava, "selective", "language"),
    (gemma3, "selective", "vision"),
]


@pytest.mark.parametrize(
    ("make", "mode", "scope"), in_tiers(_CASES, _SHORT, [*_CASES][::3]), ids=list(_CASES.values())
)
def test_gradients_are_the_same(make: Any, mode: Any, scope: str) -> None:
    torch.manual_seed(0)
    model, images = make()
    plain = copy.deepcopy(model)
    plain.config.get_text_config().use_cache = False
    apply_activation_checkpointing(model, mode, scope)
    expected, seen = run(plain, images), run(model, images)
    assert expected.keys() == seen.keys()
    for name, each in expected.items():
        torch.testing.assert_close(seen[name], each, msg=name)


def test_a_scope_without_layers_is_refused() -> None:
    model = hf_families.tiny_model("llama", tied=False)
    layers = list(model.model.layers)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has layers of \['language'\] only"):
        apply_activation_checkpointing(model, "full", "vision")
    assert not any("forward" in vars(layer) for layer in layers)
    assert model.config.use_cache
    with pytest.raises(ValueError, match="Linear has no ModuleList of layers"):
        apply_activation_checkpointing(nn.Linear(2, 2))
    config = FSDP2Config(activation_checkpointing=True, activation_checkpointing_scope="audio")
    with fake_world(2):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
        for given in (None, mesh):
            with pytest.raises(ValueError, match="would do nothing"):
                FSDP2Manager(config, given).parallelize(model)
            assert all(type(each) is nn.Parameter for each in model.parameters())


class Predictor(nn.Module):
    """A head that predicts a later token, with the weight of the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = model.lm_head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_layer_that_shares_with_the_root_is_refused(tp_size: int) -> None:
    model = hf_families.tiny_model("llama", tied=False)
    model.mtp = nn.ModuleList([Predictor(model)])
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=tp_size))
        with pytest.raises(
            ValueError, match=r"by 'lm_head.weight' \(in no layer\) and layer 'mtp.0'"
        ):
            fsdp2_strategy_parallelize(model, mesh)
        assert all(type(each) is nn.Parameter for each in model.parameters())


def test_a_layer_under_two_names_is_one() -> None:
    model = hf_families.tiny_model("llama", tied=True)
    model.first = model.model.layers[0]
    with fake_world(2):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        fsdp2_strategy_parallelize(model, mesh)
