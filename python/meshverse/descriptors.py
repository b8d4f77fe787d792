"""Decorators for attributes: computed when they are first read, and replaceable by users."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

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


if TYPE_CHECKING:
    assignable = property
else:

    class assignable(cached_property):  # noqa: N801  # used as a decorator
        """Property to which a program may assign: the object then has that value.

        torch's class has no attribute of this name, so programs may use the name for something
        else. As in any `cached_property`, which Sphinx documents like a property, what the object
        has of this name comes first. But only programs assign: each read computes the value again.
        """

        def __get__(self, instance: object | None, owner: type | None = None) -> Any:
            return self if instance is None else self.func(instance)
