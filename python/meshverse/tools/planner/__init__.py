"""Plans: the process groups that a job would create, computed without the job or a GPU.

- `views`: ways to split a world, such as "pp=8,dp=160,tp=8".
- `crossings`: the part of the cluster that each rank is on, and the parts that groups span.
- `plan`: the distinct groups of all views, the groups that torch would create, and warnings.
- `saves`: what sharing saves, in numbers of the job and in published figures.

Example:
    >>> from meshverse.tools.planner import plan
    >>> planned = plan(["pp=2,dp=4,tp=8", "pp=2,batch=4,tp=8"], node_size=8)
    >>> [(group.axes, group.size, group.count) for group in planned.groups]
    [(('pp',), 2, 32), (('dp', 'batch'), 4, 16), (('tp',), 8, 8)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .plan import Plan, PlannedGroup, plan
from .saves import Saves, saves
from .views import View, trainer_views

if TYPE_CHECKING:
    from .crossings import Places
else:

    def __getattr__(name: str) -> object:
        if name != "Places":  # the only name that needs torch
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .crossings import Places

        return Places


__all__ = ["Places", "Plan", "PlannedGroup", "Saves", "View", "plan", "saves", "trainer_views"]
