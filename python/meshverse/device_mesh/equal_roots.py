"""One line in the log where a program makes the same mesh twice, on other process groups.

Code that looks meshes up by value, above all DTensor's caches, takes equal meshes for one another.
A program that makes the same mesh twice, for two models, may not expect that.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Hashable, Sequence

from meshverse.mesh.base import MeshBase
from meshverse.universe.universe import Universe
from meshverse.world.world import WorldState

__all__ = ["note_root"]

_logger = logging.getLogger(__name__)


class _Roots(WorldState):
    """The meshes that were made in one world, not derived from others.

    Attributes:
        first: by what makes meshes equal, the universe of the first one and its groups' names.
        is_said: whether the line was logged.
        lock: protects both.
    """

    def __init__(self) -> None:
        self.first: dict[Hashable, tuple[weakref.ref[Universe], tuple[str, ...]]] = {}
        self.is_said = False
        self.lock = threading.Lock()


def note_root(mesh: MeshBase) -> None:
    """Note a mesh that was made; log, once in a world, if it equals one on other process groups."""
    universe, names = mesh.universe, mesh.group_names
    world = universe.world
    if world is None or not names:
        return
    roots = world.state(_Roots)
    with roots.lock:
        if roots.is_said:
            return
        key = mesh._identity
        first, first_names = roots.first.get(key, (None, names))
        if first is None or ((known := first()) is None or known.is_over):
            roots.first[key] = weakref.ref(universe), names
            return
        if names == first_names or not _are_apart(names, first_names, mesh.shape):
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


def _are_apart(one: Sequence[str], other: Sequence[str], sizes: Sequence[int]) -> bool:
    pairs = zip(one, other, sizes, strict=True)
    return any(mine != theirs and size > 1 for mine, theirs, size in pairs)
