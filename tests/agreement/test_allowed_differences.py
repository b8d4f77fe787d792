"""Differences that c10d allows between ranks: their groups are created all the same."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from meshverse import DeviceMesh, init_device_mesh


def _timeouts_of_their_own() -> list[int]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=120 + dist.get_rank()))
    part = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("part",))
    return reached_by(part.get_group()) if dist.get_rank() < 3 else []


@pytest.mark.long
def test_ranks_with_timeouts_of_their_own(crew: Crew) -> None:
    for rank, reached in enumerate(crew.run(_timeouts_of_their_own, 4)):
        assert reached == ([1, 1, 1, 0] if rank < 3 else [])


def _timeout_changed_after_a_subset_mesh() -> list[int]:
    if dist.get_rank() < 2:  # these ranks settled their default options before the change
        DeviceMesh("cpu", [0, 1], mesh_dim_names=("part",))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=33))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return reached_by(mesh.get_group("dp"))


def test_a_timeout_changed_after_some_ranks_made_a_mesh(crew: Crew) -> None:
    for rank, reached in enumerate(crew.run(_timeout_changed_after_a_subset_mesh, 4)):
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])
