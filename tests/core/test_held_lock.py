"""Locks are free after their block, whatever a signal handler raises meanwhile."""

from __future__ import annotations

import re
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import meshverse
from meshverse._core import HeldLock
from meshverse.locks import Lock

_PACKAGE = Path(meshverse.__file__).parent
_TIMES = 500  # of 3,000 signals, 1,457 left a lock of Python 3.14.8 taken


class _Interrupted(Exception):  # noqa: N818  (no error of the package)
    pass


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Interrupted


def _is_free(lock: Lock) -> bool:
    """Return whether another thread can take the lock."""
    found = []

    def look() -> None:
        if lock.of_python.acquire(blocking=False):
            lock.of_python.release()
            found.append(lock)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return bool(found)


def _take_until_interrupted(lock: Lock, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    while True:
        with lock.held, lock.held:
            pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_no_signal_handler_leaves_a_lock_taken() -> None:
    lock, before = Lock(), signal.signal(signal.SIGVTALRM, _interrupt)
    try:
        for time in range(_TIMES):
            with pytest.raises(_Interrupted):
                _take_until_interrupted(lock, 1e-4 + time % 97 * 1e-6)
            assert _is_free(lock)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # short-timeout: no timer any more
        signal.signal(signal.SIGVTALRM, before)


def test_the_package_takes_no_lock_in_another_way() -> None:
    taken = re.compile(r"\bwith\b.*\b\w*lock\b(?! \w)[,:]")
    files = [*_PACKAGE.rglob("*.py")]
    found = [
        f"{file}: {line}"
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if taken.search(line) and "`" not in line
    ]
    assert len(files) > 100
    assert not found


def test_a_held_lock_is_free_when_it_is_deleted() -> None:
    lock = threading.RLock()
    held = HeldLock(lock)
    held.__enter__()
    with HeldLock(lock):
        assert lock._is_owned()  # type: ignore[attr-defined]
    assert lock._is_owned()  # type: ignore[attr-defined]
    del held
    assert not lock._is_owned()  # type: ignore[attr-defined]


def test_a_lock_that_was_freed_by_hand_is_reported_when_it_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock, seen = threading.RLock(), list[Any]()
    held = HeldLock(lock)
    held.__enter__()
    lock.release()
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    del held
    ((kind, _, _, _, what),) = seen
    assert (kind, what) == (RuntimeError, lock)


def test_a_lock_that_cannot_be_taken_is_not_freed() -> None:
    class Refusing:
        def acquire(self) -> None:
            raise _Interrupted

    with pytest.raises(_Interrupted), HeldLock(Refusing()):
        pass
