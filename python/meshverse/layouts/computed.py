"""Decorator for attributes that are computed when they are first read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")


class computed(Generic[_T]):  # noqa: N801  # used as a decorator
    """Attribute that a method computes when it is first read. The result is kept.

    Like `functools.cached_property`, but the result is stored with `setattr`, not in the object's
    `__dict__`. Once a program has accessed an object's `__dict__`, CPython takes twice as long to
    read any attribute of the object, 30 ns more.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> computed[_T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...
    def __get__(self, instance: object | None, owner: type) -> computed[_T] | _T:
        if instance is None:
            return self
        value = self._compute(instance)
        setattr(instance, self._name, value)
        return value
