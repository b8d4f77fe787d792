"""Locations of ranks, the parts of the cluster that groups span, and the traffic out of each part.

A ring collective, such as NCCL's all-reduce of a large tensor, sends the same number of bytes from
each rank of a group to the next one, and from the last to the first: these are ring steps. So the
number of ring steps that leave a node measures the load of its links when all groups of one axis
communicate at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshverse._core import AxisLayout, RankGroups, RankMap
from meshverse._torch_compat.tracing import outside_torch_modes
from meshverse.tools.topology import Topology


@dataclass(frozen=True)
class Places:
    """Locations of the ranks of a world, at one level of the cluster.

    Attributes:
        level: name of the level, such as "node".
        of_rank: number of the part that each rank is on: int64, shape (world size,).
    """

    level: str
    of_rank: torch.Tensor

    @staticmethod
    @outside_torch_modes()
    def in_blocks(level: str, world_size: int, block_size: int) -> Places:
        """Put ranks 0 to n-1 on the first part, the next n on the second, and so on.

        Args:
            level: name of the level.
            world_size: number of ranks.
            block_size: number n of ranks on each part. The last part may have fewer.

        Raises:
            ValueError: `block_size` is below 1.
        """
        if block_size < 1:
            raise ValueError(f"{block_size} ranks on each {level}: give an int above 0.")
        return Places(level, torch.arange(world_size) // block_size)

    @staticmethod
    def of_topology(topology: Topology) -> list[Places]:
        """Return the levels of a topology, innermost first."""
        return [Places(level.name, level.of_rank) for level in topology.levels]

    @property
    @outside_torch_modes()
    def count(self) -> int:
        """Number of parts."""
        return int(self.of_rank.max()) + 1

    @property
    @outside_torch_modes()
    def sizes(self) -> tuple[int, int]:
        """Smallest and largest number of ranks on a part."""
        sizes = self.of_rank.bincount()
        return int(sizes.min()), int(sizes.max())

    @property
    @outside_torch_modes()
    def block_size(self) -> int | None:
        """Number of ranks on each part, if the parts are blocks as `in_blocks` returns, else None.

        The blocks may be numbered in any order.
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
    """Parts of one level that the groups of one axis span, and the ring steps between them.

    Attributes:
        level: name of the level, such as "node".
        min: smallest number of parts that a group spans.
        max: largest number of parts that a group spans.
        busiest: number of ring steps that leave the busiest part, over all groups of the axis.
        mean: number of ring steps that leave a part, on average over the parts.
    """

    level: str
    min: int
    max: int
    busiest: int
    mean: float

    @property
    def imbalance(self) -> float:
        """Ring steps out of the busiest part, relative to the average; 1 if none leaves a part."""
        return self.busiest / self.mean if self.busiest else 1.0


@outside_torch_modes()
def crossings_of(axis: AxisLayout, places: Sequence[Places]) -> tuple[Crossing, ...]:
    """Count the parts that the groups of an axis span, and the ring steps that leave a part.

    Takes O(world size) time and memory.

    Args:
        axis: layout of the axis over ranks.
        places: part of each rank, at each level.
    """
    if not places:
        return ()
    groups = RankGroups(axis, RankMap.identity(len(places[0].of_rank)))
    ranks = torch.frombuffer(groups.all(), dtype=torch.int64).view(-1, axis.size)
    return tuple(_crossing(ranks, each) for each in places)


def _crossing(ranks: torch.Tensor, places: Places) -> Crossing:
    # One row per group rank: steps between rows are then steps along contiguous memory.
    parts = places.of_rank[ranks.T]
    leaves = parts != parts.roll(-1, dims=0)
    steps = torch.bincount(parts[leaves], minlength=places.count)
    if bool((parts[1:] < parts[:-1]).any()):  # sort only if needed: it is slow
        parts = parts.sort(dim=0).values
    spans = 1 + (parts[1:] != parts[:-1]).sum(dim=0)
    return Crossing(
        places.level,
        int(spans.min()),
        int(spans.max()),
        int(steps.max()),
        float(steps.double().mean()),
    )
