"""Stacked experts split by their features: on real processes, against one process."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from expert_models import BOUND, EXPERTS, FORMS, INNER, Experts, make, objective, tokens
from rounding import largest_error
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

import meshverse
from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse.parallel.experts.features import ExpertFeaturesParallel
from meshverse.parallel.tensor_parallel.apply import apply_tp_plan


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plan() -> dict[str, ParallelStyle]:
    return {"*.experts": ExpertFeaturesParallel()}


def run(model: nn.Module) -> dict[str, Tensor]:
    """The output, the input's gradient, and those of all parameters."""
    given = tokens().requires_grad_()
    output = model(given)
    objective(output).backward()
    assert given.grad is not None
    seen = {"output": output.detach(), "input": given.grad}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        seen[name] = full(parameter.grad)
    return seen


def compare(form: str) -> tuple[float, set[str]]:
    """Return the largest relative error, and the parameters that are split."""
    whole = make(form)
    split = copy.deepcopy(whole)
    mesh = meshverse.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    apply_tp_plan(split, mesh, plan())
    copied = copy.deepcopy(split)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(full(split.get_parameter(name)), parameter, rtol=0, atol=0)
    expected = run(whole)
    seen, again = run(split), run(copied)
    worst, _ = largest_error(seen, expected, floor=1e-2)
    assert all(torch.equal(again[name], each) for name, each in seen.items())
    return worst, {n for n, each in split.named_parameters() if isinstance(each, DTensor)}


def errors_of_backwards() -> list[float]:
    """Return the largest error of the weights' gradients in each of three passes of one graph."""
    whole = make("plain")
    split = copy.deepcopy(whole)
    mesh = meshverse.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    apply_tp_plan(split, mesh["tp"], plan())
    expected = torch.autograd.grad(objective(whole(tokens())), [*whole.parameters()])
    names = [name for name, _ in whole.named_parameters()]
    output, errors = objective(split(tokens())), []
    for _ in range(3):
        seen = torch.autograd.grad(output, [*split.parameters()], retain_graph=True)
        by_name = dict(zip(names, map(full, seen), strict=True))
        errors.append(largest_error(by_name, dict(zip(names, expected, strict=True)), 1e-2)[0])
    return errors


def test_each_backward_through_a_retained_graph_equals_one_process(crew: Crew) -> None:
    for errors in crew.run(errors_of_backwards, 4):
        assert max(errors) < BOUND, errors


@pytest.mark.parametrize("ranks", in_tiers([2, 3, 4], [2]))
@pytest.mark.parametrize("form", FORMS)
def test_experts_equal_one_process(crew: Crew, form: str, ranks: int) -> None:
    for worst, split in crew.run(compare, ranks, form):
        assert worst < BOUND
        assert all("experts" in name for name in split)
        assert len(split) == len([name for name, _ in make(form)[0].experts.named_parameters()])


def restore(folder: str, transposed: bool) -> float:
    """Return the largest relative error under TP and FSDP2; what is saved must be exact."""
    form = "transposed" if transposed else "biases"
    world = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make(form)
    apply_tp_plan(model, world["tp"], plan())
    fully_shard(model, mesh=world["dp"])
    before = run(model)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    loaded = {name: torch.zeros_like(each) for name, each in make(form).state_dict().items()}
    checkpoint.load({"model": loaded}, checkpoint_id=folder)
    whole = make(form)
    for name, each in whole.state_dict().items():
        assert torch.equal(loaded[name], each), name
    return largest_error(before, run(whole), floor=1e-2)[0]


@pytest.mark.parametrize("transposed", [False, True])
def test_checkpoint_of_experts_under_fsdp2_is_that_of_one_process(
    crew: Crew, transposed: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "checkpoint")
        assert max(crew.run(restore, 4, path, transposed)) < BOUND


@pytest.mark.parametrize(
    ("module", "size", "message"),
    [
        (nn.Linear(2, 2), 2, r"layer: ExpertFeaturesParallel\(\) needs a module with experts"),
        (make("plain")[0].experts, 5, f"layer: the {INNER} inner features .* 5 ranks"),
    ],
)
def test_what_cannot_be_split_is_refused(module: nn.Module, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertFeaturesParallel().check("layer", module, size)


class AtOnce(Experts):
    """All experts on all tokens, and the gate once, as in transformers' grouped_mm."""

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        features = torch.einsum("td,efd->tef", hidden, self.gate_up_proj)
        rows = torch.einsum("tef,edf->ted", self.gated_by(features), self.down_proj)
        weights = F.one_hot(top_k_index, EXPERTS).to(rows.dtype) * top_k_weights[..., None]
        return (rows * weights.sum(1)[..., None]).sum(1)

    def gated_by(self, features: Tensor) -> Tensor:
        return self._apply_gate(features)


class ItsOwnGate(AtOnce):
    def gated_by(self, features: Tensor) -> Tensor:
        gate, up = features.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class GateAndMore(AtOnce):
    """Gets the features of its gate from elsewhere, too."""

    def gated_by(self, features: Tensor) -> Tensor:
        return self._apply_gate(features) + features.chunk(2, dim=-1)[1]


class GateOfEach(AtOnce):
    def gated_by(self, features: Tensor) -> Tensor:
        return torch.stack([self._apply_gate(each) for each in features.unbind(1)], 1)


def with_experts(kind: type[Experts]) -> nn.Module:
    """A layer whose experts have a class, and a config with transformers' default for them."""
    model = make("plain")
    experts = model.get_submodule("0.experts")
    experts.__class__ = kind
    experts.config._experts_implementation = "grouped_mm"
    return model


def compare_gates(kind: type[Experts]) -> tuple[float, str]:
    """Return the largest error, and the error if the forward is then replaced."""
    whole = with_experts(kind)
    split = copy.deepcopy(whole)
    mesh = meshverse.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    apply_tp_plan(split, mesh, plan())
    expected, first = run(whole), run(copy.deepcopy(split))
    experts = split.get_submodule("0.experts")
    experts.config._experts_implementation = "batched_mm"  # as generate() does
    worst = max(largest_error(seen, expected, floor=1e-2)[0] for seen in (first, run(split)))
    experts.__class__ = ItsOwnGate
    refusal = ""
    try:
        split(tokens())
    except RuntimeError as error:
        refusal = str(error)
    return worst, refusal


@pytest.mark.parametrize("kind", [AtOnce, ItsOwnGate, GateAndMore, GateOfEach])
def test_the_module_tells_whether_its_forward_calls_the_gate(
    crew: Crew, kind: type[Experts]
) -> None:
    for worst, refusal in crew.run(compare_gates, 2, kind):
        assert worst < BOUND
        # Only what ranks exchange at the gate is wrong without a call of it.
        assert ("ItsOwnGate called _apply_gate 0 times" in refusal) == (kind is AtOnce)
