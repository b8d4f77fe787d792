"""The hooks of Meshverse in torch's `DeviceMesh`, and `install()`.

Importing Meshverse replaces two methods of torch's class, `__new__` and `_concatenate`, so that
meshes which torch derives from a Meshverse mesh are of Meshverse's class too. FSDP2, for example,
calls `torch.distributed.DeviceMesh._concatenate`. `install()` replaces two more, and makes every
mesh that is built afterwards a Meshverse mesh.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse._torch_compat.tracing import hook_concatenate, register_with_dynamo

from .device_mesh.device_mesh import DeviceMesh
from .device_mesh.fsdp2_meshes import source_of
from .locks import state_lock
from .universe.universe_groups import share_world_wide

_installed = False  # whether install() is in force
_open_blocks: set[object] = set()  # of installed()


def _new(cls: type[StockDeviceMesh], *args: Any, **kwargs: Any) -> StockDeviceMesh:
    # Python then calls __init__ of the returned object's class, with the same arguments.
    if cls is StockDeviceMesh and _shall_be_ours(args, kwargs):
        return object.__new__(DeviceMesh)
    # Of torch or another library; or that of another base of a subclass.
    make = _new_before or super(StockDeviceMesh, cls).__new__
    return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)


def _shall_be_ours(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    root = kwargs.get("_root_mesh")
    if root is not None:  # torch derives a mesh: it gets its root's class
        return isinstance(root, DeviceMesh)
    # copy and pickle call this without arguments, to fill in a mesh of torch's class.
    if _is_installed():
        return bool(args or kwargs)
    return source_of(args[1] if len(args) > 1 else kwargs.get("mesh")) is not None


def _is_installed() -> bool:
    return _installed or bool(_open_blocks)


_TORCHS = {
    name: inspect.getattr_static(StockDeviceMesh, name) for name in ("from_group", "__setstate__")
}


@functools.wraps(_TORCHS["__setstate__"])
def _setstate(self: StockDeviceMesh, state: dict[str, Any]) -> None:
    if type(self) is StockDeviceMesh:
        from .saved_mesh.stock_pickles import convert_stock_mesh

        if convert_stock_mesh(self, state):
            return
    _TORCHS["__setstate__"](self, state)


# torch's `from_group` would write the groups' names into a Meshverse mesh, but would not register
# the groups in its universe.
_OURS = {"from_group": staticmethod(DeviceMesh.from_group), "__setstate__": _setstate}


def _update_hooks() -> None:
    """Set the hooks of `install()` on torch's class, or restore torch's methods."""
    wanted, others = (_OURS, _TORCHS) if _is_installed() else (_TORCHS, _OURS)
    for name, method in wanted.items():
        if inspect.getattr_static(StockDeviceMesh, name) is others[name]:
            setattr(StockDeviceMesh, name, method)


_new_before = StockDeviceMesh.__new__ if "__new__" in vars(StockDeviceMesh) else None
if _new_before is not None and _new_before.__module__ == __name__:  # of this module, before reload
    _new_before = None
# Set once and never removed: CPython cannot remove a __new__ from a class without breaking it.
# `inspect` reads the signature of a class from __new__ first, so these two lines restore it.
_new.__signature__ = inspect.signature(StockDeviceMesh.__init__)  # type: ignore[attr-defined]
DeviceMesh.__signature__ = inspect.signature(DeviceMesh)  # type: ignore[attr-defined]
StockDeviceMesh.__new__ = _new  # type: ignore[assignment]
hook_concatenate(DeviceMesh, DeviceMesh._concatenate)
register_with_dynamo(DeviceMesh, lambda mesh: [mesh._compile_guard])


def install(share: Literal["mesh", "world"] = "mesh") -> None:
    """Make every mesh that is built from now on a Meshverse mesh, also under torch's names.

    This includes code that has imported torch's names before. Meshes that exist already keep their
    class, as do meshes that derive from them.

    Args:
        share: which meshes share process groups. "mesh": a root mesh and all meshes that derive
            from it, as without `install()`. "world": all root meshes built from now on in this
            process, of whichever name: one group for each list of ranks, backend, options and
            isolation tag. This saves communicators. But if a program has separate meshes so that
            their collectives overlap, these then run one after the other: give such meshes an
            `isolate` tag.

    Raises:
        ValueError: `share` is neither "mesh" nor "world".
    """
    if share not in ("mesh", "world"):
        raise ValueError(f"install(share={share!r}): pass 'mesh' or 'world'.")
    global _installed
    with state_lock.held:
        _installed = True
        share_world_wide(share == "world")
        _update_hooks()


def uninstall() -> None:
    """Undo `install()`: `torch.distributed.DeviceMesh(...)` builds meshes of torch's class again.

    `from_group` and `__setstate__` of torch's class are torch's own again. The hooks that importing
    Meshverse sets, `__new__` and `_concatenate`, stay for Meshverse's meshes.

    Root meshes built from now on do not share process groups with one another. Blocks of
    `installed()` that are open stay in force until they end.
    """
    global _installed
    with state_lock.held:
        _installed = False
        share_world_wide(False)
        _update_hooks()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Make every mesh built inside the block a Meshverse mesh, in all threads.

    Blocks may nest and overlap.
    """
    block = object()
    try:
        with state_lock.held:
            _open_blocks.add(block)
            _update_hooks()
        yield
    finally:
        with state_lock.held:
            _open_blocks.discard(block)
            _update_hooks()
