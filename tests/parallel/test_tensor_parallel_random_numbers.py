"""Random numbers that a forward draws under tensor parallelism, on ranks seeded differently."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from tp_models import MLP, WIDTH, full, mesh_of_two

from helpers.crew import Crew
from helpers.worlds import fake_world
from meshverse.parallel import apply_tp_plan, synchronize_random_state

SOURCES: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "random": random.random,
    # Not the method, of whose state a trial would have a copy.
    "numpy": lambda: np.random.rand(),  # noqa: NPY002  (as below)
}
PLAN = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}


class Noisy(MLP):
    """Scales its features by a random number, which is one for all of them."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).relu() * self.draw())


class Masks(nn.Module):
    """Hides features at random, as SpecAugment does, before a noisy MLP."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.norm, self.mlp, self.draw = nn.LayerNorm(WIDTH), Noisy(draw), draw

    def forward(self, hidden: Tensor) -> Tensor:
        mask = hidden.new_tensor([self.draw() for _ in range(WIDTH)])
        return self.mlp(self.norm(hidden) * mask)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002  (the global state is the subject)


def trained_once(source: str, seed_again: bool) -> list[Tensor]:
    """Output and gradients that a rank sees."""
    torch.manual_seed(1)
    model, mesh = Masks(SOURCES[source]), mesh_of_two()
    seed(torch.distributed.get_rank())
    apply_tp_plan(model, mesh, PLAN)
    if seed_again:
        seed(10 + torch.distributed.get_rank())
        synchronize_random_state(mesh)
    output = model(torch.arange(2.0 * WIDTH).reshape(1, 2, WIDTH).sin())
    output.sin().sum().backward()
    return [output.detach(), *(full(each.grad) for each in model.parameters())]  # type: ignore[arg-type]


@pytest.mark.parametrize("seed_again", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_ranks_draw_the_same(crew: Crew, source: str, seed_again: bool) -> None:
    one, other = crew.run(trained_once, 2, source, seed_again)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("source", SOURCES)
def test_a_trial_draws_the_same_again_and_leaves_the_states(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    draw, model = SOURCES[source], Masks(SOURCES[source])
    seed(3)
    expected = draw()
    seed(3)
    with fake_world(2), caplog.at_level(logging.WARNING):
        apply_tp_plan(model, mesh_of_two(), PLAN)
    assert draw() == expected
    assert not caplog.messages
