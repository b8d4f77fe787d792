"""Slices, unflattened and concatenated meshes that cannot be: stock's exceptions, nothing made."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.observation import OURS, STOCK, Family, attempt
from helpers.versions import (
    HAS_CANONICAL_LAYOUTS,
    UNFLATTENS_BY_NAME,
    needs_canonical_layouts,
)
from helpers.worlds import groups_created
from meshverse import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8


class _Meshes(NamedTuple):
    cube: StockDeviceMesh
    other_cube: StockDeviceMesh
    nameless: StockDeviceMesh
    nameless_line: StockDeviceMesh
    part: StockDeviceMesh
    flat: StockDeviceMesh
    join: Callable[..., StockDeviceMesh]


def _meshes(family: Family) -> _Meshes:
    cube = family.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    return _Meshes(
        cube=cube,
        other_cube=family.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c")),
        nameless=family.init_device_mesh("cpu", (2, 4)),
        nameless_line=family.init_device_mesh("cpu", (8,)),
        part=family.DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("x", "y")),
        flat=cube["dp", "cp"]._flatten("flat"),
        join=family.DeviceMesh._concatenate,
    )


_Action = Callable[[_Meshes], Any]

_CONCATENATE: dict[str, tuple[_Action, type[Exception]]] = {
    "nothing": (lambda m: m.join([]), IndexError),
    "an empty tuple": (lambda m: m.join(()), IndexError),
    "None": (lambda m: m.join(None), TypeError),
    "one mesh that is no list": (lambda m: m.join(m.cube), TypeError),
    "a string": (lambda m: m.join("ab"), AttributeError),
    "a generator": (lambda m: m.join(m.cube[name] for name in ("dp", "tp")), TypeError),
    "an iterator": (lambda m: m.join(iter([m.cube["dp"]])), TypeError),
    "the same axis": (lambda m: m.join([m.cube["dp"], m.cube["dp"]]), RuntimeError),
    "axes of which one overlaps": (
        lambda m: m.join([m.cube["dp"], m.cube["dp", "cp"]]),
        RuntimeError,
    ),
    "an axis and a flattened one of it": (lambda m: m.join([m.cube["dp"], m.flat]), RuntimeError),
    "other ranks": (lambda m: m.join([m.cube["dp"], m.part["x"]]), RuntimeError),
    "no names": (lambda m: m.join([m.nameless]), TypeError),
    "no names, one axis": (lambda m: m.join([m.nameless_line]), TypeError),
    "names, then none": (lambda m: m.join([m.cube["tp"], m.nameless_line]), TypeError),
    "no names, then some": (lambda m: m.join([m.nameless_line, m.cube["tp"]]), TypeError),
    "no names, twice the same": (lambda m: m.join([m.nameless, m.nameless]), TypeError),
    "no names and other ranks": (lambda m: m.join([m.part, m.nameless]), TypeError),
    "other ranks, then no names": (
        lambda m: m.join([m.cube["dp"], m.part["x"], m.nameless]),
        RuntimeError,
    ),
    "None among them": (lambda m: m.join([m.cube["dp"], None]), AttributeError),
    "None at first": (lambda m: m.join([None, m.cube["dp"]]), AttributeError),
    "a name among them": (lambda m: m.join([m.cube["dp"], "tp"]), AttributeError),
}
_SLICE: dict[str, tuple[_Action, type[Exception]]] = {
    "without names": (lambda m: m.nameless["dp"], RuntimeError),
    "without names, two": (lambda m: m.nameless["dp", "tp"], RuntimeError),
    "without names, none": (lambda m: m.nameless[()], RuntimeError),
    "without names, by index": (lambda m: m.nameless[0], RuntimeError),
    "without names, by None": (lambda m: m.nameless[None], RuntimeError),
    "by index": (lambda m: m.cube[0], TypeError),
    "by None": (lambda m: m.cube[None], TypeError),
    "by slice": (lambda m: m.cube[0:1], TypeError),
    "by ...": (lambda m: m.cube[...], TypeError),
    "by a tuple of an index": (lambda m: m.cube[(0,)], KeyError),
    "by a tuple of a list": (lambda m: m.cube[(["tp"],)], KeyError),
    "by a list of a list": (lambda m: m.cube[["tp", []]], KeyError),
    "by an empty string": (lambda m: m.cube[""], KeyError),
    "by a part of a name": (lambda m: m.cube["t"], KeyError),
    "by bytes": (lambda m: m.cube[b"tp"], KeyError),
}
_FLATTEN: dict[str, tuple[_Action, type[Exception]]] = {
    "without names": (lambda m: m.nameless._flatten(), RuntimeError),
    "without names, to one": (lambda m: m.nameless._flatten("all"), RuntimeError),
    "without names, one axis": (lambda m: m.nameless_line._flatten("all"), RuntimeError),
    "to a name of the root": (lambda m: m.cube["dp", "cp"]._flatten("tp"), ValueError),
    "to a name that is known": (lambda m: m.cube["cp", "tp"]._flatten("flat"), ValueError),
    "all submeshes without names": (lambda m: m.nameless._get_all_submeshes("tp"), KeyError),
}
_AB, _TWO_BY_TWO = ("a", "b"), (2, 2)
_UNFLATTEN: dict[str, tuple[_Action, type[Exception]]] = {
    "without names": (lambda m: m.nameless._unflatten(1, _TWO_BY_TWO, _AB), TypeError),
    "without names, to a wrong size": (lambda m: m.nameless._unflatten(1, (3, 2), _AB), ValueError),
    "without names, to one name": (
        lambda m: m.nameless._unflatten(1, _TWO_BY_TWO, ("a",)),
        RuntimeError,
    ),
    "without names, an axis too far": (lambda m: m.nameless._unflatten(7, (2,), _AB), ValueError),
    "to a wrong size": (lambda m: m.cube._unflatten(0, (3,), ("a",)), ValueError),
    "to size 0": (lambda m: m.cube._unflatten(0, (0, 2), _AB), ValueError),
    "to nothing": (lambda m: m.cube._unflatten(0, (), ()), ValueError),
    "to a number": (lambda m: m.cube._unflatten(0, 2, ("a",)), TypeError),
    "to no names": (lambda m: m.cube._unflatten(0, (2, 1), None), TypeError),
    "an axis too far": (lambda m: m.cube._unflatten(3, (1, 2), _AB), ValueError),
    "an axis too far, of numpy": (
        lambda m: m.cube._unflatten(np.int64(9), (1, 2), _AB),
        IndexError,
    ),
    "an axis too far, from the end": (lambda m: m.cube._unflatten(-9, (1, 2), _AB), IndexError),
    "the axis None": (lambda m: m.cube._unflatten(None, (1, 2), _AB), TypeError),
    "the axis 1.0": (lambda m: m.cube._unflatten(1.0, (1, 2), _AB), TypeError),
    "an unknown axis": (lambda m: m.cube._unflatten("pp", (1, 2), _AB), ValueError),
}
_BY_NAME: dict[str, tuple[_Action, type[Exception]]] = {
    "without names, by one": (lambda m: m.nameless._unflatten("x", _TWO_BY_TWO, _AB), TypeError),
}
_ALL = {
    f"{what}: {name}": case
    for what, cases in {
        "concatenate": _CONCATENATE,
        "slice": _SLICE,
        "flatten": _FLATTEN,
        "unflatten": _UNFLATTEN | (_BY_NAME if UNFLATTENS_BY_NAME else {}),
    }.items()
    for name, case in cases.items()
}


@needs_canonical_layouts
@pytest.mark.parametrize("name", _ALL)
def test_our_words_begin_with_stocks(name: str) -> None:
    action, error = _ALL[name]
    texts = []
    for family in (STOCK, OURS):
        with pytest.raises(error) as raised:
            action(_meshes(family))
        texts.append(" ".join(map(str, raised.value.args)))
    stock, ours = (text.replace(".  ", ". ") for text in texts)
    if "mesh" in stock or "specified" in stock:  # else it is Python's own, of an accident
        # A list of names is shown as a tuple.
        stock = stock.replace("['tp', []]", "('tp', [])").replace("b'tp'", str(tuple(b"tp")))
        stock = stock.replace("device meshes", "device meshs")  # which torch spelled so before 2.15
        stock = stock.replace("_unflatten", "unflatten")  # the method that users call
        assert ours.startswith(stock.removesuffix("."))


@pytest.mark.parametrize(("action", "error"), _ALL.values(), ids=_ALL)
def test_stock_raises_the_same(action: _Action, error: type[Exception]) -> None:
    if HAS_CANONICAL_LAYOUTS:  # and the methods that stock has today
        with pytest.raises(error) as of_stock:
            action(_meshes(STOCK))
        assert of_stock.type is error
    meshes = _meshes(OURS)
    data = meshes.cube.universe.explain().to_dict()
    with groups_created(0), pytest.raises(error) as of_ours:
        action(meshes)
    assert of_ours.type is error
    assert meshes.cube.universe.explain().to_dict() == data


_KINDS: dict[str, Callable[[_Meshes], Any]] = {
    "dp": lambda m: m.cube["dp"],
    "tp": lambda m: m.cube["tp"],
    "dp, cp": lambda m: m.cube["dp", "cp"],
    "flat": lambda m: m.flat,
    "nameless": lambda m: m.nameless,
    "part": lambda m: m.part["x"],
    "None": lambda m: None,
}


@needs_canonical_layouts
@pytest.mark.parametrize("first", _KINDS)
@pytest.mark.parametrize("second", _KINDS)
def test_stocks_meshes_and_ours_together(first: str, second: str) -> None:
    meshes = {family: _meshes(family) for family in (STOCK, OURS)}

    def join(by: Family, of: tuple[Family, Family]) -> Any:
        pair = [_KINDS[kind](meshes[f]) for kind, f in zip((first, second), of, strict=True)]
        return attempt(lambda: _described(by.DeviceMesh._concatenate(pair)))

    expected = join(STOCK, (STOCK, STOCK))
    for by, *of in itertools.product((STOCK, OURS), repeat=3):
        assert join(by, tuple(of)) == expected, (by, of)


def _described(mesh: StockDeviceMesh) -> tuple[str, Any, Any]:
    groups = [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
    return repr(mesh), mesh.mesh.tolist(), groups


@pytest.mark.parametrize("by", [STOCK, OURS], ids=["by stock's name", "by ours"])
@pytest.mark.parametrize("stock_first", [True, False])
def test_with_a_stock_mesh_a_lazy_group_is_made(by: Family, stock_first: bool) -> None:
    stock = _meshes(STOCK).cube
    lazy = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), lazy=True)
    pair = [stock["tp"], lazy["dp"]] if stock_first else [lazy["dp"], stock["tp"]]
    with groups_created(1):
        joined = by.DeviceMesh._concatenate(pair)
    assert joined.get_group("dp") is lazy.get_group("dp")
    assert joined.get_group("tp") is stock.get_group("tp")


def test_a_refused_one_leaves_a_lazy_group_to_be_made() -> None:
    stock = _meshes(STOCK).cube
    lazy = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), lazy=True)
    with groups_created(0), pytest.raises(RuntimeError, match="overlapping"):
        DeviceMesh.concatenate([stock["tp"], lazy["tp"]])


def test_an_axis_is_an_index_of_numpy_too() -> None:
    for family in (STOCK, OURS):
        mesh = _meshes(family).cube
        assert mesh._unflatten(np.int64(1), (1, 2), _AB).shape == (2, 1, 2, 2)


def test_three_meshes_of_which_the_last_overlaps_are_not_concatenated(world) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    both = mesh["a", "b"].flatten("both")
    with pytest.raises(RuntimeError, match="Cannot concatenate overlapping meshes"):
        DeviceMesh.concatenate([mesh["a"], mesh["c"], both])
