"""The mesh operations that are timed, for either implementation and any shape."""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from harness import Action
from trainer_views import Degrees, InitDeviceMesh, answers, five_views

__all__ = [
    "build_views",
    "compare_equal",
    "create",
    "create_own_groups",
    "flatten",
    "slice_again",
    "slice_first",
    "unflatten_to_known_groups",
    "unflatten_to_new_groups",
]

Axes = dict[str, int]
"""Sizes of a mesh's axes by name, the rightmost varying fastest."""

_serials = itertools.count()  # of process groups, whose names must differ


def _new_mesh(init: InitDeviceMesh, axes: Axes) -> Any:
    return init("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def create(init: InitDeviceMesh, axes: Axes) -> Action:
    """Make a mesh, with its process groups, in a new world."""
    names = {"init": init, "shape": tuple(axes.values()), "axes": tuple(axes)}
    return Action(
        "init('cpu', shape, mesh_dim_names=axes)", names, lambda: answers(_new_mesh(init, axes))
    )


def build_views(init: InitDeviceMesh, degrees: Degrees) -> Action:
    """Build all views of a trainer, in a new world."""
    names = {"five_views": five_views, "init": init, "degrees": degrees}

    def answer() -> dict[str, Any]:
        return {name: answers(view) for name, view in five_views(init, degrees).items()}

    return Action("five_views(init, degrees)", names, answer)


def create_own_groups(axis_ranks: list[list[int]]) -> Action:
    """Make process groups of these ranks by c10d's helper for the members of a group, nothing else.

    It is what any mesh must do at least: this rank's own group along each axis.
    """
    backend, store = c10d._world.pg_map[c10d._get_default_group()]
    timeout, rank = c10d._get_default_timeout(dist.Backend(backend)), dist.get_rank()

    def make(ranks: list[int], name: Any) -> Any:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            ranks,
            backend,
            store,
            name,
            timeout=timeout,
            group_desc="mesh",
        )
        c10d._world.pg_group_ranks[group] = {one: index for index, one in enumerate(ranks)}
        return group

    named = [(ranks, f"own-{next(_serials)}") for ranks in axis_ranks]
    return Action(
        "for ranks, name in groups: make(ranks, name)",
        {"groups": named, "make": make},
        lambda: {"axis ranks": [dist.get_process_group_ranks(make(*group)) for group in named]},
    )


def slice_again(init: InitDeviceMesh, axes: Axes) -> Action:
    """Take an axis that was taken before."""
    mesh = _new_mesh(init, axes)
    mesh["tp"]
    return Action("mesh['tp']", {"mesh": mesh}, lambda: answers(mesh["tp"]), repeatable=True)


def slice_first(init: InitDeviceMesh, axes: Axes) -> Action:
    """Take an axis of each of a few new meshes."""
    meshes = [_new_mesh(init, axes) for _ in range(4)]
    return Action(
        "for mesh in meshes: mesh['tp']",
        {"meshes": meshes},
        lambda: answers(meshes[0]["tp"]),
        operations=len(meshes),
    )


def unflatten_to_new_groups(init: InitDeviceMesh, axes: Axes, split: int, into: Axes) -> Action:
    """Split an axis; no axis like the new ones was there before."""
    mesh = _new_mesh(init, axes)
    arguments = (split, tuple(into.values()), tuple(into))
    return Action(
        "mesh._unflatten(*arguments)",
        {"mesh": mesh, "arguments": arguments},
        lambda: answers(mesh._unflatten(*arguments)),
    )


def unflatten_to_known_groups(
    init: InitDeviceMesh, axes: Axes, split: int, into: Axes, times: int
) -> Action:
    """Split an axis as before, under other names: a new mesh on the same groups."""
    mesh = _new_mesh(init, axes)
    mesh._unflatten(split, tuple(into.values()), tuple(into))
    arguments = [
        (split, tuple(into.values()), tuple(f"{name}{turn}" for name in into))
        for turn in range(times)
    ]
    return Action(
        "for one in arguments: mesh._unflatten(*one)",
        {"mesh": mesh, "arguments": arguments},
        lambda: answers(mesh._unflatten(*arguments[0])),
        operations=times,
    )


def flatten(init: InitDeviceMesh, axes: Axes, together: tuple[str, ...]) -> Action:
    """Make one axis of several, with its process group."""
    part = _new_mesh(init, axes)[together]
    return Action("part._flatten('flat')", {"part": part}, lambda: answers(part._flatten("flat")))


def compare_equal(init: InitDeviceMesh, axes: Axes) -> Action:
    """Compare two meshes that were made apart and are equal."""
    one, other = _new_mesh(init, axes), _new_mesh(init, axes)
    unequal = _new_mesh(init, {f"{name}_": size for name, size in axes.items()})
    return Action(
        "one == other",
        {"one": one, "other": other},
        lambda: (one is other, one == other, hash(one) == hash(other), one == unequal),
        repeatable=True,
    )
