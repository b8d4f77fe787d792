"""In a world of a million ranks, no mesh operation makes anything of the world's size."""

from __future__ import annotations

import contextlib
import gc
import pickle
import tracemalloc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from helpers.observation import OURS, STOCK
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh, init_device_mesh
from meshverse._core import RankGroups, RankMap
from trainer_views import Degrees, five_views

_WORLD = 1 << 20
_RANK = 777_777
_SHAPE, _NAMES = (8, 128, 128, 8), ("pp", "dp", "cp", "tp")

# Of the world's size, a tensor of ranks takes 4 MB, a list or tuple at least twice that. The
# largest group here has 16,384 ranks, for which c10d needs 2 MB.
_LIMIT_BYTES = 4 * _WORLD
_LIMIT_RANKS = _WORLD // 16


@pytest.fixture(autouse=True)
def million_ranks() -> Iterator[None]:
    with fake_world(_WORLD, _RANK):
        yield


class WorldSizedWorkError(Exception):
    """Something of the world's size was asked for."""


@contextlib.contextmanager
def world_sized_work_refused() -> Iterator[None]:
    """Make the world-sized forms of ranks unreachable, and bound what Python allocates."""
    with pytest.MonkeyPatch.context() as patch:
        _refuse_if_large(patch, RankMap, "ranks", lambda rank_map: rank_map.size)
        _refuse_if_large(patch, RankGroups, "all", lambda _: _WORLD)  # each rank once
        tracemalloc.start()
        try:
            yield
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < _LIMIT_BYTES, f"{peak} bytes were allocated at once"


@pytest.fixture
def no_world_sized_work(million_ranks: None) -> Iterator[None]:
    """The same for a whole test, in a world in which nothing was made yet."""
    gc.collect()
    with world_sized_work_refused():
        with pytest.raises(WorldSizedWorkError):  # the guard works
            _ = init_device_mesh("cpu", (_WORLD,)).mesh
        yield


def _refuse_if_large(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, size_of: Callable[..., int]
) -> None:
    original = getattr(owner, name)

    def checked(*args: object, **kwargs: object) -> object:
        if size_of(*args) > _LIMIT_RANKS:
            raise WorldSizedWorkError(f"{owner.__name__}.{name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, checked)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", _SHAPE, mesh_dim_names=_NAMES)


def test_asking_for_every_rank_is_noticed(no_world_sized_work) -> None:
    mesh = init_device_mesh("cpu", (_WORLD,))
    for ask in (lambda: mesh.mesh, lambda: mesh._flatten_rank_map):
        with pytest.raises(WorldSizedWorkError):
            ask()


def test_creating_a_mesh(no_world_sized_work) -> None:
    with groups_created(4):
        mesh = _mesh()
    assert mesh.shape == _SHAPE
    assert mesh.get_coordinate() == (5, 119, 70, 1)
    assert [group.size() for group in mesh.get_all_groups()] == list(_SHAPE)
    assert [mesh.get_local_rank(name) for name in _NAMES] == [5, 119, 70, 1]
    assert repr(mesh)
    assert mesh.universe.explain().created == 4


def test_slicing(no_world_sized_work) -> None:
    mesh = _mesh()
    assert mesh["tp"] is mesh["tp"]
    assert mesh["pp", "cp"]["cp"].size() == 128
    assert mesh[["dp", "tp"]].get_coordinate() == (119, 1)


def test_flattening(no_world_sized_work) -> None:
    mesh = _mesh()
    assert mesh["pp", "cp"].flatten().size() == 1024
    assert mesh.flatten("world").size() == _WORLD


def test_unflattening(no_world_sized_work) -> None:
    mesh = _mesh()
    view = mesh.unflatten("dp", (16, 8), ("replicate", "shard"))
    assert view.get_coordinate() == (5, 14, 7, 70, 1)
    assert view.get_group("shard").size() == 8


def test_concatenating(no_world_sized_work) -> None:
    mesh = _mesh()
    assert DeviceMesh.concatenate([mesh["dp"], mesh["tp"]]) is mesh["dp", "tp"]


def test_comparing(no_world_sized_work) -> None:
    one, two = _mesh(), _mesh()
    assert one == two
    assert one["dp", "tp"] == two["dp", "tp"]
    assert one["dp"] != two["cp"]
    assert one != init_device_mesh("cpu", _SHAPE)


def test_hashing(no_world_sized_work) -> None:
    mesh = _mesh()
    meshes = {mesh["dp"], mesh["tp"], mesh["dp", "tp"].flatten(), _mesh()["dp"], _mesh()}
    assert len(meshes) == 4
    assert mesh in meshes


def test_the_hash_is_stocks() -> None:
    ours, stock = (
        make("cpu", (_WORLD,), mesh_dim_names=("all",))
        for make in (init_device_mesh, STOCK.init_device_mesh)
    )
    assert hash(ours) == hash(stock)
    assert ours == stock


def test_what_was_read_of_ranks_goes_with_the_meshes() -> None:
    rank_maps = []
    for _ in range(3):
        mesh = DeviceMesh("cpu", torch.randperm(4096), _init_backend=False)
        hash(mesh), mesh.mesh, mesh._flatten_rank_map
        rank_maps.append(weakref.ref(mesh.universe.rank_map))
        del mesh
    gc.collect()
    assert [rank_map() for rank_map in rank_maps] == [None] * 3


def test_pickling(no_world_sized_work) -> None:
    mesh = _mesh()
    for view in (mesh, mesh["tp"], mesh["dp", "cp"].flatten()):
        saved = pickle.dumps(view)
        assert len(saved) < 1024
        assert pickle.loads(saved) is view


def test_a_trainers_recipe(no_world_sized_work) -> None:
    degrees = Degrees(pp=8, dp_replicate=2, dp_shard=512, cp=8, tp=16, ep=64)
    assert degrees.world_size == _WORLD
    views = five_views(OURS.init_device_mesh, degrees)
    assert views["experts"].shape == (8, 2, 1024, 64)


def test_a_mesh_of_part_of_the_world(no_world_sized_work) -> None:
    ranks = [_RANK - 1, _RANK, 0, _WORLD - 1]
    mesh = DeviceMesh("cpu", [ranks], mesh_dim_names=("pp", "dp"))
    with pytest.raises(ValueError, match=str(_WORLD)):
        DeviceMesh("cpu", [_RANK, _WORLD])
    assert mesh.get_coordinate() == (0, 1)
