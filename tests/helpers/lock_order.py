"""Record of what Meshverse's threads wait for, to check the order of docs/architecture.md.

Inside `recorded()`, a thread that waits out of order fails, whether or not another thread makes a
deadlock of it this time. So does one that calls c10d or the store while it holds the lock.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from helpers import jitter
from helpers.replaced import replace_everywhere
from meshverse import locks
from meshverse._torch_compat.c10d_creation import (
    create_c10d_group,
    create_c10d_groups,
    split_c10d_group,
)
from meshverse._torch_compat.c10d_groups import clone_store, end_group
from meshverse.groups.group import Group
from meshverse.universe.universe_groups import UniverseGroups

__all__ = ["CREATES_ENTRY", "KINDS", "MAKES_GROUP", "STATE_LOCK", "recorded"]

# In the order in which a thread may take them, as in docs/architecture.md.
KINDS = CREATES_ENTRY, MAKES_GROUP, STATE_LOCK = (
    "an entry of a `GroupCache`",
    "a process group (`Group.make`)",
    "`locks.state_lock`",
)
_C10D = {"_new_process_group_helper", "_abort_process_group", "destroy_process_group", "new_group"}
_OF_C10D = [
    *(create_c10d_group, create_c10d_groups, split_c10d_group),
    *(clone_store, end_group),
]


class _Record:
    """Record of what each thread holds, which was taken while which was held, and mistakes."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str | None, str]] = Counter()
        self.wrong: list[str] = []
        self._of_thread = threading.local()

    def held(self) -> list[str]:
        if not hasattr(self._of_thread, "held"):
            self._of_thread.held = []
        held: list[str] = self._of_thread.held
        return held

    def take(self, kind: str) -> None:
        held = self.held()
        outer = held[-1] if held else None
        if kind != STATE_LOCK or outer != STATE_LOCK:  # the lock is re-entrant
            self.seen[outer, kind] += 1
            if outer is not None and KINDS.index(outer) >= KINDS.index(kind):
                self._fail(f"a thread waits for {kind} while it holds {outer}")
        held.append(kind)

    def release(self) -> None:
        self.held().pop()

    def check_free(self, call: str) -> None:
        if STATE_LOCK in self.held():
            self._fail(f"{call} is called while the thread holds {STATE_LOCK}")

    def _fail(self, what: str) -> None:
        self.wrong.append(what)
        raise AssertionError(what)


class _RecordedLock:
    """`state_lock`, recorded. `threading.Condition` uses the last four methods."""

    def __init__(self, lock: Any, record: _Record) -> None:
        self._lock, self._record = lock, record

    @property
    def held(self) -> _RecordedLock:
        return self

    def acquire(self, *arguments: Any, **named: Any) -> bool:
        self._record.take(STATE_LOCK)
        taken: bool = self._lock.acquire(*arguments, **named)
        if not taken:
            self._record.release()
        return taken

    def release(self) -> None:
        self._lock.release()
        self._record.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:  # from Python 3.14 on
        locked: bool = self._lock.locked()
        return locked

    def _is_owned(self) -> bool:
        owned: bool = self._lock._is_owned()
        return owned

    def _release_save(self) -> Any:
        assert self._record.held().count(STATE_LOCK) == 1, "a wait inside another change"
        self._record.release()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._record.take(STATE_LOCK)


@contextlib.contextmanager
def recorded() -> Iterator[Counter[tuple[str | None, str]]]:
    """Check the order in all threads of this process.

    Yields:
        How often a thread took which kind while it held which; None for none.
    """
    record = _Record()
    lock = _RecordedLock(locks.state_lock.of_python, record)
    with pytest.MonkeyPatch.context() as patch:
        changed = threading.Condition(lock)  # type: ignore[arg-type]
        mine = [(locks.state_lock, lock), (locks.state_changed, changed)]
        for kept, recording in mine:
            replace_everywhere(patch, kept, recording)
        patch.setattr(Group, "make", _holding(record, MAKES_GROUP, Group.make))
        one = UniverseGroups._get_or_make_one
        patch.setattr(UniverseGroups, "_get_or_make_one", _holding(record, CREATES_ENTRY, one))
        for store in jitter._STORES:
            _check_calls(patch, record, store, jitter._STORE_OPERATIONS)
        _check_calls(patch, record, dist.ProcessGroup, jitter._COLLECTIVES)
        _check_calls(patch, record, dist.distributed_c10d, _C10D)
        for call in _OF_C10D:
            replace_everywhere(patch, call, _checked(record, call.__name__, call))
        yield record.seen
    assert not record.wrong


def _holding(record: _Record, kind: str, call: Any) -> Any:
    @functools.wraps(call)
    def holding(*arguments: Any, **named: Any) -> Any:
        record.take(kind)
        try:
            return call(*arguments, **named)
        finally:
            record.release()

    return holding


def _check_calls(patch: pytest.MonkeyPatch, record: _Record, owner: Any, names: set[str]) -> None:
    for name in sorted(names & vars(owner).keys()):
        patch.setattr(owner, name, _checked(record, name, getattr(owner, name)))


def _checked(record: _Record, name: str, call: Any) -> Any:
    @functools.wraps(call)
    def checked(*arguments: Any, **named: Any) -> Any:
        record.check_free(name)
        return call(*arguments, **named)

    return checked
