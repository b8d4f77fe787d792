"""Experts of a user's own: forwards that no library has, with the names that experts have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, EXPERTS, CHOICES = 8, 12, 4, 2


class Own(nn.Module):
    """Experts that are run one after the other; subclasses say how."""

    features = 2 * INNER

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, self.features, WIDTH) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.act_fn = nn.SiLU()

    def inner(self, features: Tensor) -> Tensor:
        gate, up = features.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def expert(self, rows: Tensor, number: int) -> Tensor:
        return self.inner(rows @ self.gate_up_proj[number].mT) @ self.down_proj[number].mT

    def weighted(self, rows: Tensor, weights: Tensor, number: int) -> Tensor:
        return self.expert(rows, number) * weights

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for number in range(len(self.down_proj)):
            tokens, choices = torch.where(expert_ids == number)
            rows = self.weighted(hidden[tokens], weights[tokens, choices, None], number)
            output = output.index_add(0, tokens, rows)
        return output


class UpBeforeGate(Own):
    def inner(self, features: Tensor) -> Tensor:
        up, gate = features.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Interleaved(Own):
    def inner(self, features: Tensor) -> Tensor:
        return self.act_fn(features[..., ::2]) * features[..., 1::2]


class Clamped(Own):
    def inner(self, features: Tensor) -> Tensor:
        gate, up = features.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=0.3)) * up.clamp(-0.3, 0.3)


class UpPlusOne(Own):
    def inner(self, features: Tensor) -> Tensor:
        gate, up = features.chunk(2, dim=-1)
        return self.act_fn(gate) * (up + 1)


class Gelu(Own):
    """Has an act_fn that it does not use."""

    def inner(self, features: Tensor) -> Tensor:
        gate, up = features.chunk(2, dim=-1)
        return F.gelu(gate) * up


class WeightsFirst(Own):
    def weighted(self, rows: Tensor, weights: Tensor, number: int) -> Tensor:
        return self.expert(rows * weights, number)


class Scaled(Own):
    def expert(self, rows: Tensor, number: int) -> Tensor:
        return super().expert(rows, number) * 2.5


class SquareTransposed(Own):
    """No gates, and as many inner features as others: the shape does not show the orientation."""

    def __init__(self) -> None:
        super().__init__()
        del self.gate_up_proj
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def expert(self, rows: Tensor, number: int) -> Tensor:
        return self.act_fn(rows @ self.up_proj[number]) @ self.down_proj[number]


class SeparateGates(Own):
    """Three weights, and numbers of experts and features that it reads of itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.gate_up_proj
        self.gate_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)
        self.n, self.k = EXPERTS, INNER

    def expert(self, rows: Tensor, number: int) -> Tensor:
        assert number < self.n
        both = torch.cat([rows @ self.up_proj[number], rows @ self.gate_proj[number]], -1)
        up, gate = both.split(self.k, -1)
        return (gate.sigmoid() * up.tanh()) @ self.down_proj[number]


class AllAtOnce(Own):
    """Chooses weights by ids instead of a loop, so that an id of -1 is that of the last expert."""

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        features = torch.einsum("td,tkfd->tkf", hidden, self.gate_up_proj[expert_ids])
        rows = torch.einsum("tkf,tkdf->tkd", self.inner(features), self.down_proj[expert_ids])
        return (rows * weights[..., None]).sum(1)


class Dropout(Own):
    """Dropout, which a trial leaves out."""

    p = 0.0

    def inner(self, features: Tensor) -> Tensor:
        return F.dropout(super().inner(features), self.p, self.training)


OWN: dict[str, type[nn.Module]] = {
    each.__name__: each
    for each in (
        *(UpBeforeGate, Interleaved, Clamped, UpPlusOne, Gelu, WeightsFirst, Scaled),
        *(SquareTransposed, SeparateGates, AllAtOnce),
    )
}


# --- what cannot be run on a part ----------------------------------------------------------------


class FixedNumber(Own):
    """Counts its experts by a number in its code."""

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for number in range(EXPERTS):
            tokens, choices = torch.where(expert_ids == number)
            rows = self.weighted(hidden[tokens], weights[tokens, choices, None], number)
            output = output.index_add(0, tokens, rows)
        return output


class WithResidual(Own):
    """Adds something once for each token, not for each of its experts."""

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, expert_ids, weights) + 0.1 * hidden


class NormalizesWeights(Own):
    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, expert_ids, weights / weights.sum(-1, keepdim=True))


class MixesExperts(Own):
    """Adds the mean of all experts to each of them."""

    def expert(self, rows: Tensor, number: int) -> Tensor:
        weight = self.down_proj[number] + self.down_proj.mean(0)
        return self.inner(rows @ self.gate_up_proj[number].mT) @ weight.mT


class ScaledByAll(Own):
    """Scales by the largest of all experts' weights, of which each has many."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 1024, WIDTH) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, 512) / 3)

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, expert_ids, weights) / self.down_proj.detach().abs().amax()


class BufferOfAll(Own):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, EXPERTS))

    def expert(self, rows: Tensor, number: int) -> Tensor:
        return super().expert(rows, number) * self.scale[number]


class MeanInTraining(Own):
    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        output = super().forward(hidden, expert_ids, weights)
        return output / len(self.down_proj) if self.training else output


class NormalizesInEvaluation(NormalizesWeights):
    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        kind = Own if self.training else NormalizesWeights
        return kind.forward(self, hidden, expert_ids, weights)


class DropsTokens(Own):
    """An expert takes a quarter more than its share of the tokens."""

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        output, most = torch.zeros_like(hidden), expert_ids.numel() * 5 // (4 * EXPERTS)
        for number in range(len(self.down_proj)):
            tokens, choices = (each[:most] for each in torch.where(expert_ids == number))
            rows = self.weighted(hidden[tokens], weights[tokens, choices, None], number)
            output = output.index_add(0, tokens, rows)
        return output


class TakesSomeTokens(Own):
    """An expert takes a fixed number of tokens, whoever has sent them."""

    most = 16

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for number in range(len(self.down_proj)):
            tokens, choices = (each[: self.most] for each in torch.where(expert_ids == number))
            rows = self.weighted(hidden[tokens], weights[tokens, choices, None], number)
            output = output.index_add(0, tokens, rows)
        return output


class TakesManyTokens(TakesSomeTokens):
    most = 60


class NormalizesTokens(Own):
    """Subtracts the mean of an expert's tokens."""

    def expert(self, rows: Tensor, number: int) -> Tensor:
        mean = rows.mean(0) if len(rows) else 0.0
        return super().expert(rows - 0.1 * mean, number)


class SeesPositions(Own):
    """Scales an expert's tokens down one after the other."""

    def expert(self, rows: Tensor, number: int) -> Tensor:
        positions = torch.arange(len(rows), dtype=rows.dtype)[:, None]
        return super().expert(rows, number) / (1 + 0.01 * positions)


class Checkpointed(Own):
    def expert(self, rows: Tensor, number: int) -> Tensor:
        output: Tensor = checkpoint(super().expert, rows, number, use_reentrant=False)
        return output


class _Divided(torch.autograd.Function):
    """The identity, whose backward divides the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, number: int) -> Tensor:
        ctx.number = number
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient / ctx.number, None


class GradientByExperts(Own):
    def expert(self, rows: Tensor, number: int) -> Tensor:
        expert = super().expert(rows, number)
        output: Tensor = _Divided.apply(expert, len(self.down_proj))  # type: ignore[no-untyped-call]
        return output


class OtherArguments(Own):
    def forward(self, hidden: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        return super().forward(hidden, expert_ids, weights)


class Counts(Own):
    """Counts the tokens of each expert, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        self.load += torch.bincount(expert_ids.flatten(), minlength=EXPERTS)[:EXPERTS]
        return super().forward(hidden, expert_ids, weights)


class KeepsLast(Own):
    """Keeps the hidden states of its last call."""

    last: Tensor | None = None

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        self.last = hidden.detach()
        return super().forward(hidden, expert_ids, weights)


class CountsInList(Own):
    """Counts the tokens of each expert, in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.load = [0] * EXPERTS

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        for number in expert_ids.flatten().tolist():
            self.load[number] += 1
        return super().forward(hidden, expert_ids, weights)


class CountsTokens(Own):
    tokens = 0

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        self.tokens += len(hidden)
        return super().forward(hidden, expert_ids, weights)


class KeepsLosses(Own):
    """Keeps a loss of each call, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = list[Tensor]()

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        self.losses.append(weights.square().mean())
        return super().forward(hidden, expert_ids, weights)


