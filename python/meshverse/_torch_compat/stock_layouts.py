"""Conversion between our layouts and torch's, whose form depends on the version.

torch compares layouts to find flattened meshes, in pipeline stages, and in caches of meshes. So in
torch's form, the isolation tag of an axis is part of its layout, which is equal only to layouts
with the same tag.
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
# Before 2.13, a flattened mesh has a layout of another form, and equals no mesh that was created in
# another way.
FLATTENED_ARE_DISTINCT = _FlatLayout is None
# Whether torch's `_create_flatten_mesh` returns the mesh, as in 2.11. In 2.13 it returns None, and
# torch.compile rejects a mesh that it returns.
FLATTENING_GIVES_MESH = inspect.signature(
    StockDeviceMesh._create_flatten_mesh
).return_annotation not in (None, "None")


def _flat(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    # Our layouts are canonical, so this skips the constructor, which coalesces in 10 us per axis.
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


@lru_cache(maxsize=4096)  # layouts are immutable, and many meshes have equal ones
def to_torch_layout(layout: Layout, *, flattened: bool) -> TorchLayout:
    """Return torch's form of a layout, equal to that of the same mesh in torch.

    Args:
        layout: our layout.
        flattened: whether it is that of a flattened mesh, which has another form in 2.11 and 2.12.
    """
    if _FlatLayout is not None:
        return _MeshLayout([_flat(axis.sizes, axis.strides) for axis in layout])
    if flattened and len(layout[0].sizes) < 2:
        return _to_torch_axis(layout[0])
    # 2.11 and 2.12 keep the stride of an axis of size 1, and our layouts do not. This uses the
    # stride that it has in a root mesh, which is row-major.
    strides: list[int | tuple[int, ...]] = []
    following = 1
    for axis in reversed(layout.axes):
        strides.append(_unnested(axis.strides, following))
        following = axis.sizes[0] * axis.strides[0] if axis.sizes else following
    sizes = tuple(_unnested(axis.sizes, 1) for axis in layout)
    return _MeshLayout(sizes, tuple(reversed(strides)))


def from_torch_layout(layout: TorchLayout) -> Layout:
    """Return our form of torch's layout."""
    if _FlatLayout is not None:
        return Layout([AxisLayout(axis.shape, axis.stride) for axis in layout])
    axes = [layout[i] for i in range(len(layout))]
    flat = [list(axis.sizes_and_strides) for axis in axes]
    return Layout([AxisLayout([m[0] for m in modes], [m[1] for m in modes]) for modes in flat])


def equals_stock(mesh: StockDeviceMesh, stock: StockDeviceMesh) -> bool:
    """Whether one of our meshes equals a stock mesh in all that torch compares. O(world size).

    torch computes its hash from the same values, so equal meshes have equal hashes. On 2.11 and
    2.12, the two are unequal if an axis of size 1 has another stride in the stock mesh than
    `to_torch_layout` gives it.

    Args:
        mesh: our mesh.
        stock: mesh of torch's class.
    """
    fields = ["_flatten_rank_map", "_layout", "_device_type", "_mesh_dim_names", "_thread_id"]
    if HAS_PRESERVE_RANK_ORDER:
        fields.append("_preserve_rank_order")
    elif keeps_rank_order(mesh):  # the ranks of torch's groups are sorted
        return False
    return all(getattr(mesh, field) == getattr(stock, field) for field in fields)


class _HashedMesh:
    """A stand-in for a mesh in `hash_as_stock`, with another object for its tuple of ranks."""

    _hash_key = getattr(StockDeviceMesh, "_hash_key", None)

    def __init__(self, mesh: StockDeviceMesh, ranks: object) -> None:
        self._mesh, self._flatten_rank_map, self._hash = mesh, ranks, None
        self._layout, self._device_type = mesh._layout, mesh._device_type
        self._mesh_dim_names, self._thread_id = mesh._mesh_dim_names, mesh._thread_id

    def __getattr__(self, name: str) -> Any:  # for attributes that a later torch may read
        return getattr(self._mesh, name)


def hash_as_stock(mesh: StockDeviceMesh, ranks: object) -> int:
    """Return the hash that torch computes for a mesh, without creating the tuple of its ranks.

    Args:
        mesh: our mesh.
        ranks: object whose hash is that of the tuple of ranks.
    """
    return StockDeviceMesh.__hash__(_HashedMesh(mesh, ranks))  # type: ignore[arg-type, no-any-return, no-untyped-call]


def keeps_rank_order(mesh: StockDeviceMesh) -> bool:
    """Whether the groups of a mesh of either class keep the mesh's order of ranks."""
    return bool(getattr(mesh, "_preserve_rank_order", False))


# --- isolation tags ------------------------------------------------------------------------------


def _is_same(one: Any, other: object) -> bool:
    return type(other) is type(one) and vars(other) == vars(one)


class _TaggedAxis(_FlatLayout or object):  # type: ignore[misc]
    """The layout of an axis with a tag, in 2.13 and newer."""

    __eq__ = _is_same

    def __hash__(self) -> int:
        return hash((self.shape, self.stride, self.tag))

    def __repr__(self) -> str:
        return f"{_FlatLayout.__name__}(shape={self.shape}, stride={self.stride}, tag={self.tag!r})"


class _SlicedAxes(_MeshLayout):  # type: ignore[misc]
    """The layout of a slice, with the tag for its flattened axis, in 2.13 and newer."""

    flattened_tag: str

    def collapse(self) -> Any:
        return _tag_axis(super().collapse(), self.flattened_tag)


class _TaggedLayout(_MeshLayout):  # type: ignore[misc]
    """A layout with tags, in 2.11 and 2.12, which have no class for a single axis.

    Attributes:
        tags: one tag per axis.
        flattened_tag: tag of the axis that the layout is flattened into.
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
    vars(made).update(fields)  # torch's classes are frozen dataclasses
    return made


def tag_layout(layout: TorchLayout, tags: Sequence[str], flattened_tag: str) -> TorchLayout:
    """Return torch's layout with tags on its axes.

    Args:
        layout: torch's layout.
        tags: one tag per axis, "" for none.
        flattened_tag: tag of the axis that the layout is flattened into.
    """
    if _FlatLayout is None:
        return _tag_whole(layout, tuple(tags), flattened_tag)
    return _MeshLayout([_tag_axis(axis, tag) for axis, tag in zip(layout, tags, strict=True)])


def with_flattened_tag(layout: TorchLayout, tags: Sequence[str], flattened_tag: str) -> TorchLayout:
    """Return torch's layout of a slice, which gets this tag when torch flattens it.

    Args:
        layout: torch's layout. From 2.13 on, its axes already have their tags.
        tags: one tag per axis, "" for none.
        flattened_tag: tag of the axis that the layout is flattened into.
    """
    if _FlatLayout is None:
        return _tag_whole(layout, tuple(tags), flattened_tag)
    return _with_fields(_SlicedAxes, axes=layout.axes, flattened_tag=flattened_tag)


def tags_of(layout: TorchLayout) -> tuple[str, ...]:
    """Return the tags of the axes of torch's layout; empty if no axis has one."""
    if _FlatLayout is None:
        tags: tuple[str, ...] = getattr(layout, "tags", ())
    else:
        tags = tuple(getattr(axis, "tag", "") for axis in layout)
    return tags if any(tags) else ()
