"""Meshes for XLA: as in stock they have no process groups, and need no default group."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.observation import OURS, STOCK, Family, attempt
from helpers.worlds import groups_created
from meshverse import DeviceMesh, init_device_mesh

_AXES = ("dp", "tp")
_MAKE: dict[str, Callable[[Family], StockDeviceMesh]] = {
    "init_device_mesh": lambda family: family.init_device_mesh("xla", (2, 4), mesh_dim_names=_AXES),
    "DeviceMesh": lambda family: family.DeviceMesh(
        "xla", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=_AXES
    ),
    "flattened": lambda family: _MAKE["DeviceMesh"](family)._flatten("all"),
    "unflattened": lambda family: _MAKE["DeviceMesh"](family)._unflatten(1, (2, 2), ("a", "b")),
}
# What stock answers without its process groups.
_ASK: dict[str, Callable[[StockDeviceMesh], Any]] = {
    "shape": lambda mesh: (mesh.shape, mesh.ndim, mesh.size(), mesh.size(0)),
    "names": lambda mesh: (mesh.device_type, mesh.mesh_dim_names),
    "ranks": lambda mesh: mesh.mesh.tolist(),
    "repr": repr,
    "get_rank": lambda mesh: mesh.get_rank(),
    "get_group": lambda mesh: mesh.get_group(0),
    "get_group by name": lambda mesh: mesh.get_group("tp"),
    "get_local_rank": lambda mesh: mesh.get_local_rank(0),
    "get_all_groups": lambda mesh: mesh.get_all_groups(),
    "copy": lambda mesh: copy.deepcopy(mesh) == mesh,
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)) == mesh,
}
# What stock does not know of its own rank without a default group: it raises AttributeError.
_NEEDS_A_RANK: dict[str, Callable[[StockDeviceMesh], Any]] = {
    "get_coordinate": lambda mesh: mesh.get_coordinate(),
    "_is_current_rank_part_of_mesh": lambda mesh: mesh._is_current_rank_part_of_mesh(),
    "_sym_get_coordinate": lambda mesh: mesh._sym_get_coordinate(0),
}
in_every_way = pytest.mark.parametrize("make", _MAKE.values(), ids=_MAKE)


@in_every_way
def test_without_a_default_group_it_is_stocks(make: Callable[[Family], StockDeviceMesh]) -> None:
    assert not dist.is_initialized()
    stock, ours = make(STOCK), make(OURS)
    assert not dist.is_initialized()
    assert type(ours) is DeviceMesh
    assert ours == stock
    assert hash(ours) == hash(stock)
    for name, ask in {**_ASK, **_NEEDS_A_RANK}.items():
        assert attempt(lambda: ask(ours)) == attempt(lambda: ask(stock)), name  # noqa: B023


@in_every_way
def test_with_a_default_group_it_makes_none_either(
    world, make: Callable[[Family], StockDeviceMesh]
) -> None:
    with groups_created(0):
        stock, ours = make(STOCK), make(OURS)
        for name, ask in _ASK.items():
            assert attempt(lambda: ask(ours)) == attempt(lambda: ask(stock)), name  # noqa: B023
    assert ours == stock
    assert ours.get_coordinate() is not None  # which stock does not know


def test_what_derives_from_it_has_none() -> None:
    mesh = init_device_mesh("xla", (2, 4), mesh_dim_names=_AXES)
    derived = (mesh["tp"], mesh.flatten("all"), DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]))
    for view in derived:
        with pytest.raises(RuntimeError, match="is for XLA, whose compiler communicates without"):
            view.get_group(0)
        with pytest.raises(AttributeError, match="_coordinate_on_dim"):
            view.get_coordinate()
    assert [view.shape for view in derived] == [(4,), (8,), (4, 2)]


def test_bound_to_a_world_it_knows_its_place_and_has_no_groups(world) -> None:
    mesh = DeviceMesh("xla", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=_AXES, _rank=0)
    assert mesh.get_coordinate() == (0, 0)
    with groups_created(0):
        mesh.bind(init_device_mesh("cpu", (8,)).universe)
    assert mesh.get_coordinate() == (1, 1)
    assert not mesh.has_groups


@pytest.mark.parametrize("device_type", ["cpu", "meta", "hpu", "mps", "vulkan", "privateuseone"])
def test_other_devices_need_a_default_group(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for family in (STOCK, OURS):
        with pytest.raises(ValueError, match="environment variable RANK expected"):
            family.init_device_mesh(device_type, (2, 4), mesh_dim_names=_AXES)
        with pytest.raises(ValueError, match="environment variable RANK expected"):
            family.DeviceMesh(device_type, [0, 1])
    assert not dist.is_initialized()
