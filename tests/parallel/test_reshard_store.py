"""Late ranks and wrong arguments raise on all ranks; moves leave nothing of theirs in the store."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.crew import Crew
from meshverse import init_device_mesh
from meshverse.parallel import Reshard, redistribute

pytestmark = pytest.mark.processes

_LONG = timedelta(seconds=60)


def _come_and_go() -> list[int]:
    """Keys of the store after each round of moves."""
    rank = dist.get_rank()
    first = init_device_mesh("cpu", (2,), ranks=[0, 1])
    second = init_device_mesh("cpu", (3,), ranks=[1, 2, 3])
    whole = torch.arange(12.0).view(6, 2)
    tensor = distribute_tensor(whole, first, [Shard(0)], src_data_rank=None) if rank < 2 else None
    store = dist.distributed_c10d._get_default_store()
    n_keys, n_groups = [], []
    for _ in range(4):
        redistribute(tensor, second, [Shard(0)])
        source = {"w": torch.ones(4)} if rank == 0 else None
        with Reshard(source, {"w": torch.zeros(4)}):  # never run
            pass
        with pytest.raises((ValueError, RuntimeError)):
            Reshard(source, {"v": torch.zeros(4)})
        with Reshard(source, {"w": torch.zeros(4)} if rank == 1 else None) as move:
            move()  # ranks 2 and 3 have no tensors
        dist.barrier()
        n_keys.append(store.num_keys())
        n_groups.append(len(dist.distributed_c10d._world.pg_map))
        dist.barrier()
    assert n_groups == n_groups[:1] * 4
    return n_keys


def _groups_only() -> list[int]:
    """As `_come_and_go`, of as many process groups alone."""
    store = dist.distributed_c10d._get_default_store()
    n_keys = []
    for _ in range(4):
        for _ in range(4):
            mesh = init_device_mesh("cpu", (4,), isolate="own")
            dist.barrier(group=mesh.get_group())
            mesh.universe.destroy()
        dist.barrier()
        n_keys.append(store.num_keys())
        dist.barrier()
    return n_keys


@pytest.mark.long
def test_moves_leave_no_more_in_the_store_than_their_process_groups(crew: Crew) -> None:
    """c10d leaves some keys of each group there."""
    moves, groups = crew.run(_come_and_go, 4)[0], crew.run(_groups_only, 4)[0]
    assert moves[3] - moves[1] <= groups[3] - groups[1]


def _late_once() -> None:
    rank = dist.get_rank()
    first = init_device_mesh("cpu", (1,), ranks=[0])
    second = init_device_mesh("cpu", (1,), ranks=[1])
    whole = torch.ones(4)
    tensor = None if rank else distribute_tensor(whole, first, [Shard(0)], src_data_rank=None)
    timeout = timedelta(seconds=2)  # short-timeout: it must elapse
    if rank == 0:
        dist.barrier()  # until the other rank has given up
    with pytest.raises(RuntimeError, match="redistribute: ranks 0 to 1 could not create"):
        redistribute(tensor, second, [Shard(0)], timeout=timeout)
    if rank:
        dist.barrier()
    dist.barrier()
    moved = redistribute(tensor, second, [Shard(0)], timeout=_LONG)
    assert rank == 0 or torch.equal(moved.to_local(), torch.ones(4))


@pytest.mark.long
def test_redistribute_after_a_rank_was_late(crew: Crew) -> None:
    crew.run(_late_once, 2)


def _one_argument_is_wrong(odd: int) -> None:
    rank = dist.get_rank()
    first = init_device_mesh("cpu", (2,), ranks=[0, 1])
    second = init_device_mesh("cpu", (2,), ranks=[2, 3])
    tensor = (
        distribute_tensor(torch.ones(4), first, [Shard(0)], src_data_rank=None)
        if rank < 2
        else None
    )
    placements = [Shard(0), Shard(1)] if rank == odd else [Shard(0)]
    kind = ValueError if rank == odd else RuntimeError
    with pytest.raises(kind, match="2 placements for a mesh of 1 axes"):
        redistribute(tensor, second, placements, timeout=_LONG)
    dist.barrier()
    moved = redistribute(tensor, second, [Shard(0)], timeout=_LONG)
    assert rank < 2 or torch.equal(moved.full_tensor(), torch.ones(4))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_wrong_argument_of_one_rank_raises_on_all(crew: Crew, odd: int) -> None:
    crew.run(_one_argument_is_wrong, 4, odd)
