"""How many ways each parallelism splits the work, and whether that fits the ranks: arithmetic.

Example:
    >>> data_parallel_size(None, 64, tp_size=8, cp_size=2)
    4
    >>> degree(None), degree(-1), degree(8)
    (1, 1, 8)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ParallelismSizes",
    "check_replicas",
    "data_parallel_size",
    "degree",
    "is_degree",
    "rank_count",
]


@dataclass(frozen=True, kw_only=True)
class ParallelismSizes:
    """How many ways each parallelism splits the work; what is no int above 0 counts as unset.

    Attributes:
        dp_size: data parallelism, replicas times shards; unset: what is left of the ranks.
        dp_replicate_size: replicas within data parallelism; unset: 1, all of it shards.
        tp_size: tensor parallelism.
        pp_size: pipeline parallelism.
        cp_size: context parallelism.
        ep_size: expert parallelism, over the ranks of a pipeline stage.
    """

    dp_size: int | None = None
    dp_replicate_size: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1


def is_degree(value: Any) -> bool:
    """Whether a value is set to a degree: an int above 0."""
    return isinstance(value, int) and value > 0


def degree(value: Any) -> int:
    """A degree as it is set; what is no int above 0 counts as 1."""
    return int(value) if is_degree(value) else 1


def rank_count(world_size: int, ranks: Sequence[int] | None) -> int:
    """Number of ranks to place a mesh on.

    Args:
        world_size: number of ranks of the world.
        ranks: global ranks to place it on, or None for the whole world.

    Raises:
        ValueError: no ranks, repeated ones, or some outside the world.
    """
    if ranks is None:
        return world_size
    repeated = [rank for rank, count in Counter(ranks).items() if count > 1]
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if repeated or outside or not ranks:
        raise ValueError(
            f"A mesh on {len(ranks)} of the {world_size} ranks of the world: {repeated} are "
            f"repeated and {outside} are outside the world. Give one or more of its ranks, each "
            "once."
        )
    return len(ranks)


def data_parallel_size(dp_size: int | None, count: int, **other_sizes: int) -> int:
    """Data parallelism as it is set, or what the other degrees leave of the ranks.

    Args:
        dp_size: as set; unset if it is no degree.
        count: number of ranks.
        other_sizes: the other degrees by name, for messages too.

    Raises:
        ValueError: the product of all is not the number of ranks.
    """
    product = math.prod(other_sizes.values())
    factors = " * ".join(f"{name}={size}" for name, size in other_sizes.items())
    if dp_size is None or not is_degree(dp_size):
        if count < 1 or count % product:
            raise ValueError(
                f"{count} ranks are no multiple of {factors} = {product}, so there is no dp_size. "
                "Choose degrees whose product divides the number of ranks."
            )
        return count // product
    if dp_size * product != count:
        raise ValueError(
            f"dp_size={dp_size} * {factors} = {dp_size * product}, but there are {count} ranks. "
            "Leave dp_size unset to infer it, or choose degrees that multiply out to the ranks."
        )
    return dp_size


def check_replicas(dp: int, replicas: int) -> None:
    """Check that data parallelism can be split into replicas of shards.

    Raises:
        ValueError: dp is no multiple of replicas, or leaves one shard where there are replicas.
    """
    if dp % replicas:
        raise ValueError(
            f"dp_size={dp} is no multiple of dp_replicate_size={replicas}: every replica needs the "
            "same number of shards."
        )
    if replicas >= dp and replicas != 1:
        raise ValueError(
            f"dp_replicate_size={replicas} must be below dp_size={dp}, or nothing is sharded. "
            "Use DDPConfig to replicate only."
        )
