"""Meshes that are pickled, copied and saved: small, and the same mesh when they come back."""

from __future__ import annotations

import copy
import enum
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshverse
from helpers.forked import Forked
from helpers.observation import OURS, STOCK, observe
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh, init_device_mesh, load_mesh, save_mesh
from trainer_views import Degrees, five_views
from worlds import start_fake_world

_NAMES = ("dp", "tp")


def _save_and_load(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


_ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
    "pickle protocol 2": lambda mesh: pickle.loads(pickle.dumps(mesh, protocol=2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": _save_and_load,
    "plain data": lambda mesh: load_mesh(save_mesh(mesh)),
}


def _backwards(mesh: DeviceMesh) -> DeviceMesh:
    return DeviceMesh.concatenate([mesh["tp"], mesh["dp"]])


_MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "root": lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES),
    "nameless": lambda: init_device_mesh("cpu", (2, 4)),
    "slice": lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)["tp"],
    "flattened": lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES).flatten("world"),
    "unflattened": lambda: init_device_mesh("cpu", (8,), mesh_dim_names=("world",)).unflatten(
        0, (2, 4), _NAMES
    ),
    "concatenated": lambda: _backwards(init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)),
    "overridden": lambda: init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=_NAMES, backend_override={"tp": "cpu:fake"}
    )["tp"],
    "part of the world": lambda: DeviceMesh("cpu", [[7, 5], [0, 3]], mesh_dim_names=_NAMES),
    "of others": lambda: DeviceMesh("cpu", [[7, 6], [0, 3]], mesh_dim_names=_NAMES),
    "of a given group": lambda: DeviceMesh.from_group(dist.new_group([1, 5]), "cpu"),
    "submesh": lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)._get_all_submeshes(
        "dp"
    )[1],
}


# Meshes on groups from elsewhere come back equal and with these groups, but as new objects.
_NOT_INTERNED = ("of a given group", "submesh")


@pytest.mark.parametrize("round_trip", _ROUND_TRIPS)
@pytest.mark.parametrize("which", _MESHES)
def test_comes_back_with_its_groups(which: str, round_trip: str, world) -> None:
    mesh = _MESHES[which]()
    with groups_created(0):
        back = _ROUND_TRIPS[round_trip](mesh)
    assert back == mesh
    assert back.universe is mesh.universe
    assert observe(back) == observe(mesh)


@pytest.mark.parametrize("round_trip", _ROUND_TRIPS)
@pytest.mark.parametrize("which", [name for name in _MESHES if name not in _NOT_INTERNED])
def test_comes_back_as_the_same_object(which: str, round_trip: str, world) -> None:
    mesh = _MESHES[which]()
    assert _ROUND_TRIPS[round_trip](mesh) is mesh


def test_meshes_inside_of_other_things(world) -> None:
    mesh = _MESHES["root"]()
    state = {"mesh": mesh, "axes": [mesh["dp"], mesh["tp"]], "weight": torch.ones(2)}
    for round_trip in (_save_and_load, copy.deepcopy):
        back = round_trip(state)
        assert back["mesh"] is mesh
        assert back["axes"] == [mesh["dp"], mesh["tp"]]


def test_two_given_groups_of_the_same_ranks_are_not_mixed_up(world) -> None:
    meshes = [DeviceMesh.from_group(dist.new_group([1, 5]), "cpu") for _ in range(2)]
    for mesh in meshes:
        assert pickle.loads(pickle.dumps(mesh)).get_group() is mesh.get_group()


def test_saved_size() -> None:
    degrees = Degrees()
    with fake_world(degrees.world_size, 7_321):
        views = five_views(OURS.init_device_mesh, degrees)
        for view in [*views.values(), views["full"]["dp_shard", "tp"], views["data"]["tp"]]:
            assert len(pickle.dumps(view)) < 1024
            assert b"meshverse-" not in pickle.dumps(view)  # no name of a process group


def test_another_world_of_the_same_ranks_takes_it_in() -> None:
    with fake_world(8, 5):
        saved = pickle.dumps(_MESHES["slice"]())
    with fake_world(8, 5):
        mesh = _MESHES["root"]()
        back = pickle.loads(saved)
        assert back is mesh["tp"]
        assert back.get_group() is mesh.get_group("tp")


def test_another_world_with_other_ranks_does_not_take_it_in() -> None:
    with fake_world(8, 5):
        mesh = _MESHES["slice"]()
        saved = pickle.dumps(mesh)
    with fake_world(16, 5):
        other = init_device_mesh("cpu", (4, 4), mesh_dim_names=_NAMES)
        back = pickle.loads(saved)
        assert back.universe is not other.universe
        assert back.mesh.tolist() == [4, 5, 6, 7]
        with pytest.raises(RuntimeError, match="process group"):
            back.get_group()


