"""Descriptions of meshes, and of the meshes derived by slicing, unflattening and concatenating.

Layouts are over positions of one universe. The functions have no side effects. Most checks are
torch's, with its exception types and the first words of its messages, because programs and torch's
own tests match them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meshverse._core import AxisLayout, Layout
from meshverse.wording import did_you_mean

from .user_input import AxisNames, check_axis_names, fill_rest, has_rest, read_shape, read_sizes


class MeshDescription(NamedTuple):
    """A mesh without its universe and its process groups.

    Attributes:
        device_type: "cpu", "cuda", ... without an index.
        layout: layouts of the axes, over positions of the universe's rank map.
        axis_names: one name per axis, or None.
        preserve_rank_order: whether group ranks follow the axes' order, instead of ascending ranks.
        flattened: whether the mesh was created by flattening. Set only with a torch before 2.13,
            where such a mesh does not equal meshes that are created otherwise.
        tags: one isolation tag per axis, "" for none; empty if no axis has one.
    """

    device_type: str
    layout: Layout
    axis_names: AxisNames | None
    preserve_rank_order: bool = False
    flattened: bool = False
    tags: tuple[str, ...] = ()

    @property
    def axis_tags(self) -> tuple[str, ...]:
        """One isolation tag per axis; "" for none."""
        return self.tags or ("",) * len(self.layout)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the axes in messages: their own, or "dim_0", "dim_1", ... without names."""
        return self.axis_names or tuple(f"dim_{index}" for index in range(len(self.layout)))

    def with_tags(self, tags: Sequence[str]) -> MeshDescription:
        """Return a copy with other isolation tags, one per axis."""
        return self._replace(tags=tuple(tags) if any(tags) else ())


def check_has_names(mesh: MeshDescription, action: str, error: type[Exception]) -> AxisNames:
    """Return the names of a mesh's axes; raise `error` if it has none.

    Args:
        mesh: mesh to check.
        action: verb phrase for the message: what the user wants to do with the mesh.
        error: type of the exception.
    """
    if mesh.axis_names is None:
        raise error(
            f"Cannot {action} a DeviceMesh without mesh_dim_names! Its layout is {mesh.layout}. "
            "Pass mesh_dim_names= when you make it."
        )
    return mesh.axis_names


def check_known_axes(mesh: MeshDescription, names: AxisNames, flattened: Iterable[str]) -> None:
    """Check that the names of a slice are axes of the mesh, or flattened axes.

    Args:
        mesh: mesh to slice.
        names: names to check.
        flattened: names of the flattened axes that the slice may use.

    Raises:
        KeyError: a name is neither.
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
        mesh: mesh to slice.
        names: names of the requested axes.
        layout: layout that contains these axes.
        indices: indices of these axes in the layout.
        tags: one isolation tag per requested axis; empty if no axis of the mesh has one.

    Raises:
        KeyError: the names are in another order than the axes of the mesh.
        RuntimeError: the axes overlap.
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
        name: name of the flattened axis.
        axis: layout of the flattened axis.
        root_names: names of the root mesh's axes.
        known: layout of an axis that was flattened under this name before; None without one.
        root: root mesh, for messages.

    Raises:
        ValueError: an axis of the root mesh, or another flattened axis, has this name.
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
    """Check that an axis name is not taken in a universe with several root meshes.

    It is the name of an axis of a root mesh, or of a flattened axis. torch looks up a name at the
    first root mesh: its flattened axes take precedence over the axes of the mesh itself.

    Args:
        name: name of the axis.
        axis: layout of the axis.
        known: layout of an axis of another root mesh that has this name; None without one.
        known_as: description of that axis, for the message.
        root: first root mesh of the universe, for the message.

    Raises:
        ValueError: the two axes have different layouts.
    """
    if known is not None and known != axis:
        raise ValueError(
            f"{name} already exists in the universe of {root}: {known_as} of this name has layout "
            f"{known}, but {axis} is requested, and get_group({name!r}) could mean either. "
            "Choose another name, or give the mesh a universe of its own."
        )


def axis_index(mesh: MeshDescription, ndim: int, dim: Any) -> int:
    """Return the index of an axis given by index or name.

    Args:
        mesh: mesh with the axis.
        ndim: number of axes of the mesh.
        dim: index or name that the user passed.

    Raises:
        ValueError: no axis has this name, or this int >= 0 as its index.
        IndexError: no axis has this negative index, or this index of another integer type.
        TypeError: `dim` is neither index nor name, or it is a name and the mesh has no names.
    """
    if isinstance(dim, str):
        names = check_has_names(mesh, f"unflatten axis {dim!r} of", TypeError)
        if dim not in names:
            hint = did_you_mean(dim, names)
            raise ValueError(
                f"dim {dim} specified in `unflatten` is not in {names}: pass the name or the index "
                f"of an axis of the mesh.{hint}"
            )
        return names.index(dim)
    try:
        index = operator.index(dim)
    except TypeError:
        raise TypeError(
            f"dim {dim!r} specified in `unflatten` is neither an index nor a name of an axis; the "
            f"axes of the mesh are {mesh.labels}."
        ) from None
    if not -ndim <= index < ndim:
        error = ValueError if isinstance(dim, int) and index >= 0 else IndexError  # as in torch
        raise error(
            f"dim {index} specified in `unflatten` is out of range {ndim}: the mesh has the axes "
            f"{mesh.labels}, whose indices are 0 to {ndim - 1}."
        )
    return index % ndim


def unflatten_axis(
    mesh: MeshDescription, index: int, sizes: Sequence[int], names: Sequence[str]
) -> MeshDescription:
    """Describe a mesh with one axis split into several, in row-major order. They keep its tag.

    Args:
        mesh: mesh with the axis.
        index: index of the axis to split.
        sizes: sizes of the new axes.
        names: names of the new axes.

    Raises:
        ValueError: the product of the sizes is not the size of the axis.
        RuntimeError: there are not as many names as sizes, or a name is taken.
        TypeError: the mesh has no names, or a size is no integer.
    """
    sizes = read_sizes(sizes, "mesh_sizes")
    if names is None:
        raise TypeError(
            f"mesh_dim_names=None for mesh_sizes={sizes}: unflatten needs a name for each new axis."
        )
    if len(sizes) != len(names):
        raise RuntimeError(
            "mesh_dim_names must have same length as mesh_sizes in unflatten! Got names "
            f"{tuple(names)} for sizes {tuple(sizes)}."
        )
    if has_rest(sizes):
        axis = f"of the split axis {mesh.labels[index]!r}"
        sizes = read_shape(sizes, "mesh_sizes")
        sizes = fill_rest(sizes, mesh.layout[index].size, "mesh_sizes", axis)
    try:
        layout = mesh.layout.unflatten(index, sizes)
    except ValueError:
        size, product = mesh.layout[index].size, math.prod(sizes)
        if product == size:
            read_shape(sizes, "mesh_sizes")  # raises if two sizes are negative
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
    """Describe one mesh with the axes of several meshes, in the order given.

    Args:
        meshes: descriptions of the meshes.
        given: the meshes themselves, for messages.

    Raises:
        RuntimeError: the meshes overlap.
        TypeError: a mesh has no names.
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
