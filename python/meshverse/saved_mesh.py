"""Pickling meshes: O(axes) bytes and no process-group names; a loaded mesh finds its universe."""

from __future__ import annotations

import copyreg
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ._core import RankMap
from .device_mesh import DeviceMesh
from .mesh_base import MeshBase
from .saved_state import MeshState, SavedMesh, SavedState, read_state
from .universe import Universe

__all__ = ["load_mesh", "save_mesh"]


def save_mesh(mesh: DeviceMesh) -> MeshState:
    """A mesh as plain data, root included.

    The ranks are one number where they are 0, 1, 2, ...; other rank maps are listed. What it says
    of process groups is which options they had, never their names.
    """
    universe = mesh.universe
    ranks = universe.rank_map
    state = {
        "ranks": ranks.size if ranks.is_identity else ranks.ranks().tolist(),
        "rank": universe.rank,
        "serial": universe.serial,
        "decoupled": bool(mesh.decouple_backend_at_save),
        "mesh": _describe(mesh),
    }
    if mesh._root_mesh is not None:
        state["root"] = _describe(mesh._root())
    return state


def load_mesh(state: MeshState) -> DeviceMesh:
    """The mesh of a saved state.

    In a live universe of the same ranks it is that universe's mesh, with its process groups where
    they exist. Where there is no such universe, or the mesh was saved with
    `decouple_backend_at_save`, it comes in a universe without process groups, which
    `mesh.bind()` gives it.

    Raises:
        ValueError: a state that `save_mesh` could not have written; nothing is changed then.
    """
    saved = read_state(state)
    universe = _universe_of(saved)
    if universe.root is None and saved.root is not None:
        _rebuild(saved.root, universe)
    return _rebuild(saved.mesh, universe)


def _universe_of(saved: SavedState) -> Universe:
    if not saved.decoupled:
        rank = None if dist.is_initialized() else saved.rank
        found = Universe.find(saved.rank_map, saved.serial)
        return found or Universe(saved.rank_map, rank=rank)
    key = saved.rank_map, saved.serial
    universe = _decoupled.get(key)
    if universe is None:
        universe = _decoupled[key] = Universe(saved.rank_map, rank=saved.rank, decoupled=True)
    return universe


# Universes of decoupled meshes that are alive, by what they were saved from: meshes that were
# saved one by one from one universe are in one universe again.
_decoupled: weakref.WeakValueDictionary[tuple[RankMap, int], Universe] = (
    weakref.WeakValueDictionary()
)


def _describe(mesh: MeshBase) -> dict[str, Any]:
    return {
        "device_type": mesh.device_type,
        "axes": [(list(axis.sizes), list(axis.strides)) for axis in mesh.layout],
        "names": mesh.mesh_dim_names,
        "preserve_rank_order": mesh._preserve_rank_order,
        "flattened": mesh._description.flattened,
        "keys": mesh.key_digests,
    }


def _rebuild(saved: SavedMesh, universe: Universe) -> DeviceMesh:
    return DeviceMesh._in_universe(universe, saved.description, _known_names(saved, universe))


def _known_names(saved: SavedMesh, universe: Universe) -> list[str] | None:
    layout = saved.description.layout
    if universe.world is None:
        return None
    if universe.position is None:
        return []
    groups = [universe.known_group(*pair) for pair in zip(layout, saved.keys, strict=False)]
    names = [group.name for group in groups if group is not None and group.name is not None]
    return names if len(names) == len(layout) else None


def _reduce(mesh: DeviceMesh) -> tuple[Any, tuple[MeshState]]:
    return load_mesh, (save_mesh(mesh),)


copyreg.pickle(DeviceMesh, _reduce)
torch.serialization.add_safe_globals([load_mesh])
