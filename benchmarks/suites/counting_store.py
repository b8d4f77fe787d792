"""A store that counts the operations a rank makes, and makes them on a real store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["CountingStore"]


class CountingStore(dist.Store):
    """Passes every operation on, and counts it.

    Args:
        store: that does the work.
        keep_arguments: also keep each operation with its arguments, to make them again later.

    Attributes:
        counts: operations by name.
        operations: each with its arguments, if they are kept.
    """

    def __init__(self, store: dist.Store, *, keep_arguments: bool = False) -> None:
        super().__init__()
        self._store = store
        self._keep_arguments = keep_arguments
        self.counts: Counter[str] = Counter()
        self.operations: list[tuple[str, tuple[Any, ...]]] = []

    def _pass_on(self, name: str, *arguments: Any) -> Any:
        self.counts[name] += 1
        if self._keep_arguments:
            self.operations.append((name, arguments))
        return getattr(self._store, name)(*arguments)

    def set(self, key: str, value: Any) -> None:
        self._pass_on("set", key, value)

    def get(self, key: str) -> bytes:
        return self._pass_on("get", key)

    def add(self, key: str, amount: int) -> int:
        return self._pass_on("add", key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._pass_on("compare_set", key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self._pass_on("check", keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._pass_on("wait", keys, *(() if timeout is None else (timeout,)))

    def delete_key(self, key: str) -> bool:
        return self._pass_on("delete_key", key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def append(self, key: str, value: Any) -> None:
        self._pass_on("append", key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._pass_on("multi_get", keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._pass_on("multi_set", keys, values)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout
