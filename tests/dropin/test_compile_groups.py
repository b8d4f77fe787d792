"""Process groups looked up inside one compiled graph, in every way a program may do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers.compiling import COMPILES
from helpers.observation import Family
from helpers.sides import SIDES, side
from helpers.tiers import in_tiers
from helpers.versions import needs_opaque_meshes
from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh

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


# --- groups that a graph cannot use, beside groups that it can ---------------------------------

_OF_DP: dict[str, Callable[[StockDeviceMesh, Tensor], Tensor]] = {
    "mesh and axis": lambda mesh, x: funcol.all_reduce(x, "sum", (mesh, 0)),
    "group by name": lambda mesh, x: funcol.all_reduce(x, "sum", mesh.get_group("dp")),
    "slice": lambda mesh, x: funcol.all_reduce(x, "sum", mesh["dp"]),
    "slice of a slice": lambda mesh, x: funcol.all_reduce(x, "sum", mesh["dp", "cp"]["dp"]),
    "group of a slice": lambda mesh, x: funcol.all_reduce(x, "sum", mesh["dp"].get_group()),
    "flattened": lambda mesh, x: funcol.all_reduce(x, "sum", mesh["dp", "cp"]._flatten()),
    "redistribution": lambda mesh, x: _gather(mesh["dp"], x),
    "size of the other axis": lambda mesh, x: x * mesh["tp"].size() * mesh["cp", "tp"].size(1),
}
_OF_TP: dict[str, Callable[[StockDeviceMesh, Tensor], Tensor]] = {
    "mesh and axis": lambda mesh, x: funcol.all_reduce(x, "sum", (mesh, 2)),
    "slice": lambda mesh, x: funcol.all_reduce(x, "sum", mesh["tp"]),
    "slice of two": lambda mesh, x: funcol.all_reduce(x, "sum", (mesh["cp", "tp"], 1)),
    "group by name": lambda mesh, x: funcol.all_reduce(x, "sum", mesh.get_group("tp")),
    "group of a slice": lambda mesh, x: funcol.all_reduce(x, "sum", mesh["tp"].get_group()),
    "redistribution": lambda mesh, x: _gather(mesh["tp"], x),
}
# Of these, torch.compile runs the code that reads the group, which creates it.
_CREATING = ["group of a slice", "redistribution"]


def _cube(**extra: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), **extra)


def _destroyed_tp() -> DeviceMesh:
    mesh = _cube()
    mesh["dp", "cp"]._flatten()
    dist.destroy_process_group(mesh.get_group("tp"))
    return mesh


def _lazy_tp() -> DeviceMesh:
    mesh = _cube(lazy=True)
    for group in (mesh["dp", "cp"]._flatten().get_group(), *map(mesh.get_group, ("dp", "cp"))):
        assert group.size() > 1
    return mesh


def _run(form: Callable[[Any, Tensor], Tensor], mesh: StockDeviceMesh, given: str) -> Tensor:
    torch._dynamo.reset()
    x = torch.ones(2, 3)
    if given == "argument":
        program = torch.compile(lambda mesh, x: form(mesh, x) + 1, fullgraph=True, backend="eager")
        return program(mesh, x)
    program = torch.compile(lambda x: form(mesh, x) + 1, fullgraph=True, backend="aot_eager")
    return program(x)


@pytest.mark.parametrize("given", in_tiers(["closure", "argument"], ["closure"], []))
@pytest.mark.parametrize("made", [_destroyed_tp, _lazy_tp], ids=["destroyed", "lazy"])
@pytest.mark.parametrize("form", _OF_DP)
def test_live_groups_beside_one_that_is_not(
    form: str, made: Callable[[], DeviceMesh], given: str
) -> None:
    with fake_world(8, 5):
        result = _run(_OF_DP[form], made(), given)
    assert tuple(result.shape) == ((4, 3) if form == "redistribution" else (2, 3))


@needs_opaque_meshes
@pytest.mark.parametrize("given", in_tiers(["closure", "argument"], ["closure"], []))
@pytest.mark.parametrize(
    "form", in_tiers([form for form in _OF_TP if form not in _CREATING], ["mesh and axis", "slice"])
)
def test_a_lazy_group_needs_warm_up(form: str, given: str) -> None:
    with fake_world(8, 5):
        mesh = _lazy_tp()
        with pytest.raises(
            RuntimeError,
            match=r"The process group of axis 'tp' with ranks \[4, 5\] is lazy and not created "
            r"yet, and torch.compile cannot create it inside a compiled function. Call "
            r"mesh.universe.warm_up\(\) on all its ranks before the first call of that function.",
        ):
            _run(_OF_TP[form], mesh, given)
        mesh.universe.warm_up()
        assert _run(_OF_TP[form], mesh, given).dim() == 2


@pytest.mark.long
@pytest.mark.parametrize("form", _CREATING)
def test_torch_compile_creates_a_lazy_group(form: str) -> None:
    with fake_world(8, 5):
        mesh = _lazy_tp()
        assert _run(_OF_TP[form], mesh, "closure").dim() == 2
        assert type(mesh._dim_group_names) is list


@pytest.mark.parametrize("given", in_tiers(["closure", "argument"], ["closure"], []))
@pytest.mark.parametrize("form", in_tiers(_OF_TP, ["mesh and axis", "slice"]))
def test_a_destroyed_group(form: str, given: str) -> None:
    with (
        fake_world(8, 5),
        pytest.raises(
            RuntimeError, match=r"axis 'tp' with ranks \[4, 5\] was destroyed, by destroy_process_g"
        ),
    ):
        _run(_OF_TP[form], _destroyed_tp(), given)


@needs_opaque_meshes
@pytest.mark.parametrize("ends", ["universe", "world"])
def test_a_group_that_has_ended(ends: str) -> None:
    with fake_world(8, 5):
        mesh = _cube()
        if ends == "universe":
            mesh.universe.destroy()
        else:
            dist.destroy_process_group()
        with pytest.raises(RuntimeError, match=r"of a mesh in a compiled function has ended, with"):
            _run(_OF_TP["slice"], mesh, "closure")
