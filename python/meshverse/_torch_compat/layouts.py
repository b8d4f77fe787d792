"""torch's layout classes, whose form depends on the version, to and from ours."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from meshverse._core import AxisLayout, Layout

from .private_names import HAS_PRESERVE_RANK_ORDER, StockDeviceMesh, TorchLayout
from .tagged_layouts import FlatLayout as _FlatLayout
from .tagged_layouts import MeshLayout as _MeshLayout

# Before 2.13, a mesh made by flattening has another form, and is unequal to one made otherwise.
FLATTENED_ARE_APART = _FlatLayout is None
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
    """torch's form of a layout, equal to the one stock torch builds for the same mesh.

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
    """Our form of a layout of torch's."""
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
