"""Names of the core that extras use, beyond those of `meshverse` itself.

Extras import the rest of the core from here and from the modules that every part may use
(`_core`, `_torch_compat`, `explain`, `layouts`, `locks`, `store`, `wording`). Of the core's
classes, they use public attributes only.

- `on_world_started`: calls a function at the start of each world.
- `World`, `WorldState`: the world, with its store, and an extra's own state in it.
- `Rendezvous`: ranks wait for each other through the store, and exchange texts.
- `WorldUniverses`, `universes_here`: the universes of a world.
- `GroupRequest`: the ranks of a process group.
- `find_group_optional`, `finest_coordinate`: a group's axes by c10d's name; a rank's coordinate.
- `check_timeout`: raises unless it is a positive timedelta.
"""

from __future__ import annotations

from .agreement import Rendezvous
from .groups.request import GroupRequest
from .options.group_options import check_timeout
from .universe.find_group import find_group_optional, finest_coordinate
from .universe.world_universes import WorldUniverses, universes_here
from .world import World, WorldState, on_world_started

__all__ = [
    "GroupRequest",
    "Rendezvous",
    "World",
    "WorldState",
    "WorldUniverses",
    "check_timeout",
    "find_group_optional",
    "finest_coordinate",
    "on_world_started",
    "universes_here",
]
