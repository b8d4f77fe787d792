"""A store of c10d with strings as values, and keys under a prefix."""

from __future__ import annotations

from typing import Any

# No key ever has this value. `compare_set` with it changes nothing and returns the key's value: a
# read in one operation that does not wait. (`get` waits until the key exists; `check` before it
# would be a second operation.)
_NEVER_WRITTEN = "?"


class TextStore:
    """A store with strings as values. Each method makes one operation.

    Args:
        store: c10d's store.
        prefix: beginning of all keys.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def read(self, key: str) -> str:
        """Return the value of a key, "" if it has none. Does not wait for a value."""
        text = self.replace(key, _NEVER_WRITTEN, _NEVER_WRITTEN)
        return "" if text == _NEVER_WRITTEN else text

    def replace(self, key: str, old: str, new: str) -> str:
        """Write a value if the key has `old`, "" for none; return the value that it has then."""
        found: bytes = self._store.compare_set(self._key(key), old, new)
        return found.decode()

    def put_first(self, key: str, text: str) -> str:
        """Write a value if the key has none; return the value that it has then."""
        return self.replace(key, "", text)

    def write(self, key: str, text: str) -> None:
        """Write a value, whether or not the key has one."""
        self._store.set(self._key(key), text)

    def append(self, key: str, text: str) -> None:
        """Append to the value of a key, which is "" at first."""
        self._store.append(self._key(key), text)

    def count(self, key: str, amount: int = 1) -> int:
        """Add to the number of a key, which is 0 at first; return the sum."""
        total: int = self._store.add(self._key(key), amount)
        return total

    def remove(self, key: str) -> None:
        """Remove a key, if it exists."""
        self._store.delete_key(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"
