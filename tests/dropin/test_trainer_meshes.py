"""A trainer that knows only torch's names, under `installed()`: the same meshes, fewer groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshverse
from helpers.observation import observe
from helpers.sides import mesh_class, side
from helpers.worlds import fake_world, group_names
from trainer_views import Degrees

# --- how a modern trainer lays out its meshes, written against torch's own names only ------------


@dataclass(frozen=True)
class TrainerDegrees(Degrees):
    """Degrees with layers of experts that are split too, each over `etp` of the experts' ranks."""

    etp: int = 1

    @property
    def efsdp(self) -> int:
        """Ranks that share the weights of one part of one expert."""
        return super().efsdp // self.etp


class TrainerMeshes:
    """Every mesh of a training job: views of one world mesh, and slices of those views.

    An axis of size 1 communicates with nobody, so the views give it the fake backend.

    Args:
        degrees: of parallelism; their `world_size` must be that of the job.
    """

    def __init__(self, degrees: TrainerDegrees) -> None:
        d = degrees
        self.world = init_device_mesh("cpu", (d.world_size,), mesh_dim_names=("world",))
        self.data_loading = self._view(("pp", "batch", "cp", "tp"), (d.pp, d.batch, d.cp, d.tp))
        self.loss = self.data_loading["batch", "cp"]._flatten("loss")
        self.dense = self._view(
            ("pp", "dp_replicate", "fsdp", "tp"), (d.pp, d.dp_replicate, d.fsdp, d.tp)
        )
        self.experts = self._view(
            ("pp", "dp_replicate", "efsdp", "ep", "etp"),
            (d.pp, d.dp_replicate, d.efsdp, d.ep, d.etp),
        )

    def _view(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
        unused = {name: "fake" for name, size in zip(names, sizes, strict=True) if size == 1}
        # By index: torch 2.11 refuses the name of the axis to unflatten.
        return self.world._unflatten(0, sizes, names, backend_override=unused)

    def all(self) -> dict[str, DeviceMesh]:
        """Every mesh that the trainer hands out: the views, and the slices its parts ask for."""
        meshes = {
            "world": self.world,
            "data loading": self.data_loading,
            "loss": self.loss,
            "dense": self.dense,
            "experts": self.experts,
        }
        for view, axes in _SLICES:
            parent = meshes[view]
            meshes[f"{view}: {' '.join(axes)}"] = parent[axes if len(axes) > 1 else axes[0]]
        return meshes


_SLICES: Sequence[tuple[str, tuple[str, ...]]] = (
    ("data loading", ("batch",)),  # the data loader
    ("data loading", ("batch", "cp")),
    ("data loading", ("cp",)),  # context parallelism
    ("dense", ("pp",)),  # the pipeline's schedule
    ("dense", ("tp",)),  # tensor parallelism
    ("dense", ("fsdp",)),  # FSDP2
    ("dense", ("dp_replicate", "fsdp")),  # hybrid FSDP2
    ("dense", ("dp_replicate", "fsdp", "tp")),  # checkpoints of the dense weights
    ("experts", ("ep",)),  # expert parallelism
    ("experts", ("ep", "etp")),
    ("experts", ("efsdp",)),
    ("experts", ("dp_replicate", "efsdp")),  # hybrid FSDP2 of the experts
    ("experts", ("dp_replicate", "efsdp", "ep", "etp")),  # checkpoints of the experts
)


# --- what it gets --------------------------------------------------------------------------------

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
    """The meshes that the trainer of one side built."""

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
