"""Warnings about a program's meshes that are logged once in a world, on one rank.

- Groups that list their ranks in another order than the mesh does. torch sorts the ranks of a
  group. DTensor and FSDP2 hand out shards by the rank in a group, and
  `torch.distributed.checkpoint` goes by the coordinate in the mesh: where the two differ, what is
  saved is permuted.
- The same mesh made twice, on other process groups. Code that looks meshes up by value, above all
  DTensor's caches, takes equal meshes for one another. A program that makes the same mesh twice,
  for two models, may not expect that.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from meshverse._core import AxisLayout
from meshverse.universe.universe import Universe
from meshverse.world.world import WorldState

if TYPE_CHECKING:
    from .device_mesh import DeviceMesh

_logger = logging.getLogger(__name__)


class _Logged(WorldState):
    """Which of the warnings were logged in a world.

    Attributes:
        order: acquired once, by the thread that logs the first one.
        equal: whether the second one was logged.
        first: by what makes meshes equal, the universe of the first one and its groups' names.
        lock: protects these two.
    """

    def __init__(self) -> None:
        self.order = threading.Lock()
        self.equal = False
        self.first: dict[Hashable, tuple[weakref.ref[Universe], tuple[str, ...]]] = {}
        self.lock = threading.Lock()


def note_order(mesh: DeviceMesh, axes: Sequence[AxisLayout], names: Sequence[str]) -> None:
    """Log that groups of a mesh have their ranks sorted, if the mesh lists them otherwise.

    Args:
        mesh: whose groups have ascending ranks.
        axes: along which groups were made.
        names: of these axes.
    """
    universe = mesh.universe
    world, ascends = universe.world, universe.groups.ascends
    pairs = zip(axes, names, strict=True)
    sorted_by_torch = [name for axis, name in pairs if not ascends(axis)]
    if not sorted_by_torch or world is None:
        return
    is_logged = not world.state(_Logged).order.acquire(blocking=False)
    if not is_logged and world.rank == universe.rank_map.rank_at(0):
        _logger.warning(
            "%s over %s lists ranks of axis %s in an order that is not ascending, and its process "
            "groups have them sorted, as torch's do. DTensor and FSDP2 hand out shards by the rank "
            "in a group, checkpoints go by the coordinate in the mesh: what is saved is permuted. "
            "Give preserve_rank_order=True (meshverse.DeviceMesh has it for every torch, torch's "
            "own from 2.15 on), or make the mesh with meshverse.init_device_mesh(..., ranks=...). "
            "(Logged once.)",
            mesh,
            universe.rank_map,
            " and ".join(map(repr, sorted_by_torch)),
        )


def note_root(mesh: DeviceMesh) -> None:
    """Note a root mesh that was made; log if it equals one on other process groups."""
    universe, names = mesh.universe, mesh.group_names
    world = universe.world
    if world is None or not names:
        return
    logged = world.state(_Logged)
    with logged.lock:
        if logged.equal:
            return
        # Not the rank map itself, which would be kept.
        key = universe.rank_map.fingerprint, universe.token, mesh.description
        first, first_names = logged.first.get(key, (None, names))
        if first is None or ((known := first()) is None or known.is_over):
            logged.first[key] = weakref.ref(universe), names
            return
        if names == first_names or not _are_apart(names, first_names, mesh.shape):
            return
        logged.equal = True
    if universe.position == 0:
        _logger.warning(
            "%s over %s was made a second time, on process groups of its own. Equal meshes are one "
            "mesh to DTensor's caches, as in torch: what is computed from tensors on one may come "
            "out on the other, and communicate in its process groups. To have both on the same "
            "groups, make the second with universe=first.universe, or call meshverse.install("
            "share='world') before. To keep them apart, give the second isolate='some tag': meshes "
            "that are used at the same time need that. (Logged once.)",
            mesh,
            universe.rank_map,
        )


def _are_apart(one: Sequence[str], other: Sequence[str], sizes: Sequence[int]) -> bool:
    pairs = zip(one, other, sizes, strict=True)
    return any(mine != theirs and size > 1 for mine, theirs, size in pairs)
