"""What stock's methods and the rest of torch read of a mesh: by arithmetic, and only when asked."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse import _torch_compat as compat
from meshverse.layouts.computed import computed
from meshverse.nearest import did_you_mean
from meshverse.options.isolation import merge_tags

from .comparison import ComparedMesh

__all__ = ["ViewedMesh"]


class ViewedMesh(ComparedMesh):
    """A mesh with the attributes that torch reads, each computed when it is first read."""

    # Stock annotates these as attributes that can be written; torch does not write them.
    @computed
    def _layout(self) -> compat.TorchLayout:
        layout = compat.to_torch_layout(self.layout, flattened=self._description.flattened)
        tags = self._description.tags
        return compat.tag_layout(layout, tags, merge_tags(tags)) if tags else layout

    @computed
    def _rank_map(self) -> torch.Tensor:
        return self._universe.rank_views.tensor

    @computed
    def _flatten_rank_map(self) -> tuple[int, ...]:
        return self._universe.rank_views.tuple

    @computed
    def mesh(self) -> torch.Tensor:
        """Global ranks of this mesh: int32 CPU tensor with one dimension per axis.

        A copy of this mesh's own: to write to it changes no other mesh.

        Raises:
            RuntimeError: a part of the universe, asked for on a rank outside the universe, or in a
                process that is another rank now than the one that made the mesh.
        """
        universe, layout = self._universe, self.layout
        if layout.size == universe.size:
            first = 0
        elif universe.position is not None:
            if universe.world is not None:
                universe.world.check_rank()
            first = layout.base(universe.position)
        else:
            raise RuntimeError(
                "In order to get the mesh Tensor of a DeviceMesh it needs to either have all its "
                "original dimensions (e.g., no slicing) or it needs to contain the local rank. "
                f"Rank {universe.rank} is not in {self}, which has ranks of {universe.rank_map}."
            )
        sizes = [size for axis in layout for size in axis.sizes]
        strides = [stride for axis in layout for stride in axis.strides]
        with compat.untraced():
            ranks = self._rank_map.as_strided(sizes, strides, first)
            return ranks.clone(memory_format=torch.contiguous_format).view(layout.shape)

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        try:
            return StockDeviceMesh._get_mesh_dim_by_name(self, mesh_dim_name)
        except KeyError as error:
            flattened = self._root().flattened
            if mesh_dim_name in flattened:
                hint = f"It is a flattened axis, of the mesh that mesh[{mesh_dim_name!r}] gives."
            else:
                known = [*(self._mesh_dim_names or ()), *flattened]
                hint = did_you_mean(mesh_dim_name, known)
            if not hint:
                raise
            raise KeyError(*error.args, hint.strip()) from None

    def _get_slice_mesh_layout(self, mesh_dim_names: tuple[str, ...]) -> compat.TorchLayout:
        # DTensor flattens this layout, and looks for a flattened mesh with the result at the root.
        layout = StockDeviceMesh._get_slice_mesh_layout(self, mesh_dim_names)
        return self._sliced_layout(layout, mesh_dim_names) if self._description.tags else layout

    def _sliced_layout(
        self, layout: compat.TorchLayout, names: tuple[str, ...]
    ) -> compat.TorchLayout:
        own = dict(zip(self._description.labels, self._description.axis_tags, strict=True))
        flattened = self._root().flattened
        tags = [
            own[name] if name in own else flattened[name].description.axis_tags[0] for name in names
        ]
        return compat.with_flattened_tag(layout, tags, merge_tags(tags))

    def __repr__(self) -> str:
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL stock prints the ranks too. A rank outside a slice has
        # none to print; stock has no such slices.
        universe, layout = self._universe, self.layout
        if universe.position is not None or layout.size == universe.size:
            return StockDeviceMesh.__repr__(self)
        names = self._mesh_dim_names or ()
        axes = f"({', '.join(map('{}={}'.format, names, self._shape))})" if names else self._shape
        strides = tuple(
            axis.strides[0] if len(axis.strides) == 1 else axis.strides for axis in layout
        )
        return f"DeviceMesh({axes}, '{self._device_type}', stride={strides})"
