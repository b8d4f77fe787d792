"""Modules of a user's own with a plan: as on one process, or refused before anything is changed.

What a forward does between a column-wise and a row-wise layer shows in no parameter and no name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from rounding import relative_errors
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tp_models import BOUND, FEATURES, HEADS, WIDTH, mesh_of_two, run

from helpers.crew import Crew
from helpers.worlds import fake_world
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    LocalParameters,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    ParallelismSizes,
    Replicated,
    ReplicatedWithGradAllreduce,
    apply_tp_plan,
    create_device_meshes,
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    megatron_fsdp_strategy_parallelize,
    register_tp_plan,
)
from meshverse.parallel.tensor_parallel import apply, choice

INNER = 16


class Attention(nn.Module):
    """Attention, of which other classes change a step."""

    num_heads: int

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * FEATURES) for _ in range(3))
        self.out, self.num_heads = nn.Linear(HEADS * FEATURES, WIDTH), HEADS
        self.build()

    def build(self) -> None:
        pass

    def split(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def last(self, output: Tensor) -> Tensor:
        return output

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (self.split(each(hidden)) for each in (self.query, self.key, self.value))
        mixed = self.scores(q, k).softmax(-1) @ v
        return self.last(self.out(mixed.transpose(1, 2).flatten(-2)))


def distances(query: Tensor) -> Tensor:
    positions = torch.arange(query.size(-2))
    return positions - positions[:, None]


class PerHead(Attention):
    def build(self) -> None:
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT * self.temperature


class LayerScale(Attention):
    def build(self) -> None:
        self.gamma = nn.Parameter(torch.rand(WIDTH))

    def last(self, output: Tensor) -> Tensor:
        return output * self.gamma


class RelativeBias(Attention):
    def build(self) -> None:
        self.table = nn.Embedding(2 * 8, HEADS)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT + self.table(distances(query) + 8).permute(2, 0, 1)


class DividedByHeads(Attention):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT / self.num_heads


class DividedByFeatures(Attention):
    def build(self) -> None:
        self.dim = HEADS * FEATURES

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT * (self.dim // self.num_heads) ** -0.5


class Slopes(Attention):
    """ALiBi, whose slopes are computed from the number of heads."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(self.num_heads)
        return query @ key.mT - slopes[:, None, None] * distances(query).abs()


class SlopesIfMasked(Attention):
    mask: Tensor | None = None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        if self.mask is None:
            return query @ key.mT
        slopes = 2.0 ** -torch.arange(self.num_heads)
        scores = query @ key.mT - slopes[:, None, None] * distances(query).abs()
        return scores.masked_fill(self.mask[:, None, None] == 0, -1e9)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        self.mask = mask
        output = super().forward(hidden)
        self.mask = None
        return output


class TakesMask(nn.Module):
    """A model that takes a mask as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SlopesIfMasked()

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        output: Tensor = self.attention(hidden, attention_mask)
        return output


class SlopesOfList(Attention):
    def build(self) -> None:
        self.slopes = [2.0**-head for head in range(HEADS)]

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        pairs = zip(query.unbind(1), key.unbind(1), self.slopes, strict=False)
        return torch.stack([q @ k.mT * slope for q, k, slope in pairs], dim=1)


class InTuple(Attention):
    """The number of heads in a value that is no int."""

    def build(self) -> None:
        self.shape = (HEADS, -1)

    def split(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, self.shape).transpose(1, 2)


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def forward(self, *projected: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in projected)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class WithCore(nn.Module):
    """The number of heads in a module without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * FEATURES) for _ in range(3))
        self.core, self.out = Core(), nn.Linear(HEADS * FEATURES, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.core(self.query(hidden), self.key(hidden), self.value(hidden)))


class Normed(Attention):
    def build(self) -> None:
        self.norm = nn.LayerNorm(FEATURES)

    def split(self, features: Tensor) -> Tensor:
        return self.norm(super().split(features))


class SharedNorm(nn.Module):
    """Two modules with one norm's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Normed(), Normed()
        self.second.norm.weight = self.first.norm.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(self.first(hidden))


class MLP(nn.Module):
    """An MLP, of which other classes change a step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.build()

    def build(self) -> None:
        pass

    def between(self, inner: Tensor) -> Tensor:
        return inner.sigmoid()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.between(self.up(hidden)))


class Gated(MLP):
    def build(self) -> None:
        self.gain = nn.Parameter(torch.rand(INNER))

    def between(self, inner: Tensor) -> Tensor:
        return inner.sigmoid() * self.gain


class Convolved(MLP):
    def build(self) -> None:
        self.conv = nn.Conv1d(INNER, INNER, 3, padding=1, groups=INNER)

    def between(self, inner: Tensor) -> Tensor:
        return self.conv(inner.mT).mT


class Softmax(MLP):
    def between(self, inner: Tensor) -> Tensor:
        return inner.softmax(-1)


class FunctionalNorm(MLP):
    def between(self, inner: Tensor) -> Tensor:
        return F.layer_norm(inner, inner.shape[-1:])


class GroupNorm(MLP):
    def build(self) -> None:
        self.norm = nn.GroupNorm(4, INNER, affine=False)

    def between(self, inner: Tensor) -> Tensor:
        return self.norm(inner.flatten(0, 1)).view_as(inner)


