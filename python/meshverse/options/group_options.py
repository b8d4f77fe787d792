"""Options of one process group, from what a user gives to what c10d gets.

1. `normalize_overrides` makes one (backend, backend options) pair an axis of `backend_override=`.
2. `GroupOptions.resolve` fills in what the pair and the universe (`Defaults`) leave out. It makes
   the key that says which groups are the same, and keeps a copy of the backend options.
3. `GroupOptions.new_backend_options` makes another copy, for c10d, which writes to it.

Backend options are a backend's own options object, such as `ProcessGroupNCCL.Options`.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from types import FunctionType, MemberDescriptorType
from typing import Any, TypeAlias

from meshverse import _torch_compat as compat
from meshverse._core import OptionsKey, data_in

from .by_axis import by_axis

# --- what a user gives ---------------------------------------------------------------------------

Override: TypeAlias = "tuple[str | None, compat.BackendOptions | None]"
"""One axis's override: backend name and backend options, None where the default is meant."""

SingleOverride: TypeAlias = "str | compat.BackendOptions | Override"
"""The override of one axis: a backend name, an options object, or both as a pair."""

BackendOverride: TypeAlias = "Mapping[int | str, SingleOverride]"
"""Overrides of some axes, by axis index or name."""

NO_OVERRIDE: Override = (None, None)


def normalize_override(value: Any) -> Override:
    """Return one override as a (backend, backend options) pair.

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
    """Return the override of every axis, in axis order; empty for None.

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
    if isinstance(overrides, Mapping):
        values = by_axis(overrides, axis_names, ndim, argument="backend_override")
        return tuple(normalize_override(value) for value in values)
    pairs = tuple(normalize_override(value) for value in overrides)
    if len(pairs) != ndim:
        raise ValueError(
            "backend_override should have the same length as the number of mesh dimensions, "
            f"but got {len(pairs)} and {ndim}."
        )
    return pairs


@dataclass(frozen=True)
class Defaults:
    """Options that a universe's groups inherit where an axis has none of its own.

    Attributes:
        timeout: of the groups' operations; None for that of the default group.
        backend_options: for the groups of the default group's backend; None for its defaults.
    """

    timeout: timedelta | None = None
    backend_options: compat.BackendOptions | None = None

    @classmethod
    def of(
        cls, timeout: timedelta | None, backend_options: compat.BackendOptions | None
    ) -> Defaults:
        """Return a snapshot of what a user gives: later changes of the options do not reach it.

        `NO_DEFAULTS` if that is nothing: groups are as the default group.

        Raises:
            TypeError: the timeout is no timedelta, or the options are no options object.
            ValueError: the timeout is not positive.
        """
        if timeout is None and backend_options is None:
            return NO_DEFAULTS
        if timeout is not None:
            check_timeout(timeout)
        if backend_options is not None and not compat.is_backend_options(backend_options):
            raise TypeError(
                f"options={backend_options!r} of type {type(backend_options).__name__}: give an "
                "options object of the default group's backend, such as ProcessGroupNCCL.Options()."
            )
        return cls(timeout, _copy(backend_options))

    def or_else(self, others: Defaults) -> Defaults:
        """Return these, and where they say nothing, others."""
        if self is NO_DEFAULTS:
            return others
        return Defaults(
            others.timeout if self.timeout is None else self.timeout,
            others.backend_options if self.backend_options is None else self.backend_options,
        )


NO_DEFAULTS = Defaults()


def check_timeout(timeout: timedelta) -> None:
    """Raise TypeError for what is no timedelta, ValueError for one that is not positive."""
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout={timeout!r} of type {type(timeout).__name__}: give a datetime.timedelta, "
            "such as timedelta(minutes=5)."
        )
    if timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout}: a timeout is longer than zero.")


# --- what a group shall be -----------------------------------------------------------------------


