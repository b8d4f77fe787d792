"""Ranks that build a small mesh, of which one may build another, and how that ends for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from meshverse import DeviceMesh, init_device_mesh

__all__ = ["AXES", "ODD_RANK", "TIMEOUT", "Ending", "ending_of", "raised_by_the_call", "small_mesh"]

AXES = ("dp", "tp")
ODD_RANK = 2
TIMEOUT = timedelta(seconds=1.5)  # of what ranks that agree wait for the odd one


class Ending(NamedTuple):
    """The end of a rank's call: its error, and after how many seconds."""

    message: str
    seconds: float


def small_mesh(shape: tuple[int, ...] = (2, 2), **changed: Any) -> DeviceMesh:
    """Return a mesh whose ranks wait a short time only for one that does not come."""
    given = {"mesh_dim_names": AXES, "timeout": TIMEOUT, **changed}
    return init_device_mesh("cpu", shape, **given)


def ending_of(build: Callable[[], Any]) -> Ending:
    """Return the end of a call that builds meshes."""
    start, message = time.monotonic(), "no error"
    try:
        build()
    except RuntimeError as error:
        message = str(error)
    return Ending(message, time.monotonic() - start)


def raised_by_the_call(ending: Ending) -> bool:
    """Whether the call itself raised, rather than the rank's next one."""
    return "Ranks are building different meshes" in ending.message
