"""Ctrl-C while this rank does something that the other ranks have done too."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["interrupt_after"]


@contextlib.contextmanager
def interrupt_after() -> Iterator[None]:
    """Handle a Ctrl-C that comes inside this block at its end. A second one is handled at once.

    Python handles a signal as soon as c10d's C++ code returns. That is late enough for a group to
    be connected on all members, and too early for this rank to note that it has the group.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            usual(number, frame)
        held.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if held:
            usual(signal.SIGINT, held[0])
