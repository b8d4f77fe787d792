"""What one rank measures: the store, its clock, its own speed, and its process groups."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["GroupMeasured", "clock_readings", "compute_seconds", "measure_group", "store_seconds"]

_STORE_TURNS, _CLOCK_TURNS, _SMALL_TURNS, _LARGE_TURNS, _COMPUTE_TURNS = 20, 5, 20, 5, 5
_MATRIX = 512


@dataclass(frozen=True)
class GroupMeasured:
    """All-reduces in one process group, as one rank saw them.

    Attributes:
        ranks: global ranks of the group.
        is_right: whether the sums were.
        small_seconds: of one of 8 bytes; the median of 20.
        large_seconds: of one of `large_bytes`; the median of 5.
        large_bytes: its size.
    """

    ranks: tuple[int, ...]
    is_right: bool
    small_seconds: float
    large_seconds: float
    large_bytes: int


def store_seconds(store: dist.Store, rank: int) -> float:
    """Seconds that writing a key of the store and reading it take; the median of 20."""

    def write_and_read() -> None:
        store.set(f"latency {rank}", "x")
        store.get(f"latency {rank}")

    return _median_seconds(write_and_read, _STORE_TURNS)


def clock_readings() -> list[float]:
    """This rank's clock after each of 5 barriers, which all ranks leave at nearly the same time."""
    readings = []
    for _ in range(_CLOCK_TURNS):
        dist.barrier()
        readings.append(time.time())
    return readings


def compute_seconds(device: torch.device) -> float:
    """Seconds that a product of two 512 x 512 matrices takes on this rank; the median of 5."""
    matrix = torch.ones(_MATRIX, _MATRIX, device=device)

    def multiply() -> None:
        torch.mm(matrix, matrix)
        _finish(device)

    multiply()
    return _median_seconds(multiply, _COMPUTE_TURNS)


def measure_group(
    group: dist.ProcessGroup, device: torch.device, large_bytes: int
) -> GroupMeasured:
    """All-reduce known numbers in a group, then time small and large ones. Its members all call it.

    Args:
        group: to be measured.
        device: of the tensors.
        large_bytes: of the large tensor.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    # In one of these, a rank whose part is lost or comes twice changes the sum.
    mine = torch.tensor([dist.get_rank() + 1, 1], dtype=torch.int64, device=device)
    dist.all_reduce(mine, group=group)
    is_right = mine.tolist() == [sum(ranks) + len(ranks), len(ranks)]
    large = torch.ones(max(large_bytes // 4, 1), device=device)
    dist.all_reduce(large, group=group)
    is_right = is_right and bool((large == len(ranks)).all())
    small = torch.zeros(1, dtype=torch.int64, device=device)
    large.zero_()

    def reduce(tensor: torch.Tensor) -> Callable[[], None]:
        def once() -> None:
            dist.all_reduce(tensor, group=group)
            _finish(device)

        return once

    return GroupMeasured(
        ranks,
        is_right,
        _median_seconds(reduce(small), _SMALL_TURNS),
        _median_seconds(reduce(large), _LARGE_TURNS),
        large.nbytes,
    )


def _median_seconds(action: Callable[[], None], turns: int) -> float:
    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
