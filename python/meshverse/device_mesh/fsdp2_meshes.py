"""The universes of meshes that FSDP2 creates itself.

FSDP2 creates a root mesh in each call of `fully_shard`, though all of them may be equal. Each would
be in a universe of its own, and have process groups of its own:

- With an integer `reshard_after_forward`, it creates a mesh from the ranks of the mesh that it
  shards over. We let it belong to the universe of that mesh, like a derived mesh.
- Without `mesh=`, it creates a mesh over all ranks. All of these are on the default group, and we
  let them belong to one universe.

In both cases, the users of the shared groups have shared a group before: that of the mesh which
FSDP2 shards over. So they already have to call their collectives in the same order on all ranks.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from meshverse._core import Layout, RankMap
from meshverse._torch_compat.tracing import base_of
from meshverse.locks import state_lock
from meshverse.universe.universe import Universe
from meshverse.universe.universe_groups import shares_world_wide
from meshverse.world import World, WorldState

if TYPE_CHECKING:
    from .device_mesh import DeviceMesh


class _DefaultMeshes(WorldState):
    """The universe of the meshes over all ranks that FSDP2 creates in one world."""

    def __init__(self) -> None:
        # A strong reference, so that all ranks find it, whenever each collects garbage.
        self._universe: Universe | None = None

    def universe(self, rank_map: RankMap) -> Universe:
        """Return the universe, which is created at the first call, or after it has ended."""
        known = self._universe
        if known is not None and not known.is_over:
            return known
        made = Universe(rank_map)  # without the lock: in a further thread, it connects to the store
        with state_lock.held:
            if self._universe is known:
                self._universe = made
            return self._universe or made  # None if the world has ended meanwhile

    def end(self) -> None:
        """Drop the universe: this process may have another rank in the next world."""
        self._universe = None

    def reset_after_fork(self) -> None:
        """Drop the parent's universe in a forked process."""
        self._universe = None


def note_source(ranks: torch.Tensor, mesh: DeviceMesh) -> None:
    """Let `source_of` find the mesh whose ranks this tensor contains, and views of it."""
    ranks._ranks_of_mesh = weakref.ref(mesh)  # type: ignore[attr-defined]


def source_of(ranks: Any) -> DeviceMesh | None:
    """Return our mesh from whose tensor of ranks FSDP2 is creating a mesh, or None.

    Args:
        ranks: argument `mesh` of the new mesh. FSDP2 passes a view of `mesh.mesh`.
    """
    base = base_of(ranks) if type(ranks) is torch.Tensor else None
    reference: weakref.ref[DeviceMesh] | None = getattr(base, "_ranks_of_mesh", None)
    if reference is None or not _fsdp2_is_creating():
        return None
    source = reference()
    return source if source is not None and source._has_groups else None


def universe_of_default_mesh(layout: Layout, rank_map: RankMap) -> Universe | None:
    """Return the universe of FSDP2's default meshes if it is creating one, else None.

    Args:
        layout: layout of the new mesh, which has no options of its own.
        rank_map: ranks of the new mesh.
    """
    world = World.current()
    if (
        world is None
        or layout.shape != (world.size,)
        or not rank_map.is_identity
        or shares_world_wide()  # then all roots share their groups
        or not _fsdp2_is_creating()
    ):
        return None
    return world.state(_DefaultMeshes).universe(rank_map)


def _fsdp2_is_creating() -> bool:
    from meshverse._torch_compat.callers import fsdp2_is_creating

    return fsdp2_is_creating()
