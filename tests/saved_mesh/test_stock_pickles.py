"""Meshes that torch's own class saved, loaded under `install()`: ours, or refused at use."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # torch.load(weights_only=True) wants it for any mesh

import meshverse
from helpers.observation import STOCK, observe
from helpers.versions import HAS_CANONICAL_LAYOUTS
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh, Universe, init_device_mesh

pytestmark = pytest.mark.usefixtures("uninstalled_afterwards")

_SHAPE, _NAMES = (2, 2, 2), ("dp", "cp", "tp")
_RANK = 5  # coordinate (1, 0, 1)


def _stock() -> Any:
    return STOCK.init_device_mesh("cpu", _SHAPE, mesh_dim_names=_NAMES)


def _line() -> Any:
    return STOCK.init_device_mesh("cpu", (8,), mesh_dim_names=("w",))


def _stock_flattened() -> Any:
    return _stock()["dp", "cp"]._flatten("data")


def _saved(make: Callable[[], Any], rank: int = _RANK) -> bytes:
    """A stock mesh, pickled in a world of its own."""
    with fake_world(8, rank):
        return pickle.dumps(make())


def _ours() -> Any:
    """The mesh of the loading program, with groups for every axis of what is saved."""
    mesh = init_device_mesh("cpu", _SHAPE, mesh_dim_names=_NAMES)
    mesh["dp", "cp"].flatten("data")
    return mesh


_MESHES: dict[str, tuple[Callable[[], Any], Callable[[DeviceMesh], Any]]] = {
    "root": (_stock, lambda mesh: mesh),
    "slice": (lambda: _stock()["tp"], lambda mesh: mesh["tp"]),
    "two axes": (lambda: _stock()["dp", "tp"], lambda mesh: mesh["dp", "tp"]),
    "flattened": (_stock_flattened, lambda mesh: mesh["dp", "cp"].flatten("data")),
    "unflattened": (
        lambda: _line()._unflatten(0, _SHAPE, _NAMES),
        lambda mesh: mesh,
    ),
    "concatenated": (
        lambda: (lambda m: STOCK.DeviceMesh._concatenate([m["tp"], m["dp"]]))(_stock()),
        lambda mesh: DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]),
    ),
}


def test_a_root_that_this_program_has_unflattened() -> None:
    saved = _saved(_stock)
    meshverse.install()
    with fake_world(8, _RANK):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("w",)).unflatten(0, _SHAPE, _NAMES)
        loaded = pickle.loads(saved)
        assert loaded == mesh
        assert loaded.get_group("dp") is mesh.get_group("dp")


@pytest.mark.parametrize("own_groups", [0, 9], ids=["numbers free", "numbers taken"])
@pytest.mark.parametrize("which", _MESHES)
def test_it_is_on_the_live_meshs_groups(which: str, own_groups: int) -> None:
    make, same = _MESHES[which]
    saved = _saved(make)
    with fake_world(8, _RANK):
        meshverse.install()
        for _ in range(own_groups):
            dist.new_group([4, 5])
        expected = same(_ours())
        with groups_created(0):
            mesh = pickle.loads(saved)
        assert type(mesh) is DeviceMesh
        assert mesh == expected
        assert hash(mesh) == hash(expected)
        assert mesh.get_all_groups() == expected.get_all_groups()
        assert mesh._get_root_mesh() == expected._get_root_mesh()
        assert observe(mesh) == observe(expected)


def test_what_derives_from_it_is_the_live_meshs() -> None:
    saved = _saved(_stock)
    with fake_world(8, _RANK):
        meshverse.install()
        live = _ours()
        mesh = pickle.loads(saved)
        with groups_created(0):
            assert mesh["tp"] is live["tp"]
            assert mesh["dp", "cp"]._flatten("data") is live["dp", "cp"]._flatten("data")
        assert pickle.loads(pickle.dumps(mesh)) is live
        assert copy.deepcopy(mesh) is mesh


def test_a_loaded_root_is_a_root() -> None:
    saved = _saved(_stock)
    with fake_world(8, _RANK):
        meshverse.install()
        live, mesh = _ours(), pickle.loads(saved)
        mesh.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            live.get_group("tp")


@pytest.mark.parametrize("weights_only", [True, False])
def test_by_torch_load(weights_only: bool) -> None:
    file = io.BytesIO()
    with fake_world(8, _RANK):
        root = _stock()
        data = root["dp", "cp"]._flatten("data")
        torch.save({"data": data, "root": root, "tp": root["tp"]}, file)
    file.seek(0)
    with fake_world(8, _RANK):
        meshverse.install()
        live = _ours()
        loaded = torch.load(file, weights_only=weights_only)
        expected = {"data": live["dp", "cp"].flatten("data"), "root": live, "tp": live["tp"]}
        for name, mesh in loaded.items():
            assert type(mesh) is DeviceMesh, name
            assert observe(mesh) == observe(expected[name]), name
            assert mesh.get_all_groups() == expected[name].get_all_groups(), name


def test_another_ranks_file() -> None:
    saved = _saved(_stock, rank=2)
    with fake_world(8, _RANK):
        meshverse.install()
        live = _ours()
        mesh = pickle.loads(saved)
        assert observe(mesh) == observe(live), "this rank's coordinate and groups, not the saver's"


def test_the_universe_that_asked_by_the_axes_names() -> None:
    saved = _saved(_stock)
    with fake_world(8, _RANK):
        meshverse.install()
        others = [
            init_device_mesh("cpu", _SHAPE, mesh_dim_names=("x", "y", "z")),
            init_device_mesh("meta", _SHAPE, mesh_dim_names=_NAMES),
            init_device_mesh("cpu", (4, 2), mesh_dim_names=("x", "tp")),
        ]
        live, later = _ours(), _ours()
        assert pickle.loads(saved).universe is live.universe
        del others, later


def test_a_group_without_a_tag_first() -> None:
    saved = _saved(lambda: _stock()["tp"])
    with fake_world(8, _RANK):
        meshverse.install()
        live = init_device_mesh("cpu", _SHAPE, mesh_dim_names=_NAMES, isolate={"tp": "mine"})
        tagged = live.get_group("tp")
        assert pickle.loads(saved).get_group() is tagged, "there is no other"
        plain = init_device_mesh("cpu", (4, 2), mesh_dim_names=("x", "y"), universe=live.universe)
        assert pickle.loads(saved).get_group() is plain.get_group("y")


# --- what is not here ----------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["root", "slice", "flattened"])
def test_no_such_mesh_here_until_bound(which: str) -> None:
    make, same = _MESHES[which]
    saved = _saved(make)
    with fake_world(8, _RANK):
        meshverse.install()
        for _ in range(9):
            dist.new_group([4, 5])
        with groups_created(0):
            mesh, other = pickle.loads(saved), pickle.loads(saved)
            assert type(mesh) is DeviceMesh
            for use in (lambda: mesh.get_group(0), lambda: mesh._dim_group_names[0]):
                with pytest.raises(RuntimeError, match=r"without them.*mesh\.bind\(\)"):
                    use()
        mesh.bind()
        expected = same(_ours())
        assert mesh == other == expected
        for bound in (mesh, other):
            assert observe(bound) == observe(expected)
        assert mesh.universe.root.shape == _SHAPE, "its root was saved with it"


def test_in_a_process_without_process_groups() -> None:
    saved = _saved(lambda: _stock()["tp"])
    meshverse.install()
    mesh = pickle.loads(saved)
    assert type(mesh) is DeviceMesh
    assert (mesh.mesh.tolist(), list(mesh.get_coordinate())) == ([4, 5], [1])
    assert mesh._get_root_mesh().shape == _SHAPE
    with pytest.raises(RuntimeError, match=r"mesh\.bind\(\)"):
        mesh.get_group()


def test_in_a_process_that_holds_another_mesh_without_process_groups() -> None:
    saved = _saved(lambda: _stock()["tp"])
    held = DeviceMesh(
        "cpu", torch.arange(8).view(2, 4), mesh_dim_names=("x", "tp"), _init_backend=False, _rank=5
    )
    meshverse.install()
    for _ in range(2):
        mesh = pickle.loads(saved)
        assert mesh._get_root_mesh().shape == _SHAPE
        assert mesh["tp"] is mesh
    assert pickle.loads(pickle.dumps(held["x"]))._get_root_mesh() is held


def test_another_number_of_ranks() -> None:
    saved = _saved(_stock)
    with fake_world(4, 1):
        meshverse.install()
        init_device_mesh("cpu", (4,))
        mesh = pickle.loads(saved)
        assert mesh.mesh.numel() == 8
        with pytest.raises(RuntimeError, match=r"mesh\.bind\(\)"):
            mesh.get_group("tp")
        with pytest.raises(ValueError, match="includes rank 7"):
            mesh.bind()


def _without(name: str, state: dict[str, Any]) -> None:
    del state[name]


_BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no layout": lambda state: _without("_layout", state),
    "no ranks": lambda state: _without("_rank_map", state),
    "a layout that is none": lambda state: state.update(_layout=3),
    "ranks that repeat": lambda state: state.update(_rank_map=torch.zeros(8)),
    "ranks without values": lambda state: state.update(_rank_map=torch.empty(8, device="meta")),
    "fewer ranks": lambda state: state.update(_rank_map=torch.arange(2)),
    "more names than axes": lambda state: state.update(_mesh_dim_names=("a",) * 9),
    "a rank that is none": lambda state: state.update(_rank="5"),
    "names that are a number": lambda state: state.update(_dim_group_names=3),
    "a mapping that is none": lambda state: state.update(_flatten_mapping=None),
}


@pytest.mark.parametrize("how", _BROKEN)
def test_a_mesh_of_another_form_is_loaded_but_never_used(how: str) -> None:
    with fake_world(8, _RANK):
        state = _stock().__getstate__()
    _BROKEN[how](state)
    with fake_world(8, _RANK):
        meshverse.install()
        live, taken = _ours(), [dist.new_group([4, 5]) for _ in range(9)]
        mesh = object.__new__(STOCK.DeviceMesh)
        before = Universe(8).serial
        mesh.__setstate__(state)
        assert Universe(8).serial == before - 1
        with pytest.raises(RuntimeError, match=r"torch's own DeviceMesh.*init_device_mesh\(\)"):
            mesh._dim_group_names[0]
        del live, taken


# --- what stays torch's --------------------------------------------------------------------------

_COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
}


@pytest.mark.parametrize("how", _COPIES)
@pytest.mark.parametrize("which", _MESHES)
def test_a_copy_of_a_live_stock_mesh_stays_stock(which: str, how: str, world) -> None:
    mesh = _MESHES[which][0]()
    meshverse.install()
    _ours()
    back = _COPIES[how](mesh)
    assert type(back) is STOCK.DeviceMesh
    assert back == mesh
    assert observe(back) == observe(mesh)


@pytest.mark.parametrize("how", _COPIES)
def test_a_copy_of_one_on_the_default_group_stays_stock(how: str, world) -> None:
    mesh = _line()
    meshverse.install()
    live = init_device_mesh("cpu", (8,), mesh_dim_names=("w",))
    back = _COPIES[how](mesh)
    live.universe.destroy()
    assert type(back) is STOCK.DeviceMesh
    assert back.get_group() is dist.group.WORLD


def test_a_mesh_without_groups_stays_as_it_is(world) -> None:
    mesh = STOCK.DeviceMesh("cpu", torch.arange(8).reshape(_SHAPE), _init_backend=False)
    meshverse.install()
    _ours()
    assert type(copy.deepcopy(mesh)) is STOCK.DeviceMesh
    assert type(pickle.loads(pickle.dumps(mesh))) is STOCK.DeviceMesh


@pytest.mark.parametrize("which", ["line", "flattened"])
def test_on_the_default_group_it_stays_stock(which: str) -> None:
    make = _line if which == "line" else lambda: _stock()._flatten("w")
    saved = _saved(make)
    with fake_world(8, _RANK):
        meshverse.install()
        alone = pickle.loads(saved)
        live = init_device_mesh("cpu", (8,), mesh_dim_names=("w",))
        for mesh in (alone, pickle.loads(saved)):
            assert type(mesh) is STOCK.DeviceMesh
            assert mesh.get_group() is dist.group.WORLD
            if which == "line" or HAS_CANONICAL_LAYOUTS:
                assert mesh == live


def test_a_subclass_of_stock_stays_what_it_is() -> None:
    saved = _saved(lambda: _Theirs("cpu", torch.arange(8)))
    with fake_world(8, _RANK):
        meshverse.install()
        assert type(pickle.loads(saved)) is _Theirs


class _Theirs(STOCK.DeviceMesh):
    pass


def test_a_copy_of_one_whose_groups_ours_use_too_stays_stock(world) -> None:
    mesh = _stock()
    meshverse.install()
    ours = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=_NAMES)
    assert ours.get_all_groups() == mesh.get_all_groups()
    assert type(copy.deepcopy(mesh)) is STOCK.DeviceMesh


def test_a_copy_on_a_rank_outside_stays_stock(world) -> None:
    mesh = STOCK.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    meshverse.install()
    for back in (copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
        assert type(back) is STOCK.DeviceMesh
        assert back.get_coordinate() is None
