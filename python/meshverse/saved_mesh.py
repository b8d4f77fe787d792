"""Pickling meshes: O(axes) bytes and no process-group names; a loaded mesh finds its universe."""

from __future__ import annotations

import copyreg
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ._core import AxisLayout, Layout, RankMap
from .derivation import MeshDescription
from .device_mesh import DeviceMesh
from .mesh_base import MeshBase
from .universe import Universe

__all__ = ["load_mesh", "save_mesh"]

MeshState: TypeAlias = dict[str, Any]
"""A mesh as plain data: numbers, strings, lists and dictionaries of them."""


def save_mesh(mesh: DeviceMesh) -> MeshState:
    """A mesh as plain data, root included.

    The ranks are one number where they are 0, 1, 2, ...; other rank maps are listed.
    """
    universe = mesh.universe
    ranks = universe.rank_map
    state = {
        "ranks": ranks.size if ranks.is_identity else ranks.ranks().tolist(),
        "rank": universe.rank,
        "serial": universe.serial,
        "mesh": _describe(mesh),
    }
    if mesh._root_mesh is not None:
        state["root"] = _describe(mesh._root())
    return state


def load_mesh(state: MeshState) -> DeviceMesh:
    """The mesh of a saved state.

    In a live universe of the same ranks it is that universe's mesh, with its process groups where
    they exist. Otherwise a new universe without process groups is made for it.
    """
    ranks = state["ranks"]
    rank_map = RankMap.identity(ranks) if isinstance(ranks, int) else RankMap.from_ranks(ranks)
    universe = Universe.find(rank_map, state["serial"])
    if universe is None:
        universe = Universe(rank_map, rank=None if dist.is_initialized() else state["rank"])
    if universe.root is None and "root" in state:
        _rebuild(state["root"], universe)
    return _rebuild(state["mesh"], universe)


def _describe(mesh: MeshBase) -> dict[str, Any]:
    names: list[str] = getattr(mesh, "_dim_group_names", [])
    return {
        "device_type": mesh.device_type,
        "axes": [(list(axis.sizes), list(axis.strides)) for axis in mesh.layout],
        "names": mesh.mesh_dim_names,
        "preserve_rank_order": mesh._preserve_rank_order,
        # One an axis; none on a rank outside the mesh, and for a mesh without groups.
        "keys": [mesh.universe.key_digest(*pair) for pair in zip(mesh.layout, names, strict=False)],
    }


def _rebuild(saved: dict[str, Any], universe: Universe) -> DeviceMesh:
    layout = Layout([AxisLayout(sizes, strides) for sizes, strides in saved["axes"]])
    description = MeshDescription(
        saved["device_type"], layout, saved["names"], saved["preserve_rank_order"]
    )
    return DeviceMesh._in_universe(universe, description, _known_names(saved, layout, universe))


def _known_names(saved: dict[str, Any], layout: Layout, universe: Universe) -> list[str] | None:
    if universe.position is None and universe.world is not None:
        return []
    groups = [universe.known_group(*pair) for pair in zip(layout, saved["keys"], strict=False)]
    names = [group.name for group in groups if group is not None and group.name is not None]
    return names if len(names) == len(layout) else None


def _reduce(mesh: DeviceMesh) -> tuple[Any, tuple[MeshState]]:
    return load_mesh, (save_mesh(mesh),)


copyreg.pickle(DeviceMesh, _reduce)
torch.serialization.add_safe_globals([load_mesh])
