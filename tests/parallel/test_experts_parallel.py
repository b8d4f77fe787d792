"""Whole experts on the ranks of a mesh: on real processes, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_models import BOUND, EXPERTS, FORMS, WIDTH, make, objective, tokens
from rounding import largest_error
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import meshverse
from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    ExpertFeaturesParallel,
    ExpertParallel,
    SameTokensExpertParallel,
)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(model: nn.Module, given: Tensor) -> dict[str, Tensor]:
    """The output, the input's gradient, and those of all parameters."""
    given = given.clone().requires_grad_()
    output = model(given)
    objective(output).backward()
    assert given.grad is not None
    seen = {"output": output.detach(), "input": given.grad}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        seen[name] = full(parameter.grad)
    return seen


def error_of(
    seen: dict[str, Tensor], expected: dict[str, Tensor], mine: slice, parts: int
) -> tuple[float, str]:
    """Return the largest relative error to one process that has all tokens, and of what.

    Args:
        seen: on this rank.
        expected: in one process.
        mine: which of the tokens are this rank's.
        parts: number of ranks whose gradients of whole parameters add up.
    """
    wanted = {}
    for name, each in expected.items():
        wanted[name] = each[:, mine] if name in ("output", "input") else each
        if name not in ("output", "input") and "experts" not in name and parts > 1:
            dist.all_reduce(seen[name])
    return largest_error(seen, wanted, floor=1e-2)


def compare_own_tokens(form: str, counts: list[int], crowded: bool) -> tuple[float, str]:
    """Each rank has tokens of its own, in the given numbers; perhaps all for two experts."""
    whole = make(form, layers=2)
    if crowded:
        with torch.no_grad():
            for layer in whole:
                layer.gate.weight[2:] = -layer.gate.weight[:1] * 1e-3
                layer.gate.weight[:2] *= 100
    split = copy.deepcopy(whole)
    mesh = meshverse.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    parallelize_module(split, mesh, {"*.experts": ExpertParallel()})
    for layer in split:
        assert layer.experts.down_proj.placements == (Shard(0),)
        assert layer.experts.down_proj.to_local().size(0) == EXPERTS // mesh.size()
    rank, given = dist.get_rank(), tokens(sum(counts))
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    seen = run(copy.deepcopy(split), given[:, mine])
    return error_of(seen, run(whole, given), mine, mesh.size())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", in_tiers([[5, 9], [7, 0, 1]], [[7, 0, 1]]), ids=str)
def test_own_tokens_equal_one_process(crew: Crew, form: str, counts: list[int]) -> None:
    for error, worst in crew.run(compare_own_tokens, len(counts), form, counts, False):
        assert error < BOUND, worst


@pytest.mark.parametrize("counts", [[5, 9], [6, 0, 0]], ids=str)
def test_experts_without_tokens_equal_one_process(crew: Crew, counts: list[int]) -> None:
    for error, worst in crew.run(compare_own_tokens, len(counts), "biases", counts, True):
        assert error < 100 * BOUND, worst  # routers' logits are 100 times as large


def errors_of_backwards(counts: list[int]) -> list[float]:
    """Return the error of the input's gradient in each of three passes through one graph."""
    whole = make("plain", layers=2)
    split = copy.deepcopy(whole)
    mesh = meshverse.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    parallelize_module(split, mesh, {"*.experts": ExpertParallel()})
    rank, given = dist.get_rank(), tokens(sum(counts))
    own = given[:, sum(counts[:rank]) : sum(counts[: rank + 1])].clone().requires_grad_()
    (expected,) = torch.autograd.grad(objective(whole(own)), own)
    output = objective(split(own))
    seen = [torch.autograd.grad(output, own, retain_graph=True)[0] for _ in range(3)]
    return [largest_error({"input": each}, {"input": expected}, floor=1e-2)[0] for each in seen]


def test_each_backward_through_a_retained_graph_equals_one_process(crew: Crew) -> None:
    for errors in crew.run(errors_of_backwards, 3, [7, 2, 1]):
        assert max(errors) < BOUND, errors


def second_order() -> None:
    mesh = meshverse.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    styles: list[ParallelStyle] = [*(each() for each in STYLES.values()), ExpertParallel(mesh)]
    for style in styles:
        model = make("biases")
        parallelize_module(model, mesh, {"*.experts": style})
        given = tokens().requires_grad_()
        before = [each for name, each in model.named_parameters() if "shared" not in name]
        for wanted in (given, *before):
            # The residual is a path on which a second pass meets no experts.
            output = objective(given.tanh() + model(given))
            with pytest.raises(RuntimeError, match="second-order gradients would lack the terms"):
                torch.autograd.grad(output, wanted, create_graph=True)
        (first,) = torch.autograd.grad(objective(model(given)), given)
        assert not first.requires_grad


