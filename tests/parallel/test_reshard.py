"""Moves between meshes on real processes: any placements, bitwise, with no byte too many."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from helpers.crew import Crew
from helpers.turns import wait_until
from meshverse import DeviceMesh, Topology, init_device_mesh
from meshverse.parallel import Reshard, redistribute

pytestmark = pytest.mark.processes

_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64]


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class _Counted:
    """Bytes that this rank gave to `batch_isend_irecv`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = self.received = self.longest = 0
        exchange = dist.batch_isend_irecv

        def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
            for operation in operations:
                self.longest = max(self.longest, operation.tensor.nbytes)
                if operation.op is dist.isend:
                    self.sent += operation.tensor.nbytes
                else:
                    self.received += operation.tensor.nbytes
            return exchange(operations)

        monkeypatch.setattr(dist, "batch_isend_irecv", counting)


# --- random pairs of meshes and placements ----------------------------------------------------


def _random_mesh(chance: random.Random, world: int) -> Any:
    n = chance.choice([1, 2, 3, 4, 6, 8])
    n = min(n, world)
    ranks = chance.sample(range(world), n)
    if chance.random() < 0.6:
        first = chance.randrange(world - n + 1)
        ranks = list(range(first, first + n))
    shape = chance.choice(
        [
            s
            for s in [(1,), (2,), (3,), (4,), (2, 2), (6,), (2, 3), (8,), (2, 4), (4, 2), (2, 2, 2)]
            if _product(s) == n
        ]
    )
    if chance.random() < 0.5:
        return DeviceMesh("cpu", torch.tensor(ranks).view(shape), preserve_rank_order=True)
    stock = dist.device_mesh.DeviceMesh
    return stock("cpu", torch.tensor(ranks).view(shape), _init_backend=False)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _random_tensor(chance: random.Random, mesh: Any, whole: Tensor) -> Tensor | None:
    """This rank's part of a tensor on a mesh, laid out in any way."""
    if mesh.get_coordinate() is None:
        return None
    placements = [
        Shard(chance.randrange(whole.ndim)) if whole.ndim and chance.random() < 0.7 else Replicate()
        for _ in range(mesh.ndim)
    ]
    local = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = list(torch.chunk(local, mesh.size(axis), placement.dim))
            empty = local.narrow(placement.dim, 0, 0)
            parts += [empty] * (mesh.size(axis) - len(parts))
            local = parts[mesh.get_coordinate()[axis]]
    local = local.clone()
    if local.ndim > 1 and chance.random() < 0.3:  # not contiguous
        local = local.transpose(0, 1).contiguous().transpose(0, 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _random_moves(first: int, last: int) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    monkeypatch = pytest.MonkeyPatch()
    counted = _Counted(monkeypatch)
    for seed in range(first, last):
        chance = random.Random(seed)
        meshes = [_random_mesh(chance, world) for _ in range(2)]
        wholes = []
        for _ in range(chance.randrange(1, 5)):
            shape = [chance.choice([1, 2, 3, 5, 8, 13, 40]) for _ in range(chance.randrange(4))]
            numbers = torch.arange(_product(tuple(shape))).view(shape)
            wholes.append((numbers * 7 + seed).to(chance.choice(_DTYPES)))
        sides: list[dict[str, Tensor]] = [{}, {}]
        for number, whole in enumerate(wholes):
            is_plain = chance.random() < 0.2
            for side, mesh in enumerate(meshes):
                before = chance.getstate()
                tensor = _random_tensor(chance, mesh, whole)
                chance.setstate(before)
                chance.random()  # the same on all ranks from here
                if tensor is not None:
                    sides[side][f"t{number}"] = whole.clone() if is_plain else tensor
        source, target = sides
        expected = {
            name: _bits(t.to_local() if isinstance(t, DTensor) else t) for name, t in target.items()
        }
        for tensor in target.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        counted.sent = counted.received = counted.longest = 0
        buffer_bytes = chance.choice([1024, 4096, 1 << 20])
        everybody = list(range(world))
        with Reshard(
            source or None, target or None, ranks=everybody, buffer_bytes=buffer_bytes
        ) as move:
            for _ in range(2):
                move()
            traffic = move.explain()
        for name, tensor in target.items():
            found = _bits(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
            assert found == expected[name], (seed, rank, name)
        assert counted.received == 2 * sum(traffic.received.values()) == 2 * traffic.lower_bound
        assert counted.sent == 2 * sum(traffic.sent.values())
        assert traffic.staging <= buffer_bytes
        assert 4 * counted.longest <= buffer_bytes
    monkeypatch.undo()
    return last - first


@pytest.mark.parametrize(
    ("world", "seeds"),
    [
        (4, (0, 8)),
        pytest.param(4, (8, 100), marks=pytest.mark.long),
        pytest.param(8, (0, 10), marks=pytest.mark.long),
        pytest.param(8, (10, 100), marks=pytest.mark.sweep),
    ],
)
def test_random_moves(crew: Crew, world: int, seeds: tuple[int, int]) -> None:
    """Equal, bit by bit, to what a gather and a new distribution give."""
    n_moves = seeds[1] - seeds[0]
    assert crew.run(_random_moves, world, *seeds, timeout=900) == [n_moves] * world


# --- what trainers have -----------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 18)
        self.down = nn.Linear(18, 6)
        self.norm = nn.LayerNorm(6)


def _plan() -> dict[str, Any]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _trained(mesh: Any, rows: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block(), nn.Embedding(rows, 6))
    for block in list(model)[:2]:
        parallelize_module(block, mesh["tp"], _plan())
    parallelize_module(model, mesh["tp"], {"2": ColwiseParallel()})
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return dict(model.named_parameters())


def _whole(rows: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block(), nn.Embedding(rows, 6))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _from_fsdp2(rows: int) -> dict[str, Any]:
    """FSDP2 over tensor parallelism on ranks 0 to 3; generators of 2 and of 1 on the others."""
    rank = dist.get_rank()
    trainer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), ranks=[0, 1, 2, 3])
    generator = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), ranks=[4, 5])
    source = _trained(trainer, rows) if rank < 4 else None
    whole = _whole(rows)
    target: dict[str, Tensor] | None = None
    if rank in (4, 5):
        target = {
            name: distribute_tensor(torch.zeros_like(t), generator, [Shard(0)], src_data_rank=None)
            for name, t in whole.items()
        }
    if rank == 6:
        target = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in whole.items()}
    if rank == 7:
        return {}
    move = Reshard(source, target, ranks=list(range(7)))
    move()
    if rank in (4, 5):
        for name, tensor in target.items():
            assert torch.equal(tensor.full_tensor(), whole[name]), name
    if rank == 6:
        for name, tensor in target.items():
            assert torch.equal(tensor, whole[name].bfloat16()), name
    explained = move.explain().to_dict()
    move.close()
    return explained


