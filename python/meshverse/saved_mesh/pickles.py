"""Pickling meshes without process-group names; a loaded mesh finds its universe again.

The pickle of a mesh over ranks 0, 1, 2, ... takes O(number of axes) bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshverse._core import AxisLayout, RankMap
from meshverse._torch_compat.one_graph import is_one_graph_compiled
from meshverse.device_mesh.device_mesh import DeviceMesh
from meshverse.universe.universe import Universe
from meshverse.universe.world_universes import find_universe

from .state import MeshState, SavedMesh, SavedState, read_state

_NO_RANK = -1  # as in c10d
_Mesh = TypeVar("_Mesh", bound=DeviceMesh)


def state_of(mesh: DeviceMesh) -> MeshState:
    """Return a mesh and its root as plain data; see `save_mesh`."""
    universe = mesh._universe
    ranks = universe.rank_map
    state = {
        "ranks": ranks.size if ranks.is_identity else ranks.ranks().tolist(),
        # If a mesh is an input of a graph, torch's caches find the graph by the mesh's pickle. So
        # the pickle must be the same on all ranks if a graph is compiled for all of them.
        "rank": _NO_RANK if is_one_graph_compiled() else universe.rank,
        "serial": universe.serial,
        "decoupled": bool(mesh.decouple_backend_at_save),
        "mesh": mesh_fields(mesh),
    }
    if mesh._root_mesh is not None:
        state["root"] = mesh_fields(mesh._root())
    return state


def load_saved(saved: SavedState) -> DeviceMesh:
    """Return the mesh of a saved state that was already checked; see `load_mesh`."""
    return _loaded(DeviceMesh._get_or_create, saved.mesh, _universe_of(saved))


def load_as(mesh_class: type[DeviceMesh], state: MeshState) -> DeviceMesh:
    """Return a mesh of a subclass from its saved state; see `load_mesh_as`."""
    if not _is_ours(mesh_class):
        raise TypeError(f"A saved mesh of {mesh_class!r}, which is not a subclass of {DeviceMesh}.")
    saved = read_state(state)
    universe = _universe_of(saved)
    mesh = _loaded(mesh_class._create, saved.mesh, universe)
    if universe.root is None or not mesh._has_groups:  # bind() looks through these meshes
        universe.meshes.add(mesh)
    else:
        universe.meshes.note(mesh)
    return mesh


def _is_ours(mesh_class: object) -> bool:
    return isinstance(mesh_class, type) and issubclass(mesh_class, DeviceMesh)


def _universe_of(saved: SavedState) -> Universe:
    """Return the universe to load a mesh into: a live one, or one without process groups."""
    universe = _live_universe_of(saved) or _universe_without_groups_of(saved)
    if universe.root is None and saved.root is not None:
        _loaded(DeviceMesh._get_or_create, saved.root, universe)
    return universe


def _loaded(make: Callable[..., _Mesh], saved: SavedMesh, universe: Universe) -> _Mesh:
    """Return a saved mesh in a universe, with groups if the universe has those that it had."""
    mesh = make(universe, saved.description, _known_names(saved, universe))
    if not mesh._has_groups:  # so that saving it again saves these digests too
        mesh._key_digests = list(saved.keys)
    return mesh


def _live_universe_of(saved: SavedState) -> Universe | None:
    if saved.decoupled:
        return None
    universe = find_universe(saved.rank_map, saved.serial, _groups_of(saved), saved.descriptions)
    if universe is None and dist.is_initialized():
        return Universe(saved.rank_map)
    # A process without a default group has no rank, and may load meshes that several ranks saved.
    # Here, it has a universe for each of these ranks.
    is_of_rank = universe is not None and (
        universe.world is not None
        or (universe.rank == saved.rank and not _has_other_meshes(universe, saved))
    )
    return universe if is_of_rank else None


def _has_other_meshes(universe: Universe, saved: SavedState) -> bool:
    """Whether a universe without process groups has other meshes than a saved one.

    Different programs may give different universes the same number, as may one program without
    process groups. And an interrupted `bind()` may have left meshes here that are in another
    universe already.
    """
    meshes = [mesh for mesh in (universe.root, *universe.meshes) if mesh is not None]
    has_moved = any(mesh._universe is not universe for mesh in meshes)
    return has_moved or not universe.meshes.may_have(saved.descriptions)


def _universe_without_groups_of(saved: SavedState) -> Universe:
    key = saved.rank_map, saved.serial, saved.rank, saved.decoupled
    universe = _without_groups.get(key)
    if universe is None or _has_other_meshes(universe, saved):
        universe = Universe(saved.rank_map, rank=saved.rank, decoupled=saved.decoupled)
        universe.set_saved_serial(saved.serial)
        _without_groups[key] = universe
    return universe


# The live universes that meshes are loaded into without process groups, by the universe and rank
# that they were saved from. So meshes of one universe that one rank saved in several files are
# again in one universe.
_without_groups: weakref.WeakValueDictionary[tuple[RankMap, int, int, bool], Universe] = (
    weakref.WeakValueDictionary()
)


def _groups_of(saved: SavedState) -> list[tuple[AxisLayout, str | None]]:
    meshes = [saved.mesh, *([] if saved.root is None else [saved.root])]
    return [
        pair for mesh in meshes for pair in zip(mesh.description.layout, mesh.keys, strict=False)
    ]


def mesh_fields(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the fields of one mesh in a saved state."""
    return {
        "device_type": mesh.device_type,
        "axes": [(list(axis.sizes), list(axis.strides)) for axis in mesh._description.layout],
        "names": mesh.mesh_dim_names,
        "preserve_rank_order": bool(mesh._preserve_rank_order),
        "flattened": mesh._description.flattened,
        "tags": mesh._description.tags,
        "keys": mesh._key_digests,
    }


def _known_names(saved: SavedMesh, universe: Universe) -> list[str] | None:
    layout = saved.description.layout
    if universe.world is None:
        return None
    if universe.position is None:
        return []
    groups = [universe.groups.known(*pair) for pair in zip(layout, saved.keys, strict=False)]
    names = [group.name for group in groups if group is not None and group.name is not None]
    return names if len(names) == len(layout) else None
