"""Choices that are of no expert: padding, or tokens beyond an expert's capacity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_models import BOUND
from rounding import largest_error
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from helpers.crew import Crew
from meshverse import init_device_mesh
from meshverse.parallel import (
    ExpertFeaturesParallel,
    ExpertParallel,
    SameTokensExpertParallel,
)

_STYLES = {
    "tokens are sent": ExpertParallel,
    "same tokens": SameTokensExpertParallel,
    "features": ExpertFeaturesParallel,
}


class _Experts(nn.Module):
    """Runs its 8 experts one by one, so that ids of none of them give nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(8, 12, 6, dtype=torch.double))
        self.down_proj = nn.Parameter(torch.randn(8, 6, 6, dtype=torch.double))
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for expert in range(len(self.down_proj)):
            tokens, choices = torch.where(expert_ids == expert)
            gate, up = (hidden[tokens] @ self.gate_up_proj[expert].mT).chunk(2, dim=-1)
            rows = (self.act_fn(gate) * up) @ self.down_proj[expert].mT
            output = output.index_add(0, tokens, rows * weights[tokens, choices, None])
        return output


def _run(module: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the tokens and of the router's weights."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 6, generator=generator, dtype=torch.double).requires_grad_()
    weights = torch.rand(4, 2, generator=generator, dtype=torch.double).requires_grad_()
    output = module(hidden, ids, weights)
    output.square().sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    return {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}


def _error(style: str, none: int, dtype: torch.dtype) -> tuple[float, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    module: Any = parallelize_module(nn.Sequential(_Experts()), mesh, {"0": _STYLES[style]()})
    ids = torch.tensor([[0, none], [2, 3], [none, 7], [none, none]]).to(dtype)
    return largest_error(_run(module[0], ids), _run(_Experts(), ids), floor=1e-2)


@pytest.mark.parametrize("style", _STYLES)
@pytest.mark.parametrize(
    ("none", "dtype"),
    [(8, torch.int64), (9, torch.int32), (-1, torch.int64), (8, torch.uint8)],
    ids=str,
)
def test_they_give_nothing(crew: Crew, style: str, none: int, dtype: torch.dtype) -> None:
    for error, worst in crew.run(_error, 2, style, none, dtype):
        assert error < BOUND, worst
