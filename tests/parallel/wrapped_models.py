"""Wrappers around models of transformers, built like PEFT's and like those with a value head."""

from __future__ import annotations

from typing import Any

import hf_families
import torch
from torch import Tensor, nn

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A linear layer with a pair of low-rank matrices beside it, under PEFT's names."""

    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        first = nn.Linear(base_layer.in_features, rank, bias=False)
        second = nn.Linear(rank, base_layer.out_features, bias=False)
        self.lora_A = nn.ModuleDict({"default": first})
        self.lora_B = nn.ModuleDict({"default": second})
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        self.lora_magnitude_vector = nn.ModuleDict()

    def forward(self, hidden: Tensor) -> Tensor:
        result = self.base_layer(hidden)
        low_rank = self.lora_A["default"](self.lora_dropout["default"](hidden))
        return result + self.lora_B["default"](low_rank) * 2.0


class Tuner(nn.Module):
    """The layer between PEFT's wrapper and the model: attributes are the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.model(*arguments, **keywords)


class PeftLike(nn.Module):
    """PEFT's wrapper: attributes are those of the model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = Tuner(model)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.base_model(*arguments, **keywords)


class WithValueHead(nn.Module):
    """A model whose logits are joined by a value for each token."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, model)
        self.v_head = nn.Linear(model.config.hidden_size, 1)

    def forward(self, **keywords: Any) -> Any:
        outputs = self.get_submodule(self.name)(**keywords, output_hidden_states=True)
        outputs.logits = (
            hf_families.full(outputs.logits) + self.v_head(outputs.hidden_states[-1]).mean()
        )
        return outputs


def inject_lora(model: nn.Module, targets: tuple[str, ...], rank: int = 4) -> nn.Module:
    """Put LoRA layers around a model's layers of these names, and freeze the rest."""
    model.requires_grad_(False)
    torch.manual_seed(3)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, rank))
    return model


def make(kind: str, family: str = "qwen3") -> nn.Module:
    """A wrapped tiny model, the same each time."""
    model = hf_families.tiny_model(family, tied=False)
    if kind == "lora":
        return PeftLike(inject_lora(model, (*ATTENTION, *MLP)))
    if kind == "lora of attention":
        return PeftLike(inject_lora(model, ATTENTION))
    if kind == "lora of latents":
        return PeftLike(inject_lora(model, LATENTS))
    if kind == "lora with head":
        return PeftLike(inject_lora(model, (*MLP, "lm_head")))
    if kind == "lora in place":
        return inject_lora(model, (*ATTENTION, *MLP))
    return WithValueHead(model, kind)
