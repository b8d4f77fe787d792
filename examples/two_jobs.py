"""Weights from a trainer to an engine, each a job of its own: `python examples/two_jobs.py`.

The trainer (4 processes) has a model in FSDP2 and tensor parallelism. The engine (2 processes,
started by another command) has tensor parallelism and fuses the query, key and value weights.
Neither knows the other's default process group. After every step, a `Reshard` copies the weights
over a connection. The same weights are then copied by `full_tensor()` and broadcast, as programs
without it do, and both results are compared bit by bit.

Without arguments, this starts both jobs. Each alone, in two terminals:

    python examples/two_jobs.py trainer 127.0.0.1:29700
    python examples/two_jobs.py engine 127.0.0.1:29700
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import meshverse
from meshverse.parallel import Piece, Reshard

_TRAINERS, _ENGINES, _STEPS, _WIDTH = 4, 2, 3, 512
_TIMEOUT = timedelta(minutes=2)
_PARTS = ("q", "k", "v")


class Block(nn.Module):
    """Enough of a transformer's block: three projections in, one out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and what the projections make of it."""
        return x + self.out(self.q(x) * self.k(x).sigmoid() + self.v(x))


def train(rank: int, address: str, folder: str) -> None:
    """Be a rank of the trainer."""
    _start("trainer", rank, _TRAINERS, folder)
    mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Block()
    plan = {**{part: ColwiseParallel() for part in _PARTS}, "out": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights: dict[str, Any] = dict(model.named_parameters())
    with meshverse.connect(
        "weights", address, rank=rank, size=_TRAINERS + _ENGINES, timeout=_TIMEOUT
    ) as connection:
        reshard = Reshard(weights, None, group=connection)
        for step in range(_STEPS):
            x = torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier(group=connection.group)  # for the clock of the engine
            reshard()
            dist.barrier(group=connection.group)
            for name in sorted(weights):  # as programs do it without
                whole = weights[name].full_tensor().detach()
                dist.broadcast(whole.contiguous(), src=0, group=connection.group)
        if rank == 0:
            print(f"trainer, {reshard.explain()}", flush=True)
        dist.barrier(group=connection.group)  # all have what they wait for
    dist.destroy_process_group()


def serve(rank: int, address: str, folder: str) -> None:
    """Be a rank of the engine."""
    _start("engine", rank, _ENGINES, folder)
    mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    # Query, key and value in one weight, split by rows; the other one by columns.
    fused = distribute_tensor(torch.zeros(3 * _WIDTH, _WIDTH), mesh, [Shard(0)])
    out = distribute_tensor(torch.zeros(_WIDTH, _WIDTH), mesh, [Shard(1)])
    weights: dict[str, Any] = {
        f"{part}.weight": Piece(fused, 0, index * _WIDTH, _WIDTH)
        for index, part in enumerate(_PARTS)
    }
    weights["out.weight"] = out
    with meshverse.connect(
        "weights", address, rank=_TRAINERS + rank, size=_TRAINERS + _ENGINES, timeout=_TIMEOUT
    ) as connection:
        reshard = Reshard(None, weights, group=connection)
        for step in range(_STEPS):
            dist.barrier(group=connection.group)
            start = time.perf_counter()
            reshard()
            copied = time.perf_counter() - start
            dist.barrier(group=connection.group)
            start = time.perf_counter()
            whole = {name: torch.zeros(_WIDTH, _WIDTH) for name in sorted(weights)}
            for tensor in whole.values():
                dist.broadcast(tensor, src=0, group=connection.group)
            sent_whole = time.perf_counter() - start
            assert torch.equal(_full(out), whole["out.weight"])
            expected = torch.cat([whole[f"{part}.weight"] for part in _PARTS])
            assert torch.equal(_full(fused), expected)
            if rank == 0:
                print(
                    f"engine, step {step}: bit by bit the trainer's weights; copied in "
                    f"{copied * 1e3:.1f} ms, by full_tensor() and broadcast in "
                    f"{sent_whole * 1e3:.1f} ms",
                    flush=True,
                )
        if rank == 0:
            print(f"engine, {reshard.explain()}", flush=True)
        dist.barrier(group=connection.group)
    dist.destroy_process_group()


def _full(tensor: DTensor) -> Tensor:
    return tensor.full_tensor()


def _start(job: str, rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / job), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)


def _run_job(job: str, address: str) -> None:
    body, size = (train, _TRAINERS) if job == "trainer" else (serve, _ENGINES)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(body, (address, folder), nprocs=size)


def _run_both() -> None:
    with socket.socket() as held:
        # Bound until the jobs end, so no other program gets this port. A server may bind it too.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"  # port: still bound
        command = [sys.executable, __file__]
        jobs = [subprocess.Popen([*command, job, address]) for job in ("engine", "trainer")]
        statuses = [job.wait() for job in jobs]
    if any(statuses):
        sys.exit(f"A job has failed: {statuses}")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("trainer", "engine"):
        _run_job(*sys.argv[1:])
    elif len(sys.argv) == 1:
        _run_both()
    else:
        sys.exit(__doc__)
