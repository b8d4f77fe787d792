"""Interrupting a call of Meshverse wherever Python runs signal handlers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import meshverse

_PACKAGE = os.path.dirname(meshverse.__file__) + os.sep


class _Interrupts:
    """Interrupt this thread at the n-th place in the package, and in another file, if one is given.

    The places are the entry of a function, and the return from a function of C.
    """

    def __init__(self, place: int, also_in: str | None) -> None:
        self.left = place
        self._where = _PACKAGE if also_in is None else (_PACKAGE, also_in)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(self._where):
            if event == "call" and sys.version_info < (3, 11) and frame.f_lasti >= 0:
                # A generator goes on. Python 3.10 would end it here without its `finally`; signal
                # handlers run later, inside of it.
                return
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def is_interrupted_at(place: int, call: Callable[[], object], also_in: str | None = None) -> bool:
    """Call a function, and interrupt it at its n-th place; return whether it has so many.

    Args:
        place: number of the place, from 1.
        call: function of the package.
        also_in: another file that has places.
    """
    interrupt = _Interrupts(place, also_in)
    with contextlib.suppress(KeyboardInterrupt):  # Python drops it in the callback of a reference
        sys.setprofile(interrupt)
        try:
            call()
        finally:
            sys.setprofile(None)
    return interrupt.left <= 0
