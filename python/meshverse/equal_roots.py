"""One line in the log where a program makes the same mesh twice, on other process groups.

Equal meshes are one mesh to whatever keeps meshes by value, above all DTensor's caches. A program
that makes one twice, for two models, may not know that.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING

from .world import World

if TYPE_CHECKING:
    from .mesh_base import MeshBase

__all__ = ["note_root"]

_logger = logging.getLogger(__name__)


class _Roots:
    """The meshes that were made in one world, not derived, by what makes them equal."""

    def __init__(self) -> None:
        self.first: dict[Hashable, weakref.ref[MeshBase]] = {}
        self.is_said = False


_by_world: weakref.WeakKeyDictionary[World, _Roots] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # protects the above


def note_root(mesh: MeshBase) -> None:
    """Note a mesh that was made; log, once in a world, if it equals one on other process groups."""
    universe = mesh.universe
    if universe.world is None or not mesh.group_names:
        return
    with _lock:
        roots = _by_world.setdefault(universe.world, _Roots())
        if roots.is_said:
            return
        known = roots.first.setdefault((universe.rank_map, mesh.description), weakref.ref(mesh))
        first = known()
        if first is None or first.universe.is_over:
            roots.first[universe.rank_map, mesh.description] = weakref.ref(mesh)
            return
        if not _are_apart(first, mesh):
            return
        roots.is_said = True
    if universe.position == 0:
        _logger.warning(
            "%s over %s was made a second time, on process groups of its own. Equal meshes are one "
            "mesh to DTensor's caches, as in torch: what is computed from tensors on one may come "
            "out on the other, and communicate in its process groups. To have both on the same "
            "groups, make the second with universe=first.universe, or call meshverse.install("
            "share='world') before. To keep them apart, give the second isolate='some tag': meshes "
            "that are used at the same time need that. (This is said once.)",
            mesh,
            universe.rank_map,
        )


def _are_apart(one: MeshBase, other: MeshBase) -> bool:
    if one == other:
        names = zip(one.group_names or (), other.group_names or (), one.shape, strict=False)
        return any(mine != theirs and size > 1 for mine, theirs, size in names)
    return False
