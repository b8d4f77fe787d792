"""Experts that are lists of modules, as in transformers 4, handed out to ranks."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from expert_models import CHOICES, WIDTH, objective, tokens
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from helpers.crew import Crew
from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse.parallel import (
    ParallelismSizes,
    apply_expert_parallelism,
    clip_grad_norm_,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    get_total_norm,
)

_SEQUENCES, _LENGTH, _EXPERTS, _INNER = 8, 3, 4, 12
_EXACT = MixedPrecisionPolicy()


class Expert(nn.Module):
    def __init__(self, inner: int = _INNER) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Sparse(nn.Module):
    """Calls the experts that are chosen, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(_EXPERTS))
        self.shared = Expert()

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(hidden).softmax(-1).topk(CHOICES)
        return chosen, weights

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden_states.reshape(-1, WIDTH)
        chosen, weights = self.route(hidden)
        output = torch.zeros_like(hidden)
        for number in chosen.unique():
            rows, choices = torch.where(chosen == number)
            given = self.experts[number](hidden[None, rows].reshape(-1, WIDTH))
            output.index_add_(0, rows, given * weights[rows, choices, None])
        output = output + self.shared(hidden)
        return output.view_as(hidden_states), weights


class Told(Sparse):
    """Has a method that is told the experts, of which the last two hand tokens on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, _EXPERTS + 2, bias=False)
        self.experts.extend([nn.Identity(), nn.Identity()])

    def moe(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows, choices = torch.where(chosen == number)
            if len(rows):
                given = expert(hidden[rows]) * weights[rows, choices, None]
                output.index_add_(0, rows, given)
        return output

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden_states.reshape(-1, WIDTH)
        output = self.moe(hidden, *self.route(hidden)) + self.shared(hidden)
        return output.view_as(hidden_states), output


class Jittery(Sparse):
    jitter_noise = 0.1


for _block in (Sparse, Told, Jittery):  # what is known of transformers' models
    _block.__module__ = "transformers.models.made_up.modeling_made_up"


class Elsewhere(Sparse):
    """Nobody knows how it calls its experts."""


class Model(nn.Module):
    def __init__(self, block: type[Sparse]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return hidden


_BLOCKS: dict[str, type[Sparse]] = {"called one by one": Sparse, "told": Told}
_MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 4": (4, {"ep_size": 4}),
    "ep 2 x 2 shards": (4, {"ep_size": 2}),
    "ep 2 x tp 2": (4, {"ep_size": 2, "tp_size": 2}),
}


def _plan() -> dict[str, ParallelStyle]:
    """Of tensor parallelism: for experts too, which are handed out instead."""
    styles: dict[str, ParallelStyle] = {}
    for owner in ("layers.*.shared", "layers.*.experts.*"):
        styles |= {f"{owner}.{name}": ColwiseParallel() for name in ("gate", "up")}
        styles[f"{owner}.down"] = RowwiseParallel()
    return styles


def _shard(model: nn.Module, sizes: dict[str, int], **settings: Any) -> Any:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    plan = _plan() if sizes.get("tp_size", 1) > 1 else None
    fsdp2_strategy_parallelize(model, mesh, mp_policy=_EXACT, tp_shard_plan=plan, **settings)
    return get_flat_mesh(mesh, "dp_cp")


def _gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def _compare(name: str, sizes: dict[str, int], settings: dict[str, Any], same: bool) -> list[str]:
    """Two steps of a model and of one process; all tokens are the same in one case."""
    alone, model = Model(_BLOCKS[name]).double(), Model(_BLOCKS[name]).double()
    names = [name for name, _ in model.named_parameters()]
    data = _shard(model, sizes, **settings)
    assert [name for name, _ in model.named_parameters()] == names
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    rows = _SEQUENCES // data.size()
    share = slice(data.get_local_rank() * rows, (data.get_local_rank() + 1) * rows)
    for step in range(2):
        batch = tokens(_SEQUENCES * _LENGTH, seed=step).view(_SEQUENCES, _LENGTH, WIDTH)
        batch = batch[:1, :1].expand_as(batch) if same else batch
        expected, output = alone(batch), model(batch[share])
        torch.testing.assert_close(output, expected[share])
        objective(expected).backward()
        (objective(output) * data.size()).backward()
        largest = torch.nn.utils.get_total_norm(_gradients(alone), float("inf"))
        torch.testing.assert_close(get_total_norm(_gradients(model), "inf"), largest)  # type: ignore[arg-type]
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for seen, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(seen, DTensor)
        torch.testing.assert_close(seen.full_tensor(), wanted)
    weight: Any = model.get_parameter("layers.0.experts.1.down.weight")
    return list(weight.device_mesh.mesh_dim_names)


@pytest.mark.parametrize("name", _BLOCKS)
@pytest.mark.parametrize("mesh", _MESHES)
def test_training_equals_one_process(four: Crew, mesh: str, name: str) -> None:
    ranks, sizes = _MESHES[mesh]
    for axes in four.run(_compare, ranks, name, sizes, {}, False):
        assert axes[-1] == "ep"


@pytest.mark.parametrize("name", _BLOCKS)
def test_experts_and_ranks_without_tokens(four: Crew, name: str) -> None:
    four.run(_compare, 4, name, {"ep_size": 4}, {}, True)


@pytest.mark.parametrize("name", _BLOCKS)
def test_layers_may_run_again_in_backward(four: Crew, name: str) -> None:
    four.run(_compare, 2, name, {"ep_size": 2}, {"activation_checkpointing": True}, False)


def _saved(folder: str, name: str) -> float:
    model, other = Model(_BLOCKS[name]).double(), Model(_BLOCKS[name]).double()
    whole = copy.deepcopy(model.state_dict())
    _shard(model, {"ep_size": 2})
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    loaded = {key: torch.zeros_like(each) for key, each in other.state_dict().items()}
    checkpoint.load(loaded, checkpoint_id=folder)
    return max((loaded[key] - each).abs().max().item() for key, each in whole.items())


@pytest.mark.parametrize("name", _BLOCKS)
def test_checkpoint_is_that_of_one_process(four: Crew, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert max(four.run(_saved, 4, str(Path(folder) / "checkpoint"), name)) == 0


def _copied(name: str) -> None:
    model = Model(_BLOCKS[name]).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    assert apply_expert_parallelism(model, mesh) == ["layers.0.experts", "layers.1.experts"]
    alone, copied = Model(_BLOCKS[name]).double(), copy.deepcopy(model)
    batch = tokens(4).view(2, 2, WIDTH)
    expected = alone(batch)
    with torch.no_grad():
        for parameter in (*alone.parameters(), *copied.parameters()):
            parameter.zero_()
    torch.testing.assert_close(copied(batch), alone(batch))
    torch.testing.assert_close(model(batch), expected)


@pytest.mark.parametrize("name", _BLOCKS)
def test_a_copy_runs_on_its_own_experts(four: Crew, name: str) -> None:
    four.run(_copied, 2, name)


def _different() -> Model:
    model = Model(Sparse)
    model.layers[1].experts[2] = Expert(2 * _INNER)
    return model


@pytest.mark.parametrize(
    ("model", "ep_size", "message"),
    [
        (Model(Elsewhere), 2, r"layers\.0\.experts is a list of modules, which Elsewhere may call"),
        (Model(Jittery), 2, r"Jittery changes its input at random, by jitter_noise=0\.1"),
        (Model(Sparse), 8, r"layers\.0\.experts: its 4 experts do not divide by the 8 ranks"),
        (_different(), 2, r"layers\.1\.experts: its experts have parameters of different shapes"),
    ],
)
def test_what_cannot_be_handed_out_is_refused(model: Model, ep_size: int, message: str) -> None:
    before = dict(model.named_parameters())
    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(ep_size=ep_size))
        with pytest.raises(ValueError, match=message):
            fsdp2_strategy_parallelize(model, mesh)
    assert dict(model.named_parameters()) == before
