"""Submeshes by axis names, native and flattened ones mixed: found by layout, made once.

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

from collections.abc import Mapping, Sequence
from typing import cast

from meshverse import DeviceMesh
from meshverse._core import Layout
from meshverse.nearest import did_you_mean

__all__ = [
    "get_flat_mesh",
    "get_fsdp_dp_mesh",
    "get_submesh",
    "register_flattened_axes",
    "unflatten_compat",
]

_DP_SHARD = "dp_shard"


def register_flattened_axes(mesh: DeviceMesh, flattened_axes: Mapping[str, Sequence[str]]) -> None:
    """Flatten axes of a mesh under new names, for `get_flat_mesh` to find in its universe.

    Args:
        mesh: which has the axes.
        flattened_axes: by new name, the axes to combine, in the order of the mesh.

    Raises:
        KeyError: axes that the mesh does not have, or in another order.
        ValueError: a name that is taken by an axis, or by another flattened axis.
    """
    for name, sources in flattened_axes.items():
        mesh[tuple(map(str, sources))].flatten(str(name))


def unflatten_compat(
    mesh: DeviceMesh, axis: str, sizes: Sequence[int], names: Sequence[str]
) -> DeviceMesh:
    """A mesh with one axis split into several, the rightmost varying fastest.

    Args:
        mesh: the mesh.
        axis: one of its axes, or a flattened axis of its universe.
        sizes: of the new axes; their product is the size of the axis.
        names: of the new axes.

    Returns:
        The whole mesh with the axis split; of a flattened axis, the new axes alone.

    Raises:
        KeyError: no such axis.
        ValueError: sizes that do not multiply out to the axis.
        RuntimeError: another number of names than sizes, or a name that is taken.
    """
    whole = mesh if axis in (mesh.mesh_dim_names or ()) else get_flat_mesh(mesh, axis)
    return whole.unflatten(str(axis), sizes, tuple(map(str, names)))


def get_flat_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The 1-D mesh of one axis: the mesh's own, else a flattened one of its universe.

    Raises:
        KeyError: there is no axis of this name.
        TypeError: the mesh has none, and is not a `meshverse.DeviceMesh`.
    """
    own = mesh.mesh_dim_names or ()
    if name in own:
        return mesh[str(name)]
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{mesh} is a mesh of torch's own, which has no flattened axis {str(name)!r} to find. "
            "Make it with meshverse.init_device_mesh, or call meshverse.install() before."
        )
    flattened = mesh._root().flattened
    if name not in flattened:
        raise KeyError(
            f"No axis {str(name)!r}: the mesh has the axes {own}, and its universe the flattened "
            f"axes {tuple(flattened)}.{did_you_mean(name, [*own, *flattened])}"
        )
    return cast("DeviceMesh", flattened[name])


def get_submesh(mesh: DeviceMesh, names: str | Sequence[str]) -> DeviceMesh:
    """The mesh of some axes, native and flattened ones mixed; the same object each time.

    It is on the axes' own process groups: asking creates none.

    Args:
        mesh: whose axes are meant, besides the flattened ones of its universe.
        names: of the axes. Native axes alone come in the order of the mesh, as in a slice; a
            mixture has the order asked for.

    Raises:
        KeyError: a name that is unknown or repeated, axes that share ranks (such as "dp" and
            "dp_cp"), no name at all, or native axes in another order than in the mesh.
    """
    names = (str(names),) if isinstance(names, str) else tuple(map(str, names))
    if not names or len(set(names)) < len(names):
        raise KeyError(f"A submesh of the axes {names}: name one or more axes, each once.")
    if len(names) == 1:
        return get_flat_mesh(mesh, names[0])
    if set(names).issubset(mesh.mesh_dim_names or ()):
        return mesh[names]
    parts = [get_flat_mesh(mesh, name) for name in names]
    layout = Layout([part.layout[0] for part in parts])
    if not layout.is_orthogonal():
        raise KeyError(
            f"No submesh of the axes {names}: their layouts {layout} overlap, and every axis of a "
            "mesh must step through ranks that no other steps through."
        )
    return cast("DeviceMesh", DeviceMesh.concatenate(parts))


def get_fsdp_dp_mesh(
    mesh: DeviceMesh,
    dp_replicate_name: str = "dp_replicate",
    dp_shard_cp_name: str = "dp_shard_cp",
) -> DeviceMesh:
    """The mesh to give to FSDP2: 1-D to shard, or 2-D (replicas, shards).

    Without replicas it has one axis also where context parallelism is on: of two, `fully_shard`
    would replicate over the first. Its root is that of the TP and EP meshes, as FSDP2 needs.

    Args:
        mesh: the root mesh.
        dp_replicate_name: axis of the replicas.
        dp_shard_cp_name: flattened axis of shards and context parallelism.

    Raises:
        KeyError: one of the axes is not there.
    """
    shards = dp_shard_cp_name
    if _same_ranks(mesh, _DP_SHARD, dp_shard_cp_name):  # as without context parallelism
        shards = _DP_SHARD
    if get_flat_mesh(mesh, dp_replicate_name).size() == 1:
        return get_flat_mesh(mesh, shards)
    return get_submesh(mesh, (dp_replicate_name, shards))


def _same_ranks(mesh: DeviceMesh, native: str, other: str) -> bool:
    flat = get_flat_mesh(mesh, other)
    return native in (mesh.mesh_dim_names or ()) and mesh[native].layout == flat.layout
