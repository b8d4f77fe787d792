"""Meshes on some ranks of a world, and timeouts of all their groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.worlds import group_names, in_worlds
from meshverse import init_device_mesh
from meshverse.parallel import (
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    ParallelismSizes,
    create_device_meshes,
    get_flat_mesh,
    get_fsdp_dp_mesh,
)

_SIZES = ParallelismSizes(dp_replicate_size=2, cp_size=2, tp_size=2, ep_size=4)
_RANKS = tuple(range(3, 35, 2))  # every other rank: 16 of 40


@in_worlds((40, 9), (40, 10))
def test_a_mesh_on_some_ranks(world) -> None:
    mesh, moe_mesh = create_device_meshes(FSDP2Config(), _SIZES, world_size=40, ranks=_RANKS)
    assert mesh is not None
    assert moe_mesh is not None
    inside = world.rank in _RANKS
    assert mesh.shape == (1, 2, 2, 2, 2)
    assert sorted(mesh.mesh.flatten().tolist()) == list(_RANKS)
    assert (mesh.get_coordinate() is not None) == inside
    assert (mesh["tp"].shape, moe_mesh.shape) == ((2,), (4, 4))
    assert get_fsdp_dp_mesh(mesh).shape == (2, 4)
    assert "dp_shard" in repr(mesh)
    if inside:  # ranks 3 + 2 * position; rank 9 is at position 3
        assert dist.get_process_group_ranks(mesh.get_group("tp")) == [7, 9]
        assert get_fsdp_dp_mesh(mesh).mesh.tolist() == [[5, 9, 13, 17], [21, 25, 29, 33]]
        assert dist.get_process_group_ranks(moe_mesh.get_group("ep")) == [3, 5, 7, 9]
    else:
        assert len(group_names()) == 1  # the default group
        assert str(mesh.universe.explain())


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        ((0, 1, 2, 3), {"dp_size": 8}, r"dp_size=8 .* = 8, but there are 4 ranks"),
        ((0, 1, 2), {"tp_size": 2}, "tp_size=2 .*but there are 3 ranks"),
        ((0, 1, 1, 3), {}, "rank 1 stands at positions 1 and 2"),
        ((0, 1, 2, 8), {}, "includes rank 8, but the default process group has ranks 0 to 7"),
        ((0, -1), {}, "got -1 at position 1"),
        ((), {}, "there are 0 ranks"),
    ],
)
@pytest.mark.parametrize("config", [FSDP2Config(), MegatronFSDPConfig()])
def test_ranks_that_do_not_fit(world, config, ranks, sizes, message) -> None:
    before = group_names()
    with pytest.raises(ValueError, match=message):
        create_device_meshes(config, ParallelismSizes(**sizes), world_size=8, ranks=ranks)
    assert group_names() == before


def test_the_timeout_reaches_every_group(crew) -> None:
    for minutes in crew.run(_timeouts, 4):
        assert minutes == [7.0] * len(minutes)
        assert len(minutes) >= 8


def _timeouts() -> list[float]:
    sizes = ParallelismSizes(tp_size=2, ep_size=2)
    mesh, moe_mesh = create_device_meshes(FSDP2Config(), sizes, world_size=4, timeout_minutes=7)
    assert mesh is not None
    assert moe_mesh is not None
    later = mesh["dp_shard", "cp", "tp"].flatten("later")
    meshes: list[Any] = [mesh, moe_mesh, later, get_flat_mesh(mesh, "dp_cp")]
    groups = [group for each in meshes for group in each.get_all_groups()]
    assert dist.group.WORLD not in groups
    return [_timeout(group) / timedelta(minutes=1) for group in groups]


def _timeout(group: dist.ProcessGroup) -> timedelta:
    from torch.distributed import distributed_c10d as c10d

    return (
        c10d._get_pg_config(group) and group._get_backend(c10d.torch.device("cpu")).options._timeout
    )


@in_worlds((40, 9))
def test_a_part_of_a_job(world) -> None:
    job = init_device_mesh("cpu", (40,), mesh_dim_names=("job",))
    pairs = init_device_mesh("cpu", (2,), ranks=[7, 9], universe=job.universe)
    mesh, moe_mesh = create_device_meshes(
        FSDP2Config(), _SIZES, ranks=_RANKS, universe=job.universe, timeout_minutes=None
    )
    assert moe_mesh is not None
    assert mesh.universe.whole is job.universe
    assert moe_mesh.universe is mesh.universe
    assert mesh.get_group("tp") is pairs.get_group()
    assert get_flat_mesh(mesh, "dp_cp").size() == 8
    whole, _ = create_device_meshes(
        MegatronFSDPConfig(), ParallelismSizes(tp_size=2), universe=job.universe
    )
    assert whole.universe is job.universe
    assert whole.shape == (20, 1, 2)
    with pytest.raises(ValueError, match=r"universe=.*: DDP has no mesh"):
        create_device_meshes(DDPConfig(), ParallelismSizes(), universe=job.universe)
