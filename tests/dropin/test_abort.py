"""`DeviceMesh.abort()`, which stock has from 2.15 on: it ends a mesh's groups, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.crew import Crew
from helpers.observation import Family
from helpers.sides import SIDES, side
from helpers.worlds import live_groups
from meshverse import init_device_mesh

_SIDES = SIDES if hasattr(StockDeviceMesh, "abort") else ("ours",)


def _mesh(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _sum_of_ranks(group: dist.ProcessGroup) -> float:
    total = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(total, group=group)
    return total[1].item()


def _abort_one_of_two(side_name: str) -> list[float]:
    with side(side_name) as family:
        mesh, other = _mesh(family), _mesh(family)
        ended = {mesh.get_group(axis).group_name for axis in ("dp", "tp")}
        before = live_groups()
        with pytest.raises(RuntimeError, match="root mesh"):
            mesh["tp"].abort()
        assert live_groups() == before
        dist.barrier()
        mesh.abort()
        assert live_groups().keys() == before.keys() - ended
        for use in (lambda: mesh.get_group("tp"), lambda: mesh["dp"].get_group()):
            with pytest.raises(RuntimeError, match=r"Could not resolve|was aborted.*mesh again"):
                use()
        return [_sum_of_ranks(kept.get_group("tp")) for kept in (other, _mesh(family))]


def test_abort_ends_the_groups_of_one_mesh_and_no_others(crew: Crew) -> None:
    for name in _SIDES:
        sums = crew.run(_abort_one_of_two, 4, name)
        assert sums == [[1, 1], [1, 1], [5, 5], [5, 5]], name


def _abort_over_the_world(folder: str) -> bool:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    assert mesh.get_group() is dist.group.WORLD
    rank = dist.get_rank()
    dist.barrier()
    mesh.abort()
    gone = not dist.is_initialized()
    store = dist.FileStore(f"{folder}/after", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    return gone


def test_abort_ends_the_default_group_where_the_mesh_is_on_it(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_abort_over_the_world, 4, str(tmp_path)) == [True] * 4
