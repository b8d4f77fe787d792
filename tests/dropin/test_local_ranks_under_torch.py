"""Where a rank stands along an axis, under torch's simulated ranks and under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.compiling import COMPILES
from helpers.observation import Family
from helpers.sides import SIDES, side
from helpers.worlds import groups_created, in_worlds
from meshverse import init_device_mesh

_AXES = ("dp", "tp")
_DIMS = (0, 1, -1, "dp", "tp")


def _lazy() -> StockDeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, lazy=True)


def _eager(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)


def _of_each_rank(value: Any) -> dict[int, int]:
    return dict(value.node._local_ints)


@in_worlds((4, 0))
def test_simulated_ranks_have_a_place_each(world) -> None:
    module = pytest.importorskip("torch.distributed._local_tensor", reason="is in later torch")
    seen: dict[str, list[Any]] = {}
    meshes = {"lazy": _lazy()}
    for which in SIDES:
        with side(which) as family:
            meshes[which] = _eager(family)
    kept = []  # the mode knows a mesh by its address, which is free for the next once it ends
    with module.LocalTensorMode(4):
        for which, mesh in meshes.items():
            slices = [mesh[axis] for axis in _AXES]
            kept += slices
            seen[which] = [_of_each_rank(mesh.get_local_rank(dim)) for dim in _DIMS]
            seen[which] += [_of_each_rank(each.get_local_rank()) for each in slices]
    assert seen["stock"][0] == {0: 0, 1: 0, 2: 1, 3: 1}
    assert seen["lazy"] == seen["ours"] == seen["installed"] == seen["stock"]
    # And again by itself, when the mode is over.
    with groups_created(0):
        assert [mesh.get_local_rank("tp") for mesh in meshes.values()] == [0] * 4


@in_worlds((4, 3))
class TestCompiled:
    pytestmark = COMPILES

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_a_lazy_group_is_not_made(self, world, fullgraph: bool) -> None:
        mesh, tensor = _lazy(), torch.ones(3)

        def program(tensor: torch.Tensor) -> torch.Tensor:
            place = mesh.get_local_rank("dp") + 10 * mesh.get_local_rank(1)
            return tensor * (place + 100 * mesh["tp"].get_local_rank())

        with groups_created(0):
            compiled = torch.compile(program, backend="eager", fullgraph=fullgraph)
            assert compiled(tensor).tolist() == program(tensor).tolist() == [111.0] * 3

    def test_exported(self, world) -> None:
        mesh = _lazy()

        class Program(torch.nn.Module):
            def forward(self, tensor: torch.Tensor) -> torch.Tensor:
                return tensor + mesh.get_local_rank("dp") + 1

        with groups_created(0):
            for strict in (True, False):
                exported = torch.export.export(Program(), (torch.zeros(2),), strict=strict)
                assert exported.module()(torch.zeros(2)).tolist() == [2.0, 2.0]