class Halves(MLP):
    """Packed gate and up in a column-wise layer, which gives a rank features of one of them."""

    def build(self) -> None:
        self.up = nn.Linear(WIDTH, 2 * INNER)

    def between(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return gate.sigmoid() * up


class DividedByWidth(MLP):
    def between(self, inner: Tensor) -> Tensor:
        return inner.sigmoid() / inner.size(-1)


class Tied(MLP):
    def build(self) -> None:
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight


class Transposed(MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(self.up(hidden).sigmoid(), self.up.weight.mT)


class OwnLayer(nn.Linear):
    """A layer that needs its whole weight: torch splits it, and computes the same."""

    def forward(self, given: Tensor) -> Tensor:
        return F.linear(given, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class OwnLayers(MLP):
    def build(self) -> None:
        self.up, self.down = OwnLayer(WIDTH, INNER), OwnLayer(INNER, WIDTH)


class ReadsNumber(nn.Linear):
    """A layer that reads a number of what is split: torch would give a rank that of its part."""

    def __init__(self, given: int, features: int, read: Callable[[Tensor, Tensor], float]) -> None:
        super().__init__(given, features)
        self.read = read

    def forward(self, given: Tensor) -> Tensor:
        return F.linear(given, self.weight / self.read(self.weight.detach(), given), self.bias)


class OneReadsNumber(MLP):
    def __init__(self, name: str, read: Callable[[Tensor, Tensor], float]) -> None:
        super().__init__()
        layer = self.get_submodule(name)
        setattr(self, name, ReadsNumber(layer.in_features, layer.out_features, read))


def largest_weight(weight: Tensor, given: Tensor) -> float:
    return weight.abs().max().item()


def deviation(weight: Tensor, given: Tensor) -> float:
    return float(weight.std())


def by_sign(weight: Tensor, given: Tensor) -> float:
    return 2.0 if weight.mean() > 0 else 3.0


def largest_input(weight: Tensor, given: Tensor) -> float:
    return given.detach().abs().max().item() + 1


class Normalized(MLP):
    def build(self) -> None:
        nn.utils.parametrizations.weight_norm(self.down)


class OldNormalized(MLP):
    def build(self) -> None:
        nn.utils.weight_norm(self.up)  # type: ignore[no-untyped-call]


class DirectInput(MLP):
    """The output is right on each rank; the gradient of the hidden states is that of one rank."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).sigmoid() * hidden.mean(-1, keepdim=True))


class Temperature(Attention):
    def build(self) -> None:
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT * self.temperature


class _MeanGradient(torch.autograd.Function):
    """The identity, whose backward subtracts the mean over features."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        return inner.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient - gradient.mean(-1, keepdim=True)


class OwnBackward(MLP):
    def between(self, inner: Tensor) -> Tensor:
        output: Tensor = _MeanGradient.apply(inner)  # type: ignore[no-untyped-call]
        return output.sigmoid()


class AfterDown(MLP):
    """After the row-wise layer, each rank uses its output on features of its own."""

    def build(self) -> None:
        self.second = nn.Linear(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.up(hidden).sigmoid()
        return self.second(inner * self.down(inner).mean(-1, keepdim=True))


class InPlace(MLP):
    def between(self, inner: Tensor) -> Tensor:
        inner *= 2
        return inner


class InPlaceAfter(MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = super().forward(hidden)
        output += 1
        return output


class Detached(MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).sigmoid() * hidden.detach().mean(-1, keepdim=True))


class InTrainingMode(MLP):
    def between(self, inner: Tensor) -> Tensor:
        return inner.softmax(-1) if self.training else inner.sigmoid()


class InDict(Softmax):
    def forward(self, hidden: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"output": super().forward(hidden)}


class WithPenalty(MLP):
    """Returns a value of all features besides its output, which is right."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        inner = self.up(hidden).sigmoid()
        return self.down(inner), inner.square().mean()


class KeepsPenalty(MLP):
    """Keeps such a value in an attribute."""

    penalty: Tensor | None = None

    def between(self, inner: Tensor) -> Tensor:
        self.penalty = inner.square().mean()
        return inner.sigmoid()


@dataclass
class Loss:
    value: Tensor
    name: str = ""
    before: Loss | None = None


def in_cycle(value: Tensor) -> Loss:
    loss = Loss(value)
    loss.before = loss
    return loss


class KeepsIn(MLP):
    """Keeps such a value in a container, or as a number."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def between(self, inner: Tensor) -> Tensor:
        self.penalty = self.wrap(inner.square().mean())
        return inner.sigmoid()


class ReturnsIn(KeepsIn):
    """Returns it in a container besides the output."""

    def forward(self, hidden: Tensor) -> Any:
        inner = self.up(hidden).sigmoid()
        return self.down(inner), self.wrap(inner.square().mean())


_WRAPPED: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda value: [value],
    "a tuple in a dict": lambda value: {"losses": (value, "mean")},
    "a set of numbers": lambda value: {value.item()},
    "a dataclass": Loss,
    "a dataclass with itself": in_cycle,
    "a number": Tensor.item,
}


class KeepsHistory(MLP):
    """Scales by the largest feature of earlier calls, in a list that it changes in place."""

    def build(self) -> None:
        self.history = [1.0]

    def between(self, inner: Tensor) -> Tensor:
        scale = max(self.history)
        self.history.append(inner.detach().abs().max().item())
        return (inner / scale).sigmoid()


class AddsToTensor(MLP):
    """A tensor that is no buffer, and is changed in place."""

    def build(self) -> None:
        self.total = torch.zeros(())

    def between(self, inner: Tensor) -> Tensor:
        self.total += inner.detach().mean()
        return inner.sigmoid()


class CountsCalls(Attention):
    """Numbers that are the same on all ranks, in containers, and one of a rank's own shape."""

    def build(self) -> None:
        self.calls, self.by_name, self.loss = 0, {"calls": [0]}, Loss(torch.ones(1))
        self.shape, self.scales = torch.Size(()), [0.5] * HEADS
        self.table, self.mask = torch.ones(2, dtype=torch.complex64), torch.ones(2, 2).to_sparse()
        self.later = torch.ones(2, device="meta")

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        self.calls += 1
        self.by_name["calls"].append(self.calls)
        self.loss.value = torch.ones(1) * self.calls
        self.shape, self.scales = query.shape, [0.5] * query.size(1)
        return query @ key.mT


class DelayedScaling(MLP):
    """Scales by the largest feature of the step before, which each rank would see by its own."""

    def build(self) -> None:
        self.register_buffer("largest", torch.ones(()))

    def between(self, inner: Tensor) -> Tensor:
        scale = self.largest.clone()
        self.largest.copy_(inner.detach().abs().max())
        return (inner / scale).sigmoid()


class KeepsFeatures(MLP):
    """A buffer of other shape on a rank."""

    def between(self, inner: Tensor) -> Tensor:
        self.register_buffer("kept", inner.detach())
        return inner.sigmoid()


class KeepsHidden(MLP):
    """Buffers of what all ranks have, and one that is not finite."""

    def build(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.full((2,), -torch.inf))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = super().forward(hidden)
        self.mean.lerp_(output.detach().mean((0, 1)), 0.5)
        self.calls += 1
        return output


class Checkpointed(MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, hidden, use_reentrant=False)
        return output


class CheckpointedReentrantly(MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, hidden, use_reentrant=True)
        return output


class OwnGradient(MLP):
    def build(self) -> None:
        self.up.weight.register_hook(torch.tanh)


class OwnGradientLater(MLP):
    def build(self) -> None:
        self.down.weight.register_post_accumulate_grad_hook(lambda weight: None)


class SummedTwice(MLP):
    """A scale of a rank's own features, and a penalty of it, of which all ranks have the whole."""

    def build(self) -> None:
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.down(self.up(hidden).sigmoid() * self.scale), self.scale.square()


class ReadsWeight(MLP):
    """A rank would read the largest value of its own part, without an error."""

    def between(self, inner: Tensor) -> Tensor:
        bound = self.up.weight.detach().abs().max().item()
        return inner.clamp(-bound, bound)


class AsksForDtype(MLP):
    def between(self, inner: Tensor) -> Tensor:
        weight = self.down.weight
        return inner.to(weight.device, weight.dtype).sigmoid() / weight.shape[1]


class Elsewhere(nn.Module):
    """An MLP that scales features by a parameter of the module around it, which it refers to."""

    def __init__(self, refer: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(1))
        self.mlp = RefersTo(refer(self.gain))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(hidden) * self.gain


class RefersTo(MLP):
    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.reference = reference

    def between(self, inner: Tensor) -> Tensor:
        return inner.sigmoid() * self.value().to(inner.dtype)

    def value(self) -> Tensor:
        if callable(self.reference):
            return self.reference()
        (first,) = self.reference
        return first if isinstance(first, Tensor) else first.weight


def module_with(parameter: nn.Parameter) -> nn.Module:
    module = nn.PReLU()
    module.weight = parameter
    return module


class OwnLoss(MLP):
    """A name that transformers' models have, too."""

    def loss_function(self, output: Tensor) -> Tensor:
        return output.square().mean()


class Shares(nn.Module):
    """Two layers with one MLP."""

    def __init__(self) -> None:
        super().__init__()
        first = MLP()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": each}) for each in (first, first))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer["mlp"](hidden)
        return hidden


class Heads(Attention):
    """An attention whose output layer the parent has."""

    def build(self) -> None:
        self.out = nn.Identity()


class Reads(nn.Module):
    """A block that reads its attention's number of heads in its own forward."""

    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.attn, self.out = kind(), nn.Linear(HEADS * FEATURES, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.attn(hidden)
        if isinstance(self.attn, Heads):
            mixed = self.out(mixed.unflatten(-1, (self.attn.num_heads, -1)).sin().flatten(-2))
            return hidden + mixed
        return hidden + mixed / self.number()

    def number(self) -> int:
        return self.attn.num_heads


class ReadsByMask(Reads):
    """A block that reads it only if there is a mask."""

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scale = 1.0 if attention_mask is None else self.number() ** -0.5
        return hidden + self.attn(hidden) * scale


class KeepsNumber(Reads):
    """A block that has the number in an attribute of its own, and calls `forward` by itself."""

    def __init__(self, kind: type[Attention]) -> None:
        super().__init__(kind)
        self.n_of_all = self.attn.num_heads

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.attn.forward(hidden) / self.n_of_all


class SharesALayer(nn.Module):
    """Two MLPs with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()
        self.second.up = self.first.up

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(self.first(hidden))


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.attn(hidden, hidden, hidden)[0]
        return output


class ScaledDown(Softmax):
    """A residual branch that hardly counts yet, or not at all."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * super().forward(hidden)


class SmallBranch(MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 1e-6 * super().forward(hidden)


class DirectInputScaledDown(DirectInput):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * super().forward(hidden)


Plan = dict[str, ParallelStyle]


class AttentionBesideLayers(nn.Module):
    """A block with attention, and layers of its own, each added to the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.between, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.up, self.down = self.mlp.up, self.mlp.down
        del self.mlp

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.before(hidden))
        return hidden + self.down(self.up(self.between(hidden)).sigmoid())


class FlattensTokens(MLP):
    """Adds to a view of the hidden states, twice."""

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        for _ in range(2):
            tokens = tokens + self.down(self.up(tokens).sigmoid())
        return tokens.unflatten(0, hidden.shape[:2])


class Depthwise(MLP):
    def build(self) -> None:
        self.conv = nn.Conv1d(INNER, INNER, 3, padding=1, groups=INNER)

    def between(self, inner: Tensor) -> Tensor:
        return self.conv(inner.mT).mT.sigmoid()


class StackedHeads(nn.Module):
    """Multiplies hidden states with a weight for each head; no layer sums their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.rand(HEADS, WIDTH, FEATURES))
        self.out = nn.Linear(HEADS * FEATURES, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = torch.einsum("btw, hwf -> bthf", hidden, self.heads)
        return self.out(heads.tanh().flatten(-2))


class WithWeights(Attention):
    """Returns its weights in a dict, and keeps them in a list."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        query, key = self.split(self.query(hidden)), self.split(self.key(hidden))
        weights = self.scores(query, key).softmax(-1)
        self.kept = [weights]
        mixed = weights @ self.split(self.value(hidden))
        return self.out(mixed.transpose(1, 2).flatten(-2)), {"weights": weights}


def mean_of_copy(weights: Tensor) -> Tensor:
    copies = torch.zeros(1, *weights.shape, dtype=weights.dtype)
    copies[0] = weights.detach()
    return copies.mean()


class UsesWeights(nn.Module):
    """A model that uses the attention's weights, or not."""

    def __init__(self, use: Callable[[Tensor, list[Tensor]], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithWeights() for _ in range(2))
        self.use = use

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            output, other = layer(hidden)
            hidden = hidden + output
        return hidden * self.use(other["weights"], layer.kept)


QKV: Plan = {
    **{name: ColwiseParallel() for name in ("query", "key", "value")},
    "out": RowwiseParallel(),
}
UP_DOWN: Plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
_IN_LAYERS: Plan = {f"layers.*.{name}": style for name, style in QKV.items()}
_USES: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "returns": lambda returned, kept: returned.square().mean(),
    "returns a number": lambda returned, kept: returned.detach().max().item(),
    "returns and is copied": lambda returned, kept: mean_of_copy(returned),
    "keeps in its attribute 'kept'": lambda returned, kept: 1 + kept[0].detach().mean(0).amax(),
}
_IN_ATTN: Plan = {f"attn.{name}": style for name, style in QKV.items()}
_TWICE: Plan = {
    f"{each}.{name}": style for each in ("first", "second") for name, style in QKV.items()
}

EQUAL: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "a parent with the last layer reads a number of heads": (
        partial(Reads, Heads),
        {"attn." * (name != "out") + name: style for name, style in QKV.items()},
    ),
    "a parent keeps the number of heads": (partial(KeepsNumber, Attention), _IN_ATTN),
    "attention beside layers": (
        AttentionBesideLayers,
        _IN_ATTN | UP_DOWN | {"before": Replicated(), "between": Replicated()},
    ),
    "tokens in one dim": (FlattensTokens, UP_DOWN),
    "depthwise": (
        Depthwise,
        UP_DOWN | {"conv": LocalParameters(dict.fromkeys(("weight", "bias", "groups"), Shard(0)))},
    ),
    "weights that are not used": (
        partial(UsesWeights, lambda returned, kept: returned.size(-1) + kept[0].detach().dim()),
        _IN_LAYERS,
    ),
    "per head": (PerHead, QKV | {"": LocalParameters({"temperature": Shard(0)})}),
    "layer scale": (LayerScale, QKV | {"": LocalParameters({"gamma": Replicate()})}),
    "relative bias": (RelativeBias, QKV | {"table": ColwiseParallel()}),
    "core": (WithCore, QKV | {"core": LocalParameters({"num_heads": Shard(0)})}),
    "shared norm": (
        SharedNorm,
        _TWICE | {f"{each}.norm": ReplicatedWithGradAllreduce() for each in ("first", "second")},
    ),
    "gated": (Gated, UP_DOWN | {"": LocalParameters({"gain": Shard(0)})}),
    "convolved": (
        Convolved,
        UP_DOWN | {"conv": LocalParameters(dict.fromkeys(("weight", "bias", "groups"), Shard(0)))},
    ),
    "own layers": (OwnLayers, UP_DOWN),
    "reads a number of the whole input": (partial(OneReadsNumber, "up", largest_input), UP_DOWN),
    "detached": (Detached, UP_DOWN),
    "an output times 1e-6": (SmallBranch, UP_DOWN),
    "asks for a dtype": (AsksForDtype, UP_DOWN),
    "buffers of hidden states": (KeepsHidden, UP_DOWN),
    "counts calls": (CountsCalls, QKV),
    "a loss of its own": (OwnLoss, UP_DOWN),
    "a constant elsewhere": (partial(RefersTo, [torch.full((2, 1, 1), 2.0)]), UP_DOWN),
    "shared by layers": (
        Shares,
        {f"layers.*.mlp.{name}": style for name, style in UP_DOWN.items()},
    ),
}
_TRIED = "computes something else with 2 ranks' parts"
_GRADIENT = f"{_TRIED}.*relative error of the gradient of "
REFUSED: dict[str, tuple[Callable[[], nn.Module], Plan, str]] = {
    **{
        each.__name__: (each, QKV, _TRIED)
        for each in (DividedByHeads, DividedByFeatures, Slopes, SlopesOfList, InTuple, WithCore)
    },
    **{
        each.__name__: (each, UP_DOWN, _TRIED)
        for each in (Softmax, FunctionalNorm, GroupNorm, Halves, DividedByWidth, Transposed)
    },
    "slopes if there is a mask": (
        TakesMask,
        {f"attention.{name}": style for name, style in QKV.items()},
        f"'attention' .*{_TRIED}",
    ),
    "one of two": (
        SharedNorm,
        _TWICE | {"first.norm": ReplicatedWithGradAllreduce()},
        "'second.norm.weight'",
    ),
    "a groups number": (
        Convolved,
        UP_DOWN | {"conv": LocalParameters({"weight": Shard(0), "bias": Shard(0)})},
        _TRIED,
    ),
    **{
        each.__name__: (each, UP_DOWN, f"{_TRIED}.*must not be changed in place")
        for each in (InPlace, InPlaceAfter)
    },
    "hidden states between": (DirectInput, UP_DOWN, f"{_GRADIENT}input 0"),
    **{
        f"an output times {scale}": (
            partial(ScaledDown, scale),
            UP_DOWN,
            f"{_TRIED}.*relative error of the output of 'down'",
        )
        for scale in (1e-3, 1e-6, 0.0)
    },
    **{
        f"hidden states between, times {scale}": (
            partial(DirectInputScaledDown, scale),
            UP_DOWN,
            f"{_GRADIENT}input 0",
        )
        for scale in (1e-4, 0.0)
    },
    "own backward": (OwnBackward, UP_DOWN, f"{_GRADIENT}input 0"),
    "after a row-wise layer": (
        AfterDown,
        UP_DOWN | {"second": RowwiseParallel()},
        f"{_TRIED}.*different gradients of the output of 'down'",
    ),
    "a temperature not summed": (
        Temperature,
        QKV | {"": LocalParameters({"temperature": Replicate()})},
        f"{_GRADIENT}'temperature'",
    ),
    "a norm not summed": (
        Normed,
        QKV | {"norm": Replicated()},
        f"{_GRADIENT}'norm.bias'",
    ),
    "layer scale summed": (
        LayerScale,
        QKV | {"": LocalParameters(summed=["gamma"])},
        f"{_GRADIENT}'gamma'",
    ),
    "a penalty of a scale that is summed": (
        SummedTwice,
        UP_DOWN | {"": LocalParameters(summed=["scale"])},
        f"{_GRADIENT}'scale'",
    ),
    "reads a weight": (ReadsWeight, UP_DOWN, f"{_TRIED}.*'up.weight' is read outside its layer"),
    **{
        f"{name} reads a number, {read.__name__}": (
            partial(OneReadsNumber, name, read),
            UP_DOWN,
            f"{_TRIED}.*'{name}' reads a number of its weight or input",
        )
        for name, some in (("up", ()), ("down", (largest_input,)))
        for read in (largest_weight, deviation, by_sign, *some)
    },
    **{
        f"a parameter elsewhere, {name}": (
            partial(Elsewhere, refer),
            {f"mlp.{each}": style for each, style in UP_DOWN.items()},
            r"'mlp' \(RefersTo\).*'gain' of shape \(1,\) and torch.float64, which requires",
        )
        for name, refer in (
            ("in a list", lambda gain: [gain]),
            ("in a closure", lambda gain: lambda: gain),
            ("of another module", lambda gain: [module_with(gain)]),
        )
    },
    "a tensor elsewhere": (
        partial(RefersTo, [torch.ones(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)]),
        UP_DOWN,
        r"a tensor of shape \(2, 1, 1\) and torch.bfloat16, which requires a gradient",
    ),
    "a shared layer without a style": (
        SharesALayer,
        {f"first.{name}": style for name, style in UP_DOWN.items()},
        r"\['first.up', 'second.up'\] are one module.*same style under each name",
    ),
    "a shared layer with two styles": (
        SharesALayer,
        {
            "first.up": ColwiseParallel(output_layouts=Replicate()),
            "second.up": ColwiseParallel(),
            "second.down": RowwiseParallel(),
        },
        r"\['first.up', 'second.up'\] are one module.*same style under each name",
    ),
    "tied": (Tied, UP_DOWN, "are one parameter, but the plan would split it in different ways"),
    "parametrized": (Normalized, UP_DOWN, "down: RowwiseParallel.* splits a weight, which Param"),
    "weight norm": (OldNormalized, UP_DOWN, "splits a weight, which Linear computes from"),
    **{
        each.__name__: (each, UP_DOWN, _TRIED)
        for each in (InTrainingMode, InDict, Checkpointed, CheckpointedReentrantly)
    },
    **{
        each.__name__: (each, UP_DOWN, f"{_TRIED}.*another tensor or number besides its output")
        for each in (WithPenalty, KeepsPenalty)
    },
    **{
        f"{how} {name}": (partial(kind, wrap), UP_DOWN, f"{_TRIED}.*{how}.* besides its output")
        for how, kind in (("keeps", KeepsIn), ("returns", ReturnsIn))
        for name, wrap in _WRAPPED.items()
    },
    **{
        f"other code uses what it {how}": (
            partial(UsesWeights, use),
            _IN_LAYERS,
            r"'layers.1' \(WithWeights\) (returns|keeps in .*'kept') a tensor besides.*other code",
        )
        for how, use in _USES.items()
    },
    "stacked heads": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), StackedHeads()),
        {"1": LocalParameters({"heads": Shard(0)}), "1.out": RowwiseParallel()},
        f"{_GRADIENT}input 0 .*only through column-wise layers",
    ),
    "a history of numbers": (KeepsHistory, UP_DOWN, f"{_TRIED}.*keeps in its attribute 'history'"),
    "adds to a tensor": (AddsToTensor, UP_DOWN, f"{_TRIED}.*keeps in its attribute 'total'"),
    "a buffer of features": (DelayedScaling, UP_DOWN, f"{_TRIED}.*in the buffer 'largest'"),
    "a buffer of a rank's shape": (KeepsFeatures, UP_DOWN, f"{_TRIED}.*in the buffer 'kept'"),
    "a hook of a gradient": (OwnGradient, UP_DOWN, "up.weight has hooks of its gradient"),
    "a later hook": (OwnGradientLater, UP_DOWN, "down.weight has hooks of its gradient"),
    "a parent's read": (
        partial(Reads, Attention),
        _IN_ATTN,
        r"Reads cannot be split.*'attn.num_heads': 2\}.*Keep the number in an attribute of",
    ),
    "a parent's read with a mask": (partial(ReadsByMask, Attention), _IN_ATTN, "Keep the number"),
    "multihead's own weights": (
        Multihead,
        {"attn": LocalParameters({"in_proj_weight": Shard(0)})},
        "nn.MultiheadAttention uses",
    ),
    "multihead": (Multihead, {"attn.out_proj": RowwiseParallel()}, "nn.MultiheadAttention uses"),
}


def make(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build().double()


def all_errors() -> dict[str, float]:
    errors = {}
    for case, (build, plan) in EQUAL.items():
        split = make(build)
        apply_tp_plan(split, mesh_of_two(), plan)
        found = relative_errors(run(split), run(make(build)), floor=1e-2)
        errors |= {f"{case}: {name}": error for name, error in found.items()}
    return errors


def test_modules_equal_one_process(crew: Crew) -> None:
    for errors in crew.run(all_errors, 2):
        assert len({name.partition(":")[0] for name in errors}) == len(EQUAL)
        assert max(errors.values()) < BOUND, max(errors, key=lambda name: errors[name])


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("case", REFUSED)
def test_modules_are_refused_before_any_change(case: str) -> None:
    build, plan, text = REFUSED[case]
    model = make(build)
    before, state = {**vars(model)}, torch.get_rng_state()
    with fake_world(2), pytest.raises(ValueError, match=text):
        apply_tp_plan(model, mesh_of_two(), plan)
    assert vars(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


class WithMask(MLP):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.down(self.between(self.up(hidden)) * mask)


def rejects(hidden: Tensor) -> None:
    raise TypeError("an input that no trial knows")


class Unknown(MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        return rejects(hidden) or hidden


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "was not tried" in each]


@pytest.mark.parametrize("build", [MLP, WithMask, Unknown])
def test_what_cannot_be_tried_is_logged(
    build: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(make(build), mesh_of_two(), UP_DOWN)
    assert len(warnings_of(caplog)) == (build is not MLP)


class UnknownHeads(Attention):
    def forward(self, hidden: Tensor) -> Tensor:
        return rejects(hidden) or hidden


def test_numbers_of_heads_set_in_what_is_not_tried_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make(UnknownHeads)
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(model, mesh_of_two(), QKV)
    (warning,) = warnings_of(caplog)
    assert model.num_heads == HEADS // 2
    assert f"UnknownHeads.num_heads={HEADS // 2}" in warning


class Dropout(MLP):
    def build(self) -> None:
        self.dropout = nn.Dropout(0.5)

    def between(self, inner: Tensor) -> Tensor:
        return F.dropout(self.dropout(inner), 0.5, self.training)


class AttentionDropout(Attention):
    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (self.split(each(hidden)) for each in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, None, 0.5 * self.training)
        mixed = F.scaled_dot_product_attention(q, mixed, v, dropout_p=0.5 * self.training)
        return self.out(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize(("build", "plan"), [(Dropout, UP_DOWN), (AttentionDropout, QKV)])
def test_a_trial_has_no_dropout(
    build: Callable[[], nn.Module], plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(make(build), mesh_of_two(), plan)
    assert not warnings_of(caplog)


class OtherShape(MLP):
    """Returns split features besides its output, as some attentions return their weights."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        inner = self.up(hidden).sigmoid()
        return self.down(inner), inner


def test_split_features_besides_the_output_are_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(make(OtherShape), mesh_of_two(), UP_DOWN)
    assert not warnings_of(caplog)


class CrossAttention(nn.Module):
    """Packs keys and values in one layer, as halves or as one after the other for each head."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.by_head, size = by_head, HEADS * FEATURES
        self.query, self.both = nn.Linear(WIDTH, size), nn.Linear(WIDTH, 2 * size)
        self.out = nn.Linear(size, WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        query = self.query(hidden).unflatten(-1, (-1, FEATURES)).transpose(1, 2)
        if self.by_head:
            key, value = self.both(memory).unflatten(-1, (-1, 2, FEATURES)).unbind(-2)
        else:
            key, value = self.both(memory).unflatten(-1, (2, -1, FEATURES)).unbind(-3)
        mixed = (query @ key.transpose(1, 2).mT).softmax(-1) @ value.transpose(1, 2)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Decoder(nn.Module):
    """Takes tokens of two languages, and a number, by name only."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(CrossAttention(by_head) for _ in range(3))

    def forward(self, source: Tensor, target: Tensor, *, scales: dict[str, Tensor]) -> Tensor:
        memory, hidden = self.table(source), self.table(target) * scales["target"]
        for layer in self.layers:
            hidden = hidden + layer(hidden, memory)
        return hidden


_EXAMPLE = {
    "source": torch.arange(8).reshape(2, 4),
    "target": torch.arange(6).reshape(2, 3),
    "scales": {"target": torch.tensor(0.5, dtype=torch.float64)},
}
_DECODER: Plan = {
    **{f"layers.*.{name}": ColwiseParallel() for name in ("query", "both")},
    "layers.*.out": RowwiseParallel(),
}


@pytest.mark.parametrize("by_head", [False, True])
def test_without_example_inputs_a_model_of_two_inputs_is_not_tried(
    by_head: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(make(partial(Decoder, by_head)), mesh_of_two(), _DECODER)
    (warning,) = warnings_of(caplog)
    assert r"['layers.* (3 modules)']" in warning
    assert "pass example_inputs=" in warning


def test_a_wrong_module_is_found_on_example_inputs() -> None:
    with fake_world(2), pytest.raises(ValueError, match=f"'layers.0' .CrossAttention. {_TRIED}"):
        apply_tp_plan(
            make(partial(Decoder, by_head=False)),
            mesh_of_two(),
            _DECODER,
            example_inputs=_EXAMPLE,
        )


def _by_fsdp2(model: nn.Module) -> None:
    mesh, _ = create_device_meshes(FSDP2Config(), ParallelismSizes(tp_size=2))
    fsdp2_strategy_parallelize(model, mesh, tp_shard_plan=_DECODER, example_inputs=_EXAMPLE)


def _by_fsdp2_manager(model: nn.Module) -> None:
    config = FSDP2Config(tp_plan=_DECODER)
    mesh, _ = create_device_meshes(config, ParallelismSizes(tp_size=2))
    FSDP2Manager(config, mesh).parallelize(model, example_inputs=_EXAMPLE)


def _by_megatron_fsdp(model: nn.Module) -> None:
    mesh, _ = create_device_meshes(MegatronFSDPConfig(), ParallelismSizes(tp_size=2))
    megatron_fsdp_strategy_parallelize(model, mesh, tp_shard_plan=_DECODER, example_inputs=_EXAMPLE)


def _by_megatron_fsdp_manager(model: nn.Module) -> None:
    register_tp_plan(Decoder, lambda model, _: _DECODER)
    mesh, _ = create_device_meshes(MegatronFSDPConfig(), ParallelismSizes(tp_size=2))
    manager = MegatronFSDPManager(MegatronFSDPConfig(), mesh)
    manager.parallelize(model, example_inputs=_EXAMPLE)


@pytest.mark.parametrize(
    "split", [_by_fsdp2, _by_fsdp2_manager, _by_megatron_fsdp, _by_megatron_fsdp_manager]
)
def test_strategies_take_example_inputs(
    split: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_registered", {})
    model = make(partial(Decoder, by_head=False))
    with fake_world(2), pytest.raises(ValueError, match=f"'layers.0' .CrossAttention. {_TRIED}"):
        split(model)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def _decoder_errors() -> float:
    whole, split = (make(partial(Decoder, by_head=True)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply._logger, "warning", pytest.fail)
        apply_tp_plan(split, mesh_of_two(), _DECODER, example_inputs=_EXAMPLE)
    results = []
    for model in (split, whole):
        output = model(**_EXAMPLE)
        output.square().sum().backward()
        results.append({"output": output.detach(), "table": model.table.weight.grad})
    return max(relative_errors(*results, floor=1e-2).values())


def test_a_right_module_is_tried_on_example_inputs(crew: Crew) -> None:
    assert max(crew.run(_decoder_errors, 2)) < BOUND


@pytest.mark.parametrize(
    ("example", "error", "text"),
    [
        ({"source": 1}, ValueError, "Decoder.* raises TypeError.* on example_inputs"),
        ((_EXAMPLE["source"],), ValueError, "Decoder.* raises TypeError.* on example_inputs"),
        (_EXAMPLE["source"], TypeError, "of type Tensor must be tuple or Mapping or None"),
    ],
)
def test_example_inputs_that_do_not_fit_are_refused(
    example: Any, error: type[Exception], text: str
) -> None:
    model = make(partial(Decoder, by_head=True))
    with fake_world(2), pytest.raises(error, match=text):
        apply_tp_plan(model, mesh_of_two(), _DECODER, example_inputs=example)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def _with_other_inputs() -> str:
    example = _EXAMPLE | {"target": _EXAMPLE["target"][: 1 + torch.distributed.get_rank()]}
    with pytest.raises(ValueError, match="different models, plans or example inputs") as raised:
        apply_tp_plan(
            make(partial(Decoder, by_head=True)),
            mesh_of_two(),
            _DECODER,
            example_inputs=example,
        )
    return str(raised.value)


def test_ranks_with_other_example_inputs_are_refused(crew: Crew) -> None:
    for text in crew.run(_with_other_inputs, 2):
        assert "rank 0': ['example input 1 of shape (1, 3)" in text


def with_hook() -> nn.Module:
    """Less the mean of a rank's own features, by a hook that a trial does not run."""
    model = MLP()
    model.down.register_forward_pre_hook(lambda _, given: (given[0] - given[0].mean(),))
    return model


def with_closure() -> nn.Module:
    """Runs the model itself, also if it is copied."""
    model = MLP()
    model.forward = lambda hidden: model.down(model.up(hidden).softmax(-1))  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("build", [with_hook, with_closure])
def test_what_a_copy_does_not_run_is_logged(
    build: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(model, mesh_of_two(), UP_DOWN)
    assert len(warnings_of(caplog)) == 1


class Masked(nn.Module):
    """A model whose inner modules get what only the model can give them."""

    def __init__(self, inner: Callable[[], nn.Module], n_layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(inner() for _ in range(n_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden, mask=torch.linspace(0, 1, hidden.size(1))[:, None])
        return hidden


class MaskedSoftmax(WithMask):
    def between(self, inner: Tensor) -> Tensor:
        return inner.softmax(-1)


_LAYERS: Plan = {f"layers.*.{name}": style for name, style in UP_DOWN.items()}


def test_inputs_come_from_a_run_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    state = torch.get_rng_state()
    with fake_world(2), caplog.at_level(logging.WARNING):
        with pytest.raises(ValueError, match=rf"'layers.0' \(MaskedSoftmax\) {_TRIED}"):
            apply_tp_plan(Masked(MaskedSoftmax), mesh_of_two(), _LAYERS)
        before = torch.get_rng_state()
        apply_tp_plan(Masked(WithMask), mesh_of_two(), _LAYERS)
    assert not warnings_of(caplog)
    assert not torch.equal(state, before)  # weights of the models


class Noted(WithMask):
    """Notes each run of its forward, by the number of its layer."""

    runs: ClassVar[list[int]] = []

    def __init__(self, number: int, kind: str, inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.number, self.kind = number, kind

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        self.runs.append(vars(self)["number"])  # which is no reading that is noted
        return super().forward(hidden, mask)

    def between(self, inner: Tensor) -> Tensor:
        return inner.softmax(-1) if self.kind == "softmax" else getattr(inner, self.kind)()


class ByNumber(Noted):
    """Layers that differ by their number only."""

    def between(self, inner: Tensor) -> Tensor:
        return inner.softmax(-1) if self.number == 3 else inner.sin()


class ByNumberInChild(Noted):
    """A child knows the number, and is asked in every second layer."""

    def __init__(self, number: int, kind: str) -> None:
        super().__init__(number, kind)
        self.child = Noting(number)

    def between(self, inner: Tensor) -> Tensor:
        return inner.softmax(-1) if self.kind == "odd" and self.child() else inner.sin()


class Noting(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self) -> bool:
        return getattr(self, "number", None) == 3


class NoSubclass(Noted):
    """A class in which no reading can be noted."""

    def __init_subclass__(cls) -> None:
        raise NotImplementedError


def tried(*layers: Noted) -> set[int]:
    """Return the numbers of the layers that are tried, and not only run as part of the model."""
    model = Masked(iter(layers).__next__, len(layers))
    Noted.runs.clear()
    with fake_world(2):
        apply_tp_plan(model, mesh_of_two(), _LAYERS)
    return {layer.number for layer in layers if Noted.runs.count(layer.number) > 1}


def test_one_of_equal_modules_is_tried() -> None:
    assert tried(*(Noted(number, "sin") for number in range(12))) == {0}
    kinds = ("sin", "sin", "cos", "sin", "cos")
    assert tried(*(Noted(*each) for each in enumerate(kinds))) == {0, 2}
    inner = (INNER, 2 * INNER, INNER, 2 * INNER)
    assert tried(*(Noted(number, "sin", each) for number, each in enumerate(inner))) == {0, 1}


def test_modules_that_may_differ_are_tried_apart() -> None:
    layers = [Noted(number, "sin") for number in range(6)]
    layers[3].scale = object()  # type: ignore[assignment]  # which no forward reads
    layers[4].register_buffer("shift", torch.zeros(2))
    layers[5].register_buffer("shift", torch.ones(2))
    assert tried(*layers) == {0, 4, 5}
    assert tried(*(NoSubclass(number, "sin") for number in range(3))) == {0, 1, 2}


def test_a_wrong_module_among_others_is_found() -> None:
    kinds = ("sin", "sin", "sin", "softmax", "sin")
    with pytest.raises(ValueError, match=rf"'layers.3' \(Noted\) {_TRIED}"):
        tried(*(Noted(*each) for each in enumerate(kinds)))


@pytest.mark.parametrize("kind", [ByNumber, ByNumberInChild])
def test_a_layer_that_its_number_alone_makes_wrong_is_found(kind: type[Noted]) -> None:
    tried(*(kind(number, "odd") for number in range(3)))
    with pytest.raises(ValueError, match=rf"'layers.3' \({kind.__name__}\) {_TRIED}"):
        tried(*(kind(number, "odd" if number % 2 else "even") for number in range(6)))


class Asked(MLP):
    """Computes something else if it is asked to."""

    def forward(self, hidden: Tensor, softmax: bool = False) -> Tensor:
        inner = self.up(hidden)
        return self.down(inner.softmax(-1) if softmax else inner.sigmoid())


class Asks(nn.Module):
    """Runs its layers, and the last one again in another way."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Asked() for _ in range(n_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.layers[-1](hidden, softmax=True)


@pytest.mark.parametrize("n_layers", [1, 3])
def test_each_kind_of_call_is_tried(n_layers: int) -> None:
    model = make(lambda: Asks(n_layers))
    with fake_world(2), pytest.raises(ValueError, match=rf"'layers.{n_layers - 1}' .*{_TRIED}"):
        apply_tp_plan(model, mesh_of_two(), _LAYERS)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


class NeedsMask(nn.Module):
    """A model that no trial can run, around a module that it could run by itself."""

    def __init__(self, beside: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp, self.beside = Asked(), beside

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.mlp(hidden * mask, softmax=True)


_MLP: Plan = {f"mlp.{name}": style for name, style in UP_DOWN.items()}


def test_modules_that_the_model_does_not_reach_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(make(NeedsMask), mesh_of_two(), _MLP)
    (said,) = warnings_of(caplog)
    assert "no run of the model on token ids or hidden states calls it': ['mlp']" in said


def test_a_model_with_a_plan_inside_speaks_for_its_own_modules_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hf_families = pytest.importorskip("hf_families", reason="transformers is not installed")
    inner = hf_families.tiny_model("llama", tied=False)
    plan = {f"beside.{key}": each for key, each in get_hf_tp_shard_plan(inner).items()}
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(NeedsMask(inner), mesh_of_two(), plan | _MLP)
    (said,) = warnings_of(caplog)
    assert "['mlp']" in said
    assert "beside" not in said


class OwnError(Exception):
    pass


class NotCopied:
    def __deepcopy__(self, memo: object) -> object:
        raise OwnError


@pytest.mark.parametrize(
    "attribute", [threading.Lock(), torch.ones(1, requires_grad=True) * 2, NotCopied()]
)
def test_modules_that_cannot_be_copied_are_split_with_a_warning(
    attribute: object, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(MLP)
    model.attribute = attribute  # type: ignore[assignment]
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(model, mesh_of_two(), UP_DOWN)
    assert len(warnings_of(caplog)) == 1


def test_models_without_values_are_tried_too() -> None:
    with torch.device("meta"):
        right, wrong = MLP(), Softmax()
    with fake_world(2):
        with pytest.raises(ValueError, match=_TRIED):
            apply_tp_plan(wrong, mesh_of_two(), UP_DOWN)
        apply_tp_plan(right, mesh_of_two(), UP_DOWN)
    assert isinstance(right.up.weight, DTensor)


class WithLargeLayers(Masked):
    """Half a terabyte of layers behind others, and a head that does not run."""

    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__(inner)
        self.wide, self.narrow = nn.Linear(WIDTH, 2**20), nn.Linear(2**20, 2**17)
        self.last, self.head = nn.Linear(2**17, WIDTH), nn.Linear(2**20, 2**17)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.last(self.narrow(self.wide(super().forward(tokens))))
        return super().forward(hidden.argmax(-1))


def test_a_trial_holds_no_weights_of_the_whole_model(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        wrong, right = (WithLargeLayers(each) for each in (MaskedSoftmax, WithMask))
    with fake_world(2), caplog.at_level(logging.WARNING):
        with pytest.raises(ValueError, match=rf"'layers.0' .*{_TRIED}"):
            apply_tp_plan(wrong, mesh_of_two(), _LAYERS)
        apply_tp_plan(right, mesh_of_two(), _LAYERS)
    assert not warnings_of(caplog)


class Rotary(WithMask):
    """A buffer, which has no values on the meta device."""

    def build(self) -> None:
        self.register_buffer("angles", torch.rand(INNER // 2), persistent=False)

    def between(self, inner: Tensor) -> Tensor:
        return inner * self.angles.sum()


def test_buffers_without_values_are_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = Masked(Rotary)
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(model, mesh_of_two(), _LAYERS)
    assert not warnings_of(caplog)
