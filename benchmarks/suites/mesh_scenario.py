"""Every mesh operation in turn, as a program calls them, for stock torch and for Meshverse."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from harness import Action, Scenario
from trainer_views import InitDeviceMesh, answers

__all__ = ["FIGURES", "Axes", "mesh_operations"]

Axes = dict[str, int]
"""Sizes of a mesh's axes by name, the rightmost varying fastest."""

FIGURES = {
    "creating": ["create 4-D mesh", "create 1-D mesh of the world"],
    "slicing": ["slice first", "slice again", "slice two axes first", "slice two axes again"],
    "deriving": [
        "unflatten to new groups",
        "unflatten to known groups",
        "flatten to a new group",
        "flatten to a known group",
        "concatenate first",
        "concatenate again",
    ],
    "comparing": [
        "compare equal meshes",
        "compare unequal meshes",
        "hash first in a world",
        "hash first of a mesh",
        "hash again",
    ],
    "reading": [
        "get_group",
        "get_coordinate",
        ".mesh first",
        ".mesh again",
        "pickle a slice",
        "unpickle a slice",
    ],
}
"""Operations by the plot they are drawn in."""

_TURNS = 2000  # more than a batch has


def mesh_operations(init: InitDeviceMesh, axes: Axes) -> Scenario:
    """Return the operations on new meshes of one shape, in the default group's world.

    Args:
        init: stock's `init_device_mesh` or Meshverse's.
        axes: four, named pp, dp, cp and tp.
    """
    shape, names = tuple(axes.values()), tuple(axes)
    mesh = yield Action(
        "create 4-D mesh",
        "init('cpu', shape, mesh_dim_names=names)",
        {"init": init, "shape": shape, "names": names},
        answers,
    )
    yield from _slicing(mesh)
    yield from _concatenating(mesh)
    yield from _comparing(init, mesh, shape, names)
    yield from _reading(mesh)
    part = mesh["dp", "cp"]
    yield Action("flatten to a new group", "part._flatten('flat')", {"part": part}, answers)
    yield from _deriving_from_the_world(init, axes, dist.get_world_size())


def _slicing(mesh: Any) -> Scenario:
    yield Action(
        "slice first",
        "[mesh[name] for name in names]",
        {"mesh": mesh, "names": mesh.mesh_dim_names},
        _all_answers,
        operations=mesh.ndim,
    )
    tp = {"mesh": mesh}
    yield Action("slice again", "mesh['tp']", tp, answers, repeatable=True)
    pairs = [("pp", "dp"), ("dp", "tp"), ("pp", "tp")]
    yield Action(
        "slice two axes first",
        "[mesh[pair] for pair in pairs]",
        {"mesh": mesh, "pairs": pairs},
        _all_answers,
        operations=len(pairs),
    )
    yield Action("slice two axes again", "mesh['dp', 'tp']", tp, answers, repeatable=True)


def _concatenating(mesh: Any) -> Scenario:
    # No slice had these two axes, so that the first concatenation gives a new mesh.
    names = {"concatenate": type(mesh)._concatenate, "parts": [mesh["cp"], mesh["tp"]]}
    yield Action("concatenate first", "concatenate(parts)", names, answers)
    yield Action("concatenate again", "concatenate(parts)", names, answers, repeatable=True)


def _comparing(init: InitDeviceMesh, mesh: Any, shape: Any, names: Any) -> Scenario:
    equal = init("cpu", shape, mesh_dim_names=names)
    yield Action(
        "hash first in a world",
        "hash(equal)",
        {"equal": equal},
        lambda _: True,
        is_first=True,
    )
    yield Action(
        "hash first of a mesh", "hash(mesh)", {"mesh": mesh}, lambda value: value == hash(equal)
    )
    pair = {"mesh": mesh, "equal": equal, "part": mesh["dp", "tp"]}
    yield Action(
        "compare equal meshes",
        "mesh == equal",
        pair,
        lambda same: (same, mesh is equal),
        repeatable=True,
    )
    yield Action("compare unequal meshes", "mesh == part", pair, repeatable=True)
    yield Action("hash again", "hash(mesh)", pair, lambda value: isinstance(value, int), 1, True)


def _reading(mesh: Any) -> Scenario:
    names = {"mesh": mesh, "part": mesh["tp"], "pickle": pickle}
    group_ranks = dist.get_process_group_ranks
    yield Action("get_group", "mesh.get_group('tp')", names, group_ranks, repeatable=True)
    yield Action("get_coordinate", "mesh.get_coordinate()", names, tuple, repeatable=True)
    yield Action(".mesh first", "mesh.mesh", names, lambda ranks: ranks.tolist())
    yield Action(".mesh again", "mesh.mesh", names, lambda ranks: ranks.tolist(), repeatable=True)
    pickled = yield Action(
        "pickle a slice",
        "pickle.dumps(part)",
        names,
        lambda data: answers(pickle.loads(data)),
        repeatable=True,
    )
    yield Action(
        "unpickle a slice",
        "pickle.loads(pickled)",
        {"pickle": pickle, "pickled": pickled},
        answers,
        repeatable=True,
    )


def _deriving_from_the_world(init: InitDeviceMesh, axes: Axes, size: int) -> Scenario:
    names = {"init": init, "size": (size,), "axes": ("world",)}
    world = yield Action(
        "create 1-D mesh of the world", "init('cpu', size, mesh_dim_names=axes)", names, answers
    )
    yield Action(
        "unflatten to new groups",
        "world._unflatten(0, sizes, names)",
        {"world": world, "sizes": tuple(axes.values()), "names": tuple(axes)},
        answers,
    )
    # The same axes under names that are new each time: a new mesh on the same groups.
    view = yield Action(
        "unflatten to known groups",
        "world._unflatten(0, sizes, next(names))",
        {
            "world": world,
            "sizes": tuple(axes.values()),
            "names": iter([tuple(f"{name}_{turn}" for name in axes) for turn in range(_TURNS)]),
        },
        lambda mesh: {**answers(mesh), "axes": len(mesh.mesh_dim_names)},
        repeatable=True,
    )
    part = view[view.mesh_dim_names[1:3]]
    part._flatten("dp_cp")
    # More names for the same ranks, as that of a trainer's losses is for its batch.
    yield Action(
        "flatten to a known group",
        "part._flatten(next(names))",
        {"part": part, "names": iter([f"dp_cp_{turn}" for turn in range(_TURNS)])},
        lambda mesh: answers(mesh)["axis ranks"],
        repeatable=True,
    )


def _all_answers(meshes: Iterable[Any]) -> list[Any]:
    return [answers(mesh) for mesh in meshes]
