"""What the groups of one axis cross: how many nodes a group spans, what leaves each node.

A ring collective, such as NCCL's all-reduce of a large tensor, sends the same number of bytes from
each rank of a group to the next one, and from the last to the first. So the number of such steps
that leave a node says what its links carry, when the groups of one axis communicate all at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, RankGroups, RankMap

from .places import Places

__all__ = ["Crossing", "crossing_of", "ranks_of_all_groups"]


@dataclass(frozen=True)
class Crossing:
    """What the groups of one axis cross at one level of the cluster.

    Attributes:
        level: "node", ...
        min: of how many parts the groups with the fewest have ranks.
        max: the same of those with the most.
        busiest: steps of rings that leave the busiest part, of all groups of the axis together.
        mean: steps that leave a part, on average.
    """

    level: str
    min: int
    max: int
    busiest: int
    mean: float

    @property
    def imbalance(self) -> float:
        """What the busiest part sends out, relative to the average; 1 where nothing leaves any."""
        return self.busiest / self.mean if self.busiest else 1.0


@compat.untraced()
def ranks_of_all_groups(axis: AxisLayout, world_size: int) -> torch.Tensor:
    """The ranks of every group of an axis, shape (number of groups, group size). O(world)."""
    groups = RankGroups(axis, RankMap.identity(world_size))
    return torch.frombuffer(groups.all(), dtype=torch.int64).view(-1, axis.size)


@compat.untraced()
def crossing_of(ranks: torch.Tensor, places: Places) -> Crossing:
    """What groups cross.

    Args:
        ranks: of every group, in group-rank order, shape (number of groups, group size).
        places: where each rank is.
    """
    # A row for each place in a group: the steps between two rows then run along memory.
    parts = places.of_rank[ranks.T]
    leaves = parts != parts.roll(-1, dims=0)
    steps = torch.bincount(parts[leaves], minlength=places.count)
    if bool((parts[1:] < parts[:-1]).any()):  # mostly in order, and sorting takes long
        parts = parts.sort(dim=0).values
    spans = 1 + (parts[1:] != parts[:-1]).sum(dim=0)
    return Crossing(
        places.level,
        int(spans.min()),
        int(spans.max()),
        int(steps.max()),
        float(steps.double().mean()),
    )
