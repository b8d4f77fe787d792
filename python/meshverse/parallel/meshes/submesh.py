"""Submeshes by names of axes (native or flattened), and the mesh of a pipeline stage.

Example:
    >>> from meshverse import init_device_mesh
    >>> mesh = init_device_mesh(  # doctest: +SKIP
    ...     "cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp")
    ... )
    >>> register_flattened_axes(mesh, {"dp_shard_cp": ("dp_shard", "cp")})  # doctest: +SKIP
    >>> hybrid = get_submesh(mesh, ("dp_replicate", "dp_shard_cp"))  # doctest: +SKIP
    >>> hybrid.shape, hybrid is get_submesh(mesh, ("dp_replicate", "dp_shard_cp"))  # doctest: +SKIP
    ((2, 4), True)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import cast

from torch import nn

from meshverse import DeviceMesh
from meshverse.parallel.models.modules import stage_of

_logger = logging.getLogger(__name__)


def register_flattened_axes(mesh: DeviceMesh, flattened_axes: Mapping[str, Sequence[str]]) -> None:
    """Flatten axes of a mesh under new names, by which `get_flat_mesh` finds them.

    Raises:
        KeyError: the mesh lacks an axis, or has the axes in another order. Nothing is flattened.
        TypeError: the mesh is not Meshverse's.
        ValueError: a name exists already.
    """
    check_class("mesh", mesh)
    parts = {name: mesh[tuple(map(str, axes))] for name, axes in flattened_axes.items()}
    for name, part in parts.items():
        part.flatten(str(name))


def unflatten_compat(
    mesh: DeviceMesh, axis: str, sizes: Sequence[int], names: Sequence[str]
) -> DeviceMesh:
    """Return a mesh with one axis split into several, the rightmost varying fastest.

    If `axis` is a flattened axis of the universe, the result has only the new axes. KeyError if
    there is no such axis, TypeError if the mesh is not Meshverse's; other errors are those of
    `unflatten`.
    """
    check_class("mesh", mesh)
    whole = mesh if axis in (mesh.mesh_dim_names or ()) else get_flat_mesh(mesh, axis)
    return whole.unflatten(str(axis), sizes, tuple(map(str, names)))


def check_class(name: str, mesh: object) -> None:
    """Raise TypeError unless an argument is a mesh of our class."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{name}={mesh!r:.80} of type {type(mesh).__module__}.{type(mesh).__qualname__} must "
            "be a Meshverse mesh. Use meshverse.init_device_mesh, or call meshverse.install() "
            "first."
        )


def get_flat_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the 1-D mesh of one axis of the mesh, or of a flattened axis of its universe.

    Raises:
        KeyError: there is no axis of this name.
        TypeError: the mesh has no axis of this name, and is of torch's class, whose flattened axes
            cannot be found.
    """
    own, name = mesh.mesh_dim_names or (), str(name)
    if name in own:
        return mesh[name]
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{mesh} has no axis {name!r}; it is of torch's own class, whose flattened axes cannot "
            "be found. Use meshverse.init_device_mesh, or call meshverse.install() first."
        )
    flattened = mesh.flattened
    if name not in flattened:
        near = "".join(get_close_matches(name, [*own, *flattened], n=1))
        raise KeyError(
            f"No axis {name!r}: the mesh has the axes {own}, and its universe the flattened axes "
            f"{tuple(flattened)}.{near and f' Did you mean {near!r}?'}"
        )
    return flattened[name]


def get_submesh(mesh: DeviceMesh, names: str | Sequence[str]) -> DeviceMesh:
    """Return the mesh of some axes, native or flattened; the same object each time.

    It uses the process groups that the axes already have.

    Args:
        mesh: mesh that has the native axes; flattened axes are found in its universe.
        names: names of the axes. Native axes alone must be in the order of the mesh.

    Raises:
        KeyError: `names` is empty; a name is unknown or repeated; axes overlap, such as "dp" and
            "dp_cp"; or native axes are in another order than in the mesh.
    """
    names = (str(names),) if isinstance(names, str) else tuple(map(str, names))
    if not names or len(set(names)) < len(names):
        raise KeyError(f"A submesh of the axes {names}: it must have one or more axes, each once.")
    if len(names) == 1:
        return get_flat_mesh(mesh, names[0])
    if set(names).issubset(mesh.mesh_dim_names or ()):
        return mesh[names]
    parts = [get_flat_mesh(mesh, name) for name in names]
    try:
        return cast("DeviceMesh", DeviceMesh.concatenate(parts))
    except RuntimeError as error:  # the axes overlap
        raise KeyError(f"No submesh of the axes {names}: {error}") from error


def get_fsdp_dp_mesh(
    mesh: DeviceMesh, dp_replicate_name: str = "dp_replicate", dp_shard_cp_name: str = "dp_shard_cp"
) -> DeviceMesh:
    """Return the mesh to give to FSDP2: 1-D to shard, or 2-D (replicas, shards).

    Without replicas it has one axis, even with context parallelism: `fully_shard` would replicate
    over the first of two axes. It has the same root as the TP and EP meshes, which FSDP2 requires.

    Raises:
        KeyError: the mesh lacks one of the axes.
        TypeError: the mesh is not Meshverse's.
    """
    check_class("mesh", mesh)
    shards, names = dp_shard_cp_name, mesh.mesh_dim_names or ()
    layout = get_flat_mesh(mesh, shards).layout
    if "dp_shard" in names and mesh["dp_shard"].layout == layout:  # no context parallelism
        shards = "dp_shard"
    replicated = get_flat_mesh(mesh, dp_replicate_name).size() > 1
    return get_submesh(mesh, (dp_replicate_name, shards) if replicated else shards)


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the size of an axis of a mesh; 1 if the mesh has no such axis."""
    axes = mesh.mesh_dim_names or ()
    return mesh.size(axes.index(axis)) if axis in axes else 1


