"""Submeshes by axis names, native and flattened ones mixed, and of a model's pipeline stage.

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
    """Flatten axes of a mesh under new names, for `get_flat_mesh` to find in its universe.

    Raises:
        KeyError: axes that the mesh does not have, or in another order.
        ValueError: a name that is taken.
    """
    for name, sources in flattened_axes.items():
        mesh[tuple(map(str, sources))].flatten(str(name))


def unflatten_compat(
    mesh: DeviceMesh, axis: str, sizes: Sequence[int], names: Sequence[str]
) -> DeviceMesh:
    """Return a mesh with one axis split into several, the rightmost varying fastest.

    Of a flattened axis of the universe, the mesh returned has the new axes alone. Raises KeyError
    for another axis, and otherwise as `unflatten` does.
    """
    whole = mesh if axis in (mesh.mesh_dim_names or ()) else get_flat_mesh(mesh, axis)
    return whole.unflatten(str(axis), sizes, tuple(map(str, names)))


def get_flat_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the 1-D mesh of one axis: the mesh's own, else a flattened one of its universe.

    Raises:
        KeyError: there is no axis of this name.
        TypeError: the mesh has none, and is one of torch's own.
    """
    own, name = mesh.mesh_dim_names or (), str(name)
    if name in own:
        return mesh[name]
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{mesh} is a mesh of torch's own, which has no flattened axis {name!r} to find. "
            "Make it with meshverse.init_device_mesh, or call meshverse.install() before."
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
    """Return the mesh of some axes, native and flattened ones mixed; the same object each time.

    It is on the axes' own process groups: asking creates none.

    Args:
        mesh: whose axes are meant, besides the flattened ones of its universe.
        names: of the axes; native axes alone come in the order of the mesh, as in a slice.

    Raises:
        KeyError: no name, one that is unknown or repeated, axes that share ranks (such as "dp" and
            "dp_cp"), or native axes in another order than in the mesh.
    """
    names = (str(names),) if isinstance(names, str) else tuple(map(str, names))
    if not names or len(set(names)) < len(names):
        raise KeyError(f"A submesh of the axes {names}: name one or more axes, each once.")
    if len(names) == 1:
        return get_flat_mesh(mesh, names[0])
    if set(names).issubset(mesh.mesh_dim_names or ()):
        return mesh[names]
    parts = [get_flat_mesh(mesh, name) for name in names]
    try:
        return cast("DeviceMesh", DeviceMesh.concatenate(parts))
    except RuntimeError as error:  # every axis must step through ranks that no other does
        raise KeyError(f"No submesh of the axes {names}: {error}") from error


def get_fsdp_dp_mesh(
    mesh: DeviceMesh, dp_replicate_name: str = "dp_replicate", dp_shard_cp_name: str = "dp_shard_cp"
) -> DeviceMesh:
    """Return the mesh to give to FSDP2: 1-D to shard, or 2-D (replicas, shards).

    Without replicas it has one axis also where context parallelism is on: of two, `fully_shard`
    would replicate over the first. Its root is that of the TP and EP meshes, as FSDP2 needs.
    KeyError if the mesh lacks one of the axes.
    """
    shards, names = dp_shard_cp_name, mesh.mesh_dim_names or ()
    layout = get_flat_mesh(mesh, shards).layout
    if "dp_shard" in names and mesh["dp_shard"].layout == layout:  # no context parallelism
        shards = "dp_shard"
    replicated = get_flat_mesh(mesh, dp_replicate_name).size() > 1
    return get_submesh(mesh, (dp_replicate_name, shards) if replicated else shards)


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the size of a mesh's own axis; 1 if it has none of this name."""
    axes = mesh.mesh_dim_names or ()
    return mesh.size(axes.index(axis)) if axis in axes else 1


def mesh_of_stage(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False
) -> DeviceMesh:
    """Return the mesh of this rank's pipeline stage.

    Raises:
        ValueError: the mesh has several stages, and the model is not one of this rank's; or it is
            one of several, and sequence parallelism is asked for.
    """
    size, name, own = axis_size(mesh, "pp"), type(model).__name__, stage_of(model)
    if sequence_parallel and own is not None and own.count > 1:
        raise ValueError(
            f"sequence_parallel=True for stage {own.index} of {own.count} of {name}: stages pass "
            "on whole hidden states. Use sequence_parallel=False."
        )
    if size == 1:
        return mesh
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != "pp")
    if own is None:
        others = ", ".join(f'"{axis}"' for axis in axes)
        raise ValueError(
            f"pp={size}: {name} would be whole on each of the {size} stages. Split it into stages "
            'first, with meshverse.parallel.pipeline_stages(model, device_mesh["pp"]). Parallelize '
            f"a stage that was made in another way on device_mesh[{others}]."
        )
    rank = mesh.get_local_rank("pp")
    if own.count % size or own.index % size != rank:
        raise ValueError(
            f"{name} is stage {own.index} of {own.count}, and this rank is number {rank} of "
            f"pp={size}. Give the stages that pipeline_stages made on this rank with this mesh."
        )
    return mesh[axes]


def check_covered(mesh: DeviceMesh, used: Sequence[DeviceMesh]) -> None:
    """Refuse a mesh with more ranks than the meshes that a strategy splits the model over.

    Log what is left to do where it has an axis cp.
    """
    count = math.prod(each.size() for each in used)
    if count != mesh.size():
        axes = ", ".join(f"{each.mesh_dim_names} of {each.size()}" for each in used)
        raise ValueError(
            f"{mesh} has {mesh.size()} ranks, and the strategy splits the model over {count} of "
            f"them: {axes} ranks. Name the axes that cover the mesh, or give the part of it that "
            "this model is on."
        )
    if (size := axis_size(mesh, "cp")) > 1:
        _logger.warning(
            "cp=%d: parameters are sharded over cp, and sequences are not split. Run forward and "
            "backward within meshverse.parallel.context_parallel(mesh, buffers=..., "
            "buffer_seq_dims=...), or give each of these ranks sequences of its own.",
            size,
        )
