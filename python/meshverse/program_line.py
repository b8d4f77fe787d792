"""The current line of the user's program, for messages."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

import torch

_OWN = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__))
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
# Python's own library, and code without a file: that of imports and of torch.compile's graphs.
_PYTHONS_OWN = (os.path.dirname(os.__file__) + os.sep, "<frozen ", "<eval_with_key>")


def program_line() -> str:
    """Return the file and line of the user's program that is being run.

    This is the innermost line outside of this package, torch, Python and other installed packages.
    If there is none, because the program itself is an installed package, it is the innermost line
    in a package other than Meshverse and torch.
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