def test_second_order_gradients_raise(crew: Crew) -> None:
    crew.run(second_order, 2)


def compare_same_tokens(kind: str, form: str, ep_size: int) -> tuple[float, str]:
    """Ranks of a tensor-parallel mesh have the same tokens, which are nine or one."""
    size = dist.get_world_size()
    whole = make(form, layers=2)
    split = copy.deepcopy(whole)
    tp = meshverse.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    shape = (size // ep_size, ep_size)
    names = ("ep_shard", "ep")
    moe = meshverse.init_device_mesh("cpu", shape, mesh_dim_names=names, universe=tp.universe)
    if kind == "same":
        style: Any = SameTokensExpertParallel()
    else:
        style = ExpertParallel(same_tokens=tp["tp"])
    parallelize_module(split, moe["ep"], {"*.experts": style})
    given = tokens(10)
    mine = [slice(0, 9), slice(9, 10)][tp["dp"].get_local_rank()]
    if kind == "same":
        mine = slice(0, 10)
    seen = run(split, given[:, mine])
    # Copies of an expert, and ranks of another share, add up to the gradient of one process.
    for name, gradient in seen.items():
        if "experts" in name and kind != "same":
            dist.all_reduce(gradient, group=moe.get_group("ep_shard"))
        elif name not in ("output", "input") and kind != "same":
            dist.all_reduce(gradient, group=tp.get_group("dp"))
    return error_of(seen, run(whole, given), mine, 1)


@pytest.mark.parametrize("form", FORMS)
def test_same_tokens_equal_one_process(crew: Crew, form: str) -> None:
    for error, worst in crew.run(compare_same_tokens, 2, "same", form, 2):
        assert error < BOUND, worst


def test_tokens_of_tensor_parallelism_are_sent_once(crew: Crew) -> None:
    for error, worst in crew.run(compare_same_tokens, 4, "dispatch", "biases", 2):
        assert error < BOUND, worst


STYLES: dict[str, Any] = {
    "dispatch": ExpertParallel,
    "same": SameTokensExpertParallel,
    "features": ExpertFeaturesParallel,
}


def compare_compiled(kind: str) -> float:
    """Return the largest error of compiled layers, also with another number of tokens."""
    mesh = meshverse.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model = make("biases", layers=2)
    parallelize_module(model, mesh, {"*.experts": STYLES[kind]()})
    compiled = copy.deepcopy(model)
    for layer in compiled:
        layer.compile(backend="aot_eager")
    errors = []
    for count in (10, 7):
        for each in (model, compiled):
            each.zero_grad()
        given = tokens(count, seed=dist.get_rank() if kind == "dispatch" else 0)
        expected, seen = run(model, given), run(compiled, given)
        errors.append(largest_error(seen, expected, floor=1e-2)[0])
    return max(errors)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=pytest.mark.sweep if each == "features" else ()) for each in STYLES],
)
def test_compiled_layers_equal_those_that_are_not(crew: Crew, kind: str) -> None:
    assert max(crew.run(compare_compiled, 2, kind)) < BOUND


class TakesRows(nn.Module):
    """Experts that take equally many rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(4, WIDTH, 6))
        self.down_proj = nn.Parameter(torch.randn(4, 6, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        by_expert = hidden.view(len(self.down_proj), -1, WIDTH)
        return ((by_expert @ self.up_proj).sin() @ self.down_proj).view(-1, WIDTH)


@pytest.mark.parametrize("kind", in_tiers(["dispatch", "same"], ["dispatch"]))
def test_rows_that_experts_cannot_share_are_refused(kind: str) -> None:
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        experts = parallelize_module(TakesRows(), mesh, STYLES[kind]())
        with pytest.raises(ValueError, match="called with 9 rows, which 4 experts cannot share"):
            experts(torch.randn(9, WIDTH))


@pytest.mark.parametrize("style", [ExpertParallel(), SameTokensExpertParallel()])
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Linear(2, 2),
            r"layer: \w+\(\) needs a module with experts .* Linear with \['weight', 'bias'\]",
        ),
        (make("plain")[0], r"layer: .*\['gate.weight', 'experts.gate_up_proj'"),
        (make("plain")[0].experts, "layer: its 6 experts are not divisible by the 4 ranks"),
    ],
)
def test_what_cannot_be_handed_out_is_refused(style: Any, module: nn.Module, message: str) -> None:
    before = dict(module.named_parameters())
    with pytest.raises(ValueError, match=message):
        style.check("layer", module, 4)
    assert before == dict(module.named_parameters())
    assert WIDTH == 8
