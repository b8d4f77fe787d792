"""Interrupting a call of Meshverse wherever Python runs signal handlers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import meshverse

ALL_FILES = ("",)


class _InterruptsInFiles:
    """Interrupt this thread at the n-th place in some files of the package.

    The places are the entry of a function, and the return from a function of C.
    """

    def __init__(self, place: int, files: tuple[str, ...]) -> None:
        self.left = place
        package = os.path.dirname(meshverse.__file__)
        self._files = tuple(os.path.join(package, file) for file in files)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(self._files):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def is_interrupted_at(
    place: int, call: Callable[[], object], files: tuple[str, ...] = ALL_FILES
) -> bool:
    """Call a function, and interrupt it at its n-th place; return whether it has so many."""
    interrupt = _InterruptsInFiles(place, files)
    with contextlib.suppress(KeyboardInterrupt):  # Python drops it in the callback of a reference
        sys.setprofile(interrupt)
        try:
            call()
        finally:
            sys.setprofile(None)
    return interrupt.left <= 0
