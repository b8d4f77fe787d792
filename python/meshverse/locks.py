"""State that threads share: its lock, claims, and registries of weak references.

Write `with state_lock.held:`, and see `Lock` for why.

There is one lock, so no two threads can take two of ours in different orders. docs/architecture.md
has a table of what else a thread can wait for, in which order.

- It is held for a few statements, and never while c10d, the store or Python code of others is
  called: whoever holds it releases it soon. Only Python's collector may run a program's finalizers
  there, as it runs wherever objects are created.
- A signal handler may run while its thread holds it, and call any function: it is re-entrant.
- `os.fork` waits for it. So the child finds it free, and no change half done.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from meshverse._core import HeldLock


class Lock:
    """A re-entrant lock, which `with lock.held:` takes and frees, whatever a signal handler raises.

    Python 3.14 may run a signal handler between taking a lock of `threading` and the block: if it
    raises, nothing frees the lock, and other threads wait for ever. There, each block has a
    `HeldLock`, whose end frees it. Source: https://github.com/python/cpython/issues/148874.

    Attributes:
        of_python: the lock of `threading`.
        held: context in which this thread holds the lock.
    """

    def __init__(self) -> None:
        self.of_python = threading.RLock()
        self.acquire, self.release = self.of_python.acquire, self.of_python.release
        if sys.version_info < (3, 14):
            self.held: AbstractContextManager[object] = self.of_python

    if sys.version_info >= (3, 14):
        held = property(HeldLock)  # a new one for each block


state_lock = Lock()
state_changed = threading.Condition(state_lock.of_python)  # a group has left `State.BEING_MADE`

os.register_at_fork(
    before=state_lock.acquire,
    after_in_parent=state_lock.release,
    after_in_child=state_lock.release,
)


class Claim:
    """The right to do something alone. Of several callers, one has it; the others do not wait."""

    def __init__(self) -> None:
        self._holders: dict[str, object] = {}

    def take(self, caller: object | None = None) -> bool:
        """Return whether the caller has the claim from now on; False if somebody has it already.

        Args:
            caller: an object of this call's own, with which it gives the claim back. If it takes
                the claim in a `try` block, and gives it back in its `finally`, no signal handler
                that raises can leave the claim taken.
        """
        mine = object() if caller is None else caller
        # Atomic, with and without the interpreter's lock.
        return self._holders.setdefault("holder", mine) is mine

    def give_back(self, caller: object) -> None:
        """Let somebody else have the claim, if this caller has it."""
        try:
            self._drop(caller)
        finally:
            self._drop(caller)  # if a signal handler has raised in the first

    def _drop(self, caller: object) -> None:
        if self._holders.get("holder") is caller:
            self._holders.clear()


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

    def alive(self) -> list[_T]:
        """Return the objects that are alive now, in the order in which they were added."""
        # `list` copies a dict's values atomically, with and without the interpreter's lock.
        entries = [reference() for reference in list(self._references.values())]
        return [entry for entry in entries if entry is not None]
