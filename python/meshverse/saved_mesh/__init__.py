"""Meshes in files: saved by Meshverse's class or by torch's.

- `state`: a saved mesh as plain data. It comes from a file, so every field is checked.
- `pickles`: saving and loading of our meshes.
- `stock_pickles`: meshes that torch's class saved, turned into ours on this process's groups.

Importing this package registers the functions below with pickle and `torch.load`; they import the
modules when they are called. Pickles refer to `load_mesh` and `load_mesh_as` by the name of this
package, so that name must not change.
"""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any

import torch

from meshverse.device_mesh.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from .state import MeshState

__all__ = ["load_mesh", "load_mesh_as", "save_mesh"]


def save_mesh(mesh: DeviceMesh) -> MeshState:
    """Return a mesh and its root as plain data.

    Ranks 0, 1, 2, ... are saved as their number, other ranks as a list. Of the process groups,
    digests of their options are saved, and not their names.

    Raises:
        TypeError: `mesh` is no mesh of ours.
    """
    from .pickles import state_of

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"save_mesh() got {mesh!r} of type {type(mesh).__qualname__}: pass a "
            "meshverse.DeviceMesh. torch.save() and pickle save other objects."
        )
    return state_of(mesh)


def load_mesh(state: MeshState) -> DeviceMesh:
    """Return the mesh of a saved state.

    If this process has a live universe with the same ranks, and with the axes of this mesh or of
    its root, the result is that universe's mesh, with process groups if the universe has one for
    each of its axes. If there is no such universe, or the mesh was saved with
    `decouple_backend_at_save`, the result has no process groups until `mesh.bind()`.

    Raises:
        ValueError: `save_mesh` cannot have written this state; nothing was loaded.
    """
    from .pickles import load_saved
    from .state import read_state

    return load_saved(read_state(state))


def load_mesh_as(mesh_class: type[DeviceMesh], state: MeshState) -> DeviceMesh:
    """Return a mesh of a subclass from its saved state, without attributes that the subclass adds.

    As in torch, each call returns a new object, because each may get different attributes.

    Raises:
        TypeError: the class is not a subclass of our `DeviceMesh`.
        ValueError: `save_mesh` cannot have written this state; nothing was loaded.
    """
    from .pickles import load_as

    return load_as(mesh_class, state)


def _reduce(mesh: DeviceMesh) -> tuple[Any, ...]:
    if type(mesh) is DeviceMesh:
        return load_mesh, (save_mesh(mesh),)
    return load_mesh_as, (type(mesh), save_mesh(mesh)), mesh.__getstate__()


copyreg.pickle(DeviceMesh, _reduce)
torch.serialization.add_safe_globals([load_mesh, load_mesh_as])
