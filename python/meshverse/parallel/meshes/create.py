"""Meshes of a trainer in one universe, created from degrees.

Example:
    >>> mesh, moe_mesh = create_fsdp2_device_mesh(  # doctest: +SKIP
    ...     ParallelismSizes(tp_size=2, cp_size=2, ep_size=4), world_size=16
    ... )
    >>> mesh.shape, moe_mesh.shape  # doctest: +SKIP
    ((1, 1, 4, 2, 2), (4, 4))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypedDict
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from meshverse import DeviceMesh, Universe, init_device_mesh

from .degrees import (
    MeshSpec,
    ParallelismSizes,
    check_sizes,
    data_parallel_size,
    degree,
    fsdp2_specs,
    moe_spec,
)
from .submesh import axis_size, check_class, register_flattened_axes

# The ep_sizes requested with the root mesh of a universe, for strategies that get only this mesh.
# There are several if it was created again with another one.
_ep_sizes: WeakKeyDictionary[Universe, set[int]] = WeakKeyDictionary()


class MeshKwargs(TypedDict, total=False):
    """Keywords about ranks and groups of a mesh, which `create_device_meshes` explains."""

    world_size: int | None
    timeout_minutes: float | None
    ranks: Sequence[int] | None
    universe: Universe | None


def create_fsdp2_device_mesh(
    parallelism: ParallelismSizes, **where: Unpack[MeshKwargs]
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Create the root mesh (pp, dp_replicate, dp_shard, cp, tp), and (ep_shard, ep) if ep > 1.

    Axes of size 1 are included. `get_flat_mesh` returns the flattened axes dp = (dp_replicate,
    dp_shard), dp_shard_cp = (dp_shard, cp) and dp_cp = (dp_replicate, dp_shard, cp).

    Args:
        parallelism: degrees of parallelism.
        where: keywords of `create_device_meshes`.

    Raises:
        ValueError: the degrees do not fit the ranks or each other, or `world_size` is not the
            process group's.
    """
    count, keywords = _ranks_and_options(**where)
    mesh = _build(fsdp2_specs(parallelism, count)[0], keywords)
    ep = parallelism.ep_size or 1
    moe_mesh = create_moe_mesh(mesh, ep_size=ep) if ep > 1 else None
    _ep_sizes.setdefault(mesh.universe, set()).add(ep)
    return mesh, moe_mesh


def requested_ep_size(mesh: DeviceMesh) -> int:
    """Return the ep_size that was requested with a mesh or its root; 1 if there was none.

    Raises:
        ValueError: several were requested.
    """
    sizes = _ep_sizes.get(mesh.universe, {1})
    if len(sizes) > 1:
        raise ValueError(
            f"{mesh} was created several times in its universe, with "
            f"ep_size={' and '.join(map(str, sorted(sizes)))}. Pass the experts' mesh as "
            "moe_mesh=, or ep_size=1 for a model without experts."
        )
    return min(sizes)


def create_moe_mesh(mesh: DeviceMesh, *, ep_size: int) -> DeviceMesh:
    """Create the mesh (ep_shard, ep) over all ranks of a pipeline stage, in the mesh's universe.

    Args:
        mesh: root mesh of its universe. If it has an axis pp, this must be the first axis, and each
            stage must have consecutive ranks of the universe.
        ep_size: number of ranks to split the experts over.

    Raises:
        TypeError: the mesh is not Meshverse's.
        ValueError: `ep_size` does not divide the number of ranks of a stage, the mesh does not have
            all ranks of its universe, or the axis pp is not as above.
    """
    check_class("mesh", mesh)
    stages = axis_size(mesh, "pp")
    spec = moe_spec(stages, mesh.size() // stages, ep_size)
    if stages > 1 and (mesh.size(0), *mesh.layout[0].strides) != (stages, mesh.size() // stages):
        raise ValueError(
            f"{mesh}: pp must be its first axis, and each stage must have consecutive ranks. "
            "Create the mesh with create_fsdp2_device_mesh()."
        )
    if mesh.size() != mesh.universe.size:
        raise ValueError(
            f"The mesh has {mesh.size()} of the {mesh.universe.size} ranks of its universe, and "
            "must have all of them. Give the root mesh."
        )
    experts = init_device_mesh(
        mesh.device_type, spec.shape, mesh_dim_names=spec.axes, universe=mesh.universe
    )
    return experts["ep_shard", "ep"]


def create_megatron_fsdp_device_mesh(
    parallelism: ParallelismSizes, **where: Unpack[MeshKwargs]
) -> DeviceMesh:
    """Create the root mesh (dp, cp, tp), with the flattened axis dp_cp if cp > 1.

    Arguments and errors are those of `create_fsdp2_device_mesh`. A degree above 1 of another axis
    raises ValueError.
    """
    refuse_degrees(parallelism, "Megatron-FSDP", ("dp_replicate_size", "pp_size", "ep_size"))
    tp, cp = parallelism.tp_size or 1, parallelism.cp_size or 1
    count, keywords = _ranks_and_options(**where)
    dp = data_parallel_size(parallelism.dp_size, count, tp_size=tp, cp_size=cp)
    flattened = {"dp_cp": ("dp", "cp")} if cp > 1 else {}
    return _build(MeshSpec((dp, cp, tp), ("dp", "cp", "tp"), flattened), keywords)


def refuse_degrees(parallelism: ParallelismSizes, strategy: str, names: Sequence[str]) -> None:
    """Raise ValueError if any of the named degrees, which the strategy lacks, is above 1."""
    check_sizes(parallelism)
    for name in names:
        if (size := getattr(parallelism, name) or 1) > 1:
            raise ValueError(f"{strategy} does not support {name}={size}. Use FSDP2Config for it.")


def world_size_of(given: int | None) -> int:
    """Return the default process group's size; without such a group, the argument."""
    degree(given, "world_size")
    size = dist.get_world_size() if dist.is_initialized() else given
    if size is None:
        raise ValueError(
            "world_size=None, and there is no process group to take it from. Give world_size=."
        )
    if given not in (None, size):
        raise ValueError(
            f"world_size={given}, but the world has {size} ranks. Give ranks= to use some of them."
        )
    return size


def _ranks_and_options(
    *,
    world_size: int | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
    universe: Universe | None = None,
) -> tuple[int, dict[str, Any]]:
    """Return the number of ranks of a mesh, and keywords for `init_device_mesh`."""
    count = world_size_of(world_size)
    if universe is not None and not isinstance(universe, Universe):
        raise TypeError(
            f"universe={universe!r:.80} of type {type(universe).__name__} must be a Universe: give "
            "that of a mesh, mesh.universe."
        )
    minutes: Any = timeout_minutes
    is_number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
    if minutes is not None and not (is_number and 0 < minutes < math.inf):
        raise ValueError(f"timeout_minutes={minutes!r} must be a number above 0, or None.")
    if universe is not None and ranks is None:
        ranks = universe.rank_map.ranks().tolist()
    timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
    keywords = {"ranks": ranks, "timeout": timeout, "universe": universe}
    return count if ranks is None else len(ranks), keywords


def _build(spec: MeshSpec, keywords: dict[str, Any]) -> DeviceMesh:
    mesh = init_device_mesh(_device_type(), spec.shape, mesh_dim_names=spec.axes, **keywords)
    register_flattened_axes(mesh, spec.flattened_axes)
    return mesh


def _device_type() -> str:
    has_nccl = not dist.is_initialized() or "nccl" in dist.get_backend_config()
    return "cuda" if torch.cuda.is_available() and has_nccl else "cpu"
