"""Ranks that failed before they joined a move build the next one with the others."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.crew import Crew
from helpers.turns import wait_until_they_wait
from meshverse import init_device_mesh
from meshverse.parallel import Reshard, redistribute
from meshverse.parallel.reshard.plan import transfers_of
from meshverse.parallel.reshard.sides import Side, Spec, describe

_SOON = timedelta(seconds=2)  # short-timeout: it must elapse
_LONG = timedelta(seconds=60)


def _one_raises_before(n_failures: int) -> None:
    rank = dist.get_rank()
    first, second = (init_device_mesh("cpu", (2,), ranks=ranks) for ranks in ([0, 1], [1, 2]))
    source = {"w": torch.ones(4)} if rank == 0 else None
    target = {"w": torch.zeros(4)}
    tensor = distribute_tensor(torch.ones(4), first, [Shard(0)]) if rank < 2 else None
    timeout = _LONG if rank else _SOON
    moves = (
        lambda: Reshard(source, target, timeout=timeout),
        lambda: redistribute(tensor, second, [Shard(0)], timeout=timeout),
    )
    for move_once in moves * n_failures:
        dist.barrier()  # nobody waits any more
        if rank == 0:
            wait_until_they_wait(2)
        if rank != 1:  # rank 1 fails by itself, and joins neither
            words = r"could not create.*missing: ranks \[1\]"
            with pytest.raises(RuntimeError, match=words):
                move_once()
    dist.barrier()
    for _ in range(2):
        target["w"].zero_()
        with Reshard(source, target, timeout=_LONG) as move:
            move()
        assert torch.equal(target["w"], torch.ones(4))
        moved = redistribute(tensor, second, [Shard(0)], timeout=_LONG)
        assert rank == 0 or torch.equal(moved.full_tensor(), torch.ones(4))


@pytest.mark.processes
@pytest.mark.parametrize(
    "n_failures",
    [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.sweep)],
)
def test_a_rank_that_raised_before_a_move_builds_the_next(crew: Crew, n_failures: int) -> None:
    crew.run(_one_raises_before, 3, n_failures)


def test_matching_the_tensors_of_20000_ranks_takes_seconds() -> None:
    """Every rank reads the descriptions of all ranks once, and each distinct content once."""
    world = 20_000
    side = Side({"w": Spec((8,), "float32", ((0, 8),))}, {"w": torch.zeros(8)})
    sender, contents = describe({"source": side, "target": None}, 1024, None)
    receiver, _ = describe({"source": None, "target": side}, 1024, None)
    transfers = transfers_of(dict.fromkeys(range(world), receiver) | {0: sender}, contents)
    assert [bool(transfers.parts("target", rank)[0]) for rank in (0, 19_999)] == [False, True]
