"""Which part of a cluster each rank is on: its node, its NVLink domain."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshverse import _torch_compat as compat
from meshverse.topology import Topology

__all__ = ["Places", "several"]


def several(level: str) -> str:
    """The plural of a level's name: "nodes", "switches"."""
    return f"{level}es" if level.endswith(("ch", "s", "x")) else f"{level}s"


@dataclass(frozen=True)
class Places:
    """Where the ranks of a world are, at one level of the cluster.

    Attributes:
        level: what the parts are called, such as "node".
        of_rank: the part that each rank is on: an int64 tensor of shape (world size,).
    """

    level: str
    of_rank: torch.Tensor

    @staticmethod
    @compat.untraced()
    def in_blocks(level: str, world_size: int, block_size: int) -> Places:
        """Ranks 0 to n-1 on the first part, the next n on the second, and so on.

        Args:
            level: what the parts are called.
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
        """The levels of a topology, innermost first."""
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
