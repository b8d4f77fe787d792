"""Second-order gradients through a model's outputs raise; those beside it do not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from meshverse.parallel.models.second_order import refuse_second_order


@dataclass
class _Output:
    hidden: Tensor
    given: Tensor


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, given: Tensor) -> _Output:
        return _Output(self.inner(given).sin(), given)


def test_an_object_of_the_programs_own_is_searched() -> None:
    model = _Model()
    refuse_second_order(model)
    loss = model(torch.ones(3)).hidden.square().sum()
    with pytest.raises(RuntimeError, match="second-order gradients would lack the terms"):
        torch.autograd.grad(loss, model.inner.weight, create_graph=True)


def test_the_callers_own_tensors_are_left_alone() -> None:
    model = _Model()
    refuse_second_order(model)
    leaf = torch.ones(3, requires_grad=True)
    for given in (leaf, leaf * 2):
        for _ in range(2):
            assert model(given).given is given
        assert not given._backward_hooks
    torch.autograd.grad(leaf.square().sum(), leaf, create_graph=True)
