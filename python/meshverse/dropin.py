"""The hooks of Meshverse on torch's `DeviceMesh`, and `install()`.

Importing Meshverse puts two hooks there, so that what torch derives from one of our meshes is ours
too: FSDP2, for example, calls `torch.distributed.DeviceMesh._concatenate`. With `install()`, every
mesh that is built afterwards is ours, which takes two more.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from . import _torch_compat as compat
from .device_mesh.device_mesh import DeviceMesh
from .saved_mesh.stock_pickles import take_in
from .universe.groups import share_world_wide

_lock = threading.Lock()  # protects the two below
_installed = False  # install() is in force
_open_blocks = 0  # of installed()


def _new(cls: type[StockDeviceMesh], *args: Any, **kwargs: Any) -> StockDeviceMesh:
    # Python calls __init__ of the class of what this returns, with the same arguments.
    if cls is StockDeviceMesh and _shall_be_ours(args, kwargs):
        return object.__new__(DeviceMesh)
    make = super(StockDeviceMesh, cls).__new__  # of a program's own subclass, with other bases
    return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)


def _shall_be_ours(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    root = kwargs.get("_root_mesh")
    if root is not None:  # torch derives a mesh: it stays with its root's class
        return isinstance(root, DeviceMesh)
    # copy and pickle call this without arguments, and fill in a stock mesh by themselves.
    return bool(args or kwargs) and _is_installed()


def _is_installed() -> bool:
    return _installed or _open_blocks > 0


_STOCKS = {
    name: inspect.getattr_static(StockDeviceMesh, name) for name in ("from_group", "__setstate__")
}


@functools.wraps(_STOCKS["__setstate__"])
def _setstate(self: StockDeviceMesh, state: dict[str, Any]) -> None:
    if type(self) is not StockDeviceMesh or not take_in(self, state):
        _STOCKS["__setstate__"](self, state)


# Stock's `from_group` would write the groups' names into the mesh, and its universe would not know
# the groups.
_OURS = {"from_group": staticmethod(DeviceMesh.from_group), "__setstate__": _setstate}


def _follow_switch() -> None:
    """Put the hooks of `install()` on torch's class, or stock's own methods back."""
    wanted, others = (_OURS, _STOCKS) if _is_installed() else (_STOCKS, _OURS)
    for name, method in wanted.items():
        if inspect.getattr_static(StockDeviceMesh, name) is others[name]:
            setattr(StockDeviceMesh, name, method)


# Set once and left there: CPython cannot take a __new__ off a class again without breaking it.
# Python reads the signature of a class from __new__ first; these keep it what it was.
_new.__signature__ = inspect.signature(StockDeviceMesh.__init__)  # type: ignore[attr-defined]
DeviceMesh.__signature__ = inspect.signature(DeviceMesh)  # type: ignore[attr-defined]
StockDeviceMesh.__new__ = _new  # type: ignore[assignment]
compat.hook_concatenate(DeviceMesh, DeviceMesh._concatenate)
compat.let_compile_know(DeviceMesh, lambda mesh: [mesh._compile_guard])


def install(share: Literal["mesh", "world"] = "mesh") -> None:
    """Make every mesh built from now on ours, whatever names the program imported before.

    Meshes that exist already, and what derives from them, stay what they are.

    Args:
        share: who shares process groups. "mesh": a root mesh with all that derives from it, as
            ever. "world": all root meshes built from now on in this process, by either name, with
            one another: one group for every list of ranks, backend, options and isolation tag.
            Fewer communicators, but meshes that a program made separately, to overlap their
            communication, then queue behind each other; give those an `isolate` tag.

    Raises:
        ValueError: `share` is neither.
    """
    if share not in ("mesh", "world"):
        raise ValueError(f"install(share={share!r}): give 'mesh' or 'world'.")
    global _installed
    with _lock:
        _installed = True
        share_world_wide(share == "world")
        _follow_switch()


def uninstall() -> None:
    """Undo `install()`: `torch.distributed.DeviceMesh(...)` builds stock meshes again.

    `from_group` and `__setstate__` of torch's class are stock's again. The two hooks that importing
    Meshverse has put there stay, for our meshes: `__new__` and `_concatenate`.

    Root meshes built from now on share no process groups. Blocks of `installed()` that are open
    stay in force to their end.
    """
    global _installed
    with _lock:
        _installed = False
        share_world_wide(False)
        _follow_switch()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Make every mesh built inside the block ours, in all threads. Blocks may nest and overlap."""
    global _open_blocks
    with _lock:
        _open_blocks += 1
        _follow_switch()
    try:
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            _follow_switch()
