"""What a trainer's meshes are called and how large they are: plain data, checked.

Example:
    >>> spec = MeshSpec((2, 4), ("dp", "tp"), {"world": ("dp", "tp")})
    >>> validate_mesh_spec(spec)
    >>> spec.size
    8
    >>> MeshAxisName.TP == "tp", {"tp": 4}[MeshAxisName.TP]
    (True, 4)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from meshverse.nearest import did_you_mean

from .degrees import is_degree

__all__ = ["MeshAxisName", "MeshSpec", "validate_mesh_spec"]


class MeshAxisName(str, Enum):
    """Names of the axes, each equal to its string, with the same hash."""

    PP = "pp"
    DP = "dp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    DP_SHARD_CP = "dp_shard_cp"
    DP_CP = "dp_cp"
    CP = "cp"
    TP = "tp"
    EP = "ep"
    EP_SHARD = "ep_shard"

    # Enum's own differ between versions of Python.
    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


@dataclass(frozen=True)
class MeshSpec:
    """A root mesh and the flattened axes that go with it.

    Attributes:
        shape: size of each axis.
        axes: one name an axis.
        flattened_axes: by name, the axes that it combines.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    flattened_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)


def validate_mesh_spec(spec: MeshSpec) -> None:
    """Check that a mesh can be built as described.

    Raises:
        ValueError: no axes; another number of sizes than names; a size that is no int above 0; a
            repeated name; a flattened axis with an axis's name, without sources, or of sources
            that are no axes, repeat, or come in another order than in the mesh.
    """
    if not spec.axes or len(spec.shape) != len(spec.axes):
        raise ValueError(
            f"Mesh of shape {spec.shape} with axes {spec.axes}: {len(spec.shape)} sizes for "
            f"{len(spec.axes)} names. Give one size and one name an axis, and at least one axis."
        )
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    wrong = {axis: size for axis, size in sizes.items() if not is_degree(size)}
    if wrong:
        raise ValueError(f"Mesh axes of sizes {wrong}: every size must be an int above 0.")
    repeated = [axis for axis, count in Counter(spec.axes).items() if count > 1]
    if repeated:
        raise ValueError(f"Mesh axes {spec.axes} repeat {repeated}: give each axis its own name.")
    for name, sources in spec.flattened_axes.items():
        _check_flattened_axis(name, tuple(sources), spec.axes)


def _check_flattened_axis(name: str, sources: tuple[str, ...], axes: tuple[str, ...]) -> None:
    if name in axes:
        raise ValueError(
            f"Flattened axis {name!r} has the name of an axis of the mesh, {axes}: give it another."
        )
    hint = next((did_you_mean(each, axes) for each in sources if each not in axes), "")
    if not sources or sources != tuple(axis for axis in axes if axis in sources):
        raise ValueError(
            f"Flattened axis {name!r} of {sources}: it must combine one or more of the mesh's axes "
            f"{axes}, each once and in this order.{hint}"
        )
