"""Registry of weakly held objects, for several threads."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

_T = TypeVar("_T")


class WeakRegistry(Generic[_T]):
    """Weakly held objects, in the order in which they were added.

    Unlike a `weakref.WeakSet`, it may grow while another thread iterates over it, and objects that
    are equal, as meshes can be, are separate entries.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[_T]] = {}  # by the id of the object

    def add(self, entry: _T) -> None:
        """Add an object. It stays for as long as something else references it."""
        references, key = self._references, id(entry)
        references[key] = weakref.ref(entry, lambda _: references.pop(key, None))

    def discard(self, entry: _T) -> None:
        """Remove an object, if it was added."""
        self._references.pop(id(entry), None)

    def __len__(self) -> int:
        return len(self._references)

    def alive(self) -> list[_T]:
        """Return the objects that are alive now, in the order in which they were added."""
        # `list` copies a dict's values atomically, with and without the interpreter's lock.
        entries = (reference() for reference in list(self._references.values()))
        return [entry for entry in entries if entry is not None]
