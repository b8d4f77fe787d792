"""Decorators for attributes: computed when they are first read, and replaceable by users."""

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


class assignable(property, Generic[_T]):  # noqa: N801  # used as a decorator
    """Property to which a program may assign: it then has that value on that object.

    torch's class has no attribute of this name, so programs may use the name for something else.
    The class needs an attribute `_assigned`, which is None.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        super().__init__(compute)
        self.__doc__ = compute.__doc__
        self._compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> assignable[_T]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> _T: ...
    def __get__(self, instance: Any, owner: type | None = None) -> assignable[_T] | _T:
        if instance is None:
            return self
        assigned: dict[str, Any] | None = instance._assigned
        if assigned is not None and self._name in assigned:
            value: _T = assigned[self._name]
            return value
        return self._compute(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        # Not into `__dict__`, for the reason above.
        instance._assigned = {**(instance._assigned or {}), self._name: value}

    def __delete__(self, instance: Any) -> None:
        if self._name not in (instance._assigned or {}):
            raise AttributeError(self._name)
        instance._assigned = {k: v for k, v in instance._assigned.items() if k != self._name}
