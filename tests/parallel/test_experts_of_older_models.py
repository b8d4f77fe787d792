"""Experts as transformers 4 has them: not handed out, and named with the cure; split by TP."""

from __future__ import annotations

import pytest
import torch
from expert_models import CHOICES, WIDTH, objective, tokens
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from helpers.crew import Crew
from helpers.worlds import fake_world
from meshverse.parallel import (
    ExpertParallel,
    ParallelismSizes,
    SameTokensExpertParallel,
    apply_expert_parallelism,
    clip_grad_norm_,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
)
from meshverse.parallel.styles.local_styles import CheckedStyle

_SEQUENCES, _LENGTH, _EXPERTS, _INNER = 8, 3, 4, 12


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, _INNER), nn.Linear(WIDTH, _INNER, bias=False)
        self.down = nn.Linear(_INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Sparse(nn.Module):
    """Calls the experts of a list that are chosen, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(_EXPERTS))

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = hidden_states.reshape(-1, WIDTH)
        weights, chosen = self.router(hidden).softmax(-1).topk(CHOICES)
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows, choices = torch.where(chosen == number)
            given = expert(hidden[rows]) * weights[rows, choices, None]
            output = output.index_add(0, rows, given)
        return output.view_as(hidden_states)


class AllWeights(nn.Module):
    """Stacked experts that take a weight for every expert, as GPT-OSS had them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(_EXPERTS, WIDTH, 2 * _INNER))
        self.down_proj = nn.Parameter(torch.randn(_EXPERTS, _INNER, WIDTH))

    def forward(self, hidden: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for number in range(_EXPERTS):
            rows, _ = torch.where(router_indices == number)
            gate, up = (hidden[rows] @ self.gate_up_proj[number]).chunk(2, dim=-1)
            given = (F.silu(gate) * up) @ self.down_proj[number]
            output = output.index_add(0, rows, given * routing_weights[rows, number, None])
        return output


class WithAllWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, _EXPERTS), AllWeights()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(hidden, self.router(hidden))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Sparse) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


@pytest.mark.parametrize(
    ("block", "form"),
    [
        (Sparse, "of Model is a list of modules"),
        (WithAllWeights, ": the forward of AllWeights raises IndexError"),
    ],
)
def test_they_are_not_handed_out(block: type[nn.Module], form: str) -> None:
    model = Model(block)
    before = dict(model.named_parameters())
    message = rf"(?i)layers\.0\.experts ?{form}.* use transformers 5\.0 or newer"
    with fake_world(8):
        mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(ep_size=2))
        assert moe_mesh is not None
        with pytest.raises(ValueError, match=message):
            fsdp2_strategy_parallelize(model, mesh)
        with pytest.raises(ValueError, match=message):
            apply_expert_parallelism(model, moe_mesh["ep"])
    assert {name: id(each) for name, each in model.named_parameters()} == {
        name: id(each) for name, each in before.items()
    }


@pytest.mark.parametrize("style", [ExpertParallel(), SameTokensExpertParallel()])
def test_no_style_hands_out_those_that_take_all_weights(style: CheckedStyle) -> None:
    with pytest.raises(ValueError, match=r"layer: .*AllWeights raises .* use transformers 5\.0"):
        style.check("layer", AllWeights(), 2)


def _train_split() -> None:
    """Two steps of a model whose experts a plan splits like any MLP, and of one process."""
    styles = {"gate": ColwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}
    plan = {f"layers.*.experts.*.{name}": style() for name, style in styles.items()}
    alone, model = Model().double(), Model().double()
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
    fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(), tp_shard_plan=plan)
    data = get_flat_mesh(mesh, "dp_cp")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for step in range(2):
        batch = tokens(_SEQUENCES * _LENGTH, seed=step).view(_SEQUENCES, _LENGTH, WIDTH)
        share = batch.chunk(data.size())[data.get_local_rank()]
        objective(alone(batch)).backward()
        (objective(model(share)) * data.size()).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for seen, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(seen.full_tensor(), wanted)  # type: ignore[attr-defined]


@pytest.mark.long
def test_tensor_parallelism_splits_each(crew: Crew) -> None:
    crew.run(_train_split, 4)
