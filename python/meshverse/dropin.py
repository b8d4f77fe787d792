"""The one hook on torch: which class `DeviceMesh(...)` builds when torch's own code says so.

Importing Meshverse sets it, so that what torch derives from one of our meshes (FSDP2 concatenates
by the stock name) is ours too. `install()` widens it to every mesh built afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from . import _torch_compat as compat
from .device_mesh import DeviceMesh

__all__ = ["install", "installed", "uninstall"]

_lock = threading.Lock()  # protects _installs
_installs = 0


def _new(cls: type[StockDeviceMesh], *args: Any, **kwargs: Any) -> StockDeviceMesh:
    # Python calls __init__ of the class of what this returns, with the same arguments.
    if cls is StockDeviceMesh and (_installs or isinstance(kwargs.get("_root_mesh"), DeviceMesh)):
        return object.__new__(DeviceMesh)
    return object.__new__(cls)


# Set once and left there: CPython cannot take a __new__ off a class again without breaking it.
# Python reads the signature of a class from __new__ first; these keep it what it was.
_new.__signature__ = inspect.signature(StockDeviceMesh.__init__)  # type: ignore[attr-defined]
DeviceMesh.__signature__ = inspect.signature(DeviceMesh)  # type: ignore[attr-defined]
StockDeviceMesh.__new__ = _new  # type: ignore[assignment]
compat.let_dynamo_know_subclasses()


def install() -> None:
    """Make every mesh built from now on ours, whatever names the program imported before."""
    global _installs
    with _lock:
        _installs = 1


def uninstall() -> None:
    """Undo `install()`: `torch.distributed.DeviceMesh(...)` builds stock meshes again."""
    global _installs
    with _lock:
        _installs = 0


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install()` inside the block; what was before it afterwards."""
    global _installs
    with _lock:
        before, _installs = _installs, 1
    try:
        yield
    finally:
        with _lock:
            _installs = before
