"""Meshverse and stock torch side by side: every mesh operation in a world of 10,240 ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import device_mesh as stock

import mesh_operations as operations
import meshverse
from harness import Action, Bound, Comparison, Side, same_answer
from reports import Quantity
from trainer_views import Degrees, InitDeviceMesh, answers, count_process_groups, five_views
from worlds import fake_world

__all__ = ["TITLE", "comparisons", "quantities"]

TITLE = "Mesh operations, 10,240 ranks"

_DEGREES = Degrees()
_WORLD_SIZE = _DEGREES.world_size
_RANK = 777
_AXES = {"pp": 8, "dp": 8, "cp": 20, "tp": 8}
_DATA_AXES = {"pp": 8, "batch": 160, "cp": 1, "tp": 8}
_WORLD = {"world": _WORLD_SIZE}


def _side(label: str, set_up: Callable[[], Action]) -> Side:
    return Side(label, set_up, _WORLD_SIZE, _RANK)


def _against_stock(
    title: str, at_least: float, operation: Callable[..., Action], *args: Any
) -> Comparison:
    return Comparison(
        title,
        _side("stock", partial(operation, stock.init_device_mesh, *args)),
        _side("Meshverse", partial(operation, meshverse.init_device_mesh, *args)),
        Bound(at_least=at_least),
    )


def comparisons() -> list[Comparison]:
    """What is timed, and what is to be reached."""
    return [
        _against_stock("create 4-D mesh", 100, operations.create, _AXES),
        _create_against_floor(),
        _against_stock("slice again", 500, operations.slice_again, _AXES),
        _against_stock("slice first", 50, operations.slice_first, _AXES),
        _against_stock(
            "unflatten to new groups",
            100,
            operations.unflatten_to_new_groups,
            _WORLD,
            0,
            _AXES,
        ),
        _unflatten_to_known_groups(),
        _against_stock("flatten to a new group", 30, operations.flatten, _AXES, ("dp", "cp")),
        # As a trainer does for its losses; without context parallelism, it is the group of `batch`.
        _against_stock(
            "flatten to a known group", 30, operations.flatten, _DATA_AXES, ("batch", "cp")
        ),
        _against_stock("compare equal meshes", 150, operations.compare_equal, _AXES),
        _against_stock("five views of one world", 100, operations.build_views, _DEGREES),
    ]


def _create_against_floor() -> Comparison:
    with fake_world(_WORLD_SIZE, _RANK):
        mesh = operations.create(stock.init_device_mesh, _AXES).answer()

    def check(floor: Any, ours: Any) -> None:
        same_answer(floor["axis ranks"], ours["axis ranks"])

    return Comparison(
        "create 4-D mesh, against c10d making my 4 groups",
        _side("c10d", partial(operations.create_own_groups, mesh["axis ranks"])),
        _side("Meshverse", partial(operations.create, meshverse.init_device_mesh, _AXES)),
        Bound(at_most=2),
        check,
    )


def _unflatten_to_known_groups() -> Comparison:
    def side(label: str, init: InitDeviceMesh, times: int) -> Side:
        unflatten = operations.unflatten_to_known_groups
        return _side(label, partial(unflatten, init, _WORLD, 0, _AXES, times))

    return Comparison(
        "unflatten to known groups",
        side("stock", stock.init_device_mesh, 1),  # some 75 ms each
        side("Meshverse", meshverse.init_device_mesh, 20),
        Bound(at_least=2000),
    )


def quantities() -> list[Quantity]:
    """What is counted, and what is to be reached."""
    ours, theirs = meshverse.init_device_mesh, stock.init_device_mesh
    return [
        Quantity(
            "pickle of a slice",
            "bytes",
            _pickled_slice_bytes(theirs),
            _pickled_slice_bytes(ours),
            at_most=1000,
        ),
        Quantity(
            "groups after five views",
            "groups",
            _groups_after_views(theirs),
            _groups_after_views(ours),
            at_most=7,
        ),
    ]


def _pickled_slice_bytes(init: InitDeviceMesh) -> int:
    with fake_world(_WORLD_SIZE, _RANK):
        part = init("cpu", tuple(_AXES.values()), mesh_dim_names=tuple(_AXES))["tp"]
        pickled = pickle.dumps(part)
        loaded = pickle.loads(pickled)
        assert loaded == part
        assert loaded.get_coordinate() == part.get_coordinate() == (1,)
        assert loaded.mesh.tolist() == part.mesh.tolist() == list(range(776, 784))
        return len(pickled)


def _groups_after_views(init: InitDeviceMesh) -> int:
    with fake_world(_WORLD_SIZE, _RANK):
        views = five_views(init, _DEGREES)
        assert answers(views["full"])["coordinate"] == (0, 0, 97, 0, 1)
        return count_process_groups()
