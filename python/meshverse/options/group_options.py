"""Options of one process group, from the user's arguments to c10d's.

1. `normalize_overrides` turns `backend_override=` into one pair per axis: (backend, backend
   options).
2. `GroupOptions.resolve` fills in what the pair leaves out, from the universe's options
   (`Defaults`) and the default group's. It computes the key, which groups must have in common to be
   shared, and keeps a copy of the backend options. In the key, options that equal those of a new
   object count as none.
3. `GroupOptions.new_backend_options` returns another copy, for c10d, which writes to it.

Backend options are a backend's own options object, such as `ProcessGroupNCCL.Options`.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FunctionType, MemberDescriptorType
from typing import Any, TypeAlias

import torch.distributed as dist

from meshverse._core import OptionsKey, data_in
from meshverse._torch_compat.backends import (
    IGNORED_OPTION_FIELDS,
    backend_in_words,
    canonical_backend,
    check_backend,
    default_backend,
    default_timeout,
    explicit_timeout_of,
    is_backend_options,
    new_like,
    set_timeout,
    split_devices,
    split_options,
)
from meshverse._torch_compat.private_names import BackendOptions, ProcessGroup

from .isolation_tags import IN_MESH_ORDER

# --- a user's arguments --------------------------------------------------------------------------

Override: TypeAlias = "tuple[str | None, BackendOptions | None]"
"""One axis's override: backend name and backend options; None stands for the default."""

SingleOverride: TypeAlias = "str | BackendOptions | Override"
"""The override of one axis: a backend name, an options object, or both as a pair."""

BackendOverride: TypeAlias = "Mapping[int | str, SingleOverride]"
"""Overrides of some axes, by axis index or name."""

NO_OVERRIDE: Override = (None, None)


def normalize_override(value: Any) -> Override:
    """Return one override as a (backend, backend options) pair.

    Args:
        value: a backend name, an options object, a pair of the two, or None.

    Raises:
        TypeError: the value is something else, or its options have no fields.
        ValueError: the backend is unknown.
    """
    if value is None:
        return NO_OVERRIDE
    if isinstance(value, str):
        pair: Override = (value, None)
    elif is_backend_options(value):
        pair = (None, value)
    elif (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[0], (str, type(None)))
    ):
        pair = (value[0], value[1])
    else:
        raise TypeError(
            f"Invalid backend override {value!r} of type {type(value).__name__}: expected a "
            "backend name, an options object such as ProcessGroupNCCL.Options, or a (name, "
            "options) pair. To set one axis's timeout, pass an options object with its _timeout "
            "set."
        )
    if pair[0] is not None:
        check_backend(pair[0])
    if pair[1] is not None:  # TypeError, before anything changes, if it cannot be compared
        OptionsKey.of(pair[0] or "", pair[1], ignored=IGNORED_OPTION_FIELDS)
    return pair


def normalize_overrides(
    overrides: Any,
    axis_names: Sequence[str] | None,
    ndim: int,
) -> tuple[Override, ...]:
    """Return the override of every axis, in axis order; empty for None.

    Args:
        overrides: overrides by axis index or name, or one pair per axis, or None; as a user passed
            them.
        axis_names: names of the axes, if they have any.
        ndim: number of axes.

    Raises:
        RuntimeError: a key is not an axis, or an axis has two keys, its index and its name.
        ValueError: a sequence has the wrong length, or a backend is unknown.
        TypeError: a value has a wrong type.
    """
    if overrides is None:
        return ()
    if isinstance(overrides, Mapping):
        from .by_axis import by_axis  # not loaded by `import meshverse`

        values = by_axis(overrides, axis_names, ndim, argument="backend_override")
        return tuple(normalize_override(value) for value in values)
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        axes = tuple(axis_names or range(ndim)) or (0,)
        raise TypeError(
            f"backend_override={overrides!r} of type {type(overrides).__name__} names no axis: "
            "pass a mapping from axis names or indices to backends, such as "
            f"{{{axes[0]!r}: 'gloo'}}. For all axes: dict.fromkeys({axes}, ...)."
        )
    pairs = tuple(normalize_override(value) for value in overrides)
    if len(pairs) != ndim:
        raise ValueError(
            "backend_override should have the same length as the number of mesh dimensions, "
            f"but got {len(pairs)} and {ndim}."
        )
    return pairs


