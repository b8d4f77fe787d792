"""Copies of options objects: data is copied; handles (locks, devices) are the same in the copy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import FunctionType, MemberDescriptorType
from typing import Any

from meshverse import _torch_compat as compat
from meshverse._core import has_fields, is_composite

__all__ = ["copy_of"]

# Methods by which a type can define how its objects are copied, and what to call for each.
_WAYS = (("__copy__", copy.copy), ("__setstate__", copy.copy), ("__deepcopy__", copy.deepcopy))
# What such a method may raise if an object cannot be copied after all.
_CANNOT_COPY = (TypeError, RuntimeError, copy.Error, pickle.PicklingError)


def copy_of(options: compat.BackendOptions | None) -> compat.BackendOptions | None:
    """A copy that does not change with the original, nor the original with it.

    Data is copied: all that an options key looks into. The rest are handles: locks, devices,
    connections, and objects that hold one. The copy has the same handles as the original.

    Two kinds of objects cannot be copied, and are given back themselves: those of which no second
    one can be made (a C++ type whose constructor needs arguments), and those that clean up at their
    end (`__del__`), which must not happen twice.
    """
    return options if options is None or not has_fields(options) else _Copier(options).copied()


class _Copier:
    """Copies of all that belongs to one options object, one of each."""

    def __init__(self, options: Any) -> None:
        self._options = options
        # By id of the original: the original, which is kept so that its id stays its own, and the
        # copy.
        self._made: dict[int, tuple[Any, Any]] = {}

    def copied(self) -> Any:
        """The copy of the options themselves."""
        return self._of_object(self._options)

    def _of(self, value: Any) -> Any:
        """The copy of a value of a field; of a scalar or a handle itself."""
        if id(value) in self._made:
            return self._made[id(value)][1]
        if not is_composite(value, self._options):
            return value
        if isinstance(value, tuple):
            return self._of_tuple(value)
        if isinstance(value, (list, dict)):
            return self._of_container(value)
        if isinstance(value, (set, frozenset)):
            return copy.copy(value)  # what is in a set does not change
        return self._of_object(value)

    def _of_tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = [self._of(item) for item in value]
        if all(item is mine for item, mine in zip(value, items, strict=True)):
            return value
        return tuple.__new__(type(value), items)

    def _of_container(self, value: list[Any] | dict[Any, Any]) -> Any:
        mine: Any = copy.copy(value)
        self._made[id(value)] = (value, mine)
        if isinstance(value, list):
            list.__setitem__(mine, slice(None), [self._of(item) for item in value])
        else:
            for key, item in value.items():
                dict.__setitem__(mine, key, self._of(item))
        return mine

    def _of_object(self, value: Any) -> Any:
        """The copy of an object that has fields."""
        mine = _empty_like(value)
        self._made[id(value)] = (value, value if mine is None else mine)
        if mine is None:
            return value
        for field in _cpp_fields(type(value)):
            self._copy_cpp_field(field, value, mine)
        for slot in _slots(type(value)):
            self._copy_slot(slot, value, mine)
        if hasattr(value, "__dict__"):
            vars(mine).clear()
            vars(mine).update((name, self._of(item)) for name, item in vars(value).items())
        return mine

    def _copy_cpp_field(self, field: Any, original: Any, mine: Any) -> None:
        value = field.__get__(original)
        if value is field.__get__(mine):  # above all None: some fields give it and do not take it
            return
        field.__set__(mine, value)
        # Most C++ fields copy what they are given. One that holds a pointer gives the same object.
        if field.__get__(mine) is value and (own := self._of(value)) is not value:
            field.__set__(mine, own)

    def _copy_slot(self, slot: MemberDescriptorType, original: Any, mine: Any) -> None:
        try:
            value = slot.__get__(original)
        except AttributeError:  # never set
            return
        slot.__set__(mine, self._of(value))


def _empty_like(value: Any) -> Any | None:
    """An object of the same type, to be filled with the fields; None where there can be none."""
    kind = type(value)
    if hasattr(kind, "__del__"):
        return None
    for way, make in _WAYS:
        if not hasattr(kind, way):
            continue
        try:
            mine = make(value)
        except _CANNOT_COPY:
            continue
        if mine is value:  # the type allows no second object
            return None
        if type(mine) is kind:  # a C++ base class may copy only its own part
            return mine
    return compat.new_like(value)


def _cpp_fields(kind: type) -> Iterator[Any]:
    """Properties of C++ base classes that can be set."""
    for base in kind.__mro__:
        for member in vars(base).values():
            if (
                isinstance(member, property)
                and member.fset is not None
                and not isinstance(member.fget, FunctionType)
            ):
                yield member


def _slots(kind: type) -> Iterator[MemberDescriptorType]:
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType) and name not in ("__dict__", "__weakref__"):
                yield member