@dataclass(frozen=True)
class GroupOptions:
    """Options of one process group: an override with every default filled in.

    Attributes:
        backend: backend string of the group.
        backend_options: a copy of the options object, or None for the backend's defaults.
        timeout: of the group's operations; None where unknown.
        key: equal for equal backend, options, timeout and tag.
        says_timeout: whether the timeout was given, and not taken from the default group.
        tag: the isolation tag it is shared under; "" for none.
        keeps_order: whether the ranks follow the order of the mesh, not ascending.
    """

    backend: str
    backend_options: compat.BackendOptions | None
    timeout: timedelta | None
    key: OptionsKey
    says_timeout: bool = False
    tag: str = ""
    keeps_order: bool = False

    @cached_property
    def digest(self) -> str:
        """Digest of the key."""
        return self.key.digest

    @cached_property
    def name_digest(self) -> str:
        """Digest of the key without the timeout, which c10d lets every rank choose by itself.

        So the timeout cannot be in the name that all members have to agree on.
        """
        return self.key.without_timeout().digest

    @classmethod
    def resolve(
        cls,
        override: Override,
        default_group: compat.ProcessGroup,
        defaults: Defaults = NO_DEFAULTS,
    ) -> GroupOptions:
        """Fill in what is not overridden: backend, backend options and timeout.

        The backend is the default group's. The universe's options are for groups of that backend.
        The timeout is that of the axis's own options, if they say one; else the universe's; else
        that of its options; else the default group's.
        """
        wanted_backend, backend_options = override
        usual_backend = compat.canonical_backend(compat.default_backend(default_group))
        backend = compat.canonical_backend(wanted_backend or usual_backend)
        said_timeout = compat.said_timeout(backend_options) or defaults.timeout
        inherits = backend_options is None and backend == usual_backend
        if inherits:
            backend_options = defaults.backend_options
            said_timeout = said_timeout or compat.said_timeout(backend_options)
        timeout = said_timeout or compat.default_timeout(backend, default_group)
        # A split of the default group inherits its options where none are given.
        in_force = backend_options
        if in_force is None and compat.can_split(default_group, backend):
            in_force = compat.split_options(default_group)
        ignored = compat.IGNORED_OPTION_FIELDS
        key = OptionsKey.of(backend, in_force, timeout=timeout, ignored=ignored)
        mine = backend_options if inherits else _copy(backend_options)
        return cls(backend, mine, timeout, key, says_timeout=said_timeout is not None)

    @classmethod
    def given(cls, group: compat.ProcessGroup) -> GroupOptions:
        """Return what is known of a group that the user made: its backend."""
        backend = compat.default_backend(group)
        return cls(backend, None, None, OptionsKey.of(backend))

    def in_words(self) -> str:
        """Return all of it for messages: "'gloo', timeout=1800s"."""
        return str(self.key).removeprefix("OptionsKey(").removesuffix(")")

    def with_tag(self, tag: str) -> GroupOptions:
        """Return these options for a group that is shared only under a tag; "" for none."""
        return self if tag == self.tag else self._separate(tag, self.keeps_order)

    def in_mesh_order(self) -> GroupOptions:
        """Return these options for a group whose ranks follow the order of the mesh."""
        return self._separate(self.tag, keeps_order=True)

    def _separate(self, tag: str, keeps_order: bool) -> GroupOptions:
        # Beside the options, one text in the key separates groups.
        text = "; ".join(filter(None, (tag, "in the order of the mesh" if keeps_order else "")))
        return replace(self, key=self.key.with_tag(text), tag=tag, keeps_order=keeps_order)

    def new_backend_options(self) -> compat.BackendOptions | None:
        """Return a copy of the backend options for c10d, which keeps the object and writes to it.

        c10d takes the timeout as an argument too, and warns if the object has another one. So the
        copy gets this timeout.
        """
        mine = _copy(self.backend_options)
        if mine is not self.backend_options and self.timeout is not None:
            compat.set_timeout(mine, self.timeout)
        return mine

    def new_backend_options_for_split(
        self, default_group: compat.ProcessGroup
    ) -> compat.BackendOptions | None:
        """Return backend options for a split of the default group.

        Without options, c10d takes the default group's own object and writes to it. So a split gets
        a copy of that object then.
        """
        mine = self.new_backend_options()
        return _copy(compat.split_options(default_group)) if mine is None else mine


# --- copies of backend options -------------------------------------------------------------------


def _copy(backend_options: compat.BackendOptions | None) -> compat.BackendOptions | None:
    """Return a copy that does not change with the original, nor the original with it.

    What an options key looks into is copied. The rest are handles (locks, devices, connections, and
    objects that hold one), which the copy has in common with the original.

    Options that cannot be copied are returned themselves: those of which no second object can be
    made (a C++ type whose constructor needs arguments), and those that do something at their end
    (`__del__`), which must not happen twice.
    """
    if backend_options is None:
        return None
    data = data_in(backend_options, compat.IGNORED_OPTION_FIELDS)
    copies = dict.fromkeys(map(id, data))  # by id of the original, which `data` keeps alive

    def copied(value: Any) -> Any:
        if id(value) not in copies:
            return value
        if copies[id(value)] is None:
            copies[id(value)] = _copy_data(value, copied)
        return copies[id(value)]

    return copied(backend_options)


def _copy_data(value: Any, copied: Callable[[Any], Any]) -> Any:
    """Return a copy of a container or an object; `copied` gives those of its parts."""
    if isinstance(value, tuple):
        return tuple.__new__(type(value), map(copied, value))
    if isinstance(value, (list, dict, set, frozenset)):
        mine: Any = copy.copy(value)
        if isinstance(value, list):
            list.__setitem__(mine, slice(None), map(copied, value))
        elif isinstance(value, dict):
            dict.update(mine, {key: copied(item) for key, item in value.items()})
        return mine
    mine = _empty_like(value)
    if mine is None:
        return value
    for field in _fields(type(value)):
        _copy_field(field, value, mine, copied)
    if hasattr(value, "__dict__"):
        vars(mine).clear()
        vars(mine).update((name, copied(item)) for name, item in vars(value).items())
    return mine


def _empty_like(value: Any) -> Any | None:
    """Return an object of the same type, to be filled with the fields; None if none can be had."""
    kind = type(value)
    if hasattr(kind, "__copy__") or hasattr(kind, "__setstate__"):
        with contextlib.suppress(TypeError, RuntimeError, copy.Error, pickle.PicklingError):
            mine = copy.copy(value)
            if mine is value:  # the type allows no second object
                return None
            if type(mine) is kind:  # a C++ base class may copy only its own part
                return mine
    return compat.new_like(value)


def _fields(kind: type) -> Iterator[Any]:
    """Yield what sets the fields of an object that are not in its `__dict__`: slots, C++ fields."""
    for base in kind.__mro__:
        for name, member in vars(base).items():
            is_slot = isinstance(member, MemberDescriptorType)
            is_cpp = isinstance(member, property) and not isinstance(member.fget, FunctionType)
            if (is_slot and name not in ("__dict__", "__weakref__")) or (is_cpp and member.fset):
                yield member


def _copy_field(field: Any, original: Any, mine: Any, copied: Callable[[Any], Any]) -> None:
    try:
        value = field.__get__(original)
    except AttributeError:  # a slot that was never set
        return
    # Some C++ fields give None and do not take it.
    if isinstance(field, MemberDescriptorType) or value is not field.__get__(mine):
        field.__set__(mine, copied(value))
