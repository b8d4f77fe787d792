"""Meshes that torch's own class saved, loaded under `install()`.

torch names process groups by numbers, and saves a mesh with these names. When torch loads it, it
looks them up, which is right if the loading program created the same groups in the same order.
Under `install()` that is not so: groups of our meshes are not named by numbers, and a number may
name a group that the program itself created. So the loaded mesh becomes one of ours, with the
groups that live universes have for its axes, or without groups until it is bound.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse._core import RankGroups
from meshverse._torch_compat.saved_stock import (
    StockState,
    is_made_by_stock,
    is_unread,
    read_stock_state,
)
from meshverse.device_mesh.device_mesh import DeviceMesh
from meshverse.device_mesh.group_names import NoGroupNames
from meshverse.layouts.user_input import as_rank_tensor, rank_map_of
from meshverse.universe.universe import Universe
from meshverse.universe.world_universes import universes_over
from meshverse.world import World

from .pickles import load_saved, mesh_fields
from .state import SavedState, read_state

# Errors while reading saved attributes that are wrong, or of another version of torch.
_UNREADABLE = (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


def convert_stock_mesh(mesh: StockDeviceMesh, state: dict[str, Any]) -> bool:
    """Turn a stock mesh that is being loaded into one of ours, on this process's groups.

    It stays a mesh of torch's class if it has no groups. It also stays one if its groups are the
    default group, or were created in this process by torch's class, under the same names and for
    the same ranks: then it is a copy of a mesh of this process.

    Args:
        mesh: the mesh, still without attributes.
        state: its saved attributes.

    Returns:
        Whether this loaded the mesh; if not, torch has to.
    """
    if "_dim_group_names" not in state:
        return False
    try:
        stock = read_stock_state(state)
        saved = _as_ours(stock)
    except _UNREADABLE:
        _leave_without_groups(mesh, state)
        return True
    if _are_stocks(stock.group_names, saved):
        return False
    live = _live_mesh(saved)
    if live is None and is_unread(stock.root):
        _leave_without_groups(mesh, state)  # the loop below, in the call for its root, loads it
        return True
    # Other objects in the file refer to this object, so the live mesh cannot replace it. Instead,
    # the two share one `__dict__`, so that later changes such as those of bind() reach both.
    mesh.__class__ = DeviceMesh
    mesh.__dict__ = vars(live or load_saved(saved))
    for flattened in stock.flattened:
        if isinstance(vars(flattened).get("_dim_group_names"), NoGroupNames):
            convert_stock_mesh(flattened, dict(vars(flattened)))
    return True


def _as_ours(stock: StockState) -> SavedState:
    """Return a stock mesh as a saved state of ours, with the same checks. O(world size)."""
    state = {
        "ranks": rank_map_of(as_rank_tensor(stock.rank_map)).ranks().tolist(),
        "rank": stock.rank,
        "serial": 0,
        "decoupled": False,
        "mesh": stock.fields,
    }
    root = stock.root
    if isinstance(root, DeviceMesh):
        state["root"] = mesh_fields(root)
    elif root is not None and not is_unread(root):
        state["root"] = read_stock_state(vars(root)).fields
    return read_state(state)


def _are_stocks(names: list[str], saved: SavedState) -> bool:
    """Whether torch's class created live groups of these names and ranks in this process."""
    layout, ranks, world = saved.mesh.description.layout, saved.rank_map, World.current()
    position = None if world is None else ranks.position_of(world.rank)
    if position is None:
        return world is not None and not names  # a rank outside the mesh has no groups
    universes = universes_over(ranks)
    return len(names) == len(layout) and all(
        is_made_by_stock(name, RankGroups(axis, ranks).ranks_of(position))
        and not any(universe.groups.has_made(name) for universe in universes)
        for name, axis in zip(names, layout, strict=True)
    )


def _live_mesh(saved: SavedState) -> DeviceMesh | None:
    """Return the mesh in a live universe that may have it and has a group for each axis, or None.

    Of several such universes, this takes the one whose groups were requested for the most of these
    axis names, and of equals the first. The choice depends only on the groups and the order of
    their creation, which are the same on all ranks; it does not depend on slices, which may differ.
    """
    description = saved.mesh.description
    axes = list(zip(description.layout, description.axis_names or description.labels, strict=True))
    best: tuple[int, Universe, list[str]] | None = None
    for universe in universes_over(saved.rank_map) if World.current() else ():
        if universe.root is None or universe.root.device_type != description.device_type:
            continue
        if not universe.meshes.may_have(saved.descriptions):
            continue
        if universe.position is None:
            return DeviceMesh._get_or_create(universe, description, [])
        groups = [universe.groups.best_match(*axis) for axis in axes]
        known = [group for group in groups if group is not None and group.name is not None]
        n_named = sum(name in g.requests for (_, name), g in zip(axes, known, strict=False))
        if len(known) == len(axes) and (best is None or n_named > best[0]):
            best = n_named, universe, [str(group.name) for group in known]
    return None if best is None else DeviceMesh._get_or_create(best[1], description, best[2])


def _leave_without_groups(mesh: StockDeviceMesh, state: dict[str, Any]) -> None:
    vars(mesh).update(state)
    mesh._pg_registry = {}
    names = state["_dim_group_names"]
    ndim = len(names) if isinstance(names, list) else 1
    mesh._dim_group_names = NoGroupNames(ndim, _refuse)  # type: ignore[assignment]


def _refuse() -> None:
    raise RuntimeError(
        "This mesh was saved by torch's own DeviceMesh, and this process does not have its process "
        "groups, which the file names by numbers of the program that saved it. Create a mesh of "
        "the same ranks and axes with init_device_mesh() and load again, or use to_local()."
    )
