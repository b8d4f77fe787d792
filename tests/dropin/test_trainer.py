"""A trainer that knows only torch's names, under `installed()`: the same meshes, fewer groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import meshverse
from helpers.observation import observe
from helpers.sides import mesh_class, side
from helpers.trainer import TrainerDegrees, TrainerMeshes
from helpers.worlds import fake_world, group_names

_JOBS = {
    "fsdp only": TrainerDegrees(pp=1, dp_shard=8, tp=1, ep=1),
    "hsdp, tp": TrainerDegrees(pp=1, dp_replicate=2, dp_shard=2, tp=2, ep=1),
    "every axis of 2": TrainerDegrees(2, 2, 2, 2, 2, ep=4, etp=2),
    "uneven": TrainerDegrees(pp=3, dp_shard=4, cp=2, tp=2, ep=8),
    "experts beyond tp": TrainerDegrees(2, 2, 4, 2, 4, ep=16, etp=2),
    "no replicas": TrainerDegrees(pp=4, dp_shard=16, tp=8, ep=32),
}
_RANKS = ("first", "middle", "last")


class Built(NamedTuple):
    """What the trainer of one side built."""

    views: dict[str, dict[str, Any]]  # all that is public of each mesh
    group_ranks: dict[tuple[str, str], list[int]]  # of the group of a mesh's axis
    classes: set[type]  # of the meshes
    groups: int  # that c10d has besides the default one


def _build(side_name: str, degrees: TrainerDegrees, rank: int) -> Built:
    with fake_world(degrees.world_size, rank), side(side_name):
        before = group_names()
        meshes = TrainerMeshes(degrees).all()
        group_ranks = {
            (name, axis): dist.get_process_group_ranks(mesh.get_group(axis))
            for name, mesh in meshes.items()
            for axis in mesh.mesh_dim_names
        }
        groups = len(group_names() - before)
        views = {name: observe(mesh) for name, mesh in meshes.items()}
        assert len(group_names() - before) == groups, "looking at a mesh creates no group"
        return Built(views, group_ranks, {type(mesh) for mesh in meshes.values()}, groups)


def _rank(which: str, world_size: int) -> int:
    return {"first": 0, "middle": world_size // 2 + 1, "last": world_size - 1}[which]


@pytest.mark.parametrize("which", _RANKS)
@pytest.mark.parametrize("job", _JOBS)
def test_trainer_sees_the_meshes_of_stock_with_fewer_groups(job: str, which: str) -> None:
    degrees = _JOBS[job]
    rank = _rank(which, degrees.world_size)
    stock, ours = (_build(name, degrees, rank) for name in ("stock", "installed"))
    assert stock.classes == {mesh_class("stock")}
    assert ours.classes == {meshverse.DeviceMesh}
    assert ours.group_ranks == stock.group_ranks
    assert ours.views == stock.views
    assert ours.groups < stock.groups


def test_same_ranks_are_one_group() -> None:
    """Axes of different views that hold the same ranks share a group; stock has one for each."""
    degrees = TrainerDegrees(2, 2, 2, tp=2, ep=2, etp=2)  # experts mirror the dense
    with fake_world(degrees.world_size, rank=5), side("installed"):
        meshes = TrainerMeshes(degrees)
        assert meshes.dense["pp"].get_group() is meshes.experts["pp"].get_group()
        assert meshes.dense["tp"].get_group() is meshes.data_loading["tp"].get_group()
        assert meshes.dense["tp"].get_group() is meshes.experts["etp"].get_group()
        assert meshes.loss.get_group() is meshes.data_loading["batch"].get_group()
        assert meshes.world.get_group() is dist.group.WORLD
