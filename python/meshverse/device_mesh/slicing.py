"""Submeshes, and meshes combined of the axes of several: on the process groups that are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from typing_extensions import Self

from meshverse import _torch_compat as compat
from meshverse._core import Layout
from meshverse.layouts.derivation import check_has_names, check_known_axes, concatenate, slice_axes
from meshverse.layouts.user_input import AxisNames
from meshverse.mesh.base import MeshBase
from meshverse.mesh.copies import CopyableMesh
from meshverse.mesh.drawn import DrawnMesh
from meshverse.mesh.placed import PlacedMesh
from meshverse.options.isolation import current_tag

__all__ = ["SlicedMesh"]

_SLICES_A_FLATTENED_AXIS = (
    "Slicing a flattened dim from root mesh will be deprecated in PT 2.11. Users need to "
    "bookkeep the flattened mesh directly. "
)


class SlicedMesh(PlacedMesh, DrawnMesh, CopyableMesh):
    """A mesh whose axes can be taken apart and put together again."""

    def __getitem__(self, mesh_dim_names: str | Iterable[str]) -> Self:
        """The submesh of the named axes; the same object each time.

        Args:
            mesh_dim_names: one name, or several as a tuple or list. Order as in the mesh. On a
                root mesh, names of flattened axes too (deprecated in torch).

        Raises:
            RuntimeError: the mesh has no names, or the axes overlap.
            KeyError: an unknown name, or names in another order than in the mesh.
        """
        if is_dynamo_compiling():
            return StockDeviceMesh.__getitem__(self, mesh_dim_names)  # type: ignore[index,return-value]
        if isinstance(mesh_dim_names, (str, tuple)) and not current_tag():  # a list has no hash
            try:
                known = self._slices.get(mesh_dim_names)
            except TypeError:  # a tuple of lists has no hash either; `_slice` says what is wrong
                known = None
            if known is not None:
                return known  # type: ignore[return-value]
        return self._slice(mesh_dim_names)

    def _slice(self, mesh_dim_names: str | Iterable[str]) -> Self:
        own = self._mesh_dim_names or check_has_names(self._description, "slice", RuntimeError)
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        is_isolated = bool(current_tag())
        if names == own and not is_isolated:
            return self
        try:
            indices = list(map(own.index, names))
        except ValueError:
            return self._slice_flattened(names)
        mesh = self._description
        tags = mesh.tags and list(map(mesh.tags.__getitem__, indices))
        description = slice_axes(mesh, names, mesh.layout, indices, tags)
        group_names: Sequence[str] | None = self.group_names
        if group_names:  # None without groups, empty outside the mesh
            group_names = list(map(group_names.__getitem__, indices))
        if is_isolated:
            return self._derive(description, group_names)
        submesh = self._in_universe(self._universe, description, group_names)
        if isinstance(mesh_dim_names, (str, tuple)):
            self._slices[mesh_dim_names] = submesh
        return submesh

    def _slice_flattened(self, names: AxisNames) -> Self:
        # As in torch, which deprecates it: slicing a root mesh by names of flattened meshes.
        root = self._root()
        flattened: Any = root._flatten_mapping if self == root else {}
        check_known_axes(self._description, names, flattened)
        own = self._mesh_dim_names or ()
        sources = []
        for name in names:
            if name not in own:  # before the checks that follow, as stock
                compat.warn_as_stock(_SLICES_A_FLATTENED_AXIS, StockDeviceMesh.__getitem__)
            sources.append((self, own.index(name)) if name in own else (flattened[name], 0))
        layout = Layout([mesh.layout[index] for mesh, index in sources])
        tags = [mesh.description.axis_tags[index] for mesh, index in sources]
        description = slice_axes(self._description, names, layout, range(len(names)), tags)
        return self._derive(description, _joined_group_names(sources))

    @staticmethod
    def concatenate(device_mesh_list: Sequence[StockDeviceMesh]) -> StockDeviceMesh:
        """One mesh with the axes of several, in the order given, on their process groups.

        Args:
            device_mesh_list: meshes over the same ranks whose axes do not overlap.

        Raises:
            RuntimeError: they overlap, or are over different ranks.
            TypeError: one has no names.
            IndexError: there is none.
        """
        return SlicedMesh._concatenate(device_mesh_list)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[StockDeviceMesh]) -> StockDeviceMesh:
        meshes = [mesh for mesh in device_mesh_list if isinstance(mesh, SlicedMesh)]
        if len(meshes) < len(device_mesh_list) or not meshes:
            joined = compat.stock_concatenate(list(device_mesh_list))
            for mesh in meshes:  # stock knows no lazy groups, so they are used now
                for index in range(len(mesh.group_names or ())):
                    mesh._dim_group_names[index]
            return joined
        first = meshes[0]
        for mesh in meshes:
            check_has_names(mesh._description, "concatenate", TypeError)
            if mesh._universe.rank_map != first._universe.rank_map:
                raise RuntimeError(  # with torch's own spelling
                    "Cannot concatenate DeviceMeshes derived from different device meshs: "
                    f"{first} is over {first._universe.rank_map}, {mesh} is over "
                    f"{mesh._universe.rank_map}."
                )
        description = concatenate([mesh._description for mesh in meshes], meshes)
        for mesh in meshes:
            if mesh._universe is not first._universe and mesh.group_names:
                first._universe.groups.borrow(mesh._universe.groups, mesh.group_names)
        axes = [(mesh, index) for mesh in meshes for index in range(len(mesh.layout))]
        return first._derive(description, _joined_group_names(axes))


def _joined_group_names(axes: Iterable[tuple[MeshBase, int]]) -> list[str] | None:
    """Group names of axes of several meshes: None if one has no groups, [] outside the mesh."""
    joined: list[str] = []
    for mesh, index in axes:
        if not mesh.has_groups:
            return None
        joined.extend((mesh.group_names or ())[index : index + 1])
    return joined
