"""Objects that are alive, as threads may ask for them at any time."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

__all__ = ["WeakRegistry"]

_T = TypeVar("_T")


class WeakRegistry(Generic[_T]):
    """Objects in the order they were added, as long as somebody else holds them.

    A `weakref.WeakSet` may not grow while another thread goes through it; this may.
    """

    def __init__(self) -> None:
        self._references: dict[weakref.ref[_T], None] = {}

    def add(self, entry: _T) -> None:
        """Note an object, for as long as it lives."""
        references = self._references
        references[weakref.ref(entry, lambda gone: references.pop(gone, None))] = None

    def discard(self, entry: _T) -> None:
        """Forget an object, if it is noted."""
        self._references.pop(weakref.ref(entry), None)

    def alive(self) -> list[_T]:
        """The objects that are noted and alive now, oldest first."""
        # A list of a dict's keys is made in one go, with and without the interpreter's lock.
        entries = (reference() for reference in list(self._references))
        return [entry for entry in entries if entry is not None]
