"""Collectives for a training program: over all processes of torchrun, or of one process alone.

Example:
    >>> collective = build_collective(CollectiveConfig(device_type="cpu"))  # without torchrun
    >>> collective.rank, collective.world_size, collective.default_device
    (0, 1, device(type='cpu'))
    >>> collective.close()
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from .collectives.base import Collective, SingleProcessCollective
from .collectives.group import Meshes
from .collectives.mesh import MeshCollective, check_sizes

__all__ = [
    "Collective",
    "CollectiveConfig",
    "MeshCollective",
    "Meshes",
    "SingleProcessCollective",
    "build_collective",
]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """What collective to build.

    Attributes:
        device_type: "cpu", "cuda", "mps"; None for the GPU, or the CPU without one.
        tp_size: number of processes in a tensor-parallel group.
        sharding_world_size: number of shards; None for as many as a node has such groups.

    Raises:
        ValueError: a number is no int above 0.
    """

    device_type: str | None = None
    tp_size: int = 1
    sharding_world_size: int | None = None

    def __post_init__(self) -> None:
        check_sizes(tp_size=self.tp_size, sharding_world_size=self.sharding_world_size)


def build_collective(config: CollectiveConfig) -> Collective:
    """The collective of the processes that torchrun started, or of this one if it did not.

    Args:
        config: what to build.

    Raises:
        ValueError: only some of torchrun's environment variables are set; or the sizes do not fit
            the number of processes.
    """
    device_type = config.device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    missing = [name for name in _VARIABLES if name not in os.environ]
    if len(missing) == len(_VARIABLES):
        if config.tp_size != 1 or config.sharding_world_size not in (None, 1):
            raise ValueError(
                f"tp_size={config.tp_size} and sharding_world_size={config.sharding_world_size} "
                "for one process: start more of them with torchrun, or set both to 1."
            )
        return SingleProcessCollective(device_type)
    if missing:
        raise ValueError(
            f"The environment has not all of torchrun's {', '.join(_VARIABLES)}: {missing} are "
            "missing. Start the processes with torchrun, or unset the others for one process."
        )
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in _VARIABLES)
    return MeshCollective(
        rank,
        world_size,
        local_world_size=local_world_size,
        local_rank=local_rank,
        device_type=device_type,
        tp_size=config.tp_size,
        sharding_world_size=config.sharding_world_size,
    )
