"""Gradients of experts and of other parameters are divided alike, by whatever a user sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_models import WIDTH, Model, tokens
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse.parallel import (
    ParallelismSizes,
    Replicated,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
)

_SEQUENCES, _LENGTH = 24, 2
_PLAN = {
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    **dict.fromkeys(("layers.*.norm", "layers.*.mlp"), Replicated()),
}

# Numbers of ranks, and degrees.
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 2 x 2 shards": (4, {"ep_size": 2}),
    "ep 2, tp 2": (4, {"ep_size": 2, "tp_size": 2}),
    "ep 2, tp 2, one share": (2, {"ep_size": 2, "tp_size": 2}),
    "ep 2, 2 replicas": (4, {"ep_size": 2, "dp_replicate_size": 2}),
    "ep 2, 2 replicas of 2 shards": (8, {"ep_size": 2, "dp_replicate_size": 2}),
    "ep 2 x 3 shards": (6, {"ep_size": 2}),
}

# Precision of a model and of its sums, and how close gradients must be.
KINDS: dict[str, tuple[torch.dtype, torch.dtype | None, float]] = {
    "float64": (torch.float64, None, 1e-10),
    "float32": (torch.float32, None, 1e-4),
    "float16 sums": (torch.float32, torch.float16, 2e-2),
}


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    """Return a sum over tokens: the trainer divides it by the number of all tokens."""
    return (output.sin() * torch.linspace(-1, 1, WIDTH, dtype=output.dtype)).sum() + 0 * batch.sum()


def error_of(sizes: dict[str, int], kind: str, factor: float | None) -> float:
    """Return the largest relative error of a gradient, after a loss per token.

    With a factor, all of FSDP2's modules get it, as in a trainer whose loss is divided by the
    number of tokens of all ranks; without it, gradients are averages over the ranks.
    """
    dtype, reduced, _ = KINDS[kind]
    alone, model = Model().to(dtype), Model().to(dtype)
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    fsdp2_strategy_parallelize(
        model, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced), tp_shard_plan=_PLAN
    )
    data = get_flat_mesh(mesh, "dp_cp")
    for module in model.modules():
        if isinstance(module, FSDPModule) and factor is not None:
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(dtype == torch.float32 and reduced is None)
    batch = tokens(_SEQUENCES * _LENGTH).view(_SEQUENCES, _LENGTH, WIDTH).to(dtype)
    share = batch.chunk(data.size())[data.get_local_rank()]
    (loss_of(alone(batch), batch) / _SEQUENCES).backward()
    (
        loss_of(model(share), share) / _SEQUENCES * (data.size() if factor is None else factor)
    ).backward()
    errors = []
    for seen, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        gradient: Any = seen.grad
        assert isinstance(gradient, DTensor)
        assert wanted.grad is not None
        difference = (gradient.full_tensor() - wanted.grad).norm() / wanted.grad.norm()
        errors.append(difference.item())
    return max(errors)


_CASES = [(mesh, kind, factor) for mesh in MESHES for kind in KINDS for factor in (None, 1.0)]
_SHORT = [("ep 2, tp 2", "float64", 1.0)]


@pytest.mark.parametrize(("mesh", "kind", "factor"), in_tiers(_CASES, _SHORT, _CASES[::5]))
def test_gradients_equal_one_process(
    crew: Crew, mesh: str, kind: str, factor: float | None
) -> None:
    ranks, sizes = MESHES[mesh]
    for error in crew.run(error_of, ranks, sizes, kind, factor):
        assert error < KINDS[kind][2]
