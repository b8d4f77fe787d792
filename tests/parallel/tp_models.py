"""Small models, each with what one parallel style is for."""

from __future__ import annotations

import torch
from rounding import rounding
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import meshverse

WIDTH, HEADS, FEATURES, TOKENS, VOCABULARY = 12, 4, 6, 5, 10

# Sums are over up to 24 features of all heads, of less than a dozen operations in a row each way.
BOUND = rounding(torch.float64, terms=HEADS * FEATURES, steps=2 * 12)  # about 1e-13


class HeadNorm(nn.Module):
    """Scales the features of each head alike."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(FEATURES) + 0.5)

    def forward(self, heads: Tensor) -> Tensor:
        if torch.isnan(heads).any():
            raise ArithmeticError("not a number")
        return F.normalize(heads, dim=-1) * self.weight


class Attention(nn.Module):
    """Heads with a norm, a weight for each head, and a count of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj = nn.Linear(WIDTH, HEADS * FEATURES)
        self.q_norm = HeadNorm()
        self.sinks = nn.Parameter(torch.rand(HEADS))
        self.o_proj = nn.Linear(HEADS * FEATURES, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.q_norm(self.q_proj(hidden).unflatten(-1, (self.num_heads, FEATURES)))
        return self.o_proj((heads * self.sinks[:, None]).flatten(-2))


class PackedMLP(nn.Module):
    """Gate and up in one layer, and a layer that reads two parts as one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * 8)
        self.down = nn.Linear(2 * 8, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(torch.cat([gate.sin(), gate * up], dim=-1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8, bias=False)
        self.down = nn.Linear(8, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).relu())


class Latent(nn.Module):
    """A key of which a part comes from a latent, and the rest is shared by all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH + 3)
        self.up = nn.Linear(WIDTH, HEADS * FEATURES)
        self.out = nn.Linear(HEADS * FEATURES, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        latent, shared = self.down(hidden).split([WIDTH, 3], dim=-1)
        heads = self.up(latent).unflatten(-1, (-1, FEATURES))
        return self.out((heads * shared.sum(-1)[..., None, None]).flatten(-2))


class Tied(nn.Module):
    """An embedding whose weight is the head's, with a padding token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).sin())


def make(kind: type[nn.Module]) -> nn.Module:
    """A model with its first weights, the same each time."""
    torch.manual_seed(5)
    return kind().double()


def example(kind: type[nn.Module]) -> Tensor:
    """Input: every token once, or hidden states of shape (2, 3, WIDTH)."""
    if kind is Tied:
        return torch.arange(VOCABULARY).reshape(2, 5)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64)


def mesh_of_two() -> meshverse.DeviceMesh:
    return meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(model: nn.Module) -> dict[str, Tensor]:
    """The output for hidden states of (2, TOKENS, WIDTH), and all gradients, as full tensors."""
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    output = model(given.requires_grad_())
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    seen = {"output": output.detach(), "input": given.grad}
    seen |= {name: full(each.grad) for name, each in model.named_parameters()}
    return {name: each for name, each in seen.items() if each is not None}
