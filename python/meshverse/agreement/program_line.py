"""The line of the user's program, as messages show it."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

import torch

_OWN = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (os.path.dirname(__file__), torch.__file__)
)
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
# Python's library, and code that has no file: of imports, and of graphs that torch.compile makes.
_PYTHONS_OWN = (os.path.dirname(os.__file__) + os.sep, "<frozen ", "<eval_with_key>")


def program_line() -> str:
    """Return the file and line of the user's program that is being run.

    It is outside of this package, torch, Python and other installed packages. If the program itself
    is installed, it is the innermost line in a package that is neither this one nor torch.
    """
    frame: FrameType | None = sys._getframe(1)
    in_package = ""
    while frame is not None:
        file = frame.f_code.co_filename
        line = f"{file}:{frame.f_lineno}"
        if file.startswith(_OWN):
            pass
        elif any(folder in file for folder in _PACKAGES):  # which may lie in Python's own library
            in_package = in_package or line
        elif not file.startswith(_PYTHONS_OWN):
            return line
        frame = frame.f_back
    return in_package or f"thread {threading.current_thread().name!r}"
