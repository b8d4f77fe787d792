"""Plans of several ranks: in any order, but the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from tp_models import WIDTH, mesh_of_two

from helpers.crew import Crew
from meshverse.parallel import LocalParameters, apply_tp_plan


class OfRank(ColwiseParallel):  # type: ignore[misc]
    """A style of a user's own, with what differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = dist.get_rank()


class Gated(nn.Module):
    """An MLP whose gate and up have weights of one shape."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=bias) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(self.gate(hidden).sigmoid() * self.up(hidden))
        return output


def _model(bias: bool = False) -> Gated:
    torch.manual_seed(0)
    return Gated(bias)


def _plan(names: tuple[str, ...]) -> dict[str, ParallelStyle]:
    return {name: ColwiseParallel() for name in names} | {"down": RowwiseParallel()}


def _error_in_other_orders() -> float:
    model, hidden = _model(), torch.randn(3, WIDTH)
    expected = model(hidden)
    names = ("gate", "up")
    apply_tp_plan(model, mesh_of_two(), _plan(names if dist.get_rank() == 0 else names[::-1]))
    return float((model(hidden) - expected).abs().max())


def test_the_order_of_a_plan_does_not_matter(crew: Crew) -> None:
    """As ranks iterate over a set of names in different orders."""
    for error in crew.run(_error_in_other_orders, 2):
        assert error < 1e-5


def _other_style() -> tuple[nn.Module, dict[str, ParallelStyle]]:
    layouts = {} if dist.get_rank() == 0 else {"output_layouts": Replicate()}
    plan = {"gate": ColwiseParallel(output_layouts=Replicate()), "up": ColwiseParallel(**layouts)}
    return nn.ModuleDict({"gate": nn.Linear(WIDTH, WIDTH), "up": nn.Linear(WIDTH, WIDTH)}), plan


def _other_layers() -> tuple[nn.Module, dict[str, ParallelStyle]]:
    gathered = ColwiseParallel(output_layouts=Replicate())
    return _model(), {"gate": gathered} | ({"up": gathered} if dist.get_rank() == 0 else {})


def _other_name() -> tuple[nn.Module, dict[str, ParallelStyle]]:
    """A plan that one rank would refuse by itself."""
    return _model(), _plan(("gate", "up" if dist.get_rank() == 0 else "pu"))


def _no_style() -> tuple[nn.Module, dict[str, ParallelStyle]]:
    plan: Any = _plan(("gate", "up")) | ({} if dist.get_rank() == 0 else {"up": "colwise"})
    return _model(), plan


def _other_order() -> tuple[nn.Module, dict[str, ParallelStyle]]:
    """Entries for the same modules, of which the last one is used."""
    gathered = {"*": ColwiseParallel(output_layouts=Replicate())}
    plan = _plan(("gate", "up"))
    return _model(), (plan | gathered if dist.get_rank() == 0 else gathered | plan)


def _other_model() -> tuple[nn.Module, dict[str, ParallelStyle]]:
    return _model(bias=dist.get_rank() == 0), _plan(("gate", "up"))


def _refusal(build: str) -> tuple[str, bool]:
    model, plan = globals()[build]()
    with pytest.raises(ValueError, match="cannot be split: the ranks of tensor") as refused:
        apply_tp_plan(model, mesh_of_two(), plan)
    return str(refused.value), any(isinstance(each, DTensor) for each in model.parameters())


@pytest.mark.parametrize(
    ("build", "named"),
    [
        ("_other_style", "'up by ColwiseParallel("),
        ("_other_layers", "{'rank 0': ['up by ColwiseParallel("),
        ("_other_name", "'pu by ColwiseParallel("),
        ("_no_style", "'up by str"),
        ("_other_order", "'down by ColwiseParallel("),
        ("_other_model", "{'rank 0': ['gate.bias of shape"),
    ],
)
def test_different_plans_and_models_are_refused_on_all_ranks(
    crew: Crew, build: str, named: str
) -> None:
    for said, is_split in crew.run(_refusal, 2, build):
        assert named in said
        assert not is_split


def _with_own_objects() -> None:
    """Styles whose settings are other objects in each process."""
    model = _model()
    plan = _plan(("gate", "up"))
    plan["up"].device = torch.device("cpu", dist.get_rank())  # type: ignore[attr-defined]
    plan["up"].note = lambda: None  # type: ignore[attr-defined]
    plan[""] = LocalParameters()
    plan["gate"] = OfRank()
    apply_tp_plan(model, mesh_of_two(), plan)


def test_what_differs_in_each_process_is_not_compared(crew: Crew) -> None:
    crew.run(_with_own_objects, 2)


def _with_another_default_device() -> None:
    with torch.device("meta"):
        apply_tp_plan(Gated(), mesh_of_two(), _plan(("gate", "up")))


def test_plans_are_compared_whatever_the_default_device(crew: Crew) -> None:
    crew.run(_with_another_default_device, 2)
