"""One list of ranks, and every process group and mesh over it.

- `universe`: `Universe`, which has groups, meshes and parts.
- `groups`: `UniverseGroups`, its process groups, with what was requested of each.
- `plain_groups`: process groups of lists of ranks, without a mesh.
- `registry`: the universes of a world, and which one a saved mesh is of.
- `meshes`: `UniverseMeshes`, each mesh once; which is whose root, where isolation tags differ.
- `warm_up`, `suspension`: connecting groups before the first step; giving back their memory.

The class of meshes is in a room above: at run time, a universe only has meshes and calls them.
"""

from __future__ import annotations

from .revival import revive
from .universe import Universe

__all__ = ["Universe", "revive"]
