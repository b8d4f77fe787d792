"""Locations of ranks, and what groups cross: how many nodes one spans, what leaves each node.

A ring collective, such as NCCL's all-reduce of a large tensor, sends the same number of bytes from
each rank of a group to the next one, and from the last to the first. So the number of such steps
that leave a node says what its links carry, when the groups of one axis communicate all at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, RankGroups, RankMap
from meshverse.topology import Topology


@dataclass(frozen=True)
class Places:
    """Locations of the ranks of a world, at one level of the cluster.

    Attributes:
        level: name of the parts, such as "node".
        of_rank: the part that each rank is on: an int64 tensor of shape (world size,).
    """

    level: str
    of_rank: torch.Tensor

    @staticmethod
    @compat.untraced()
    def in_blocks(level: str, world_size: int, block_size: int) -> Places:
        """Put ranks 0 to n-1 on the first part, the next n on the second, and so on.

        Args:
            level: name of the parts.
            world_size: number of ranks.
            block_size: ranks a part. The last part may have fewer.

        Raises:
            ValueError: a part of less than one rank.
        """
        if block_size < 1:
            raise ValueError(f"{block_size} ranks on each {level}: give an int above 0.")
        return Places(level, torch.arange(world_size) // block_size)

    @staticmethod
    def of_topology(topology: Topology) -> list[Places]:
        """Return the levels of a topology, innermost first."""
        return [Places(level.name, level.of_rank) for level in topology.levels]

    @property
    @compat.untraced()
    def count(self) -> int:
        """Number of parts."""
        return int(self.of_rank.max()) + 1

    @property
    @compat.untraced()
    def block_size(self) -> int | None:
        """Ranks on each part, the last of which may have fewer; None if they are not such blocks.

        Blocks are as `in_blocks` has them, whatever the numbers of their parts.
        """
        world_size = len(self.of_rank)
        starts = 1 + (self.of_rank[1:] != self.of_rank[:-1]).nonzero().flatten()
        size = int(starts[0]) if len(starts) else world_size
        n_parts = int(self.of_rank.bincount().count_nonzero())
        is_each_once = n_parts == len(starts) + 1
        are_equal = torch.equal(starts, torch.arange(size, world_size, size))
        return size if is_each_once and are_equal else None


@dataclass(frozen=True)
class Crossing:
    """Parts of one level of the cluster that the groups of one axis cross.

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
        """Steps out of the busiest part, relative to the average; 1 where nothing leaves any."""
        return self.busiest / self.mean if self.busiest else 1.0


@compat.untraced()
def ranks_of_all_groups(axis: AxisLayout, world_size: int) -> torch.Tensor:
    """Return the ranks of all groups of an axis, shape (number of groups, group size). O(world)."""
    groups = RankGroups(axis, RankMap.identity(world_size))
    return torch.frombuffer(groups.all(), dtype=torch.int64).view(-1, axis.size)


@compat.untraced()
def crossing_of(ranks: torch.Tensor, places: Places) -> Crossing:
    """Count what groups cross.

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
