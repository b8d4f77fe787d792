"""Experts of a user's own: split in every way as in one process, or refused before any change."""

from __future__ import annotations

import copy
import re
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_models import BOUND, objective, tokens
from own_experts import (
    NO_FEATURES,
    NO_PARTS,
    OWN,
    Counts,
    Dropout,
    KeepsLast,
    MixesExperts,
    OtherInTheMiddle,
    Own,
    make,
)
from rounding import largest_error
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import meshverse
from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    ExpertFeaturesParallel,
    ExpertParallel,
    ParallelismSizes,
    SameTokensExpertParallel,
    apply_expert_parallelism,
    apply_tp_plan,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
)

STYLES: dict[str, Any] = {
    "dispatch": ExpertParallel,
    "same tokens": SameTokensExpertParallel,
    "features": ExpertFeaturesParallel,
}
WHOLE = ("dispatch", "same tokens")


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


def compare(style: str, name: str, counts: list[int]) -> tuple[float, str]:
    """Return the largest error; with "dispatch", each rank has tokens of its own."""
    whole = make(OWN[name])
    split = copy.deepcopy(whole)
    mesh = meshverse.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    parallelize_module(split, mesh, {"*.experts": STYLES[style]()})
    given, rank = tokens(sum(counts)), dist.get_rank()
    mine = slice(None)
    if style == "dispatch":
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    seen, expected = run(copy.deepcopy(split), given[:, mine]), run(whole, given)
    expected |= {each: expected[each][:, mine] for each in ("output", "input")}
    if style == "dispatch":
        for each in ("0.router.weight", "1.router.weight"):
            dist.all_reduce(seen[each])
    return largest_error(seen, expected, floor=1e-2)


@pytest.mark.parametrize("name", in_tiers(OWN, [*OWN][::4]))
@pytest.mark.parametrize("style", STYLES)
def test_own_forwards_equal_one_process(crew: Crew, style: str, name: str) -> None:
    for error, worst in crew.run(compare, 2, style, name, [5, 9]):
        assert error < BOUND, worst


_ON_MORE_RANKS = [(style, name) for style in STYLES for name in OWN]


@pytest.mark.long
@pytest.mark.parametrize(("style", "name"), in_tiers(_ON_MORE_RANKS, _ON_MORE_RANKS[::4], []))
def test_own_forwards_equal_one_process_on_more_ranks(crew: Crew, style: str, name: str) -> None:
    for error, worst in crew.run(compare, 4, style, name, [3, 0, 1, 6]):
        assert error < BOUND, worst


def refusal(model: nn.Module, style: str, size: int = 2) -> str:
    """The message with which a style refuses a model, which it has not changed."""
    before = {name: id(each) for name, each in model.named_parameters()}
    state = [dict(vars(each)) for each in model.modules()]
    mesh = meshverse.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match=r"1\.experts: ") as refused:
        apply_tp_plan(model, mesh, {"1.experts": STYLES[style]()})
    assert {name: id(each) for name, each in model.named_parameters()} == before
    assert [dict(vars(each)) for each in model.modules()] == state
    return str(refused.value)


@pytest.mark.parametrize("name", NO_PARTS)
@pytest.mark.parametrize("style", WHOLE)
def test_what_cannot_be_run_on_some_experts_is_refused(style: str, name: str) -> None:
    kind, message = NO_PARTS[name]
    with fake_world(2):
        text = refusal(make(kind), style)
        assert name in text
        assert message in text


def test_the_experts_of_each_rank_are_tried() -> None:
    with fake_world(4):
        text = refusal(make(OtherInTheMiddle), "dispatch", 4)
    assert "OtherInTheMiddle cannot be run on 1 of its 4 experts: it gives other outputs" in text


@pytest.mark.parametrize("name", NO_PARTS)
def test_ep_size_refuses_it_by_name(name: str) -> None:
    kind, message = NO_PARTS[name]
    model = make(kind)
    before = {name: id(each) for name, each in model.named_parameters()}
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(ep_size=2))
        with pytest.raises(ValueError, match=f"0.experts: .*{name}.*{re.escape(message)}"):
            fsdp2_strategy_parallelize(model, mesh)
    assert {name: id(each) for name, each in model.named_parameters()} == before


