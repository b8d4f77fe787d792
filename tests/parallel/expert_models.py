"""Small modules with stacked experts, in the forms in which transformers keeps them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from rounding import rounding
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, INNER, EXPERTS, CHOICES, TOKENS = 8, 12, 6, 2, 10

# Gradients sum over up to 48 tokens. Two layers, of less than a dozen operations each, are gone
# through forward and backward.
BOUND = rounding(torch.float64, terms=48, steps=2 * 12 * 2)  # about 5e-13


class Experts(nn.Module):
    """Experts that run one after the other.

    Args:
        transposed: weights are (experts, inputs, outputs).
        interleaved: gates and features take turns.
        biased: with biases.
        gated: with gates.
    """

    def __init__(
        self,
        *,
        transposed: bool = False,
        interleaved: bool = False,
        biased: bool = False,
        gated: bool = True,
    ) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.config = SimpleNamespace(_experts_implementation="eager")
        self.is_transposed, self.is_concatenated = transposed, not interleaved
        self.has_bias, self.has_gate = biased, gated
        up = (EXPERTS, (2 if gated else 1) * INNER, WIDTH)
        down = (EXPERTS, WIDTH, INNER)
        if transposed:
            up, down = (up[0], up[2], up[1]), (down[0], down[2], down[1])
        self.up_name = "gate_up_proj" if gated else "up_proj"
        self.register_parameter(self.up_name, nn.Parameter(torch.randn(up) / 3))
        self.down_proj = nn.Parameter(torch.randn(down) / 3)
        if biased:
            bias = torch.randn(EXPERTS, (2 if gated else 1) * INNER)
            self.register_parameter(f"{self.up_name}_bias", nn.Parameter(bias))
            self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.act_fn = F.silu

    def _apply_gate(self, features: Tensor) -> Tensor:
        if self.is_concatenated:
            gate, up = features.chunk(2, dim=-1)
        else:
            gate, up = features[..., ::2], features[..., 1::2]
        return self.act_fn(gate) * up

    def _linear(self, rows: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(self, name)[expert]
        rows = rows @ weight if self.is_transposed else F.linear(rows, weight)
        return rows + getattr(self, f"{name}_bias")[expert] if self.has_bias else rows

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            tokens, choices = torch.where(top_k_index == expert)
            features = self._linear(hidden[tokens], self.up_name, expert)
            inner = self._apply_gate(features) if self.has_gate else self.act_fn(features)
            rows = self._linear(inner, "down_proj", expert)
            output = output.index_add(0, tokens, rows * top_k_weights[tokens, choices, None])
        return output


class Sparse(nn.Module):
    """A router, experts, and one that all tokens go through."""

    def __init__(self, **form: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(**form)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, WIDTH)
        weights, chosen = self.gate(rows).softmax(-1).topk(CHOICES)
        return (self.experts(rows, chosen, weights) + self.shared(rows)).view_as(hidden)


FORMS: dict[str, dict[str, bool]] = {
    "plain": {},
    "transposed": {"transposed": True},
    "biases": {"biased": True},
    "interleaved, transposed, biases": {"interleaved": True, "transposed": True, "biased": True},
    "no gates": {"gated": False, "biased": True},
}


def make(form: str, *, layers: int = 1) -> nn.Module:
    """Layers with experts, the same weights each time, in float64."""
    torch.manual_seed(7)
    return nn.Sequential(*(Sparse(**FORMS[form]) for _ in range(layers))).double()


def tokens(count: int = TOKENS, seed: int = 3) -> Tensor:
    """Hidden states of shape (1, count, WIDTH), of which many choose the same experts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, WIDTH, generator=generator, dtype=torch.float64)


def objective(output: Tensor) -> Tensor:
    """Return a sum over tokens in which each feature has another weight."""
    weights = torch.linspace(-1, 1, WIDTH, dtype=output.dtype)
    return (output.sin() * weights).sum()


class Block(nn.Module):
    """A dense layer that tensor parallelism splits, and a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = Sparse(biased=True)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.down(self.up(self.norm(hidden)).relu())
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    """Two blocks and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden)
