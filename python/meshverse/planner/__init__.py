"""Plans: the process groups that a layout of a job makes, without the job, a process or a GPU.

- `views`: ways to split a world, such as "pp=8,dp=160,tp=8".
- `crossings`: which part of the cluster each rank is on, and what the groups of one axis cross.
- `plan`: the distinct groups of all views, what stock would make, and what to mind.

Example:
    >>> from meshverse.planner import plan
    >>> planned = plan(["pp=2,dp=4,tp=8", "pp=2,batch=4,tp=8"], node_size=8)
    >>> [(group.axes, group.size, group.count) for group in planned.groups]
    [(('pp',), 2, 32), (('dp', 'batch'), 4, 16), (('tp',), 8, 8)]
"""

from __future__ import annotations

from .crossings import Places
from .plan import Plan, PlannedGroup, plan
from .views import View, trainer_views

__all__ = ["Places", "Plan", "PlannedGroup", "View", "plan", "trainer_views"]
