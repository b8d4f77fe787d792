"""Bad input: the right exception, with the values in it, and no process group created."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.observation import OURS, STOCK, Family
from helpers.worlds import groups_created, in_worlds
from meshverse import DeviceMesh, Universe, init_device_mesh

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8

_NAMES = ("dp", "tp")


def _init(family: Family, shape=(2, 4), names=_NAMES, **extra):
    return family.init_device_mesh("cpu", shape, mesh_dim_names=names, **extra)


# Refused by stock too, with the same type: (what is asked for, exception, what our text names)
_AS_STOCK = {
    "larger than the world": (
        lambda f: _init(f, (4, 4)),
        RuntimeError,
        "default world size 8, but found 16 ranks",
    ),
    "array larger than the world": (
        lambda f: f.DeviceMesh("cpu", list(range(9))),
        RuntimeError,
        "default world size 8, but found 9 ranks",
    ),
    "negative rank": (lambda f: f.DeviceMesh("cpu", [5, -3]), ValueError, "-3"),
    "rank outside the world": (lambda f: f.DeviceMesh("cpu", [5, 9]), ValueError, r"\b9\b"),
    "rank outside the world, mine outside the mesh": (
        lambda f: f.DeviceMesh("cpu", [0, 9]),
        ValueError,
        r"\b9\b",
    ),
    "neither ranks nor private arguments": (
        lambda f: f.DeviceMesh("cpu"),
        TypeError,
        "mesh argument is required",
    ),
    "device with an index": (
        lambda f: f.init_device_mesh("cuda:0", (8,)),
        RuntimeError,
        "not supported but got cuda:0",
    ),
    "repeated name": (
        lambda f: _init(f, names=("dp", "dp")),
        RuntimeError,
        r"must be unique.*\('dp', 'dp'\)",
    ),
    "too few names": (
        lambda f: _init(f, names=("dp",)),
        RuntimeError,
        r"same length.*len\(mesh_dim_names\): 1 and len\(mesh_shape\):2",
    ),
    "too many names": (
        lambda f: _init(f, names=("pp", "dp", "tp")),
        RuntimeError,
        r"same length.*len\(mesh_dim_names\): 3 and len\(mesh_shape\):2",
    ),
    "override of an index that is no axis": (
        lambda f: _init(f, backend_override={2: "fake"}),
        RuntimeError,
        r"invalid keys in backend_override: got \[2\].*\[0, 2\) or one of \('dp', 'tp'\)",
    ),
    "override of a negative index": (
        lambda f: _init(f, backend_override={-1: "fake"}),
        RuntimeError,
        r"got \[-1\]",
    ),
    "override of an unknown axis": (
        lambda f: _init(f, backend_override={"pp": "fake"}),
        RuntimeError,
        r"got \['pp'\].*\('dp', 'tp'\)",
    ),
    "override of an axis by index and name": (
        lambda f: _init(f, backend_override={"tp": "fake", 1: "fake"}),
        RuntimeError,
        "redundant dim index 1 and name tp",
    ),
    "another number of overrides than axes": (
        lambda f: f.DeviceMesh("cpu", [[4, 5], [6, 7]], backend_override=((None, None),)),
        ValueError,
        "same length as the number of mesh dimensions, but got 1 and 2",
    ),
}


@pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])
@pytest.mark.parametrize("case", _AS_STOCK)
def test_new_mesh_that_stock_refuses_too(case: str, family: Family) -> None:
    build, error, message = _AS_STOCK[case]
    with (
        groups_created(0),
        pytest.raises(error, match=message if family is OURS else None) as raised,
    ):
        build(family)
    assert raised.type is error


# Let through by stock, or refused by it in the middle of making groups.
_REFUSED_HERE = {
    "repeated rank": (lambda: DeviceMesh("cpu", [5, 3, 3]), ValueError, r"\b3\b"),
    "repeated rank, mine": (lambda: DeviceMesh("cpu", [[5, 0], [1, 5]]), ValueError, r"\b5\b"),
    "no ranks": (lambda: DeviceMesh("cpu", []), ValueError, r"at least one rank.*\(0,\)"),
    "axis of size 0": (lambda: init_device_mesh("cpu", (0, 2)), ValueError, r"\b0\b"),
    "axis of negative size": (lambda: init_device_mesh("cpu", (-2, -4)), ValueError, "-2"),
    "ranks that are no integers": (
        lambda: DeviceMesh("cpu", [0.5, 5.0]),
        ValueError,
        r"integers from 0 to .*, but got 0\.5",
    ),
    "ranks on no device": (
        lambda: DeviceMesh("cpu", torch.empty(2, device="meta")),
        NotImplementedError,
        "meta",
    ),
    "repeated name of an array": (
        lambda: DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("dp", "dp")),
        RuntimeError,
        r"must be unique.*\('dp', 'dp'\)",
    ),
    "too few names of an array": (
        lambda: DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("dp",)),
        RuntimeError,
        r"len\(mesh_dim_names\): 1 and len\(mesh_shape\):2",
    ),
    "a name that is no string": (
        lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", 1)),
        TypeError,
        r"\('dp', 1\)",
    ),
    "unknown backend": (
        lambda: _init(OURS, backend_override={"tp": "nxcl"}),
        ValueError,
        r"Unknown backend 'nxcl'.*'gloo'",
    ),
    "unknown backend for a device": (
        lambda: _init(OURS, backend_override={"tp": "cpu:fake,cuda:nxcl"}),
        ValueError,
        "Unknown backend 'nxcl'",
    ),
    "override of a wrong type": (
        lambda: _init(OURS, backend_override={"tp": 3}),
        TypeError,
        "backend override 3 of type int",
    ),
    "override by a pair of wrong types": (
        lambda: _init(OURS, backend_override={"tp": ("fake", "fast")}),
        TypeError,
        "fast",
    ),
    "a bad override after a good one": (
        lambda: _init(OURS, backend_override={"dp": "fake", "tp": "nxcl"}),
        ValueError,
        "nxcl",
    ),
}


@pytest.mark.parametrize("case", _REFUSED_HERE)
def test_new_mesh_that_stock_lets_through_or_refuses_late(case: str) -> None:
    build, error, message = _REFUSED_HERE[case]
    with groups_created(0), pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda u: init_device_mesh("cpu", (4,), universe=u), r"\(4,\) has 4 ranks.*has 8"),
        (lambda u: DeviceMesh("cpu", [4, 9], universe=u), r"4, 9.*ranks 0 to 7.*no ranks \[9\]"),
    ],
    ids=["shape", "ranks"],
)
def test_a_universe_of_other_ranks(build: Callable, message: str) -> None:
    universe = init_device_mesh("cpu", (8,)).universe
    with groups_created(0), pytest.raises(ValueError, match=message):
        build(universe)


@pytest.mark.parametrize(
    "ranks",
    [8 / 2, torch.tensor(4), True, "4", {1, 2}, {0: 1}, (rank for rank in range(2)), None],
    ids=["float", "0-dim", "bool", "str", "set", "dict", "generator", "none"],
)
def test_what_is_no_list_of_ranks(ranks: Any) -> None:
    with pytest.raises(TypeError, match="Ranks are a number of ranks, or a list"):
        Universe(ranks)


# --- derived meshes ------------------------------------------------------------------------------

_DERIVED_AS_STOCK = {
    "sizes that do not multiply out": (
        lambda m: m._unflatten(1, (2, 3), ("a", "b")),
        ValueError,
        r"mesh_sizes=\(2, 3\) is 6.*dim=1.*size 4",
    ),
    "sizes of a part": (
        lambda m: m._unflatten(0, (1, 1), ("a", "b")),
        ValueError,
        r"mesh_sizes=\(1, 1\) is 1.*size 2",
    ),
    "another number of names than sizes": (
        lambda m: m._unflatten(1, (2, 2), ("a",)),
        RuntimeError,
        "same length as mesh_sizes",
    ),
    "axis out of range": (
        lambda m: m._unflatten(2, (2, 2), ("a", "b")),
        ValueError,
        "dim 2.*out of range 2",
    ),
    "unknown axis to split": (
        lambda m: m._unflatten("pp", (2, 2), ("a", "b")),
        ValueError,
        r"dim '?pp'?.*not in \('dp', 'tp'\)",
    ),
    "bad override of a new axis": (
        lambda m: m._unflatten(1, (2, 2), ("a", "b"), backend_override={"tp": "fake"}),
        RuntimeError,
        r"got \['tp'\].*\('a', 'b'\)",
    ),
    "meshes that overlap": (
        lambda m: type(m)._concatenate([m["dp"], m]),
        RuntimeError,
        "Cannot concatenate overlapping meshes",
    ),
    "a name that is taken by an axis": (
        lambda m: m._flatten("tp"),
        ValueError,
        "tp already exists",
    ),
}


@pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])
@pytest.mark.parametrize("case", _DERIVED_AS_STOCK)
def test_derived_mesh_that_stock_refuses_too(case: str, family: Family) -> None:
    derive, error, message = _DERIVED_AS_STOCK[case]
    mesh = _init(family)
    with (
        groups_created(0),
        pytest.raises(error, match=message if family is OURS else None) as raised,
    ):
        derive(mesh)
    assert raised.type is error


@pytest.mark.parametrize(
    ("derive", "error", "message"),
    [
        (
            lambda m: m.unflatten("tp", (2, 2), ("dp", "b")),
            RuntimeError,
            r"must be unique.*\('dp', 'dp', 'b'\)",
        ),
        (
            lambda m: m.unflatten("tp", (2, 2), ("a", "a")),
            RuntimeError,
            r"must be unique.*\('dp', 'a', 'a'\)",
        ),
        (lambda m: m.unflatten("tp", (-2, -2), ("a", "b")), ValueError, "-2"),
        (lambda m: m.unflatten("tp", (0, 4), ("a", "b")), ValueError, r"\b0\b"),
        (lambda m: m.flatten("all", "nxcl"), ValueError, "Unknown backend 'nxcl'"),
        (lambda m: m.flatten("all", 3), TypeError, r"\b3\b"),
    ],
    ids=[
        "name taken",
        "name twice",
        "negative sizes",
        "size 0",
        "unknown backend",
        "override type",
    ],
)
def test_derived_mesh_that_stock_lets_through_or_refuses_late(derive, error, message) -> None:
    mesh = _init(OURS)
    with groups_created(0), pytest.raises(error, match=message):
        derive(mesh)


def test_concatenating_meshes_over_other_ranks() -> None:
    mesh = _init(OURS)
    other = DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=_NAMES)
    with pytest.raises(RuntimeError, match=r"different device meshs.*ranks 0 to 7.*4, 5, 6, 7"):
        DeviceMesh.concatenate([mesh["dp"], other["tp"]])


def test_a_nameless_mesh_has_no_derived_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    with pytest.raises(RuntimeError, match="Cannot flatten a DeviceMesh without mesh_dim_names"):
        mesh.flatten("all")
    with pytest.raises(TypeError, match="Cannot unflatten a DeviceMesh without mesh_dim_names"):
        mesh.unflatten(1, (2, 2), ("a", "b"))
    with pytest.raises(TypeError, match="Cannot concatenate a DeviceMesh without mesh_dim_names"):
        DeviceMesh.concatenate([mesh])


@pytest.mark.parametrize("derive", [DeviceMesh.flatten, DeviceMesh._flatten])
def test_a_flattened_axis_is_named_by_a_string(derive) -> None:
    mesh = _init(OURS)
    with pytest.raises(
        TypeError, match=r"mesh_dim_name=3 of type int: .* Leave it out for 'dp_tp'"
    ):
        derive(mesh, 3)
    universe = mesh.universe
    assert "dp_tp" in mesh.flatten()._mesh_dim_names
    assert str(universe.explain())
    assert str(universe.draw())
    assert len(universe.warm_up()) == 3


def test_names_of_axes_are_a_list() -> None:
    mesh = _init(OURS)
    with pytest.raises(TypeError, match=r"axis_names='tp' is a string: .* \['tp'\]"):
        mesh.universe.warm_up("tp")
    with pytest.raises(TypeError, match="axis_names='tp' is a string"):
        mesh.universe.suspend("tp")


@pytest.mark.parametrize("size", [0, -1])
def test_a_universe_has_ranks(size: int) -> None:
    with pytest.raises(ValueError, match=f"A mesh of {size} ranks: it needs at least one"):
        Universe(size)


# --- nothing is left behind ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [{"tp": "fake", "dp": "fake"}, {0: "fake", "tp": "nxcl"}, {7: "fake"}],
    ids=["good", "bad value", "bad key"],
)
def test_the_callers_overrides_stay_as_they_are(overrides: dict) -> None:
    before = dict(overrides)
    with contextlib.suppress(RuntimeError, ValueError):
        _init(OURS, backend_override=overrides)
    assert overrides == before


def test_the_right_call_works_after_a_wrong_one() -> None:
    mesh = _init(OURS)
    for wrong in (("a",), ("dp", "b")):
        with pytest.raises(RuntimeError):
            mesh.unflatten("tp", (2, 2), wrong)
    with groups_created(2):
        view = mesh.unflatten("tp", (2, 2), ("a", "b"))
    assert view.shape == (2, 2, 2)
    with pytest.raises(ValueError, match="nxcl"):
        mesh.flatten("all", "nxcl")
    assert mesh.flatten("all").size() == 8


@in_worlds((1, 0))
def test_a_world_of_one() -> None:
    with groups_created(0):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=_NAMES)
    assert dist.get_process_group_ranks(mesh.get_group("tp")) == [0]
    with pytest.raises(RuntimeError, match="default world size 1, but found 2 ranks"):
        init_device_mesh("cpu", (2,))
