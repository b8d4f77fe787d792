"""Descriptions of meshes, and of those that slicing, unflattening and concatenating give.

Layouts are over positions of one universe. Nothing here has side effects. The checks, their
exception types and the words they begin with are stock's: programs and torch's own tests match
them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meshverse._core import AxisLayout, Layout
from meshverse.wording import did_you_mean

from .user_input import AxisNames, check_axis_names


class MeshDescription(NamedTuple):
    """A mesh without its universe and its process groups.

    Attributes:
        device_type: "cpu", "cuda", ... without an index.
        layout: the axis layouts, over positions of the universe's rank map.
        axis_names: one an axis, or None.
        preserve_rank_order: whether group ranks follow the axes' order, not ascending ranks.
        flattened: whether it was made by flattening, on a torch where that makes it unequal to
            meshes made otherwise (before 2.13).
        tags: isolation tags, one an axis, "" for none; empty where no axis has one.
    """

    device_type: str
    layout: Layout
    axis_names: AxisNames | None
    preserve_rank_order: bool = False
    flattened: bool = False
    tags: tuple[str, ...] = ()

    @property
    def axis_tags(self) -> tuple[str, ...]:
        """Isolation tags, one an axis."""
        return self.tags or ("",) * len(self.layout)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the axes in messages: their own, or numbers where they have none."""
        return self.axis_names or tuple(f"dim_{index}" for index in range(len(self.layout)))

    def with_tags(self, tags: Sequence[str]) -> MeshDescription:
        """Return the same under other isolation tags, one an axis."""
        return self._replace(tags=tuple(tags) if any(tags) else ())


def check_has_names(mesh: MeshDescription, action: str, error: type[Exception]) -> AxisNames:
    """Return the names of a mesh's axes; raise `error`, which depends on the action, for none."""
    if mesh.axis_names is None:
        raise error(
            f"Cannot {action} a DeviceMesh without mesh_dim_names! Its layout is {mesh.layout}. "
            "Give its axes names when making it."
        )
    return mesh.axis_names


def check_known_axes(mesh: MeshDescription, names: AxisNames, flattened: Iterable[str]) -> None:
    """Check that a mesh has the axes it is sliced by, or may use flattened ones of these names.

    Raises:
        KeyError: an unknown name.
    """
    valid = [*(mesh.axis_names or ()), *flattened]
    if not all(name in valid for name in names):
        unknown = next(name for name in names if name not in valid)
        raise KeyError(
            f"Invalid mesh_dim_names {names} specified. Valid mesh_dim_names are {valid}."
            f"{did_you_mean(unknown, valid)}"
        )


def slice_axes(
    mesh: MeshDescription,
    names: AxisNames,
    layout: Layout,
    indices: Sequence[int],
    tags: Sequence[str] = (),
) -> MeshDescription:
    """Describe the submesh of some axes of a mesh.

    Args:
        mesh: the mesh that is sliced.
        names: the requested axes.
        layout: that has these axes.
        indices: of these axes in the layout.
        tags: isolation tags of these axes; empty where none of the mesh has one.

    Raises:
        KeyError: names in another order than in the mesh.
        RuntimeError: axes that overlap.
    """
    part = layout.slice(indices)
    if part is None:
        part = layout.select(indices)
        if part.is_sorted():
            raise RuntimeError(
                f"Slicing overlapping dim_names {names} is not allowed: their layouts are {part}."
            )
        raise KeyError(
            f"Invalid mesh_dim_names {names} specified. Mesh dim indices should be in ascending "
            f"order; the axes of this mesh are, in order, {mesh.axis_names}."
        )
    submesh = MeshDescription(mesh.device_type, part, names or None, mesh.preserve_rank_order)
    return submesh.with_tags(tags) if tags else submesh


def check_flattened_name(
    name: str, axis: AxisLayout, root_names: AxisNames, known: AxisLayout | None, root: object
) -> None:
    """Check the name of a flattened axis.

    Args:
        name: of the flattened axis.
        axis: its layout.
        root_names: axes of the root mesh.
        known: the axis flattened under this name before, if any.
        root: the root mesh, for messages.

    Raises:
        ValueError: the root has an axis of this name, or another flattened axis has it.
    """
    if name in root_names:
        raise ValueError(
            f"{name} already exists for submesh of the {root}. The mesh_dim_names of submesh and "
            f"flattened mesh are {root_names}. Please specify another valid mesh_dim_name."
        )
    if known is not None and known != axis:
        raise ValueError(
            f"Flatten mesh with mesh_dim_name {name} has been created before, Please specify "
            f"another valid mesh_dim_name. It has layout {known}, but {axis} is requested."
        )


