"""Weakly held objects, which several threads may list at any time."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

_T = TypeVar("_T")


class WeakRegistry(Generic[_T]):
    """Objects in the order they were added, as long as somebody else holds them.

    A `weakref.WeakSet` may not grow while another thread goes through it; this may. And objects
    that are equal, as meshes can be, are objects of their own here.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[_T]] = {}  # by the id of what is alive

    def add(self, entry: _T) -> None:
        """Note an object, for as long as it lives."""
        references, key = self._references, id(entry)
        references[key] = weakref.ref(entry, lambda _: references.pop(key, None))

    def discard(self, entry: _T) -> None:
        """Forget an object, if it is noted."""
        self._references.pop(id(entry), None)

    def __len__(self) -> int:
        return len(self._references)

    def alive(self) -> list[_T]:
        """Return the objects that are noted and alive now, oldest first."""
        # A list of a dict's values is made in one go, with and without the interpreter's lock.
        entries = (reference() for reference in list(self._references.values()))
        return [entry for entry in entries if entry is not None]
