"""A mesh as a picture."""

from __future__ import annotations

from collections.abc import Mapping

from meshverse.layouts.derivation import MeshDescription
from meshverse.nearest import did_you_mean
from meshverse.pictures import Picture, PicturedGroups, PicturedView
from meshverse.report.pictured import node_size_here
from meshverse.universe.universe import Universe


def draw(
    mesh: MeshDescription,
    universe: Universe,
    flattened: Mapping[str, MeshDescription],
    axis: str | int | None,
    node_size: int | None,
) -> Picture:
    """Return a mesh of a universe as a picture; see `DeviceMesh.draw`.

    Args:
        mesh: to draw.
        universe: that it is in.
        flattened: the flattened meshes that may be drawn too, by name.
        axis: as of `DeviceMesh.draw`.
        node_size: as of `DeviceMesh.draw`.
    """
    labels = mesh.labels
    if isinstance(axis, str) and axis not in labels:
        if axis not in flattened:
            hint = did_you_mean(axis, [*labels, *flattened])
            raise KeyError(
                f"There is no axis {axis!r} to draw: the axes are {list(labels)}, the flattened "
                f"axes {list(flattened)}.{hint}"
            )
        mesh, axis = flattened[axis], 0
        labels = mesh.labels
    if isinstance(axis, str):
        shown = [labels.index(axis)]
    elif axis is None:
        shown = list(range(len(labels)))
    elif -len(labels) <= axis < len(labels):
        shown = [axis % len(labels)]
    else:
        raise IndexError(f"There is no axis {axis} to draw: the mesh has {len(labels)}.")
    sizes = zip(labels, mesh.layout.shape, strict=True)
    title = ", ".join(f"{label}={size}" for label, size in sizes)
    groups = [
        PicturedGroups((labels[index],), mesh.layout[index], mesh.preserve_rank_order)
        for index in shown
    ]
    return Picture(
        title=f"Mesh {title} of {universe.rank_map}",
        rank_map=universe.rank_map,
        rank=universe.rank,
        groups=tuple(groups),
        views=(PicturedView(title, tuple((labels[i], at) for at, i in enumerate(shown))),),
        node_size=node_size_here() if node_size is None else node_size,
    )
