"""One list of ranks, and every process group and mesh over it.

- `requests`: what is said of axes becomes one `GroupRequest` an axis.
- `consistency`: ranks compare what they are about to make.
- `making`: `GroupMaker` makes the groups of a universe: now, at first use, again, or shared.
- `groups`: `UniverseGroups` adds to that: finding known groups, taking in the user's, freeing all.
- `warm_up`: making and connecting groups before the first step.
- `owner`: `GroupOwner`, the half of a universe that owns groups.
- `roots`: which mesh is whose root, where isolation tags differ.
- `universe`: `Universe`, which adds the meshes: each of them is there once.

A universe knows meshes by what it asks of them only (`universe.Member`): their class is above.
"""

from __future__ import annotations

from .universe import Universe

__all__ = ["Universe"]
