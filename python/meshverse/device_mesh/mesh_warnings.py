"""Warnings about a program's meshes, each logged once per world, on one rank.

- The groups of a mesh have their ranks in another order than the mesh, because torch sorts the
  ranks of a group. DTensor and FSDP2 assign shards by rank within the group, and
  `torch.distributed.checkpoint` by coordinate in the mesh. If the two disagree, saved tensors are
  permuted.
- A new root mesh equals an earlier one, but has other process groups. DTensor's caches look meshes
  up by value, so they can return either mesh. A program that creates the same mesh for two models
  may not expect that.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from meshverse._core import AxisLayout
from meshverse.locks import Claim, state_lock
from meshverse.universe.universe import Universe
from meshverse.world import WorldState

if TYPE_CHECKING:
    from .device_mesh import DeviceMesh

_logger = logging.getLogger(__name__)


class _Logged(WorldState):
    """The warnings that were logged in a world, and the root meshes that it has seen.

    Attributes:
        order: claim to log the warning about sorted ranks, which is never given back.
        equal: whether the warning about equal root meshes was logged.
        first: the universe and the group names of the first root mesh of each kind, by a key that
            equal meshes have in common.
    """

    def __init__(self) -> None:
        self.order = Claim()
        self.equal = False
        self.first: dict[Hashable, tuple[weakref.ref[Universe], tuple[str, ...]]] = {}


def warn_of_sorted_ranks(
    mesh: DeviceMesh, axes: Sequence[AxisLayout], names: Sequence[str]
) -> None:
    """Warn if a mesh lists ranks of an axis in an order that its sorted groups do not keep.

    Args:
        mesh: mesh whose groups have ascending ranks.
        axes: axes of the mesh along which groups were requested.
        names: names of these axes.
    """
    universe = mesh._universe
    world, ascends = universe.world, universe.groups.ascends
    pairs = zip(axes, names, strict=True)
    sorted_by_torch = [name for axis, name in pairs if not ascends(axis)]
    if not sorted_by_torch or world is None:
        return
    is_logged = not world.state(_Logged).order.take()
    if not is_logged and world.rank == universe.rank_map.rank_at(0):
        _logger.warning(
            "%s over %s lists ranks of axis %s in an order that is not ascending, and its process "
            "groups have them sorted, as in torch. DTensor and FSDP2 assign shards by the rank "
            "within the group, checkpoints by the coordinate in the mesh: saved tensors are "
            "permuted. Give preserve_rank_order=True (meshverse.DeviceMesh has it with every "
            "torch, torch's own class from 2.15 on), or create the mesh with "
            "meshverse.init_device_mesh(..., ranks=...). (Logged once.)",
            mesh,
            universe.rank_map,
            " and ".join(map(repr, sorted_by_torch)),
        )


def register_root(mesh: DeviceMesh) -> None:
    """Register a new root mesh; warn if it equals an earlier one that has other process groups."""
    universe, names = mesh._universe, mesh._names_of_groups
    world = universe.world
    if world is None or not names:
        return
    logged = world.state(_Logged)
    with state_lock.held:
        if logged.equal:
            return
        # The fingerprint instead of the rank map, which the key would keep alive.
        key = universe.rank_map.fingerprint, universe.decoupled_token, mesh._description
        first, first_names = logged.first.get(key, (None, names))
        if first is None or ((known := first()) is None or known.is_over):
            logged.first[key] = weakref.ref(universe), names
            return
        if names == first_names or not _are_apart(names, first_names, mesh.shape):
            return
        logged.equal = True
    if universe.position == 0:
        _logger.warning(
            "%s over %s was created a second time, on process groups of its own. As in torch, "
            "DTensor's caches cannot distinguish equal meshes: a result computed from tensors on "
            "one may be on the other, and communicate in its process groups. To have both on the "
            "same groups, create the second with universe=first.universe, or call "
            "meshverse.install(share='world') before the first mesh, as `meshverse run --share "
            "world` does. To keep them separate, give the second isolate='some tag': meshes that "
            "are used at the same time need that. (Logged once.)",
            mesh,
            universe.rank_map,
        )


def _are_apart(one: Sequence[str], other: Sequence[str], sizes: Sequence[int]) -> bool:
    pairs = zip(one, other, sizes, strict=True)
    return any(mine != theirs and size > 1 for mine, theirs, size in pairs)
