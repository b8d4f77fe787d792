"""What a user asks of a process group, in every form stock accepts, as one canonical value."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias

from . import _torch_compat as compat
from ._core import OptionsKey

__all__ = [
    "NO_OVERRIDE",
    "BackendOverride",
    "GroupOptions",
    "Override",
    "SingleOverride",
    "normalize_override",
    "normalize_overrides",
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
    """The override of every axis, in axis order. The caller's mapping is left as it is.

    Args:
        overrides: by axis index or name; or one pair an axis; or None.
        axis_names: names of the axes, if they have any.
        ndim: number of axes.

    Raises:
        RuntimeError: a key is no axis, or an axis is named twice, by index and by name.
        ValueError: a sequence of the wrong length, or an unknown backend.
        TypeError: a value of a wrong type.
    """
    if overrides is None:
        return (NO_OVERRIDE,) * ndim
    if not isinstance(overrides, Mapping):
        pairs = tuple(normalize_override(value) for value in overrides)
        if len(pairs) != ndim:
            raise ValueError(
                "backend_override should have the same length as the number of mesh dimensions, "
                f"but got {len(pairs)} and {ndim}."
            )
        return pairs
    names = tuple(axis_names or ())
    invalid = [key for key in overrides if key not in names and key not in range(ndim)]
    if invalid:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {invalid}, expected integers in range "
            f"[0, {ndim}) or one of {names}"
        )
    for index, name in enumerate(names):
        if index in overrides and name in overrides:
            raise RuntimeError(
                f"Found redundant dim index {index} and name {name} in backend_override: "
                "give the axis once, by its index or by its name."
            )
    by_axis: list[Any] = [overrides.get(index) for index in range(ndim)]
    for index, name in enumerate(names):
        by_axis[index] = overrides.get(name, by_axis[index])
    return tuple(normalize_override(value) for value in by_axis)


@dataclass(frozen=True)
class GroupOptions:
    """What one process group shall be: an override with every default filled in.

    Attributes:
        backend: backend string of the group.
        options: my own copy of the options object, or None for the backend's defaults.
        timeout: of the group's operations; None where unknown.
        key: equal for equal backend, options, timeout and tag.
        name_key: the key less the timeout, which c10d lets every rank choose by itself; so it may
            not be in the name that all members have to agree on.
        override: what was asked for, as the user wrote it.
    """

    backend: str
    options: compat.BackendOptions | None
    timeout: timedelta | None
    key: OptionsKey
    name_key: OptionsKey
    override: Override

    @classmethod
    def resolve(cls, override: Override, default_group: compat.ProcessGroup) -> GroupOptions:
        """Fill in what is not overridden: the default group's backend and timeout."""
        backend, options = override
        backend = compat.canonical_backend(backend or compat.default_backend(default_group))
        timeout = compat.options_timeout(options)
        if timeout is None:
            timeout = compat.default_timeout(backend, default_group)
        # A split of the default group inherits its options where none are given.
        said = options
        if options is None and compat.can_split(default_group, override[0]):
            said = compat.live_options(default_group)
        ignored = compat.IGNORED_OPTION_FIELDS
        key = OptionsKey.of(backend, said, timeout=timeout, ignored=ignored)
        name_key = OptionsKey.of(backend, said, ignored=ignored)
        return cls(backend, _own_copy(options), timeout, key, name_key, override)

    @classmethod
    def given(cls, group: compat.ProcessGroup) -> GroupOptions:
        """What is known of a group that the user made: its backend."""
        backend = compat.default_backend(group)
        key = OptionsKey.of(backend)
        return cls(backend, None, None, key, key, NO_OVERRIDE)

    def with_tag(self, tag: str) -> GroupOptions:
        """The same options for a group of its own, shared only under the same tag."""
        return replace(self, key=self.key.with_tag(tag), name_key=self.name_key.with_tag(tag))


def _own_copy(options: compat.BackendOptions | None) -> compat.BackendOptions | None:
    """A copy that later changes of the original do not reach, nor c10d's changes the original.

    By fields where the type cannot be copied (most of c10d's before 2.15). A type that can neither
    be copied nor made without arguments is handed on as it is.
    """
    try:
        return copy.deepcopy(options)
    except TypeError:
        kind: Any = type(options)
    try:
        mine = kind()
    except TypeError:
        return options
    for name in dir(kind):
        field = getattr(kind, name)
        if isinstance(field, property) and field.fset is not None:
            setattr(mine, name, getattr(options, name))
    return mine