@dataclass(frozen=True)
class Defaults:
    """Options of a universe, for axes without options of their own.

    Attributes:
        timeout: timeout of the groups' operations; None for the default group's timeout.
        backend_options: options object for groups of the default group's backend; None for that
            backend's defaults.
    """

    timeout: timedelta | None = None
    backend_options: BackendOptions | None = None

    @classmethod
    def of(cls, timeout: timedelta | None, backend_options: BackendOptions | None) -> Defaults:
        """Return a user's options, copied so that later changes of the object have no effect.

        `NO_DEFAULTS` if both are None: then groups have the default group's options.

        Raises:
            TypeError: the timeout is not a timedelta, or the options are not an options object.
            ValueError: the timeout is not positive.
        """
        if timeout is None and backend_options is None:
            return NO_DEFAULTS
        if timeout is not None:
            check_timeout(timeout)
        if backend_options is not None and not is_backend_options(backend_options):
            raise TypeError(
                f"options={backend_options!r} of type {type(backend_options).__name__}: give an "
                "options object of the default group's backend, such as ProcessGroupNCCL.Options()."
            )
        return cls(timeout, _copy(backend_options))

    def or_else(self, others: Defaults) -> Defaults:
        """Return these options; each that is None is taken from `others`."""
        if self is NO_DEFAULTS:
            return others
        return Defaults(
            others.timeout if self.timeout is None else self.timeout,
            others.backend_options if self.backend_options is None else self.backend_options,
        )


NO_DEFAULTS = Defaults()


def check_timeout(timeout: timedelta) -> None:
    """Raise TypeError if a timeout is not a timedelta, ValueError if it is under a millisecond."""
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout={timeout!r} of type {type(timeout).__name__}: give a datetime.timedelta, "
            "such as timedelta(minutes=5). One axis's timeout is that of its options object in "
            "backend_override=."
        )
    if timeout < timedelta(milliseconds=1):  # c10d counts whole ones, and 0 may be no limit
        raise ValueError(f"timeout={timeout}: a timeout must be at least a millisecond.")


# --- the options of a group ----------------------------------------------------------------------


@dataclass(frozen=True)
class GroupOptions:
    """Options of one process group: an override with every default filled in.

    Attributes:
        backend: backend string of the group.
        backend_options: copy of the options object; None for the backend's defaults.
        timeout: timeout of the group's operations; None if unknown.
        key: options key: equal for equal backend, options, timeout, tag and `preserve_rank_order`.
        explicit_timeout: whether the user set the timeout; otherwise it is the default group's.
        tag: isolation tag under which the group is shared; "" for none.
        preserve_rank_order: whether group ranks follow the order of the mesh, instead of
            ascending ranks.
    """

    backend: str
    backend_options: BackendOptions | None
    timeout: timedelta | None
    key: OptionsKey
    explicit_timeout: bool = False
    tag: str = ""
    preserve_rank_order: bool = False

    @property
    def digest_without_timeout(self) -> str:
        """Digest of the key without the timeout, for the group's name.

        All members must compute the same name, but c10d lets each rank choose its own timeout.
        """
        return self.key.without_timeout().digest

    @classmethod
    def resolve(
        cls,
        override: Override,
        default_group: ProcessGroup,
        defaults: Defaults = NO_DEFAULTS,
    ) -> GroupOptions:
        """Fill in what is not overridden: backend, backend options and timeout.

        The default backend is the default group's. The universe's options apply only to groups of
        that backend. The timeout is the first of these that is set: in the axis's own options, the
        universe's timeout, in the universe's options, the default group's timeout.
        """
        wanted_backend, backend_options = override
        usual_backend = canonical_backend(default_backend(default_group))
        backend = canonical_backend(wanted_backend or usual_backend)
        explicit_timeout = explicit_timeout_of(backend_options) or defaults.timeout
        inherits = backend_options is None and backend == usual_backend
        if inherits:
            backend_options = defaults.backend_options
            explicit_timeout = explicit_timeout or explicit_timeout_of(backend_options)
        timeout = explicit_timeout or default_timeout(backend, default_group)
        # A split without options inherits the default group's, so these belong into the key.
        in_force = backend_options
        if in_force is None and split_devices(default_group, backend) is not None:
            in_force = split_options(default_group)
        ignored = IGNORED_OPTION_FIELDS
        key = OptionsKey.of(backend, in_force, timeout=timeout, ignored=ignored)
        mine = backend_options if inherits else _copy(backend_options)  # `Defaults` has a copy
        return cls(backend, mine, timeout, key, explicit_timeout=explicit_timeout is not None)

    @classmethod
    def given(cls, group: ProcessGroup) -> GroupOptions:
        """Return the options of a group that the user created: only the backend is known."""
        backend = default_backend(group)
        return cls(backend, None, None, OptionsKey.of(backend))

    def in_words(self) -> str:
        """Return all options as a string for messages, such as "'gloo', timeout=1800s"."""
        words = str(self.key).removeprefix("OptionsKey(").removesuffix(")")
        if self.backend != dist.Backend.UNDEFINED:
            return words
        return words.replace(repr(self.backend), repr(backend_in_words(self.backend)), 1)

    def with_tag(self, tag: str) -> GroupOptions:
        """Return these options with another tag, under which alone the group is shared."""
        return self if tag == self.tag else self._separate(tag, self.preserve_rank_order)

    def in_mesh_order(self) -> GroupOptions:
        """Return these options for a group whose ranks follow the order of the mesh."""
        return self._separate(self.tag, preserve_rank_order=True)

    def _separate(self, tag: str, preserve_rank_order: bool) -> GroupOptions:
        # The key has one string that separates groups of equal options: the tag, and the order.
        text = "; ".join(filter(None, (tag, IN_MESH_ORDER if preserve_rank_order else "")))
        return replace(
            self, key=self.key.with_tag(text), tag=tag, preserve_rank_order=preserve_rank_order
        )

    def new_backend_options(self) -> BackendOptions | None:
        """Return a copy of the backend options for c10d, which keeps the object and writes to it.

        The copy gets `timeout`: c10d gets that as an argument too, and warns if the two differ.
        """
        mine = _copy(self.backend_options)
        if mine is not self.backend_options and self.timeout is not None:
            set_timeout(mine, self.timeout)
        return mine

    def new_backend_options_for_split(self, default_group: ProcessGroup) -> BackendOptions | None:
        """Return backend options for a split of the default group.

        Without options of its own, a split gets a copy of the default group's options object: c10d
        would use that object itself and write to it.
        """
        mine = self.new_backend_options()
        return _copy(split_options(default_group)) if mine is None else mine


