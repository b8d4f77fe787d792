"""Flattened and unflattened meshes: the same ranks along other axes, on groups of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from typing_extensions import Self

from meshverse import _torch_compat as compat
from meshverse._core import Layout
from meshverse.layouts.derivation import (
    MeshDescription,
    axis_index,
    check_flattened_name,
    unflatten_axis,
)
from meshverse.options.isolation import check_tag, current_tag, merge_tags, own_tag, tag_inside
from meshverse.options.overrides import (
    NO_OVERRIDE,
    BackendOverride,
    Override,
    SingleOverride,
    normalize_override,
    normalize_overrides,
    normalize_tags,
)

from .slicing import SlicedMesh

__all__ = ["ReshapedMesh"]


class ReshapedMesh(SlicedMesh):
    """A mesh whose axes can be flattened into one, and one of them split into several."""

    def flatten(
        self,
        mesh_dim_name: str | None = None,
        backend_override: SingleOverride | None = None,
        *,
        isolate: str | None = None,
    ) -> Self:
        """A one-axis mesh over all ranks of this one, in the same order.

        Args:
            mesh_dim_name: its name; by default the names of this mesh's axes joined by "_".
            backend_override: of its group, if it shall differ from the default.
            isolate: tag for a group of its own, inside those of my axes; see `meshverse.isolate`.
                Torch keeps flattened meshes by name: one that is known under this name and this
                tag already is given as it is.

        Raises:
            RuntimeError: this mesh has no names.
            ValueError: the name is an axis of the root, or another flattened mesh has it.
        """
        if not self._mesh_dim_names:
            raise RuntimeError("Cannot flatten a DeviceMesh without mesh_dim_names!")
        name = mesh_dim_name or "_".join(self._mesh_dim_names)
        block, tags = current_tag(), self._description.tags
        if block or tags or isolate is not None:
            tag = merge_tags(
                tag_inside(block, tag)
                if isolate is None
                else own_tag(tag, block, check_tag(isolate))
                for tag in self._description.axis_tags
            )
        else:
            tag = ""
        return self._flattened_under(tag, name, normalize_override(backend_override))

    def _flatten(
        self, mesh_dim_name: str | None = None, backend_override: SingleOverride | None = None
    ) -> Self:
        if is_dynamo_compiling():  # which traces stock's method
            return StockDeviceMesh._flatten(self, mesh_dim_name, backend_override)  # type: ignore[return-value,arg-type]
        return self.flatten(mesh_dim_name, backend_override)

    def _create_flatten_mesh(  # type: ignore[override]
        self, mesh_dim_name: str | None = None, backend_override: Override = NO_OVERRIDE
    ) -> Self | None:
        # Called by stock's `_flatten`, which finds the mesh at the root; what is traced knows no
        # `isolate` blocks. 2.11 may leave the name to us.
        name = mesh_dim_name or "_".join(self._mesh_dim_names or ())
        tag = merge_tags(self._description.axis_tags)
        made = self._flattened_under(tag, name, normalize_override(backend_override))
        return made if compat.FLATTENING_GIVES_MESH else None

    def _flattened_under(self, tag: str, name: str, backend_override: Override) -> Self:
        if self.ndim == 1 and name in (self._mesh_dim_names or ()):
            return self._derive_under((tag,), self._description, self.group_names)
        axis, universe, root = self.layout.collapse(), self._universe, self._root()
        known = cast("Self | None", universe.roots.flattened(name, tag))
        known_axis = None if known is None else known.layout[0]
        check_flattened_name(name, axis, root._mesh_dim_names or (), known_axis, root)
        universe.roots.check_flattened_name(name, axis)
        if known is None:
            description = MeshDescription(
                *(self._device_type, Layout([axis]), (name,), self._preserve_rank_order),
                flattened=compat.FLATTENED_ARE_APART,
                tags=(tag,) if tag else (),
            )
            group_names = None
            if self._may_have_groups:
                overrides = () if backend_override == NO_OVERRIDE else (backend_override,)
                group_names = self._group_names_for(
                    *(description.layout, (name,), overrides, description.tags), call="flatten"
                )
            known = self._in_universe(universe, description, group_names)
            universe.add_flattened(name, tag, known)
        is_at_root = root._flatten_mapping.get(name) is known
        if not is_at_root and tag == merge_tags(self._description.axis_tags):
            root.add_flattened(name, known, replace=True)  # where torch finds it
        return known

    def unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: BackendOverride | None = None,
        *,
        isolate: str | Mapping[int | str, str] | None = None,
    ) -> Self:
        """The same ranks with one axis split into several, the rightmost varying fastest.

        Args:
            dim: index or name of the axis to split.
            mesh_sizes: sizes of the new axes; their product is the size of the axis.
            mesh_dim_names: names of the new axes.
            backend_override: by name or index of the new axes, where a group shall differ.
            isolate: tags for groups of their own, inside that of the axis: one for all the new
                axes, or by name or index of the new axes; see `meshverse.isolate`.

        Raises:
            ValueError: no such axis, or sizes that do not multiply out to it.
            RuntimeError: another number of names than sizes, or a name that is taken.
        """
        return self._unflatten(dim, mesh_sizes, mesh_dim_names, backend_override, isolate)

    def _unflatten(  # type: ignore[override]
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: BackendOverride | None = None,
        isolate: str | Mapping[int | str, str] | None = None,
    ) -> Self:
        index = axis_index(self._description, len(self._shape), dim)
        description = unflatten_axis(self._description, index, mesh_sizes, mesh_dim_names)
        n_new = len(mesh_dim_names)
        overrides: Sequence[Override] = ()
        if backend_override is not None:
            overrides = normalize_overrides(backend_override, mesh_dim_names, n_new)
        end = index + n_new
        tags = description.tags[index:end]
        if isolate is not None or tags or current_tag():
            tags = normalize_tags(isolate, mesh_dim_names, n_new, tags)
        group_names: Sequence[str] | None = self.group_names
        if group_names is not None:
            new = self._group_names_for(
                *(description.layout, mesh_dim_names, overrides, tags),
                call="unflatten",
                first=index,
            )
            group_names = [*group_names[:index], *new, *group_names[index + 1 :]]
        if any(tags):
            before = description.axis_tags
            description = description.with_tags([*before[:index], *tags, *before[end:]])
        return self._derive(description, group_names)
