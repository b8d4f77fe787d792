"""Jobs that sleep: all process groups end, and the default group is created again."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import torch.distributed as dist

__all__ = ["sleep"]

_sleeps: Counter[str] = Counter()  # by folder, which is that of one test


def sleep(folder: str, *, seconds: float = 120, is_broken: bool = False) -> None:
    """End the default group and all others, and create it again, as a new job would.

    Args:
        folder: for the new store, the same on all ranks of a test.
        seconds: timeout of the new default group.
        is_broken: whether a rank may be elsewhere, so that nobody waits for all before.
    """
    if not is_broken:
        dist.barrier()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    _sleeps[folder] += 1
    store = dist.FileStore(f"{folder}/life {_sleeps[folder]}", size)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
