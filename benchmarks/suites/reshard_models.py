"""Trainers' models and generators' tensors of the suite on copying weights, on real process groups.

Nothing here computes: the parameters are copied, laid out as trainers and generators do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

import meshverse

__all__ = ["Case", "Job", "own_part"]

_TP, _EP = 2, 2
_EXPERTS = 8


@dataclass(frozen=True)
class Case:
    """A model to reshard, and between which ranks.

    Attributes:
        name: in tables.
        has_experts: whether the blocks have stacked experts in place of a dense MLP.
        trainers: ranks; FSDP2 + TP, or FSDP2 with experts split over an axis of their own.
        generators: ranks; TP in replicas, or experts split over ranks and TP.
        blocks: how many.
        hidden: size.
        intermediate: size, of an expert where there are some.
        vocabulary: size.
    """

    name: str
    has_experts: bool
    trainers: tuple[int, ...]
    generators: tuple[int, ...]
    blocks: int = 16
    hidden: int = 256
    intermediate: int = 1024
    vocabulary: int = 4096


class Job:
    """One case on this rank: what it gives, wants, and has to have got."""

    def __init__(self, case: Case, rank: int) -> None:
        trainer_axes, generator_axes = (
            (("efsdp", "ep"), ("ep", "tp")) if case.has_experts else (("dp", "tp"), ("dp", "tp"))
        )
        split = _EP if case.has_experts else _TP
        self.case, self.rank = case, rank
        self.trainer = _mesh(case.trainers, split, trainer_axes)
        is_same = (case.trainers, trainer_axes) == (case.generators, generator_axes)
        self.generator = self.trainer if is_same else _mesh(case.generators, _TP, generator_axes)
        torch.manual_seed(7)
        model = _Model(case)
        wholes = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.shapes = {name: whole.shape for name, whole in wholes.items()}
        self.source: dict[str, Tensor] | None = None
        self.target: dict[str, DTensor] | None = None
        if rank in case.trainers:
            shard = _shard_with_experts if case.has_experts else _shard_dense
            shard(model, self.trainer)
            self.source = {name: p.detach() for name, p in model.named_parameters()}
        if rank in case.generators:
            self._expected = {
                name: self.own_part(whole, name, rank).clone() for name, whole in wholes.items()
            }
            self.target = {
                name: DTensor.from_local(
                    torch.zeros_like(self._expected[name]), self.generator, self.placements(name)
                )
                for name in wholes
            }

    def placements(self, name: str) -> list[Placement]:
        """Return the generator's layout of a parameter."""
        over_tp = _over_tp(name)
        is_expert = self.case.has_experts and ".experts." in name
        return [Shard(0) if is_expert else Replicate(), over_tp]

    def own_part(self, whole: Tensor, name: str, rank: int) -> Tensor:
        """Return a generator rank's part of a whole parameter, as a view."""
        index = self.case.generators.index(rank)
        coordinate = (index // _TP, index % _TP)
        return own_part(whole, tuple(self.generator.shape), self.placements(name), coordinate)

    def forget(self) -> None:
        """Set the targets to zero."""
        for tensor in (self.target or {}).values():
            tensor.to_local().zero_()

    def check(self, side: str) -> None:
        """Raise AssertionError unless the targets are right in every bit."""
        for name, tensor in (self.target or {}).items():
            got, expected = (t.view(torch.int32) for t in (tensor.to_local(), self._expected[name]))
            assert torch.equal(got, expected), f"{side} gives rank {self.rank} another {name}"

    @property
    def wanted_bytes(self) -> int:
        """Bytes of this rank's targets."""
        return sum(tensor.to_local().nbytes for tensor in (self.target or {}).values())


def own_part(
    whole: Tensor,
    shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Tensor:
    """One rank's part of a tensor whose sizes all divide.

    FSDP2 splits what tensor parallelism has split, but is the first axis: its strided placements
    are read from the last axis to the first.
    """
    axes: Iterable[int] = range(len(shape))
    if any(hasattr(placement, "split_factor") for placement in placements):
        axes = reversed(range(len(shape)))
    for axis in axes:
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:
            whole = whole.chunk(shape[axis], dim)[coordinate[axis]]
    return whole


class _Experts(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        hidden, inner = case.hidden, case.intermediate
        self.gate_up = nn.Parameter(torch.randn(_EXPERTS, 2 * inner, hidden))
        self.down = nn.Parameter(torch.randn(_EXPERTS, hidden, inner))


class _Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        hidden, inner = case.hidden, case.intermediate
        self.norm = nn.RMSNorm(hidden)
        nn.init.normal_(self.norm.weight)  # ones could come from anywhere
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))
        if case.has_experts:
            self.router = nn.Linear(hidden, _EXPERTS, bias=False)
            self.experts = _Experts(case)
        else:
            self.gate = nn.Linear(hidden, inner, bias=False)
            self.up = nn.Linear(hidden, inner, bias=False)
            self.down = nn.Linear(inner, hidden, bias=False)


class _Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.hidden)
        self.blocks = nn.ModuleList(_Block(case) for _ in range(case.blocks))
        self.head = nn.Linear(case.hidden, case.vocabulary, bias=False)


_BY_ROW = {"embedding", "q", "k", "v", "gate", "up", "head"}


def _over_tp(name: str) -> Placement:
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in _BY_ROW or part == "gate_up":
        return Shard(1 if part == "gate_up" else 0)
    if part in ("o", "down"):
        return Shard(2 if ".experts." in name else 1)
    return Replicate()


def _mesh(ranks: tuple[int, ...], split: int, names: tuple[str, str]) -> Any:
    return meshverse.init_device_mesh(
        "cpu", (len(ranks) // split, split), mesh_dim_names=names, ranks=list(ranks)
    )


def _shard_dense(model: _Model, mesh: Any) -> None:
    plan: dict[str, Any] = {"embedding": RowwiseParallel(), "head": ColwiseParallel()}
    for name in ("q", "k", "v", "gate", "up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("o", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def _shard_with_experts(model: _Model, mesh: Any) -> None:
    together = mesh._flatten("fsdp")
    for block in model.blocks:
        assert isinstance(block, _Block)
        for name, p in list(block.experts.named_parameters()):
            over_ep = distribute_tensor(p.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
            block.experts.register_parameter(name, nn.Parameter(over_ep))
        fully_shard(block.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
        fully_shard(block, mesh=together)
    fully_shard(model, mesh=together)
