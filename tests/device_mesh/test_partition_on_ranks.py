"""Meshes over parts of the world, made on all ranks or on their members only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.worlds import group_names
from meshverse import DeviceMesh, init_device_mesh, init_mesh_partition

_PARTS: dict[str, Any] = {
    "actor": {"mesh_shape": (2, 2), "mesh_dim_names": ("dp", "tp")},
    "reference": {"mesh_shape": (1, 3), "mesh_dim_names": ("dp", "tp")},
}


def _look_at(mesh: DeviceMesh) -> list[Any]:
    """Return the results of what any rank may do with any mesh."""
    return [repr(mesh), repr(mesh["tp"]), mesh.mesh.tolist(), mesh.shape, mesh["tp"].size()]


def _partition() -> dict[str, Any]:
    meshes = init_mesh_partition("cpu", _PARTS)
    mine = [name for name, mesh in meshes.items() if mesh.get_coordinate() is not None]
    return {
        "mine": mine,
        "seen": {name: _look_at(mesh) for name, mesh in meshes.items()},
        "reached": {
            axis: reached_by(meshes[name].get_group(axis)) for name in mine for axis in ("dp", "tp")
        },
        "coordinate": [meshes[name].get_coordinate() for name in mine],
        "groups": len(group_names()),
    }


def test_an_actor_and_a_reference(crew: Crew) -> None:
    answers = crew.run(_partition, 8)
    for rank, answer in enumerate(answers):
        assert answer["mine"] == (["actor"] if rank < 4 else ["reference"] if rank < 7 else [])
        assert answer["seen"] == answers[0]["seen"]
        assert answer["groups"] == (3 if rank < 7 else 1)
    assert answers[0]["seen"]["reference"][2] == [[4, 5, 6]]
    assert answers[3]["reached"] == {
        "dp": [0, 1, 0, 1, 0, 0, 0, 0],
        "tp": [0, 0, 1, 1, 0, 0, 0, 0],
    }
    assert answers[5]["reached"]["tp"] == [0, 0, 0, 0, 1, 1, 1, 0]
    assert answers[5]["coordinate"] == [(0, 1)]


def _stages_of_unequal_shape(on_members_only: bool) -> dict[str, Any]:
    stages = [((4,), (0, 1, 2, 3)), ((2, 1), (5, 7)), ((1, 2), (6, 4))]
    rank, reached = dist.get_rank(), {}
    for number, (shape, ranks) in enumerate(stages):
        if on_members_only and rank not in ranks:
            continue
        names = ("dp", "tp")[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, ranks=ranks)
        flat = mesh if mesh.ndim == 1 else mesh.flatten("all")
        if rank in ranks:
            reached[number] = reached_by(flat.get_group())
    whole = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    reached["world"] = reached_by(whole.get_group())
    return reached


@pytest.mark.parametrize("on_members_only", [True, False])
def test_pipeline_stages_of_unequal_shape(crew: Crew, on_members_only: bool) -> None:
    answers = crew.run(_stages_of_unequal_shape, 8, on_members_only)
    for rank, answer in enumerate(answers):
        assert answer.pop("world") == [1] * 8
        ((stage, reached),) = answer.items()
        members = [(0, 1, 2, 3), (5, 7), (4, 6)][stage]
        assert rank in members
        assert [member for member, got in enumerate(reached) if got] == list(members)


def _of_an_asynchronous_result() -> dict[str, Any]:
    # Ranks count down from the last one, so that the order shows too.
    mine = torch.tensor([dist.get_world_size() - 1 - dist.get_rank()])
    gathered = functional.all_gather_tensor(mine, 0, dist.group.WORLD)
    assert type(gathered) is functional.AsyncCollectiveTensor
    mesh = DeviceMesh("cpu", gathered, mesh_dim_names=("world",))
    return {"ranks": mesh.mesh.tolist(), "reached": reached_by(mesh.get_group())}


def test_ranks_that_were_gathered_and_not_waited_for(crew: Crew) -> None:
    for answer in crew.run(_of_an_asynchronous_result, 4):
        assert answer == {"ranks": [3, 2, 1, 0], "reached": [1, 1, 1, 1]}
