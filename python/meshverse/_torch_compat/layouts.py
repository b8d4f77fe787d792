"""torch's layout classes, whose form depends on the version, to and from ours; with isolation tags.

torch compares layouts to find flattened meshes, in pipeline stages, and in caches of meshes. So in
torch's form, the tag of an axis is part of its layout: it is equal only to one with the same tag.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from meshverse._core import AxisLayout, Layout

from .private_names import HAS_PRESERVE_RANK_ORDER, StockDeviceMesh, TorchLayout, stock_module

_MeshLayout: Any = stock_module._MeshLayout
# 2.13 split the one layout class: `_FlatLayout` is an axis, `_MeshLayout` a tuple of axes.
_FlatLayout: Any = getattr(stock_module, "_FlatLayout", None)
# Before 2.13, a mesh made by flattening has another form, and is unequal to one made otherwise.
FLATTENED_ARE_DISTINCT = _FlatLayout is None
# Whether stock's `_create_flatten_mesh` returns the mesh: it does in 2.11. In 2.13 it returns None,
# and torch.compile refuses a mesh that comes from there.
FLATTENING_GIVES_MESH = inspect.signature(
    StockDeviceMesh._create_flatten_mesh
).return_annotation not in (None, "None")


def _flat(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    # Ours are canonical already, so the constructor's own coalescing (10 us per axis) is skipped.
    axis = object.__new__(_FlatLayout)
    object.__setattr__(axis, "shape", sizes)
    object.__setattr__(axis, "stride", strides)
    return axis


def _unnested(values: tuple[int, ...], one_point: int) -> int | tuple[int, ...]:
    return one_point if not values else values[0] if len(values) == 1 else values


def _to_torch_axis(axis: AxisLayout) -> Any:
    if _FlatLayout is not None:
        return _flat(axis.sizes, axis.strides)
    return _MeshLayout(_unnested(axis.sizes, 1), _unnested(axis.strides, 1))


@lru_cache(maxsize=4096)  # they are immutable, and many meshes have the same
def to_torch_layout(layout: Layout, *, flattened: bool) -> TorchLayout:
    """Return torch's form of a layout, equal to the one stock torch builds for the same mesh.

    Args:
        layout: ours.
        flattened: whether the mesh was made by flattening; 2.11 and 2.12 write those differently.
    """
    if _FlatLayout is not None:
        return _MeshLayout([_flat(axis.sizes, axis.strides) for axis in layout])
    if flattened and len(layout[0].sizes) < 2:
        return _to_torch_axis(layout[0])
    # 2.11 and 2.12 keep the stride of a size-1 axis, which ours do not: we give the stride it has
    # in a root mesh, row-major over what follows.
    strides: list[int | tuple[int, ...]] = []
    following = 1
    for axis in reversed(layout.axes):
        strides.append(_unnested(axis.strides, following))
        following = axis.sizes[0] * axis.strides[0] if axis.sizes else following
    sizes = tuple(_unnested(axis.sizes, 1) for axis in layout)
    return _MeshLayout(sizes, tuple(reversed(strides)))


def from_torch_layout(layout: TorchLayout) -> Layout:
    """Return our form of a layout of torch's."""
    if _FlatLayout is not None:
        return Layout([AxisLayout(axis.shape, axis.stride) for axis in layout])
    axes = [layout[i] for i in range(len(layout))]
    flat = [list(axis.sizes_and_strides) for axis in axes]
    return Layout([AxisLayout([m[0] for m in modes], [m[1] for m in modes]) for modes in flat])


def equals_stock(mesh: StockDeviceMesh, stock: StockDeviceMesh) -> bool:
    """Whether a mesh of ours is the same as a stock mesh, by all that stock compares. O(world).

    Stock hashes these too, so equal meshes have equal hashes also on 2.11 and 2.12. There they are
    unequal if stock's axes of size 1 have other strides than `to_torch_layout` gives ours.

    Args:
        mesh: ours.
        stock: of torch's class.
    """
    fields = ["_flatten_rank_map", "_layout", "_device_type", "_mesh_dim_names", "_thread_id"]
    if HAS_PRESERVE_RANK_ORDER:
        fields.append("_preserve_rank_order")
    elif keeps_rank_order(mesh):  # stock's groups are sorted
        return False
    return all(getattr(mesh, field) == getattr(stock, field) for field in fields)


class _HashedMesh:
    """A mesh in `hash_as_stock`: all that stock's `__hash__` reads, and another tuple of ranks."""

    _hash_key = getattr(StockDeviceMesh, "_hash_key", None)

    def __init__(self, mesh: StockDeviceMesh, ranks: object) -> None:
        self._mesh, self._flatten_rank_map, self._hash = mesh, ranks, None
        self._layout, self._device_type = mesh._layout, mesh._device_type
        self._mesh_dim_names, self._thread_id = mesh._mesh_dim_names, mesh._thread_id

    def __getattr__(self, name: str) -> Any:  # of a later torch
        return getattr(self._mesh, name)