@pytest.mark.parametrize("rows", [16, 9, 3])
def test_from_fsdp2_and_tensor_parallelism(crew: Crew, rows: int) -> None:
    """Strided shards, also where rows do not divide: 9 over tp 2, of which 5 and 4 over dp 2."""
    answers = crew.run(_from_fsdp2, 8, rows)
    total = sum(answers[rank]["lower_bound"] for rank in range(7))
    assert sum(sum(a["sent"].values()) for a in answers[:7]) == total
    # Sent as bfloat16 where the target is: half of what rank 6's values take in float32.
    numel = sum(t.numel() for t in _whole(rows).values())
    assert answers[6]["lower_bound"] == 2 * numel


# --- views, names, kinds ----------------------------------------------------------------------


def _fused() -> None:
    """q, k and v come into one tensor, under other names, from ranks that generate too."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    wholes = {
        name: torch.randn(8, 6, generator=torch.Generator().manual_seed(ord(name)))
        for name in "qkv"
    }
    source = {
        f"model.{name}": distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
        for name, whole in wholes.items()
    }
    fused = torch.zeros(6, 6)  # two rows of each on every rank
    target = {
        name: DTensor.from_local(fused[2 * number : 2 * number + 2], mesh, [Shard(0)])
        for number, name in enumerate("qkv")
    }
    move = Reshard(source, target, rename=lambda name: name.removeprefix("model."))
    move()
    mine = slice(2 * rank, 2 * rank + 2)
    expected = torch.cat([whole[mine] for whole in wholes.values()])
    assert torch.equal(fused, expected)

    # "As often as wanted", with the values of then; a handle as well.
    for tensor in source.values():
        tensor.to_local().mul_(2)
    work = move(async_op=True)
    work.wait()
    assert work.is_completed()
    assert torch.equal(fused, 2 * expected)
    work.wait()  # again does no harm

    # The same in inference mode, into inference tensors, and into parameters that need gradients.
    with torch.inference_mode():
        weights = torch.zeros(8, 6)
    parameter = nn.Parameter(torch.zeros(8, 6))
    version = parameter._version
    first = {"w": source["model.q"]}
    Reshard(first, {"w": weights})()
    Reshard(first, {"w": parameter})()
    assert torch.equal(weights, 2 * wholes["q"])
    assert torch.equal(parameter, weights)
    assert parameter._version > version, "autograd knows that the parameter has changed"
    move.close()
    with pytest.raises(RuntimeError, match="close"):
        move()


def test_views_names_and_runs(crew: Crew) -> None:
    crew.run(_fused, 4)


def _by_topology() -> tuple[dict[int, int], dict[int, int]]:
    rank = dist.get_rank()
    source = {"w": torch.ones(64, 64)} if rank in (0, 4) else None
    target = {"w": torch.zeros(64, 64)} if rank not in (0, 4) else None
    cluster = Topology({"node": list("aaaabbbb")})
    with Reshard(source, target, topology=cluster) as move:
        move()
        assert target is None or bool((target["w"] == 1).all())
        traffic = move.explain()
        return traffic.sent, traffic.received


def test_a_replica_on_the_node_sends(crew: Crew) -> None:
    for rank, (sent, received) in enumerate(crew.run(_by_topology, 8)):
        assert {peer // 4 for peer in {*sent, *received}} == {rank // 4}


def _onto_another_mesh() -> None:
    rank = dist.get_rank()
    first = init_device_mesh("cpu", (2,), ranks=[0, 1])
    second = init_device_mesh("cpu", (3,), ranks=[1, 2, 3])
    whole = torch.arange(35.0).view(7, 5)
    tensor = distribute_tensor(whole, first, [Shard(0)], src_data_rank=None) if rank < 2 else None
    moved = redistribute(tensor, second, [Shard(-1)])
    assert (moved.device_mesh, moved.placements) == (second, (Shard(1),))
    if rank > 0:
        assert torch.equal(moved.full_tensor(), whole)
    first_dim = redistribute(tensor, second, [Shard(-2)])
    assert (first_dim.placements, first_dim.shape) == ((Shard(0),), whole.shape)  # outside, too
    if rank < 2:
        with_gradient = tensor.detach().requires_grad_()
        same = redistribute(with_gradient, first, [Replicate()], ranks=[0, 1])
        assert torch.equal(same.to_local(), whole)
        assert same.requires_grad
        with pytest.raises(ValueError, match="2 placements for a mesh of 1 axes"):
            redistribute(tensor, first, [Replicate(), Shard(0)], ranks=[0, 1])
        with pytest.raises(TypeError, match="give Replicate"):
            redistribute(tensor, first, [Partial()], ranks=[0, 1])
    # Ranks without the tensor get the error too, at once.
    needs_gradient = None if tensor is None else tensor.detach().requires_grad_()
    with pytest.raises(RuntimeError, match="gradients do not pass between meshes"):
        redistribute(needs_gradient, second, [Shard(0)])
    with pytest.raises(ValueError, match="2 placements for a mesh of 1 axes"):
        redistribute(tensor, second, [Shard(0), Shard(1)])
    with pytest.raises(TypeError, match="give Replicate"):
        redistribute(tensor, second, [Partial()])
    with pytest.raises(TypeError, match="give a DTensor"):
        redistribute(whole, second, [Shard(0)])


def test_one_dtensor_onto_another_mesh(crew: Crew) -> None:
    crew.run(_onto_another_mesh, 4)


def _onto_its_own_mesh() -> None:
    rank, soon = dist.get_rank(), timedelta(seconds=60)
    mesh = init_device_mesh("cpu", (2,), ranks=[0, 1])
    whole = torch.arange(35.0).view(7, 5)
    tensor = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) if rank < 2 else None
    same = redistribute(tensor, mesh, [Replicate()], timeout=soon)
    assert same.device_mesh == mesh
    assert same.shape == whole.shape
    if rank < 2:
        assert torch.equal(same.to_local(), whole)
        assert same.to_local().data_ptr() != tensor.to_local().data_ptr()
    needs_gradient = None if tensor is None else tensor.detach().requires_grad_()
    with pytest.raises(RuntimeError, match=r"own mesh, call dtensor.redistribute\(\)"):
        redistribute(needs_gradient, mesh, [Replicate()], timeout=soon)


def test_one_dtensor_onto_its_own_mesh_with_ranks_outside(crew: Crew) -> None:
    crew.run(_onto_its_own_mesh, 3)


def _run_that_nobody_waits_for() -> list[str]:
    source, target = {"w": torch.ones(8)}, {"w": torch.zeros(8)}
    sides = (source, None) if dist.get_rank() == 0 else (None, target)
    move = Reshard(*sides)
    records: list[str] = []
    logger = logging.getLogger("meshverse.parallel.reshard.reshard")
    logger.addFilter(lambda record: records.append(record.getMessage()) or True)
    storage = target["w"].untyped_storage()
    for n_bytes in (0, 32):  # in the first run, the target has no memory
        if dist.get_rank() == 1:
            storage.resize_(n_bytes)
        work = move(async_op=True)
        wait_until(work.is_completed)
    work.wait()
    assert dist.get_rank() == 0 or torch.equal(target["w"], torch.ones(8))
    return records


def test_a_failed_run_that_nobody_waited_for_is_logged_at_the_next(crew: Crew) -> None:
    for (record,) in crew.run(_run_that_nobody_waits_for, 2):
        assert record.startswith("The last run failed, and nobody called wait() on its handle: ")
        assert "rank 1 cannot run" in record


def _many_runs() -> tuple[int, int, int]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    source = {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
    target = {"w": distribute_tensor(torch.zeros(64, 64), mesh, [Shard(1)], src_data_rank=None)}
    counts = []
    move = Reshard(source, target)
    for run in range(201):
        if run % 2:
            move()
        else:
            move(async_op=True).wait()
        if run in (100, 200):
            gc.collect()
            n_tensors = sum(isinstance(each, Tensor) for each in gc.get_objects())
            n_files = len(os.listdir("/proc/self/fd"))
            counts.append((n_tensors, n_files, threading.active_count()))
    assert torch.equal(target["w"].full_tensor(), whole)
    before, after = counts
    return tuple(b - a for a, b in zip(before, after, strict=True))


@pytest.mark.long
def test_many_runs_leave_nothing(crew: Crew) -> None:
    for more in crew.run(_many_runs, 2):
        # 50 runs of each kind lie between the counts. What gloo's threads, or that of the last
        # run, may still hold at a count are a few objects.
        assert max(more) < 50, more
