"""Random numbers are the user's: ranks that seeded alike draw alike, whatever they waited for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from helpers.crew import Crew
from helpers.turns import wait_until_they_wait
from meshverse import init_device_mesh
from meshverse.agreement import deadlock
from meshverse.parallel import Reshard

pytestmark = pytest.mark.processes


def _drawn() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def _late(rank: int, others: Sequence[int]) -> None:
    if dist.get_rank() == rank:
        wait_until_they_wait(*others)


def _drawn_after_each() -> list[Any]:
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    drawn = [_drawn()]
    _late(1, [0, 3])  # its neighbors in both axes
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    drawn.append(_drawn())
    _late(2, [0, 1, 3])
    mesh.flatten("all")
    drawn.append(_drawn())
    source = {"w": torch.ones(4)} if dist.get_rank() == 0 else None
    target = {"w": torch.zeros(4)} if dist.get_rank() else None
    with Reshard(source, target) as move:
        drawn.append(_drawn())
        move()
    drawn.append(_drawn())
    mesh.universe.destroy()
    drawn.append(_drawn())
    return drawn


@pytest.mark.long
def test_waiting_draws_no_random_numbers(crew: Crew) -> None:
    first, *others = crew.run(_drawn_after_each, 4)
    assert others == [first] * 3


def test_choosing_ranks_to_ask_draws_no_random_numbers() -> None:
    before = random.getstate()
    assert len(deadlock._sample(range(1_000))) < 1_000
    assert random.getstate() == before
