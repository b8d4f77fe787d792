"""Meshes that torch's own class saved, loaded where meshes are ours.

Such a mesh knows its process groups by the numbers they had in the program that saved it. Stock
looks these up again, which is right where the same groups were made in the same order. Here they
were not: no mesh of ours has a number for a name, and a number may be a group of the program's own.
So it becomes a mesh of ours, on the groups that live universes have for its axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse import _torch_compat as compat
from meshverse._core import Layout, RankGroups, RankMap
from meshverse.device_mesh.device_mesh import DeviceMesh
from meshverse.device_mesh.group_names import MissingGroups
from meshverse.layouts.derivation import MeshDescription
from meshverse.layouts.rank_tensors import plain_ranks, rank_map_of
from meshverse.universe.registry import universes_over
from meshverse.universe.universe import Universe
from meshverse.world.world import World

from .pickles import mesh_fields, universe_of
from .state import SavedState, read_state

__all__ = ["take_in"]

# What may be wrong with the attributes of a mesh from a file, or from another version of torch.
_UNREADABLE = (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


def take_in(mesh: StockDeviceMesh, state: dict[str, Any], *, is_installed: bool) -> bool:
    """Make a stock mesh that is being loaded one of ours, on the groups that are here.

    It stays torch's where it has no groups, and where its groups are here: it is a copy of a mesh
    that torch made in this process, or on the default group. Without `install()` it stays torch's
    as well where there are no groups of ours for it: torch's may be made later.

    Args:
        mesh: without attributes yet.
        state: the attributes that were saved.
        is_installed: whether torch's meshes shall be ours.

    Returns:
        Whether that was done; otherwise torch is to load it.
    """
    if "_dim_group_names" not in state:
        return False
    try:
        told = compat.read_stock_state(state)
        saved = _as_ours(told)
    except _UNREADABLE:
        if is_installed:
            _leave_without_groups(mesh, state)
        return is_installed
    layout, names = saved.mesh.description.layout, told.group_names
    if _are_stocks(names, layout, saved.rank_map):
        return False
    found = _groups_here(saved)
    if found is None and (not is_installed or _are_default_groups(names, layout)):
        return False
    if found is None and _is_unread(told.root):
        _leave_without_groups(mesh, state)  # for now: its root is still being loaded
        return True
    universe, group_names = found or (universe_of(saved), None)
    _become(mesh, universe, saved.mesh.description, group_names)
    for flattened in told.flattened:
        if _waits_for_root(flattened):
            take_in(flattened, dict(vars(flattened)), is_installed=is_installed)
    return True


def _as_ours(told: compat.StockState) -> SavedState:
    """What a stock mesh says, checked like a saved mesh of ours. O(world)."""
    ranks = rank_map_of(plain_ranks(told.rank_map))
    state = {
        "ranks": ranks.size if ranks.is_identity else ranks.ranks().tolist(),
        "rank": told.rank,
        "serial": 0,
        "decoupled": False,
        "mesh": _fields(told),
    }
    root = told.root
    if isinstance(root, DeviceMesh):
        state["root"] = mesh_fields(root)
    elif root is not None and not _is_unread(root):
        state["root"] = _fields(compat.read_stock_state(vars(root)))
    return read_state(state)


def _is_unread(mesh: object) -> bool:
    """Whether a mesh has no attributes yet, because the file's meshes refer to each other.

    Pickle then makes both objects first, and gives them their attributes one after the other.
    """
    return type(mesh) is StockDeviceMesh and not vars(mesh)


def _fields(told: compat.StockState) -> Mapping[str, Any]:
    return {
        "device_type": told.device_type,
        "axes": told.axes,
        "names": told.names,
        "preserve_rank_order": told.preserve_rank_order,
        "flattened": told.is_flattened,
        "keys": [],
        "tags": [],
    }


# --- which groups are here -----------------------------------------------------------------------


def _are_stocks(names: list[str], layout: Layout, rank_map: RankMap) -> bool:
    """Whether these are live groups of a mesh that torch made here, those of these axes."""
    world = World.current()
    if world is None:
        return False
    position = rank_map.position_of(world.rank)
    if position is None:
        return not names  # a rank outside has none
    if len(names) != len(layout):
        return False
    default = world.default_group.group_name
    others = [pair for pair in zip(names, layout, strict=True) if pair[0] != default]
    universes = universes_over(rank_map)
    return bool(others) and all(
        compat.is_made_by_stock(name, RankGroups(axis, rank_map).ranks_of(position))
        and not any(universe.groups.has_made(name) for universe in universes)
        for name, axis in others
    )


def _are_default_groups(names: list[str], layout: Layout) -> bool:
    world = World.current()
    if world is None or len(names) != len(layout):
        return False
    default = world.default_group.group_name
    return all(
        name == default and axis.size == world.size
        for name, axis in zip(names, layout, strict=True)
    )


def _groups_here(saved: SavedState) -> tuple[Universe, list[str]] | None:
    """The first live universe with a group for every axis, and their names.

    It depends on the groups that were made and their order, which are the same on all ranks. It
    does not depend on which meshes there are: each rank may have made other slices.
    """
    if not dist.is_initialized():
        return None
    description = saved.mesh.description
    names = description.axis_names or (None,) * len(description.layout)
    axes = list(zip(description.layout, names, strict=True))
    found = []
    for universe in universes_over(saved.rank_map):
        if universe.root is None or universe.root.device_type != description.device_type:
            continue
        if universe.position is None:
            return universe, []
        groups = [universe.groups.likeliest(axis, name) for axis, name in axes]
        known = [group for group in groups if group is not None and group.name is not None]
        if len(known) == len(axes):
            named = sum(
                name in group.requests for (_, name), group in zip(axes, known, strict=True)
            )
            found.append((named, universe, [str(group.name) for group in known]))
    if not found:
        return None
    _, universe, group_names = max(found, key=lambda candidate: candidate[0])  # the first of them
    return universe, group_names


# --- what becomes of the mesh --------------------------------------------------------------------


def _become(
    mesh: StockDeviceMesh,
    universe: Universe,
    description: MeshDescription,
    group_names: list[str] | None,
) -> None:
    # The objects that are being loaded refer to this very object. So it cannot be replaced by the
    # live mesh, if there is one. It becomes equal to it, on the same groups.
    vars(mesh).clear()
    mesh.__class__ = DeviceMesh
    assert isinstance(mesh, DeviceMesh)
    mesh._fill(universe, description, group_names)
    known = universe.meshes.intern(mesh, mesh._intern_key)
    if known is not mesh:
        universe.meshes.note(mesh)
    if known is not mesh and group_names is None:
        mesh.__dict__ = vars(known)  # bind() gives groups to the one that the universe knows


def _leave_without_groups(mesh: StockDeviceMesh, state: dict[str, Any]) -> None:
    vars(mesh).update(state)
    mesh._pg_registry = {}
    ndim = len(state["_dim_group_names"]) if isinstance(state["_dim_group_names"], list) else 1
    mesh._dim_group_names = MissingGroups(ndim, _refuse)  # type: ignore[assignment]


def _waits_for_root(mesh: object) -> bool:
    return type(mesh) is StockDeviceMesh and isinstance(
        vars(mesh).get("_dim_group_names"), MissingGroups
    )


def _refuse() -> None:
    raise RuntimeError(
        "This mesh was saved by torch's own DeviceMesh, and its process groups are not here: they "
        "were numbers of the program that saved it. Make a mesh of the same ranks and axes with "
        "init_device_mesh() and load again, or take what you need by to_local()."
    )
