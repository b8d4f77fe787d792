"""Ranks that build a small mesh, of which one may build another, and how that ends for them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from meshverse import DeviceMesh, init_device_mesh

__all__ = ["AXES", "ODD_RANK", "TIMEOUT", "error_of", "raised_by_the_call", "small_mesh"]

AXES = ("dp", "tp")
ODD_RANK = 2
TIMEOUT = timedelta(seconds=60)  # of groups; a mismatch is found before


def small_mesh(shape: tuple[int, ...] = (2, 2), **changed: Any) -> DeviceMesh:
    """Return a mesh that takes two axes of a world of four ranks."""
    given = {"mesh_dim_names": AXES, "timeout": TIMEOUT, **changed}
    return init_device_mesh("cpu", shape, **given)


def error_of(build: Callable[[], Any]) -> str:
    """Return the error of a call that builds meshes, or "no error"."""
    try:
        build()
    except RuntimeError as error:
        return str(error)
    return "no error"


def raised_by_the_call(error: str) -> bool:
    """Whether the call itself raised, rather than the rank's next one."""
    return "Ranks are building different meshes" in error
