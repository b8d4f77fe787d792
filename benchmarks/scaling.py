"""Meshverse against itself: 1,048,576 ranks and 1,024 ranks.

Nothing but the process groups themselves may grow with the world. So that this is what is measured,
the axes whose groups are made while the clock runs have the same size in both worlds; what grows is
another axis of the mesh. Only creating a mesh makes the groups of all its axes: those have at most
32 ranks, the fewest that four equal axes of 1,048,576 ranks can have.

Both sides are warmed with a mesh of 1,024 ranks, so that work which a mesh does once for its world
is in the time of the larger one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mesh_operations as operations
import meshverse
from harness import Action, Bound, Comparison, Side

__all__ = ["TITLE", "comparisons"]

TITLE = "Meshverse alone, 1,048,576 ranks against 1,024"

_SMALL, _LARGE = 1024, 1024 * 1024
_RANK = 777
_CREATED = {
    _SMALL: {"pp": 4, "dp": 8, "cp": 4, "tp": 8},
    _LARGE: {"pp": 32, "dp": 32, "cp": 32, "tp": 32},
}
_AXES = {size: {"pp": size // 256, "dp": 16, "tp": 16} for size in (_SMALL, _LARGE)}
_INTO = {"dp_replicate": 4, "dp_shard": 4}
_SPLIT = {size: {"pp": axes["pp"], **_INTO, "tp": axes["tp"]} for size, axes in _AXES.items()}


def comparisons() -> list[Comparison]:
    """What is timed, and what is to be reached."""
    split = (1, _INTO)
    renamed = {  # what `unflatten_to_known_groups` calls the axes of its first mesh
        size: {"pp": axes["pp"], "dp_replicate0": 4, "dp_shard0": 4, "tp": axes["tp"]}
        for size, axes in _AXES.items()
    }
    all_axes = ("pp", "dp", "cp", "tp")
    return [
        _both_sizes("create 4-D mesh", operations.create, _CREATED, of=_CREATED, kept=all_axes),
        _both_sizes("slice again", operations.slice_again, _AXES, of=_AXES, kept=("tp",)),
        _both_sizes("slice first", operations.slice_first, _AXES, of=_AXES, kept=("tp",)),
        _both_sizes(
            "unflatten to new groups",
            operations.unflatten_to_new_groups,
            _AXES,
            *split,
            of=_SPLIT,
            kept=tuple(_SPLIT[_SMALL]),
        ),
        _both_sizes(
            "unflatten to known groups",
            operations.unflatten_to_known_groups,
            _AXES,
            *split,
            20,
            of=renamed,
            kept=tuple(renamed[_SMALL]),
        ),
        _both_sizes(
            "flatten to a new group",
            operations.flatten,
            _AXES,
            ("dp", "tp"),
            of={size: {"pp": axes["pp"], "flat": 256} for size, axes in _AXES.items()},
            kept=("flat",),
        ),
        _both_sizes("compare equal meshes", operations.compare_equal, _AXES),
    ]


def _both_sizes(
    title: str,
    operation: Callable[..., Action],
    axes: dict[int, dict[str, int]],
    *args: Any,
    of: dict[int, dict[str, int]] | None = None,
    kept: tuple[str, ...] = (),
) -> Comparison:
    """Compare an operation at both sizes.

    Args:
        title: of the operation.
        operation: what is timed.
        axes: of the mesh it is set up with, by world size.
        args: more arguments of the operation.
        of: axes of a whole mesh that the answer is a part of, by world size; None for a comparison
            of meshes, whose answer is no mesh.
        kept: which of those axes the answer has.
    """

    def side(size: int) -> Side:
        set_up, warm_up = (
            partial(operation, meshverse.init_device_mesh, axes[each], *args)
            for each in (size, _SMALL)
        )
        return Side(f"{size:,} ranks", set_up, size, _RANK, warm_up)

    def check(small: Any, large: Any) -> None:
        for size, answer in ((_SMALL, small), (_LARGE, large)):
            if of is None:
                assert answer == (False, True, True, False), answer
            else:
                assert answer == _expected(of[size], kept), f"wrong answer at {size} ranks"

    return Comparison(title, side(_SMALL), side(_LARGE), Bound(at_most=1.5), check)


def _expected(axes: dict[str, int], kept: tuple[str, ...]) -> dict[str, Any]:
    """What rank `_RANK` is to see of a mesh, cut out of a tensor of all ranks."""
    ranks = torch.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    place = {
        axis: int(index) for axis, index in zip(axes, torch.nonzero(ranks == _RANK)[0], strict=True)
    }

    def cut(*chosen: str) -> torch.Tensor:
        return ranks[tuple(slice(None) if axis in chosen else place[axis] for axis in axes)]

    return {
        "axes": kept,
        "shape": tuple(axes[axis] for axis in kept),
        "coordinate": tuple(place[axis] for axis in kept),
        "axis ranks": [cut(axis).tolist() for axis in kept],
        "mesh": cut(*kept).tolist(),
    }
