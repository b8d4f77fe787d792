"""Meshes over one list of ranks, and the process groups that they share.

- `universe`: `Universe`, which has groups, meshes and parts.
- `groups`: `UniverseGroups`, its process groups, with the requests for each.
- `calls`: `UniverseCalls`, the calls that request them, compared between ranks.
- `plain_groups`: process groups of lists of ranks, without a mesh.
- `registry`: the universes of a world, and the one that a saved mesh belongs to.
- `meshes`: `UniverseMeshes`, the meshes of a universe, and a root mesh for each set of isolation
  tags.
- `revival`: `revive`, by which a world that ended goes on with the next default group.
- `warm_up`: connects groups before the first step.
- `suspension`: frees the device memory of groups for a while.

These modules import the class `DeviceMesh` for type checking only: `device_mesh` imports them.
"""

from __future__ import annotations

from .universe import Universe

__all__ = ["Universe"]