def hash_as_stock(mesh: StockDeviceMesh, ranks: object) -> int:
    """Return the hash that stock gives a mesh, with an object for the tuple of its ranks.

    Args:
        mesh: ours.
        ranks: has the hash of the tuple of ranks.
    """
    return StockDeviceMesh.__hash__(_HashedMesh(mesh, ranks))  # type: ignore[arg-type, no-any-return, no-untyped-call]


def keeps_rank_order(mesh: StockDeviceMesh) -> bool:
    """Whether the groups of a mesh, of either class, have their ranks in its order."""
    return bool(getattr(mesh, "_preserve_rank_order", False))


# --- isolation tags ------------------------------------------------------------------------------


def _is_same(one: Any, other: object) -> bool:
    return type(other) is type(one) and vars(other) == vars(one)


class _TaggedAxis(_FlatLayout or object):  # type: ignore[misc]
    """An axis under a tag: 2.13 and newer."""

    __eq__ = _is_same

    def __hash__(self) -> int:
        return hash((self.shape, self.stride, self.tag))

    def __repr__(self) -> str:
        return f"{_FlatLayout.__name__}(shape={self.shape}, stride={self.stride}, tag={self.tag!r})"


class _SlicedAxes(_MeshLayout):  # type: ignore[misc]
    """The axes of a slice, with the tag that they have once they are flattened: 2.13 and newer."""

    flattened_tag: str

    def collapse(self) -> Any:
        return _tag_axis(super().collapse(), self.flattened_tag)


class _TaggedLayout(_MeshLayout):  # type: ignore[misc]
    """A layout with its axes' tags: 2.11 and 2.12, which have no class for a single axis.

    Attributes:
        tags: one per axis.
        flattened_tag: the tag of the axis that they are flattened into.
    """

    tags: tuple[str, ...]
    flattened_tag: str

    __eq__ = _is_same

    def __hash__(self) -> int:
        return hash((self.shape, self.stride, self.tags))

    def __getitem__(self, index: int) -> Any:
        return _tag_whole(super().__getitem__(index), (self.tags[index],), self.tags[index])

    def coalesce(self) -> Any:
        return _tag_whole(super().coalesce(), (self.flattened_tag,), self.flattened_tag)

    def nest(self) -> Any:
        return _tag_whole(super().nest(), self.tags, self.flattened_tag)


def _tag_axis(axis: Any, tag: str) -> Any:
    return _with_fields(_TaggedAxis, shape=axis.shape, stride=axis.stride, tag=tag) if tag else axis


def _tag_whole(layout: Any, tags: tuple[str, ...], flattened_tag: str) -> Any:
    return _with_fields(
        _TaggedLayout,
        shape=layout.shape,
        stride=layout.stride,
        tags=tags,
        flattened_tag=flattened_tag,
    )


def _with_fields(kind: type, **fields: Any) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update(fields)  # torch's are frozen dataclasses
    return made


def tag_layout(layout: TorchLayout, tags: Sequence[str], flattened_tag: str) -> TorchLayout:
    """Return a layout of torch's with tags on its axes.

    Args:
        layout: torch's.
        tags: one per axis, "" for none.
        flattened_tag: the tag of the axis that they are flattened into.
    """
    if _FlatLayout is None:
        return _tag_whole(layout, tuple(tags), flattened_tag)
    return _MeshLayout([_tag_axis(axis, tag) for axis, tag in zip(layout, tags, strict=True)])


def with_flattened_tag(layout: TorchLayout, tags: Sequence[str], flattened_tag: str) -> TorchLayout:
    """Return the layout of a slice that gets this tag when torch flattens it.

    Args:
        layout: torch's. From 2.13 on, its axes have their tags already.
        tags: one per axis, "" for none.
        flattened_tag: the tag of the axis that they are flattened into.
    """
    if _FlatLayout is None:
        return _tag_whole(layout, tuple(tags), flattened_tag)
    return _with_fields(_SlicedAxes, axes=layout.axes, flattened_tag=flattened_tag)


def tags_of(layout: TorchLayout) -> tuple[str, ...]:
    """Return the tags of a layout's axes; empty where none has one."""
    if _FlatLayout is None:
        tags: tuple[str, ...] = getattr(layout, "tags", ())
    else:
        tags = tuple(getattr(axis, "tag", "") for axis in layout)
    return tags if any(tags) else ()