def mesh_of_stage(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False
) -> DeviceMesh:
    """Return the mesh of this rank's pipeline stage.

    Raises:
        ValueError: the mesh has several stages, and the model is not a stage of this rank; or
            `sequence_parallel` is True, and the model is one of several stages.
    """
    size, name, own = axis_size(mesh, "pp"), type(model).__name__, stage_of(model)
    if sequence_parallel and own is not None and own.count > 1:
        raise ValueError(
            f"sequence_parallel=True for stage {own.index} of {own.count} of {name} is not "
            "supported: stages pass whole hidden states. Use sequence_parallel=False."
        )
    if size == 1:
        return mesh
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != "pp")
    if own is None:
        others = ", ".join(f'"{axis}"' for axis in axes)
        raise ValueError(
            f"pp={size}, but {name} is not split into {size} stages. Split it first, with "
            'meshverse.parallel.pipeline_stages(model, device_mesh["pp"]). If it is a stage from '
            f"another library, parallelize it on device_mesh[{others}]."
        )
    rank = mesh.get_local_rank("pp")
    if own.count % size or own.index % size != rank:
        raise ValueError(
            f"{name} is stage {own.index} of {own.count}, but this rank has the index {rank} of "
            f"pp={size}. Each rank must parallelize the stages that pipeline_stages() returned to "
            "it for this mesh."
        )
    return mesh[axes]


def check_covered(mesh: DeviceMesh, used: Sequence[DeviceMesh]) -> None:
    """Raise ValueError if the meshes that a strategy uses overlap, or do not cover a mesh.

    If the mesh has an axis cp, log a warning that sequences are not split yet.
    """
    count = math.prod(each.size() for each in used)
    if count != mesh.size():
        axes = ", ".join(f"{each.mesh_dim_names} of {each.size()}" for each in used)
        raise ValueError(
            f"{mesh} has {mesh.size()} ranks, but the strategy splits the model over {count} of "
            f"them: {axes} ranks. The strategy's axes must cover the mesh. Name other axes, or "
            "give the submesh that this model is on."
        )
    split = [each for each in used if each.size() > 1]
    try:
        DeviceMesh.concatenate(split or [mesh])
    except RuntimeError as error:
        raise ValueError(f"The strategy's axes must not overlap. {error}") from error
    if (size := axis_size(mesh, "cp")) > 1:
        _logger.warning(
            "cp=%d: parameters are sharded over cp, but sequences are not split. Run forward and "
            "backward within meshverse.parallel.context_parallel(mesh, buffers=..., "
            "buffer_seq_dims=...), or give each of these ranks its own sequences.",
            size,
        )