class Elsewhere(Own):
    """Scales by a parameter that is registered elsewhere, if anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.ones(1))]

    def expert(self, rows: Tensor, number: int) -> Tensor:
        return super().expert(rows, number) * self.scales[0]


NO_PARTS: dict[str, tuple[type[nn.Module], str]] = {
    each.__name__: (each, message)
    for each, message in (
        (FixedNumber, "raises IndexError"),
        (WithResidual, "gives other outputs"),
        (NormalizesWeights, "gives other outputs"),
        (MixesExperts, "gives other outputs"),
        (ScaledByAll, "gives other outputs"),
        (BufferOfAll, "gives other outputs"),
        (MeanInTraining, "gives other outputs"),
        (NormalizesInEvaluation, "gives other outputs than in one process in evaluation mode"),
        (DropsTokens, "gives a token something else if there are fewer others"),
        (TakesSomeTokens, "gives a token something else if there are fewer others"),
        (TakesManyTokens, "gives some of 64 equal tokens something else"),
        (NormalizesTokens, "gives a token something else if there are fewer others"),
        (SeesPositions, "gives a token something else if there are fewer others"),
        (Checkpointed, "runs again in backward"),
        (GradientByExperts, "gives other gradients"),
        (Counts, "changes its ['load']"),
        (KeepsLast, "changes its ['last']"),
        (CountsInList, "changes its ['load']"),
        (CountsTokens, "changes its ['tokens']"),
        (KeepsLosses, "changes its ['losses']"),
        (OtherArguments, "must take hidden states"),
        (Elsewhere, "uses a tensor of shape (1,) and torch.float32, which requires a gradient"),
    )
}


class OtherInTheMiddle(Own):
    """Experts of two kinds, by their numbers: those of the first and the last rank are alike."""

    def weighted(self, rows: Tensor, weights: Tensor, number: int) -> Tensor:
        return super().weighted(rows, weights, number) * (1, 2, 2, 1)[number]


# --- what cannot be run on a part of the features ------------------------------------------------


class NormInside(Own):
    def inner(self, features: Tensor) -> Tensor:
        return F.rms_norm(super().inner(features), (INNER,))


class NormAnyWidth(Own):
    def inner(self, features: Tensor) -> Tensor:
        inner = super().inner(features)
        return inner / inner.square().mean(-1, keepdim=True).add(1e-6).sqrt()


class NormBehind(Own):
    def expert(self, rows: Tensor, number: int) -> Tensor:
        return F.rms_norm(super().expert(rows, number), (WIDTH,))


class NormInTraining(Own):
    def inner(self, features: Tensor) -> Tensor:
        inner = super().inner(features)
        return F.normalize(inner, dim=-1) if self.training else inner


class NormInEvaluation(Own):
    def inner(self, features: Tensor) -> Tensor:
        inner = super().inner(features)
        return inner if self.training else F.normalize(inner, dim=-1)


class Largest(Own):
    """Keeps the largest inner features only."""

    def inner(self, features: Tensor) -> Tensor:
        inner = super().inner(features)
        return inner * (inner >= inner.topk(2, dim=-1).values[..., -1:])


class CountsFeatures(Own):
    """Keeps the largest of its inner features, of which a rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def inner(self, features: Tensor) -> Tensor:
        inner = super().inner(features)
        if len(inner):
            self.largest = torch.maximum(self.largest, inner.detach().max())
        return inner


NO_FEATURES: dict[str, type[nn.Module]] = {
    each.__name__: each
    for each in (
        *(NormInside, NormAnyWidth, NormBehind, NormInTraining, Largest, CountsFeatures),
        *(NormInEvaluation, Elsewhere),
    )
}


class Block(nn.Module):
    """A router, and experts of a class."""

    def __init__(self, experts: type[nn.Module]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), experts()

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOICES)
        return hidden + self.experts(rows, chosen, weights).view_as(hidden)


def make(experts: type[nn.Module]) -> nn.Module:
    """Two layers, with the same weights each time, in float64."""
    torch.manual_seed(7)
    return nn.Sequential(*(Block(experts) for _ in range(2))).double()