# --- copies of backend options -------------------------------------------------------------------


def _copy(backend_options: BackendOptions | None) -> BackendOptions | None:
    """Return a copy that shares no plain data with the original.

    Everything that an options key compares by content is copied. All other values are handles
    (locks, devices, connections, and objects that hold one); copy and original share them.

    An object that cannot be copied is returned itself: no second one can be created (a C++ type
    whose constructor needs arguments), or it has a `__del__`, which must not run twice.
    """
    if backend_options is None:
        return None
    data = data_in(backend_options, IGNORED_OPTION_FIELDS)
    copies = dict.fromkeys(map(id, data))  # by id of the original, which `data` keeps alive

    def copied(value: Any) -> Any:
        if id(value) not in copies:
            return value
        if copies[id(value)] is None:
            copies[id(value)] = _copy_data(value, copied)
        return copies[id(value)]

    return copied(backend_options)


def _copy_data(value: Any, copied: Callable[[Any], Any]) -> Any:
    """Return a copy of a container or an object. `copied` returns the copies of its parts."""
    if isinstance(value, (tuple, list, dict, set, frozenset)):
        mine: Any
        if isinstance(value, tuple):
            mine = tuple.__new__(type(value), map(copied, value))
        else:
            mine = copy.copy(value)
        if isinstance(value, list):
            list.__setitem__(mine, slice(None), map(copied, value))
        elif isinstance(value, dict):
            dict.update(mine, {key: copied(item) for key, item in value.items()})
        if own := getattr(value, "__dict__", None):  # of a class derived from a container
            vars(mine).update((name, copied(item)) for name, item in own.items())
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
    """Return an object of the same type, to be filled with the fields; None if that fails."""
    kind = type(value)
    if hasattr(kind, "__copy__") or hasattr(kind, "__setstate__"):
        with contextlib.suppress(TypeError, RuntimeError, copy.Error, pickle.PicklingError):
            mine = copy.copy(value)
            if mine is value:  # the type does not allow a second object
                return None
            if type(mine) is kind:  # else a C++ base class has copied only its own part
                return mine
    return new_like(value)


def _fields(kind: type) -> Iterator[Any]:
    """Yield the descriptors of fields that are not in an object's `__dict__`: slots, C++ fields."""
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
    # Some C++ fields return None, but do not accept it.
    if isinstance(field, MemberDescriptorType) or value is not field.__get__(mine):
        field.__set__(mine, copied(value))
