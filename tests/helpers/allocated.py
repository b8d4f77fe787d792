"""Counts of what a process has allocated, by its allocators: unlike resident memory, what they keep
for later is left out, so that they are the same on a busy machine."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import NamedTuple

import pytest


class _MallInfo2(ctypes.Structure):
    """See mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",  # bytes of blocks that were mapped
            "usmblks",
            "fsmblks",
            "uordblks",  # bytes in use of all arenas
            "fordblks",
            "keepcost",
        )
    ]


class Allocated(NamedTuple):
    native_bytes: int  # by malloc, which C++ and large Python objects use
    python_blocks: int  # small Python objects, up to 512 bytes each


def allocated() -> Allocated:
    """Return what is allocated after a garbage collection.

    Skips the test if the C library does not say: before glibc 2.33, and in others.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("the C library has no mallinfo2")
    mallinfo2.restype = _MallInfo2
    gc.collect()
    info = mallinfo2()
    return Allocated(info.uordblks + info.hblkhd, sys.getallocatedblocks())
