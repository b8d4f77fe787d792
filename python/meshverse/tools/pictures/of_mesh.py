"""Drawing a mesh as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshverse import Universe
from meshverse._core import AxisLayout
from meshverse.layouts.derivation import MeshDescription
from meshverse.wording import did_you_mean

from .model import PicturedGroups, PicturedView
from .of_universe import node_size_here
from .picture import Picture


def draw(
    mesh: MeshDescription,
    universe: Universe,
    flattened: Mapping[str, MeshDescription],
    axes: str | int | Sequence[str | int] | None,
    node_size: int | None,
) -> Picture:
    """Return a mesh of a universe as a picture; see `DeviceMesh.draw`.

    Args:
        mesh: description of the mesh to draw.
        universe: universe of the mesh.
        flattened: descriptions of the flattened meshes that `axes` can name, by name.
        axes: as the argument `axis` of `DeviceMesh.draw`.
        node_size: as for `DeviceMesh.draw`.
    """
    labels = mesh.labels
    if axes is None:
        axes = range(len(labels))
    elif isinstance(axes, str | int):
        if isinstance(axes, str) and axes in flattened and axes not in labels:
            mesh, labels = flattened[axes], (axes,)
        axes = [axes]
    found = [_axis(mesh, flattened, axis) for axis in axes]
    sizes = zip(labels, mesh.layout.shape, strict=True)
    title = ", ".join(f"{label}={size}" for label, size in sizes)
    groups = [PicturedGroups((label,), layout, mesh.preserve_rank_order) for label, layout in found]
    return Picture(
        title=f"Mesh {title} of {universe.rank_map}",
        rank_map=universe.rank_map,
        rank=universe.rank,
        groups=tuple(groups),
        views=(PicturedView(title, tuple((label, at) for at, (label, _) in enumerate(found))),),
        node_size=node_size_here() if node_size is None else node_size,
    )


def _axis(
    mesh: MeshDescription, flattened: Mapping[str, MeshDescription], axis: str | int
) -> tuple[str, AxisLayout]:
    labels = mesh.labels
    if isinstance(axis, str):
        if axis in labels:
            return axis, mesh.layout[labels.index(axis)]
        if axis in flattened:
            return axis, flattened[axis].layout[0]
        hint = did_you_mean(axis, [*labels, *flattened])
        raise KeyError(
            f"There is no axis {axis!r} to draw: the axes are {list(labels)}, the flattened axes "
            f"{list(flattened)}.{hint}"
        )
    if not -len(labels) <= axis < len(labels):
        raise IndexError(f"There is no axis {axis} to draw: the mesh has {len(labels)}.")
    return labels[axis], mesh.layout[axis % len(labels)]
