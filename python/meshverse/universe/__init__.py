"""One list of ranks, and every process group and mesh over it.

- `requests`: what a call says of its axes becomes one `GroupRequest` per axis.
- `consistency`: ranks compare what they are about to make.
- `making`: `GroupMaker` makes the groups of a universe: now, at first use, again, or shared.
- `groups`: `UniverseGroups` adds to that: finding known groups, taking in the user's, freeing all.
- `warm_up`: making and connecting groups before the first step.
- `owner`: `GroupOwner`, the half of a universe that owns groups.
- `parts`: universes over some of the ranks, on the same groups.
- `roots`: which mesh is whose root, where isolation tags differ.
- `universe`: `Universe`, which adds the meshes: each of them is there once.

A universe does not import the class of meshes, which is in a room above. It knows them by the
protocol `universe.Member`.
"""

from __future__ import annotations

from .universe import Universe

__all__ = ["Universe"]
