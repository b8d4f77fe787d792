"""How many ways each parallelism splits the work, and whether that fits the ranks: arithmetic.

Example:
    >>> data_parallel_size(None, 64, tp_size=8, cp_size=2)
    4
    >>> degree(None, "tp_size"), degree(8, "tp_size")
    (1, 8)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist

__all__ = [
    "ParallelismSizes",
    "check_replicas",
    "data_parallel_size",
    "degree",
    "is_degree",
    "rank_count",
    "refuse_degrees",
    "world_ranks",
]

_FEATURES = {
    "dp_replicate_size": "replicas of shards",
    "tp_size": "tensor parallelism",
    "pp_size": "pipeline parallelism",
    "cp_size": "context parallelism",
    "ep_size": "expert parallelism",
}


@dataclass(frozen=True, kw_only=True)
class ParallelismSizes:
    """How many ways each parallelism splits the work.

    Attributes:
        dp_size: data parallelism, replicas times shards; None or -1: what is left of the ranks.
        dp_replicate_size: replicas within data parallelism; None: 1, all of it shards.
        tp_size: tensor parallelism; for this and the others None is 1.
        pp_size: pipeline parallelism.
        cp_size: context parallelism.
        ep_size: expert parallelism, over the ranks of a pipeline stage.

    Raises:
        ValueError: a degree is neither an int above 0 nor None, nor -1 for dp_size.
    """

    dp_size: int | None = None
    dp_replicate_size: int | None = None
    tp_size: int | None = 1
    pp_size: int | None = 1
    cp_size: int | None = 1
    ep_size: int | None = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (field.name == "dp_size" and _is_inferred(value)):
                degree(value, field.name)


def is_degree(value: Any) -> bool:
    """Whether a value is a degree: an int above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_inferred(value: Any) -> bool:
    return value is None or (value == -1 and type(value) is int)


def degree(value: Any, name: str) -> int:
    """A degree as it is set; None is 1.

    Raises:
        ValueError: the value is neither None nor an int above 0.
    """
    if value is None:
        return 1
    if not is_degree(value):
        inferred = ", or -1 to infer it from the ranks" if name == "dp_size" else ""
        raise ValueError(
            f"{name}={value!r} of type {type(value).__name__} is no degree: give an int above 0"
            f"{inferred}, or None to leave it unset."
        )
    return int(value)


def refuse_degrees(parallelism: ParallelismSizes, strategy: str, names: Sequence[str]) -> None:
    """Refuse degrees that a strategy cannot apply.

    Args:
        parallelism: the degrees.
        strategy: what to call it in the message.
        names: of the fields that must be 1, or unset.

    Raises:
        ValueError: one of them is above 1.
    """
    for name in names:
        size = degree(getattr(parallelism, name), name)
        if size > 1:
            raise ValueError(
                f"{strategy} does not support {_FEATURES[name]}: {name}={size}. Set it to 1, or "
                "use FSDP2Config."
            )


def world_ranks(world_size: int | None) -> int:
    """Number of ranks of the world, given or that of the default process group.

    Raises:
        ValueError: none is given, and there is no process group; or it is no int above 0, or not
            that of the process group.
    """
    if world_size is None and not dist.is_initialized():
        raise ValueError(
            "world_size=None, and there is no process group to ask. Call init_process_group first, "
            "or give world_size."
        )
    if world_size is None:
        return dist.get_world_size()
    if not is_degree(world_size):
        raise ValueError(
            f"world_size={world_size!r} of type {type(world_size).__name__}: give an int above 0, "
            "or None for the size of the process group."
        )
    if dist.is_initialized() and dist.get_world_size() != world_size:
        raise ValueError(
            f"world_size={world_size}, but the world has {dist.get_world_size()} ranks. Give its "
            "size; `ranks` places a mesh on some of them."
        )
    return world_size


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
        dp_size: as set; None or -1 to infer it.
        count: number of ranks.
        other_sizes: the other degrees by name, for messages too.

    Raises:
        ValueError: the product of all is not the number of ranks, or dp_size is no degree.
    """
    product = math.prod(other_sizes.values())
    factors = " * ".join(f"{name}={size}" for name, size in other_sizes.items())
    if _is_inferred(dp_size):
        if count < 1 or count % product:
            raise ValueError(
                f"{count} ranks are no multiple of {factors} = {product}, so there is no dp_size. "
                "Choose degrees whose product divides the number of ranks."
            )
        return count // product
    dp_size = degree(dp_size, "dp_size")
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
