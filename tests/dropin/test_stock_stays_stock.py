"""Without `install()`, a mesh of torch's own class stays that, whatever is done with it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import meshverse
from helpers.crew import Crew
from helpers.observation import OURS, STOCK, observe
from helpers.sides import side
from helpers.worlds import fake_world, group_names

_SHAPE, _NAMES = (2, 2, 2), ("dp", "cp", "tp")


def _cube() -> Any:
    return STOCK.init_device_mesh("cpu", _SHAPE, mesh_dim_names=_NAMES)


def _line() -> Any:
    return STOCK.init_device_mesh("cpu", (8,), mesh_dim_names=("w",))


_MESHES: dict[str, Callable[[], Any]] = {
    "on the default group": _line,
    "cube": _cube,
    "slice": lambda: _cube()["tp"],
    "slice of two": lambda: _cube()["dp", "tp"],
    "flattened": lambda: _cube()["dp", "cp"]._flatten("data"),
    "flattened to the default group": lambda: _cube()._flatten("all"),
    "unflattened": lambda: _line()._unflatten(0, _SHAPE, _NAMES),
    "concatenated": lambda: (lambda m: StockDeviceMesh._concatenate([m["tp"], m["dp"]]))(_cube()),
    "of the default group": lambda: StockDeviceMesh.from_group(
        dist.group.WORLD, "cpu", mesh_dim_names=("w",)
    ),
    "of a group": lambda: StockDeviceMesh.from_group(dist.new_group([4, 5]), "cpu"),
    "of some ranks": lambda: StockDeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("a", "b")),
    "of others": lambda: StockDeviceMesh("cpu", [0, 1]),
    "without groups": lambda: StockDeviceMesh("cpu", torch.arange(8), _init_backend=False),
    "for xla": lambda: StockDeviceMesh("xla", torch.arange(8)),
}


def _ours_everywhere() -> list[Any]:
    """Meshes of ours with groups for every axis of those above."""
    cube = OURS.init_device_mesh("cpu", _SHAPE, mesh_dim_names=_NAMES)
    cube["dp", "cp"]._flatten("data")
    line = OURS.init_device_mesh("cpu", (8,), mesh_dim_names=("w",))
    some = OURS.DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("a", "b"))
    pair = OURS.DeviceMesh("cpu", [4, 5])
    return [cube, line, some, pair, cube._flatten("all"), OURS.DeviceMesh("cpu", [0, 1])]


def _saved_and_loaded(value: Any, *, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


_COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
    "pickle protocol 0": lambda mesh: pickle.loads(pickle.dumps(mesh, protocol=0)),
    "torch.save": lambda mesh: _saved_and_loaded(mesh, weights_only=False),
    "torch.save, weights only": lambda mesh: _saved_and_loaded(mesh, weights_only=True),
    "in a dictionary": lambda mesh: copy.deepcopy({"mesh": mesh})["mesh"],
}


@pytest.mark.parametrize("how", _COPIES)
@pytest.mark.parametrize("which", _MESHES)
def test_copies_are_stocks_and_on_stocks_groups(which: str, how: str, world) -> None:
    mesh = _MESHES[which]()
    ours = _ours_everywhere()
    groups, state = group_names(), _state(mesh)
    back = _COPIES[how](mesh)
    assert type(back) is StockDeviceMesh
    assert back is not mesh
    assert back == mesh
    assert _state(back) == state == _state(mesh)
    assert group_names() == groups
    for one in ours:
        one.universe.destroy()
    if mesh.device_type != "xla":
        assert observe(back) == observe(mesh)


def _state(mesh: Any) -> dict[str, Any]:
    state = {name: value for name, value in vars(mesh).items() if name != "_hash"}
    for name in ("_rank_map", "_root_mesh", "_flatten_mapping", "_pg_registry"):
        del state[name]
    return {**state, "registry": mesh._root_mesh is not None or set(mesh._pg_registry)}


@pytest.mark.parametrize("numbers_taken", [False, True])
@pytest.mark.parametrize("which", ["cube", "slice", "flattened", "on the default group"])
def test_another_programs_file_is_loaded_as_stock_loads_it(which: str, numbers_taken: bool) -> None:
    with fake_world(8, 5):
        saved = pickle.dumps(_MESHES[which]())
    with fake_world(8, 5):
        for _ in range(9 if numbers_taken else 0):
            dist.new_group([4, 5])
        ours = _ours_everywhere()
        back = pickle.loads(saved)
        assert type(back) is StockDeviceMesh
        assert all(name.isdigit() for name in back._dim_group_names)
        del ours


_DERIVED: dict[str, Callable[[Any], Any]] = {
    "slice": lambda mesh: mesh["tp"],
    "slice of two": lambda mesh: mesh["dp", "tp"],
    "flatten": lambda mesh: mesh["dp", "cp"]._flatten("data"),
    "unflatten": lambda mesh: mesh._flatten("all")._unflatten(0, (2, 4), ("x", "y")),
    "concatenate": lambda mesh: StockDeviceMesh._concatenate([mesh["dp"], mesh["tp"]]),
    "submeshes": lambda mesh: mesh._get_all_submeshes("tp")[0],
    "from group": lambda mesh: StockDeviceMesh.from_group(mesh.get_group("tp"), "cpu"),
    "new": lambda mesh: StockDeviceMesh.__new__(StockDeviceMesh),
    "subclass": lambda mesh: type("Theirs", (StockDeviceMesh,), {})("cpu", mesh.mesh),
}


@pytest.mark.parametrize("how", _DERIVED)
def test_what_derives_from_it_is_stocks(how: str, world) -> None:
    mesh = _cube()
    ours = _ours_everywhere()
    groups = group_names()
    derived = _DERIVED[how](copy.deepcopy(mesh))
    assert not isinstance(derived, meshverse.DeviceMesh)
    assert all(name.isdigit() for name in group_names() - groups)
    del ours


def test_dtensors_and_modules_are_copied_onto_their_own_mesh(world) -> None:
    mesh = _line()
    model = nn.Linear(8, 8)
    weight = DTensor.from_local(torch.ones(1, 8), mesh, [Shard(0)], run_check=False)
    model.weight = nn.Parameter(weight)
    helper = _ours_everywhere()
    ema = copy.deepcopy(model)
    state = _saved_and_loaded(copy.deepcopy(model.state_dict()), weights_only=True)
    for one in helper:
        one.universe.destroy()
    for copied in (ema.weight, state["weight"]):
        assert type(copied.device_mesh) is StockDeviceMesh
        assert copied.device_mesh.get_group() is dist.group.WORLD
        assert torch.equal((copied.detach() * 2).to_local(), torch.full((1, 8), 2.0))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_are_read_into_tensors_on_their_own_mesh(world, tmp_path: Path) -> None:
    mesh, helper = _line(), _ours_everywhere()
    state = {"w": DTensor.from_local(torch.ones(1, 8), mesh, [Shard(0)], run_check=False)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    state["w"].zero_()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["w"].device_mesh is mesh
    assert state["w"].to_local().sum() == 8
    del helper


# --- on real ranks -------------------------------------------------------------------------------


def _averaged() -> dict[str, Any]:
    """An average of the weights of a model that knows nothing of us, beside a helper that does."""
    with side("stock"):
        mesh = STOCK.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(8, 8, bias=False))
        expected = whole[0].weight.detach().clone()
        model = parallelize_module(whole, mesh, {"0": ColwiseParallel()})
        helper = OURS.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ema = copy.deepcopy(model)
        dist.barrier()
        helper.universe.destroy()
        with torch.no_grad():
            for average, weight in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(weight + 1, 0.5)
        weight = ema[0].weight
        return {
            "class": type(weight.device_mesh) is StockDeviceMesh,
            "weights": torch.allclose(weight.full_tensor(), expected + 0.5),
            "moved": weight.redistribute(placements=[Replicate()]).to_local().shape == (8, 8),
            "together": distribute_tensor(expected, mesh, [Shard(0)]).add(weight).shape == (8, 8),
        }


def test_an_average_of_a_stock_models_weights(crew: Crew) -> None:
    for answer in crew.run(_averaged, 4):
        assert all(answer.values()), answer


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_graph_serves_copies_of_its_mesh(world) -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def double(tensor: torch.Tensor, mesh: StockDeviceMesh) -> torch.Tensor:
        return tensor * 2 if mesh.size() == 8 else tensor

    mesh, ours = _line(), _ours_everywhere()
    for one in (mesh, copy.deepcopy(mesh), copy.copy(mesh), pickle.loads(pickle.dumps(mesh))):
        double(torch.ones(2), one)
    assert len(graphs) == 1
    del ours