@pytest.mark.parametrize("name", NO_FEATURES)
def test_what_cannot_be_run_on_some_features_is_refused(name: str) -> None:
    with fake_world(2):
        text = refusal(make(NO_FEATURES[name]), "features")
        assert name in text
        assert "ExpertParallel()" in text


class MoreDropout(Dropout):
    p = 0.5


class CountsCalls(Own):
    """Counts its calls in containers, and changes torch's random states."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.by_name = [0], {"calls": [0]}
        self.kept = (torch.ones(1, requires_grad=True) * 2, {0})  # no leaf, as after a forward

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        self.calls[0] += 1
        self.by_name["calls"].append(len(self.by_name))
        self.kept[1].add(self.calls[0])
        torch.rand(1)
        return super().forward(hidden, expert_ids, weights)


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        *(
            (kind, style)
            for kind in (MoreDropout, CountsCalls)
            for style in ("dispatch", "features")
        ),
        *((Dropout, style) for style in STYLES),
        *((Counts, "features"), (KeepsLast, "features")),
    ],
)
def test_what_ranks_do_alike_is_no_obstacle(kind: type[nn.Module], style: str) -> None:
    model = make(kind)
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        apply_tp_plan(model, mesh, {"*.experts": STYLES[style]()})
    assert all(isinstance(each, DTensor) for each in model.get_submodule("0.experts").parameters())


@pytest.mark.parametrize("style", STYLES)
def test_a_trial_leaves_what_a_forward_changes(style: str) -> None:
    model, mixes = make(CountsCalls), make(MixesExperts)
    model.register_module("2", mixes.get_submodule("0"))  # is refused, after the others were tried
    state = torch.get_rng_state()
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        refused = pytest.raises(ValueError, match=r"MixesExperts|draws random numbers")
        with nullcontext() if style == "features" else refused:
            apply_tp_plan(model, mesh, {"*.experts": STYLES[style]()})
    for each in ("0.experts", "1.experts"):
        experts: Any = model.get_submodule(each)
        assert (experts.calls, experts.by_name, experts.kept[1]) == ([0], {"calls": [0]}, {0})
    assert torch.equal(torch.get_rng_state(), state)


def test_experts_that_a_trial_cannot_copy_are_refused() -> None:
    model = make(Own)
    model.get_submodule("1.experts").lock = threading.Lock()
    with fake_world(2):
        assert "a trial cannot copy the attributes of Own" in refusal(model, "dispatch")


def test_dropout_in_whole_experts_is_refused_if_ranks_share_tokens() -> None:
    with fake_world(2):
        assert "MoreDropout draws random numbers" in refusal(make(MoreDropout), "same tokens")
        model, state = make(MoreDropout), torch.get_rng_state()
        mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2, ep_size=2))
        with pytest.raises(
            ValueError, match=r"0\.experts: the forward of MoreDropout draws random"
        ):
            apply_expert_parallelism(model, moe_mesh["ep"], same_tokens=mesh["tp"])
        plan: dict[str, Any] = {}
        with pytest.raises(
            ValueError, match=r"0\.experts: the forward of MoreDropout draws random"
        ):
            fsdp2_strategy_parallelize(model, mesh, moe_mesh=moe_mesh, tp_shard_plan=plan)
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        assert torch.equal(torch.get_rng_state(), state)  # of the trial's draws, none is left
        apply_expert_parallelism(model, moe_mesh["ep"])  # each rank has tokens of its own


def test_ep_size_refuses_hooks_of_gradients() -> None:
    model = make(Own)
    model.get_submodule("1.experts").get_parameter("down_proj").register_hook(torch.tanh)
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(ep_size=2))
        with pytest.raises(
            ValueError, match=r"'1.experts.down_proj', which has hooks of its gradient"
        ):
            fsdp2_strategy_parallelize(model, mesh)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def test_ep_size_refuses_layers_that_share_weights() -> None:
    model = make(Own)
    first, second = (model.get_submodule(f"{each}.experts") for each in range(2))
    second.register_parameter("down_proj", first.get_parameter("down_proj"))
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(ep_size=2))
        with pytest.raises(ValueError, match=r"1.experts.down_proj is the same parameter as 0.exp"):
            fsdp2_strategy_parallelize(model, mesh)
    assert second.down_proj is first.down_proj
    assert not any(isinstance(each, DTensor) for each in model.parameters())
