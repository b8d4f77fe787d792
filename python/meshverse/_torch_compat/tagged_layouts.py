"""torch's layouts with isolation tags on their axes, so that all of torch tells them apart.

torch compares layouts to find flattened meshes, in pipeline stages, and in caches of meshes. So in
torch's form, the tag of an axis is part of its layout: it is equal only to one with the same tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .private_names import TorchLayout, stock_module

__all__ = ["FlatLayout", "MeshLayout", "tag_layout", "tags_of", "with_flattened_tag"]

MeshLayout: Any = stock_module._MeshLayout
# 2.13 split the one layout class: `_FlatLayout` is an axis, `_MeshLayout` a tuple of axes.
FlatLayout: Any = getattr(stock_module, "_FlatLayout", None)


def _is_same(one: Any, other: object) -> bool:
    return type(other) is type(one) and vars(other) == vars(one)


class _TaggedAxis(FlatLayout or object):  # type: ignore[misc]
    """An axis under a tag: 2.13 and newer."""

    __eq__ = _is_same

    def __hash__(self) -> int:
        return hash((self.shape, self.stride, self.tag))

    def __repr__(self) -> str:
        return f"{FlatLayout.__name__}(shape={self.shape}, stride={self.stride}, tag={self.tag!r})"


class _SlicedAxes(MeshLayout):  # type: ignore[misc]
    """The axes of a slice, with the tag that they have once they are flattened: 2.13 and newer."""

    flattened_tag: str

    def collapse(self) -> Any:
        return _tag_axis(super().collapse(), self.flattened_tag)


class _TaggedLayout(MeshLayout):  # type: ignore[misc]
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
    """A layout of torch's with tags on its axes.

    Args:
        layout: torch's.
        tags: one per axis, "" for none.
        flattened_tag: the tag of the axis that they are flattened into.
    """
    if FlatLayout is None:
        return _tag_whole(layout, tuple(tags), flattened_tag)
    return MeshLayout([_tag_axis(axis, tag) for axis, tag in zip(layout, tags, strict=True)])


def with_flattened_tag(layout: TorchLayout, tags: Sequence[str], flattened_tag: str) -> TorchLayout:
    """The layout of a slice that gets this tag when torch flattens it.

    Args:
        layout: torch's. From 2.13 on, its axes have their tags already.
        tags: one per axis, "" for none.
        flattened_tag: the tag of the axis that they are flattened into.
    """
    if FlatLayout is None:
        return _tag_whole(layout, tuple(tags), flattened_tag)
    return _with_fields(_SlicedAxes, axes=layout.axes, flattened_tag=flattened_tag)


def tags_of(layout: TorchLayout) -> tuple[str, ...]:
    """The tags of a layout's axes; empty where none has one."""
    if FlatLayout is None:
        tags: tuple[str, ...] = getattr(layout, "tags", ())
    else:
        tags = tuple(getattr(axis, "tag", "") for axis in layout)
    return tags if any(tags) else ()
