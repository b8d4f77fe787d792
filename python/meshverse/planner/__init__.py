"""Which process groups a layout of a job makes, worked out without the job: no process, no GPU.

- `views`: reading the views of a world, such as "pp=8,dp=160,tp=8".
- `places`: which node, or other part of the cluster, each rank is on.
- `crossings`: what the groups of one axis cross.
- `planned`: what was planned, as data and as a table.
- `plan`: the distinct groups of all views, what stock would make, and what to mind.

Example:
    >>> from meshverse.planner import plan
    >>> planned = plan(["pp=2,dp=4,tp=8", "pp=2,batch=4,tp=8"], node_size=8)
    >>> [(group.axes, group.size, group.count) for group in planned.groups]
    [(('pp',), 2, 32), (('dp', 'batch'), 4, 16), (('tp',), 8, 8)]
"""

from __future__ import annotations

from .places import Places
from .plan import plan
from .planned import Plan, PlannedGroup
from .views import View, trainer_views

__all__ = ["Places", "Plan", "PlannedGroup", "View", "plan", "trainer_views"]
