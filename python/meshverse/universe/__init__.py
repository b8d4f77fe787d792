"""Meshes over one list of ranks, and the process groups that they share.

- `universe`: `Universe`, which has groups, meshes and parts.
- `universe_groups`: `UniverseGroups`, its process groups, with the requests for each.
- `universe_calls`: `UniverseCalls`, the calls that request them, compared between ranks.
- `universe_meshes`: `UniverseMeshes`, the meshes of a universe, and a root mesh for each set of
  isolation tags.
- `world_universes`: the universes of a world, and the one that a saved mesh belongs to.
- `groups_of_ranks`: process groups of lists of ranks, without a mesh.
- `find_group`: the search for a group by c10d's name.
- `revival`: `revive`, by which a world that ended goes on with the next default group.
- `warm_up`: connects groups before the first step.
- `suspension`: frees the device memory of groups for a while.
- `groups_in_order`: the groups of some axes in one order on all ranks, for the last two.

These modules import the class `DeviceMesh` for type checking only: `device_mesh` imports them.
"""

from __future__ import annotations

from .universe import Universe

__all__ = ["Universe"]
