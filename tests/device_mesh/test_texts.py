"""Texts of a mesh, in print and in torch's messages: letter for letter as stock's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from helpers.observation import OURS, STOCK, Family
from helpers.sides import SIDES, side
from helpers.versions import HAS_CANONICAL_LAYOUTS, needs_canonical_layouts
from helpers.worlds import in_worlds
from meshverse import DeviceMesh, init_device_mesh

_AXES = ("dp", "cp", "tp")
_Build = Callable[[Family], StockDeviceMesh]


def _cube(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_AXES)


_MESHES: dict[str, _Build] = {
    "root": _cube,
    "nameless": lambda family: family.init_device_mesh("cpu", (2, 4)),
    "nameless, one axis": lambda family: family.init_device_mesh("cpu", (8,)),
    "one rank": lambda family: family.DeviceMesh("cpu", [5]),
    "axes of size 1": lambda family: family.init_device_mesh(
        "cpu", (1, 8, 1), mesh_dim_names=_AXES
    ),
    "slice": lambda family: _cube(family)["cp"],
    "slice of two": lambda family: _cube(family)["dp", "tp"],
    "flattened": lambda family: _cube(family)["dp", "tp"]._flatten("flat"),
    "unflattened": lambda family: _cube(family)._unflatten(0, (1, 2), ("a", "b")),
    "concatenated": lambda family: family.DeviceMesh._concatenate(
        [_cube(family)["tp"], _cube(family)["dp"]]
    ),
    "permuted": lambda family: family.DeviceMesh(
        "cpu", [[6, 5], [4, 7]], mesh_dim_names=("a", "b")
    ),
    "without me": lambda family: family.DeviceMesh("cpu", [[0, 1], [2, 3]]),
    "without groups": lambda family: family.DeviceMesh("cpu", [5, 6], _init_backend=False),
    "of a group": lambda family: family.DeviceMesh.from_group(dist.group.WORLD, "cpu"),
    "on meta": lambda family: family.init_device_mesh("meta", (8,), mesh_dim_names=("dp",)),
}


def _printed(mesh: StockDeviceMesh) -> list[str]:
    return [repr(mesh), str(mesh), f"{mesh}", f"{mesh!s:>90}", "%s" % mesh, str([mesh]), f"{mesh=}"]  # noqa: UP031


@needs_canonical_layouts
@in_worlds((8, 5))
@pytest.mark.parametrize("debug", ["", "OFF", "INFO", "DETAIL"])
@pytest.mark.parametrize("build", _MESHES.values(), ids=_MESHES)
def test_printed(world, build: _Build, debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = build(STOCK), build(OURS)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)  # torch reads it each time
    assert _printed(ours) == _printed(stock)
    assert ("Mesh: [" in repr(ours)) is (debug == "DETAIL")


@in_worlds((8, 1), (8, 6))
@pytest.mark.parametrize("debug", ["", "DETAIL"])
def test_a_slice_is_printed_outside_of_it_too(
    world, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    outside = mesh.get_coordinate() is None
    shown = ", Mesh: [0, 1, 2]" if debug and not outside else ""
    if HAS_CANONICAL_LAYOUTS:
        assert repr(mesh["tp"]) == f"DeviceMesh((tp=3), 'cpu', stride=(1,){shown})"
    if outside:
        with pytest.raises(IndexError, match=r"is not in DeviceMesh\(\(tp=3\)"):
            mesh["tp"].get_group()
        with pytest.raises(RuntimeError, match="it needs to contain the local rank"):
            _ = mesh["tp"].mesh


def test_the_classs_name_is_stocks(world) -> None:
    assert (DeviceMesh.__name__, DeviceMesh.__qualname__) == ("DeviceMesh", "DeviceMesh")
    assert DeviceMesh.__module__ == "meshverse.device_mesh"  # so one sees which class it is


def _from_group(group: Any, mesh: Any, names: Any = None) -> Callable[[Family], StockDeviceMesh]:
    return lambda family: family.DeviceMesh.from_group(group(), "cpu", mesh, mesh_dim_names=names)


def _two_groups() -> list[dist.ProcessGroup]:
    return [dist.group.WORLD, dist.group.WORLD]


_WRONG: dict[str, Callable[[Family], Any]] = {
    "fewer axes than groups": _from_group(_two_groups, (0, 1, 2, 3), ("a", "b")),
    "fewer axes than groups, a tensor": _from_group(_two_groups, torch.arange(4), ("a", "b")),
    "other ranks than the group's": _from_group(lambda: dist.group.WORLD, [[0, 1], [2, 3]]),
    "no groups": _from_group(list, None),
    "groups without ranks": _from_group(_two_groups, None),
    "groups without names": _from_group(_two_groups, [[0, 1]]),
    "no groups made": lambda family: _MESHES["without groups"](family).get_group(),
    "which group": lambda family: _cube(family).get_group(),
    "which local rank": lambda family: _cube(family).get_local_rank(),
    "group of an unknown axis": lambda family: _cube(family).get_group("pp"),
    "order of axes": lambda family: _cube(family)["tp", "dp"],
    "an unknown axis": lambda family: _cube(family)["pp"],
    "repeated names": lambda family: family.init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=("dp", "dp")
    ),
    "more names than axes": lambda family: family.init_device_mesh(
        "cpu", (8,), mesh_dim_names=("dp", "tp")
    ),
    "larger than the world": lambda family: family.init_device_mesh("cpu", (2, 5)),
    "a device with an index": lambda family: family.init_device_mesh("cuda:0", (8,)),
    "FSDP2 on three axes": lambda family: fully_shard(nn.Linear(2, 2), mesh=_cube(family)),
    "distribute_tensor to another mesh": lambda family: distribute_tensor(
        _tensor(_cube(family)["dp", "tp"]), _cube(family)["cp", "tp"], [Shard(0)] * 2
    ),
    "tensors on two meshes": lambda family: (
        _tensor(_cube(family)["dp"]) + _tensor(_cube(family)["tp"])
    ),
}


def _tensor(mesh: StockDeviceMesh) -> DTensor:
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    return DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False)


@needs_canonical_layouts
@in_worlds((8, 5))
@pytest.mark.parametrize("action", _WRONG.values(), ids=_WRONG)
def test_error_texts_begin_with_stocks(world, action: Callable[[Family], Any]) -> None:
    texts = {}
    for which in SIDES:
        with side(which) as family, pytest.raises(Exception, match=r".") as raised:
            action(family)
        texts[which] = type(raised.value), " ".join(map(str, raised.value.args)).replace("  ", " ")
    kind, text = texts["stock"]
    for which in ("ours", "installed"):
        assert texts[which][0] is kind
        assert texts[which][1].startswith(text.removesuffix("."))


@needs_canonical_layouts
@in_worlds((8, 5))
def test_tensors_and_what_they_did_are_printed_as_on_stock(world) -> None:
    results = {}
    for which in SIDES:
        with side(which) as family:
            tensor = _tensor(_cube(family))
            with CommDebugMode() as seen:
                product = (tensor @ tensor.T).redistribute(placements=[Replicate()] * 3)
            results[which] = (
                repr(tensor),
                str(tensor._spec),
                repr(product.device_mesh),
                str(seen.get_comm_counts()),
                seen.generate_comm_debug_tracing_table(noise_level=3),
            )
    assert results["ours"] == results["installed"] == results["stock"]


@in_worlds((8, 5))
def test_a_mesh_says_that_its_universe_has_ended(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    texts = [repr(mesh), repr(mesh["tp"])]
    mesh.universe.destroy()
    ended = [f"{text[:-1]}, universe='destroyed')" for text in texts]
    assert [repr(mesh), repr(mesh["tp"])] == ended


@in_worlds((65_536, 5))
def test_printing_does_not_list_the_world(world) -> None:
    mesh = init_device_mesh("cpu", (256, 256), mesh_dim_names=("dp", "tp"), lazy=True)
    assert len(repr(mesh)) < 80
    assert "mesh" not in vars(mesh)  # which would be the tensor of all ranks
