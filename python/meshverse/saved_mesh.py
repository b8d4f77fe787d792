"""Pickling meshes: O(axes) bytes and no process-group names; a loaded mesh finds its universe."""

from __future__ import annotations

import copyreg
import weakref
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from . import _torch_compat as compat
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

    The ranks are one number where they are 0, 1, 2, ...; other rank maps are listed. What it says
    of process groups is which options they had, never their names.
    """
    universe = mesh.universe
    ranks = universe.rank_map
    state = {
        "ranks": ranks.size if ranks.is_identity else ranks.ranks().tolist(),
        "rank": universe.rank,
        "serial": universe.serial,
        "decoupled": mesh.decouple_backend_at_save,
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
    """
    ranks = state["ranks"]
    rank_map = RankMap.identity(ranks) if isinstance(ranks, int) else RankMap.from_ranks(ranks)
    if state["decoupled"]:
        universe = _decoupled.get((rank_map, state["serial"]))
        if universe is None:
            universe = Universe(rank_map, rank=state["rank"], decoupled=True)
            _decoupled[rank_map, state["serial"]] = universe
    else:
        universe = Universe.find(rank_map, state["serial"], _groups_in(state))
        if universe is None:
            universe = Universe(rank_map, rank=None if dist.is_initialized() else state["rank"])
    if universe.root is None and "root" in state:
        _rebuild(state["root"], universe)
    return _rebuild(state["mesh"], universe)


# Universes of decoupled meshes that are alive, by what they were saved from: meshes that were
# saved one by one from one universe are in one universe again.
_decoupled: weakref.WeakValueDictionary[tuple[RankMap, int], Universe] = (
    weakref.WeakValueDictionary()
)


def _groups_in(state: MeshState) -> list[tuple[AxisLayout, str | None]]:
    saved = [state["mesh"], *([state["root"]] if "root" in state else [])]
    return [
        (AxisLayout(*axis), key)
        for description in saved
        for axis, key in zip(description["axes"], description["keys"], strict=False)
    ]


def _describe(mesh: MeshBase) -> dict[str, Any]:
    return {
        "device_type": mesh.device_type,
        "axes": [(list(axis.sizes), list(axis.strides)) for axis in mesh.layout],
        "names": mesh.mesh_dim_names,
        "preserve_rank_order": mesh._preserve_rank_order,
        "flattened": mesh._description.flattened,
        "tags": mesh._description.tags,
        "keys": mesh.key_digests,
    }


def _rebuild(saved: dict[str, Any], universe: Universe) -> DeviceMesh:
    layout = Layout([AxisLayout(sizes, strides) for sizes, strides in saved["axes"]])
    description = MeshDescription(
        saved["device_type"],
        layout,
        saved["names"],
        saved["preserve_rank_order"],
        saved["flattened"] and compat.FLATTENED_ARE_APART,
        tuple(saved.get("tags", ())),
    )
    return DeviceMesh._in_universe(universe, description, _known_names(saved, layout, universe))


def _known_names(saved: dict[str, Any], layout: Layout, universe: Universe) -> list[str] | None:
    if universe.world is None:
        return None
    if universe.position is None:
        return []
    groups = [universe.known_group(*pair) for pair in zip(layout, saved["keys"], strict=False)]
    names = [group.name for group in groups if group is not None and group.name is not None]
    return names if len(names) == len(layout) else None


def _reduce(mesh: DeviceMesh) -> tuple[Any, tuple[MeshState]]:
    return load_mesh, (save_mesh(mesh),)


copyreg.pickle(DeviceMesh, _reduce)
torch.serialization.add_safe_globals([load_mesh])
