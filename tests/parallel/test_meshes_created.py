"""Building a trainer's meshes: their ranks, inferred degrees, and what is made for them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from helpers.trainer_meshes import AXES, FLATTENED, ranks_by_axes
from helpers.worlds import groups_created, in_worlds, live_groups
from meshverse import DeviceMesh
from meshverse.parallel import (
    FSDP2Config,
    ParallelismSizes,
    create_device_meshes,
    create_fsdp2_device_mesh,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
)

_FULL = ParallelismSizes(pp_size=4, dp_replicate_size=2, tp_size=8, cp_size=2, ep_size=64)


@in_worlds((32, 0), (32, 21))
def test_every_axis_has_its_ranks(world) -> None:
    sizes = ParallelismSizes(pp_size=2, dp_replicate_size=2, cp_size=2, tp_size=2, ep_size=4)
    mesh, moe_mesh = create_device_meshes(FSDP2Config(), sizes, world_size=32)
    assert mesh is not None
    assert moe_mesh is not None
    shape = (2, 2, 2, 2, 2)
    assert (mesh.mesh_dim_names, mesh.shape) == (AXES, shape)
    for name, sources in {**{axis: (axis,) for axis in AXES}, **FLATTENED}.items():
        flat = get_flat_mesh(mesh, name)
        assert flat.mesh_dim_names == (name,)
        assert flat.mesh.tolist() == ranks_by_axes(shape, sources, world.rank)
        assert dist.get_process_group_ranks(flat.get_group()) == flat.mesh.tolist()
    stage = ranks_by_axes(shape, AXES[1:], world.rank)
    assert moe_mesh.mesh_dim_names == ("ep_shard", "ep")
    assert moe_mesh.mesh.tolist() == torch.tensor(stage).reshape(4, 4).tolist()


@in_worlds((10_240, 0), (10_240, 777), (10_240, 10_239))
def test_at_scale_each_distinct_group_is_made_once(world) -> None:
    with groups_created(10):  # 5 axes, 3 flattened ones, ep_shard and ep: all distinct
        mesh, moe_mesh = create_device_meshes(FSDP2Config(), _FULL, world_size=10_240)
    assert mesh is not None
    assert moe_mesh is not None
    explained = mesh.universe.explain()
    assert explained.created == len({group.ranks for group in explained.groups}) == 10
    groups = live_groups()
    assert len(groups) == len(set(groups.values())) == 11  # with the default group
    with groups_created(0):
        hybrid = get_fsdp_dp_mesh(mesh)
        assert get_fsdp_dp_mesh(mesh) is hybrid
        assert get_submesh(mesh, ("dp_replicate", "dp_shard_cp")) is hybrid
        assert get_submesh(moe_mesh, "ep") is moe_mesh["ep"]
    assert mesh.universe.explain().created == 10
    assert moe_mesh.universe is mesh.universe


def test_axes_of_size_one_share_their_group(world) -> None:
    with groups_created(1):  # of size 1; dp_shard and what it is flattened into are the world
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=8)
    assert mesh.shape == (1, 1, 8, 1, 1)
    assert get_flat_mesh(mesh, "dp_cp").get_group() is dist.group.WORLD


_DEGREES = [  # of 16 ranks: (pp, replicas, cp, tp), with more than one shard where replicated
    (pp, replicas, cp, tp)
    for pp, replicas, cp, tp in itertools.product((1, 2), repeat=4)
    if replicas == 1 or replicas < 16 // (pp * cp * tp)
]


@pytest.mark.parametrize("degrees", _DEGREES)
@in_worlds((16, 5))
def test_all_combinations_build_and_share_one_root(world, degrees) -> None:
    pp, replicas, cp, tp = degrees
    sizes = ParallelismSizes(
        pp_size=pp, dp_replicate_size=replicas, cp_size=cp, tp_size=tp, ep_size=2
    )
    mesh, moe_mesh = create_fsdp2_device_mesh(sizes, world_size=16)
    assert moe_mesh is not None
    data = get_fsdp_dp_mesh(mesh)
    sliced = (data, mesh["tp"], moe_mesh, moe_mesh["ep"], get_flat_mesh(mesh, "dp_cp"))
    assert {id(each._get_root_mesh()) for each in sliced} == {id(mesh)}
    assert DeviceMesh.concatenate([data, mesh["tp"]]).size() == data.size() * tp


def test_dp_is_inferred(world) -> None:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2, cp_size=2), world_size=8)
    assert mesh.shape == (1, 1, 2, 2, 2)
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(dp_size=4, tp_size=2), world_size=8)
    assert mesh.shape == (1, 1, 4, 1, 2)


@pytest.mark.parametrize("inferred", [None, -1])
def test_unset_degrees(world, inferred) -> None:
    sizes = ParallelismSizes(
        dp_size=inferred, dp_replicate_size=None, tp_size=None, pp_size=None, cp_size=None
    )
    mesh, moe_mesh = create_device_meshes(FSDP2Config(), sizes)
    assert mesh.shape == (1, 1, 8, 1, 1)
    assert moe_mesh is None


@pytest.mark.parametrize(
    ("cuda", "backends", "expected"),
    [
        (True, "cuda:nccl,cpu:gloo", "cuda"),
        (True, "cpu:gloo,cuda:gloo", "cpu"),
        (False, "cuda:nccl", "cpu"),
        (True, None, "cuda"),
        (False, None, "cpu"),
    ],
)
def test_device_type(monkeypatch, cuda, backends, expected) -> None:
    from meshverse.parallel.meshes import create

    # This machine need not have a GPU, so what torch says of it is replaced.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(dist, "is_initialized", lambda: backends is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert create._device_type() == expected


def test_device_type_in_a_gloo_world(crew) -> None:
    assert crew.run(_device_type_here, 2) == ["cpu", "cpu"]


def _device_type_here() -> str:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=2)
    return mesh.device_type
