"""Degrees of parallelism, axis names and descriptions of meshes, with their checks.

Example:
    >>> data_parallel_size(None, 64, tp_size=8, cp_size=2)
    4
    >>> MeshSpec((2, 4), ("dp", "tp"), {"world": ("dp", "tp")}).size
    8
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


class MeshAxisName(str, Enum):
    """Names of the axes. Each member equals its string, and has the same hash."""

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

    # Enum's own methods return different strings in different versions of Python.
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class ParallelismSizes:
    """Degrees of parallelism: the number of ways in which each one splits the work.

    Attributes:
        dp_size: degree of data parallelism, which is replicas times shards. None or -1 stands for
            the number of ranks divided by the other degrees.
        dp_replicate_size: number of replicas in data parallelism; None and 1 mean no replicas.
        tp_size: degree of tensor parallelism. None means 1, as in the following degrees.
        pp_size: degree of pipeline parallelism.
        cp_size: degree of context parallelism.
        ep_size: degree of expert parallelism, which divides the ranks of a pipeline stage.

    Raises:
        ValueError: a degree is neither an int above 0 nor None; for dp_size, -1 is allowed too.
    """

    dp_size: int | None = None
    dp_replicate_size: int | None = None
    tp_size: int | None = 1
    pp_size: int | None = 1
    cp_size: int | None = 1
    ep_size: int | None = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "dp_size" or type(value) is not int or value != -1:
                degree(value, each.name)


def check_sizes(parallelism: object) -> None:
    """Raise TypeError unless an argument is a `ParallelismSizes`."""
    if not isinstance(parallelism, ParallelismSizes):
        raise TypeError(
            f"parallelism={parallelism!r:.80} of type {type(parallelism).__name__} must be a "
            "ParallelismSizes."
        )


def is_degree(value: Any) -> bool:
    """Return whether a value is a degree: an int above 0."""
    return type(value) is int and value > 0  # True is not a degree


def degree(value: Any, name: str) -> int:
    """Return a degree or number of ranks after checking it; None counts as 1.

    Raises:
        ValueError: the value is neither None nor an int above 0.
    """
    if value is not None and not is_degree(value):
        inferred = ", -1 to infer it from the ranks" if name == "dp_size" else ""
        raise ValueError(
            f"{name}={value!r} of type {type(value).__name__} must be an int above 0{inferred}, or "
            "None to leave it unset."
        )
    return 1 if value is None else int(value)


def data_parallel_size(dp_size: int | None, count: int, **other_sizes: int) -> int:
    """Return the size of data parallelism: as set, or the ranks divided by the other degrees.

    Args:
        dp_size: the degree; None or -1 to infer it.
        count: number of ranks.
        other_sizes: other degrees, by name.

    Raises:
        ValueError: the product of all degrees is not the number of ranks.
    """
    own = {} if dp_size in (None, -1) else {"dp_size": degree(dp_size, "dp_size")}
    sizes = own | other_sizes
    product = math.prod(sizes.values())
    if count < 1 or count % product or (own and count != product):
        factors = " * ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{factors} = {product}, but there are {count} ranks. The product of the degrees must "
            "be the number of ranks; without dp_size, the product of the others must divide it."
        )
    return count // math.prod(other_sizes.values())


@dataclass(frozen=True)
class MeshSpec:
    """Description of a root mesh and of its flattened axes."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    # Name of each flattened axis, with the axes that it combines.
    flattened_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)


def validate_mesh_spec(spec: MeshSpec) -> None:
    """Check that a mesh can be built as described.

    Raises:
        ValueError: there are no axes; an axis has no size above 0 or no distinct name; or a
            flattened axis has the name of an axis, or combines axes in another order than the mesh.
    """
    shape, axes = spec.shape, spec.axes
    named_once = 0 < len(axes) == len(set(axes)) == len(shape)
    if not named_once or not all(map(is_degree, shape)):
        raise ValueError(
            f"Mesh of shape {shape} with axes {axes}: it must have one or more axes, each with a "
            "size (an int above 0) and a distinct name."
        )
    for name, sources in spec.flattened_axes.items():
        in_order = tuple(axis for axis in axes if axis in sources)
        if name in axes or not sources or tuple(sources) != in_order:
            raise ValueError(
                f"Flattened axis {name!r} of {tuple(sources)}: it must combine one or more of the "
                f"mesh's axes {axes}, each once and in this order, under a new name."
            )


def fsdp2_specs(parallelism: ParallelismSizes, count: int) -> list[MeshSpec]:
    """Return the specs of the meshes that `create_fsdp2_device_mesh` creates over `count` ranks."""
    check_sizes(parallelism)
    tp, pp = parallelism.tp_size or 1, parallelism.pp_size or 1
    cp, ep = parallelism.cp_size or 1, parallelism.ep_size or 1
    replicas = parallelism.dp_replicate_size or 1
    dp = data_parallel_size(parallelism.dp_size, count, tp_size=tp, cp_size=cp, pp_size=pp)
    if replicas > 1 and (dp % replicas or dp == replicas):
        raise ValueError(
            f"dp_size={dp} must be a multiple of dp_replicate_size={replicas}, and larger: each "
            "replica has the same number of shards, at least two. Use dp_replicate_size=1"
            + (", or DDPConfig to replicate only." if tp == pp == cp == ep == 1 else ".")
        )
    spec = MeshSpec(
        shape=(pp, replicas, dp // replicas, cp, tp),
        axes=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        flattened_axes={
            "dp": ("dp_replicate", "dp_shard"),
            "dp_shard_cp": ("dp_shard", "cp"),
            "dp_cp": ("dp_replicate", "dp_shard", "cp"),
        },
    )
    experts = moe_spec(pp, dp * cp * tp, ep)
    return [spec, experts] if ep > 1 else [spec]


def moe_spec(stages: int, stage_size: int, ep_size: int) -> MeshSpec:
    """Return the spec of the mesh (pp, ep_shard, ep) over all stages of a pipeline.

    Args:
        stages: number of pipeline stages.
        stage_size: number of ranks of a stage.
        ep_size: number of ranks to split the experts over.

    Raises:
        ValueError: `ep_size` does not divide `stage_size`.
    """
    if not is_degree(ep_size) or stage_size % ep_size:
        raise ValueError(
            f"ep_size={ep_size!r} must be an int above 0 that divides the {stage_size} ranks of a "
            "pipeline stage."
        )
    return MeshSpec((stages, stage_size // ep_size, ep_size), ("pp", "ep_shard", "ep"))
