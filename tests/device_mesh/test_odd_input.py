"""Odd input, of which stock makes something: the same here, or the same type of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.observation import OURS, STOCK, Family, assert_same, attempt
from helpers.versions import AT_LEAST_2_12

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8

_RANKS = torch.arange(8)
_ROWS = _RANKS.view(2, 4)


def _init(names: Any, shape: Any = (2, 4), **extra: Any) -> Callable[[Family], Any]:
    return lambda family: family.init_device_mesh("cpu", shape, mesh_dim_names=names, **extra)


def _made(names: Any, *, mesh: Any = _ROWS) -> Callable[[Family], Any]:
    return lambda family: family.DeviceMesh("cpu", mesh, mesh_dim_names=names)


def _sliced(key: Any, names: Any = ("a", "b")) -> Callable[[Family], Any]:
    return lambda family: _init(names)(family)[key]


def _of_world(*arguments: Any, as_list: bool = False, **extra: Any) -> Callable[[Family], Any]:
    def make(family: Family) -> Any:
        world = [dist.group.WORLD] if as_list else dist.group.WORLD
        return family.DeviceMesh.from_group(world, "cpu", *arguments, **extra)

    return make


_ODD: dict[str, Callable[[Family], Any]] = {
    # A string is a tuple of its letters.
    "one letter": _init("t", (8,)),
    "two letters": _init("tp"),
    "two letters for one axis": _init("tp", (8,)),
    "one letter twice": _init("tt"),
    "an override by a letter": _init("t", (8,), backend_override={"t": "fake"}),
    "letters of a mesh of ranks": _made("tp"),
    "letters of a group's mesh": _of_world(mesh_dim_names="t"),
    "letters of a list of groups": _of_world(_RANKS, as_list=True, mesh_dim_names="a"),
    "letters to unflatten to": lambda f: _init("w", (8,))(f)._unflatten(0, (2, 4), "tp"),
    "a slice by a letter": _sliced("p", "tp"),
    "a slice by both letters": _sliced("tp", "tp"),
    # No names: init_device_mesh refuses them, the constructor takes them for none.
    "an empty tuple": _init((), (8,)),
    "an empty list": _init([], (8,)),
    "an empty string": _init("", (8,)),
    "no names of no axes": _init((), ()),
    "False": _init(False),
    "zero": _init(0, (8,)),
    "an empty tuple of a mesh of ranks": _made(()),
    "an empty list of a mesh of ranks": _made([]),
    "an empty string of a mesh of ranks": _made(""),
    "False of a mesh of ranks": _made(False),
    "an empty tuple of a group's mesh": _of_world(mesh_dim_names=()),
    # Other collections, and other things.
    "a list": _init(["a", "b"]),
    "a set": _init({"a"}, (8,)),
    "a dictionary": _init({"a": 1}, (8,)),
    "an array": _made(np.array(["a"]), mesh=_RANKS),
    "an array of two": _made(np.array(["a", "b"])),
    "a generator": lambda f: _made(name for name in "ab")(f),
    "an empty name": _init(("", "a")),
    "a number for a shape": _init(None, 8),
    "a list for a shape": _init(None, [2, 4]),
    "a size for a shape": _init(None, torch.Size([2, 4])),
    "text for a shape": _init(None, "24"),
    "no ranks": lambda f: f.DeviceMesh("cpu", None),
    "one rank": lambda f: f.DeviceMesh("cpu", 5),
    "a range": lambda f: f.DeviceMesh("cpu", range(8)),
    "no overrides": _init(None, (8,), backend_override={}),
    "an override from the end": _init(None, (8,), backend_override={-1: "fake"}),
    # Derived meshes.
    "a slice by nothing": _sliced(()),
    "a slice by an empty name": _sliced(""),
    "a slice by a list": _sliced(["a"]),
    "a slice by a list of all": _sliced(["a", "b"]),
    "a slice by a set": _sliced({"a"}),
    "a slice by one name twice": _sliced(("a", "a")),
    "a slice by a number": _sliced(0),
    "a slice by None": _sliced(None),
    "a slice by a slice": _sliced(slice(1)),
    "flattened to an empty name": lambda f: _init(("a", "b"))(f)._flatten(""),
    "concatenated from a tuple": lambda f: f.DeviceMesh._concatenate(
        tuple(_init(("a", "b"))(f)[name] for name in "ab")
    ),
    "concatenated from a generator": lambda f: f.DeviceMesh._concatenate(
        _init(("a", "b"))(f)[name] for name in "ab"
    ),
}


if AT_LEAST_2_12:  # stock 2.11 refuses a list
    _ODD["unflattened to a list"] = lambda f: _init(("w",), (8,))(f)._unflatten(
        0, [2, 4], ["t", "p"]
    )


@pytest.mark.parametrize("case", _ODD)
def test_it_is_as_in_stock(case: str) -> None:
    stock, ours = (attempt(lambda f=family: _ODD[case](f)) for family in (STOCK, OURS))
    assert ours.error == stock.error
    if stock.error is None:
        assert_same(stock.value, ours.value)
        assert ours.value == stock.value


_QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "size from the end": lambda mesh: mesh.size(-1),
    "size of no axis": lambda mesh: mesh.size(2),
    "size by name": lambda mesh: mesh.size("a"),
    "group from the end": lambda mesh: mesh.get_group(-1).size(),
    "group of no axis": lambda mesh: mesh.get_group(2),
    "group by a tuple": lambda mesh: mesh.get_group(("a",)),
    "group by truth": lambda mesh: mesh.get_group(True).size(),
    "group by a float": lambda mesh: mesh.get_group(0.0),
    "local rank of no axis": lambda mesh: mesh.get_local_rank("c"),
    "dim in the root": lambda mesh: mesh._get_root_mesh_dim(),
    "dim of a slice in the root": lambda mesh: mesh["b"]._get_root_mesh_dim(),
    "dim of a flattened mesh": lambda mesh: mesh._flatten("x")._get_root_mesh_dim(),
    "dim of a slice of an unflattened mesh": lambda mesh: mesh._unflatten(1, (2, 2), ("t", "p"))[
        "p"
    ]._get_root_mesh_dim(),
}


@pytest.mark.parametrize("case", _QUESTIONS)
def test_odd_questions_are_answered_as_in_stock(case: str) -> None:
    stock, ours = (
        attempt(lambda f=family: _QUESTIONS[case](_init(("a", "b"))(f))) for family in (STOCK, OURS)
    )
    assert ours == stock