@pytest.mark.parametrize("keep_alive", [True, False], ids=["mesh alive", "mesh gone"])
def test_after_the_world_is_gone_it_has_no_groups(keep_alive: bool) -> None:
    start_fake_world(8, 5)
    mesh = _MESHES["slice"]()
    saved, seen = pickle.dumps(mesh), observe(mesh)
    if not keep_alive:
        del mesh
    dist.destroy_process_group()
    back = pickle.loads(saved)
    assert (back.shape, back.mesh_dim_names) == (seen["shape"], seen["names"])
    assert back.get_coordinate() == seen["coordinate"]
    assert back.mesh.tolist() == [4, 5, 6, 7]
    assert repr(back).startswith(seen["repr"])
    with pytest.raises(RuntimeError, match="process groups not initialized"):
        back.get_group()


_LOADER = """
import pickle, sys
mesh = pickle.load(open(sys.argv[1], "rb"))
print(mesh, mesh.get_coordinate(), mesh.mesh.tolist(), mesh["tp"].mesh.tolist())
try:
    mesh.get_group("tp")
except RuntimeError as error:
    print(error)
"""


def test_a_process_without_process_groups_loads_it(tmp_path: Path, world) -> None:
    mesh = _MESHES["root"]()
    (tmp_path / "mesh").write_bytes(pickle.dumps(mesh))
    status, out, err = Forked(["-c", _LOADER, str(tmp_path / "mesh")]).communicate()
    assert status == 0, err
    assert out.splitlines() == [
        f"{mesh} (1, 1) {mesh.mesh.tolist()} [4, 5, 6, 7]",
        (
            f"DeviceMesh process groups not initialized! {mesh} was created or loaded without them"
            ". After init_process_group(), call mesh.bind() on all its ranks."
        ),
    ]


_HELPER = """
import pickle, sys
loaded = [pickle.load(open(name, "rb")) for name in sys.argv[1:]]
for name, mesh in zip(sys.argv[1:], loaded):
    pickle.dump(pickle.loads(pickle.dumps(mesh)), open(name, "wb"))
"""


def test_meshes_come_back_from_a_process_without_process_groups(tmp_path: Path, world) -> None:
    """As through the queues of a data loader or a checkpointer."""
    root = _MESHES["root"]()
    apart = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), isolate="x")
    meshes = [root, root["tp"], root["dp", "tp"].flatten("all"), apart, apart["tp"]]
    files = [tmp_path / str(number) for number in range(len(meshes))]
    for file, mesh in zip(files, meshes, strict=True):
        file.write_bytes(pickle.dumps(mesh))
    assert Forked(["-c", _HELPER, *map(str, files)]).communicate() == (0, "", "")
    for file, mesh in zip(files, meshes, strict=True):
        assert pickle.loads(file.read_bytes()) is mesh


def test_one_process_distinguishes_what_several_ranks_saved() -> None:
    saved = []
    for rank in (5, 3):
        with fake_world(8, rank):
            mesh = _MESHES["root"]()
            saved.append((pickle.dumps(mesh), pickle.dumps(mesh["tp"])))
    for decoupled in (False, True):
        loaded = [[load_mesh(_state_of(one, decoupled)) for one in both] for both in saved]
        assert [root.get_coordinate() for root, _ in loaded] == [(1, 1), (0, 3)]
        assert [part.mesh.tolist() for _, part in loaded] == [[4, 5, 6, 7], [0, 1, 2, 3]]
        assert all(root["tp"] is part for root, part in loaded)


def _state_of(saved: bytes, decoupled: bool) -> Any:
    return {**save_mesh(pickle.loads(saved)), "decoupled": decoupled}


class _Dim(str, enum.Enum):
    DP = "dp"
    TP = "tp"


class _Device(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=(_Dim.DP, _Dim.TP)),
        lambda: init_device_mesh(_Device("cpu"), (2, 4), mesh_dim_names=("dp", "tp")),
        lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), preserve_rank_order=1),
    ],
    ids=["names", "device type", "flag"],
)
def test_of_other_types_that_a_mesh_accepts(make: Callable[[], DeviceMesh], world) -> None:
    mesh = make()
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert pickle.loads(pickle.dumps(mesh["tp"])) is mesh["tp"]
    assert load_mesh(json.loads(json.dumps(save_mesh(mesh)))) == mesh


def test_a_stock_mesh_with_such_names_keeps_its_groups_in_a_copy(
    world, uninstalled_afterwards
) -> None:
    mesh = STOCK.init_device_mesh("cpu", (2, 4), mesh_dim_names=(_Dim.DP, _Dim.TP))
    meshverse.install()
    assert copy.deepcopy(mesh).get_group("tp") is mesh.get_group("tp")
