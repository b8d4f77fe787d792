"""Process groups looked up inside one compiled graph, in every way a program may do it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers.compiling import COMPILES
from helpers.observation import Family
from helpers.sides import SIDES, side
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse import init_device_mesh

pytestmark = COMPILES


def _gather(mesh: StockDeviceMesh, x: Tensor) -> Tensor:
    sharded = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    return sharded.redistribute(mesh, [Replicate()]).to_local()


_WAYS: dict[str, Callable[[StockDeviceMesh, StockDeviceMesh, Tensor], Tensor]] = {
    "mesh and axis": lambda mesh, tp, x: funcol.all_reduce(x, "sum", (mesh, 1)),
    "one-axis mesh": lambda mesh, tp, x: funcol.all_reduce(x, "sum", tp),
    "group of a slice made before": lambda mesh, tp, x: funcol.all_reduce(x, "sum", tp.get_group()),
    "group by name": lambda mesh, tp, x: funcol.all_reduce(x, "sum", mesh.get_group("tp")),
    "group by index": lambda mesh, tp, x: funcol.all_reduce(x, "sum", mesh.get_group(1)),
    "group of a slice made inside": lambda mesh, tp, x: funcol.all_reduce(
        x, "sum", mesh["tp"].get_group()
    ),
    "flattened inside": lambda mesh, tp, x: funcol.all_reduce(
        x, "sum", tp._flatten("alias").get_group()
    ),
    "flattened mesh": lambda mesh, tp, x: funcol.all_reduce(x, "sum", tp._flatten("alias")),
    "size of the group": lambda mesh, tp, x: x * tp.get_group().size(),
    "redistribution": lambda mesh, tp, x: _gather(tp, x),
}


def _compiled(way: str, mesh: StockDeviceMesh) -> tuple[int, ...]:
    tp = mesh["tp"]
    tp._flatten("alias")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def program(x: Tensor) -> Tensor:
        return _WAYS[way](mesh, tp, x) + 1

    for _ in range(2):
        shape = tuple(program(torch.ones(2, 3)).shape)
    return shape


def _mesh(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def _shape_of(way: str) -> tuple[int, int]:
    return (8, 3) if way == "redistribution" else (2, 3)


@pytest.mark.parametrize("which", in_tiers(SIDES, ["installed"]))
@pytest.mark.parametrize("way", _WAYS)
def test_a_group_can_be_looked_up_in_a_graph(way: str, which: str) -> None:
    with fake_world(8, 5), side(which) as family:
        assert _compiled(way, _mesh(family)) == _shape_of(way)


@pytest.mark.parametrize("way", in_tiers(_WAYS, ["mesh and axis", "group by name"]))
def test_lazy_groups_that_were_warmed_up_can_too(way: str) -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), lazy=True)
        mesh.universe.warm_up()
        assert _compiled(way, mesh) == _shape_of(way)
