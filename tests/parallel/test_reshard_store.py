"""Moves and the store: late ranks and wrong arguments are told of, and nothing is left there."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.crew import Crew
from meshverse import init_device_mesh
from meshverse.agreement import Board
from meshverse.parallel import Reshard, redistribute

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

_SOON = timedelta(seconds=4)


def _come_and_go() -> tuple[set[str], set[str]]:
    """Keys of the store that this rank wrote, and those that it removed."""
    rank = dist.get_rank()
    written, removed = set[str](), set[str]()
    first = init_device_mesh("cpu", (2,), ranks=[0, 1])
    second = init_device_mesh("cpu", (3,), ranks=[1, 2, 3])
    whole = torch.arange(12.0).view(6, 2)
    tensor = distribute_tensor(whole, first, [Shard(0)], src_data_rank=None) if rank < 2 else None
    with pytest.MonkeyPatch.context() as patch:
        for name, keys in {"write": written, "count": written, "remove": removed}.items():
            patch.setattr(Board, name, _noting(getattr(Board, name), keys))
        for _ in range(2):
            redistribute(tensor, second, [Shard(0)])
            source = {"w": torch.ones(4)} if rank == 0 else None
            with Reshard(source, {"w": torch.zeros(4)}):  # never run
                pass
            with Reshard(source, {"w": torch.zeros(4)} if rank == 1 else None) as move:
                move()  # ranks 2 and 3 have no part in it
        dist.barrier()
    return written, removed


def _noting(method: Callable[..., Any], keys: set[str]) -> Callable[..., Any]:
    def noted(self: Board, key: str, *arguments: Any) -> Any:
        if "reshard/" in key:
            keys.add(key)
        return method(self, key, *arguments)

    return noted


def test_moves_that_are_closed_leave_no_texts_in_the_store(four: Crew) -> None:
    written, removed = (set.union(*keys) for keys in zip(*four.run(_come_and_go, 4), strict=True))
    assert len(written) > 20
    assert written <= removed


def _late_once() -> None:
    rank = dist.get_rank()
    first = init_device_mesh("cpu", (1,), ranks=[0])
    second = init_device_mesh("cpu", (1,), ranks=[1])
    tensor = (
        distribute_tensor(torch.ones(4), first, [Shard(0)], src_data_rank=None)
        if not rank
        else None
    )
    soon = timedelta(seconds=1)
    if rank == 0:
        time.sleep(2)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no rank of the tensor's mesh came"):
        redistribute(tensor, second, [Shard(0)], timeout=soon)
    assert rank or time.monotonic() - began < 0.5  # who comes late is told at once
    dist.barrier()
    moved = redistribute(tensor, second, [Shard(0)], timeout=_SOON)
    assert rank == 0 or torch.equal(moved.to_local(), torch.ones(4))


def test_redistribute_after_a_rank_was_late(four: Crew) -> None:
    four.run(_late_once, 2)


def _one_argument_is_wrong(odd: int) -> None:
    rank = dist.get_rank()
    first = init_device_mesh("cpu", (2,), ranks=[0, 1])
    second = init_device_mesh("cpu", (2,), ranks=[2, 3])
    tensor = (
        distribute_tensor(torch.ones(4), first, [Shard(0)], src_data_rank=None)
        if rank < 2
        else None
    )
    began = time.monotonic()
    placements = [Shard(0), Shard(1)] if rank == odd else [Shard(0)]
    kind = ValueError if rank == odd else RuntimeError
    with pytest.raises(kind, match="2 placements for a mesh of 1 axes"):
        redistribute(tensor, second, placements, timeout=timedelta(seconds=20))
    assert time.monotonic() - began < 5
    dist.barrier()
    moved = redistribute(tensor, second, [Shard(0)], timeout=_SOON)
    assert rank < 2 or torch.equal(moved.full_tensor(), torch.ones(4))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_all_are_told_of_one_ranks_wrong_argument(four: Crew, odd: int) -> None:
    four.run(_one_argument_is_wrong, 4, odd)
