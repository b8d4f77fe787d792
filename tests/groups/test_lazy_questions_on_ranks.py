"""One rank alone asks all there is to ask of lazy meshes: it waits for nobody and makes nothing."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from helpers.asking import (
    OF_MESH,
    OF_MESH_BY_OPERATORS,
    OF_PARALLEL,
    OF_TORCH,
    OF_UNIVERSE,
    OF_UNIVERSE_INSIDE,
    lazy_cube,
    lazy_meshes,
)
from helpers.crew import Crew
from helpers.worlds import group_names
from meshverse import init_device_mesh

_RANKS = 8
_ASKS = 5
_TABLES = (OF_MESH, OF_MESH_BY_OPERATORS, OF_UNIVERSE, OF_UNIVERSE_INSIDE, OF_TORCH)


def _ask_alone() -> tuple[int, list[str]]:
    meshes = lazy_meshes()
    cube = lazy_cube()
    before, makes = group_names(), []
    if dist.get_rank() == _ASKS:
        for table in _TABLES:
            for name, question in table.items():
                for mesh in meshes.values():
                    question(mesh)
                if group_names() != before:
                    makes.append(name)
                    before = group_names()
    for name, question in OF_PARALLEL.items():  # which build meshes, so that all ranks take part
        question(cube)
        if group_names() != before:
            makes.append(name)
            before = group_names()
    return len(before), makes


@pytest.mark.long
def test_it_makes_no_group(crew: Crew) -> None:
    # Of the whole program: a rank that waited would do so until the default group's timeout.
    assert crew.run(_ask_alone, _RANKS) == [(1, [])] * _RANKS


def _local_rank_alone() -> int:
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), lazy=True, timeout=timedelta(seconds=60)
    )
    if dist.get_rank() == 3:
        assert [mesh.get_local_rank("dp"), mesh["tp"].get_local_rank()] == [1, 1]
    return len(group_names())


def test_the_local_rank_waits_for_nobody(crew: Crew) -> None:
    assert crew.run(_local_rank_alone, 4) == [1] * 4
