"""What a user asks of single axes, by index or name, as one canonical value per axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from meshverse import _torch_compat as compat
from meshverse.nearest import did_you_mean

from .isolation import check_tag, current_tag, own_tag, tag_inside

__all__ = [
    "NO_OVERRIDE",
    "BackendOverride",
    "Override",
    "SingleOverride",
    "normalize_override",
    "normalize_overrides",
    "normalize_tags",
]

Override: TypeAlias = "tuple[str | None, compat.BackendOptions | None]"
"""One axis's override: backend name and options, None where the default is meant."""

SingleOverride: TypeAlias = "str | compat.BackendOptions | Override"
"""What a user may write for one axis: a backend name, an options object, or both as a pair."""

BackendOverride: TypeAlias = "Mapping[int | str, SingleOverride]"
"""Overrides of some axes, by axis index or name."""

NO_OVERRIDE: Override = (None, None)


def normalize_override(value: Any) -> Override:
    """One override as a (backend, options) pair.

    Args:
        value: a backend name, an options object, a pair of the two, or None.

    Raises:
        TypeError: it is none of these.
        ValueError: the backend is unknown.
    """
    if value is None:
        return NO_OVERRIDE
    if isinstance(value, str):
        pair: Override = (value, None)
    elif compat.is_backend_options(value):
        pair = (None, value)
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], (str, type(None))):
        pair = (value[0], value[1])
    else:
        raise TypeError(
            f"Invalid backend override {value!r} of type {type(value).__name__}: expected a "
            "backend name, an options object such as ProcessGroupNCCL.Options, or a (name, "
            "options) pair."
        )
    if pair[0] is not None:
        compat.check_backend(pair[0])
    return pair


def normalize_overrides(
    overrides: BackendOverride | Sequence[Override] | None,
    axis_names: Sequence[str] | None,
    ndim: int,
) -> tuple[Override, ...]:
    """The override of every axis, in axis order; empty for None.

    The caller's mapping is left as it is.

    Args:
        overrides: by axis index or name; or one pair per axis; or None.
        axis_names: names of the axes, if they have any.
        ndim: number of axes.

    Raises:
        RuntimeError: a key is no axis, or an axis is named twice, by index and by name.
        ValueError: a sequence of the wrong length, or an unknown backend.
        TypeError: a value of a wrong type.
    """
    if overrides is None:
        return ()
    if not isinstance(overrides, Mapping):
        pairs = tuple(normalize_override(value) for value in overrides)
        if len(pairs) != ndim:
            raise ValueError(
                "backend_override should have the same length as the number of mesh dimensions, "
                f"but got {len(pairs)} and {ndim}."
            )
        return pairs
    return tuple(
        normalize_override(value)
        for value in _by_axis(overrides, axis_names, ndim, argument="backend_override")
    )


def normalize_tags(
    isolate: str | Mapping[int | str, str] | None,
    axis_names: Sequence[str] | None,
    ndim: int,
    inside: Sequence[str] = (),
) -> tuple[str, ...]:
    """The isolation tag of every axis, in axis order; empty if no axis has one.

    A tag is made of up to three parts: that of the axis it is derived from, that of the `isolate`
    blocks around the call, and what the call gives as `isolate=`.

    Args:
        isolate: one tag for all axes, or tags by axis index or name, or None.
        axis_names: names of the axes, if they have any.
        ndim: number of axes.
        inside: the tags of the axes they are derived from, one per new axis; empty for none.

    Raises:
        RuntimeError: a key is no axis, or an axis is named twice, by index and by name.
        TypeError, ValueError: a value is no tag.
    """
    block = current_tag()
    if isolate is None and not block:
        return tuple(inside) if any(inside) else ()
    before = inside or ("",) * ndim
    if isolate is None:
        return tuple([tag_inside(block, tag) for tag in before])
    if isinstance(isolate, str):
        return tuple(own_tag(tag, block, check_tag(isolate)) for tag in before)
    if not isinstance(isolate, Mapping):
        raise TypeError(
            f"isolate={isolate!r} of type {type(isolate).__name__}: give one tag for all axes, or "
            "a mapping from axis name or index to a tag."
        )
    tags = _by_axis(isolate, axis_names, ndim, argument="isolate")
    return tuple(
        tag_inside(block, tag) if own is None else own_tag(tag, block, check_tag(own))
        for tag, own in zip(before, tags, strict=True)
    )


def _by_axis(
    values: Mapping[int | str, Any], axis_names: Sequence[str] | None, ndim: int, *, argument: str
) -> list[Any]:
    """One value per axis; None if the mapping has none for it. Errors have stock's words."""
    names = tuple(axis_names or ())
    invalid = [key for key in values if key not in names and key not in range(ndim)]
    if invalid:
        raise RuntimeError(
            f"Found invalid keys in {argument}: got {invalid}, expected integers in range "
            f"[0, {ndim}) or one of {names}.{did_you_mean(invalid[0], names)}"
        )
    for index, name in enumerate(names):
        if index in values and name in values:
            raise RuntimeError(
                f"Found redundant dim index {index} and name {name} in {argument}: "
                "give the axis once, by its index or by its name."
            )
    by_axis = [values.get(index) for index in range(ndim)]
    for index, name in enumerate(names):
        by_axis[index] = values.get(name, by_axis[index])
    return by_axis