def check_names_at_root(
    name: str, axis: AxisLayout, known: AxisLayout | None, known_as: str, root: object
) -> None:
    """Check a name of a root mesh or a flattened axis against another root mesh of its universe.

    torch looks names up at the first root mesh: its flattened axes come before the mesh's own axes.

    Args:
        name: of an axis.
        axis: its layout.
        known: the axis that has this name already, if any.
        known_as: what that one is, for the message.
        root: the first root mesh, for the message.

    Raises:
        ValueError: the two axes differ.
    """
    if known is not None and known != axis:
        raise ValueError(
            f"{name} already exists in the universe of {root}: {known_as} of this name has layout "
            f"{known}, but {axis} is requested, and get_group({name!r}) could mean either. "
            "Choose another name, or make the mesh in a universe of its own."
        )


def axis_index(mesh: MeshDescription, ndim: int, dim: Any) -> int:
    """Return the index of an axis given by index or name.

    Args:
        mesh: the mesh.
        ndim: its number of axes.
        dim: the index or name that the user gives.

    Raises:
        ValueError: no axis of this name or index.
        IndexError: an index from the end, or of a type of numpy's, that is no axis.
        TypeError: neither index nor name, or a name where the mesh has none.
    """
    if isinstance(dim, str):
        names = check_has_names(mesh, f"unflatten axis {dim!r} of", TypeError)
        if dim not in names:
            hint = did_you_mean(dim, names)
            raise ValueError(f"dim {dim} specified in `_unflatten` is not in {names}.{hint}")
        return names.index(dim)
    try:
        index = operator.index(dim)
    except TypeError:
        raise TypeError(f"dim {dim!r} specified in `_unflatten` is no index and no name.") from None
    if not -ndim <= index < ndim:
        error = ValueError if isinstance(dim, int) and index >= 0 else IndexError  # as stock
        raise error(f"dim {index} specified in `_unflatten` is out of range {ndim}")
    return index % ndim


def unflatten_axis(
    mesh: MeshDescription, index: int, sizes: Sequence[int], names: Sequence[str]
) -> MeshDescription:
    """Describe the mesh with one axis split into several, the rightmost fastest, under its tag.

    Args:
        mesh: the mesh to change.
        index: of the axis to split.
        sizes: of the new axes.
        names: of the new axes.

    Raises:
        ValueError: sizes that do not multiply out to the axis.
        RuntimeError: another number of names than sizes, or a name that is taken.
        TypeError: a mesh without names.
    """
    if len(sizes) != len(names):
        raise RuntimeError(
            "mesh_dim_names must have same length as mesh_sizes in _unflatten! Got names "
            f"{tuple(names)} for sizes {tuple(sizes)}."
        )
    sizes = tuple(sizes)
    try:
        layout = mesh.layout.unflatten(index, sizes)
    except ValueError:
        size, product = mesh.layout[index].size, math.prod(sizes)
        if product == size:
            raise
        raise ValueError(
            f"The product of mesh_sizes={sizes} is {product}, but the original dimension at "
            f"dim={index} has size {size}. These must be equal for unflatten to work "
            f"correctly. The axes are {mesh.axis_names}."
        ) from None
    own_names = mesh.axis_names or check_has_names(mesh, "unflatten", TypeError)
    all_names = (*own_names[:index], *names, *own_names[index + 1 :])
    tags = mesh.tags and (
        *mesh.tags[:index],
        *(mesh.tags[index],) * len(sizes),
        *mesh.tags[index + 1 :],
    )
    checked, order = check_axis_names(all_names, len(all_names)), mesh.preserve_rank_order
    return MeshDescription(mesh.device_type, layout, checked, order, tags=tags)


def concatenate(meshes: Sequence[MeshDescription], given: Sequence[object]) -> MeshDescription:
    """Describe one mesh with the axes of several, in the order given.

    Args:
        meshes: the descriptions of the meshes.
        given: the meshes, for messages.

    Raises:
        RuntimeError: they overlap.
        TypeError: one has no names.
    """
    layout = Layout([])
    names: AxisNames = ()
    for mesh in meshes:
        names += check_has_names(mesh, "concatenate", TypeError)
        layout = layout.concatenate(mesh.layout)
    if not layout.is_orthogonal():
        raise RuntimeError(
            f"Cannot concatenate overlapping meshes: {given}. Axes {names} have layouts {layout}, "
            "which share positions."
        )
    tags: tuple[str, ...] = ()
    if any(mesh.tags for mesh in meshes):
        tags = tuple(tag for mesh in meshes for tag in mesh.axis_tags)
    return meshes[0]._replace(layout=layout, axis_names=names, flattened=False, tags=tags)
