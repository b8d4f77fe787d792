"""A job that keeps its state in memory: HSDP and tensor parallelism, and all that a trainer keeps.

Run by torchrun or by a crew. Its losses say whether every part of its state came back.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from meshverse import init_device_mesh
from meshverse.parallel import Snapshot

WIDTH, MICROBATCHES = 32, 2


class Block(nn.Module):
    """Layers with dropout, and all ranks' average of what passes, which no optimizer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.up(x).relu(), 0.1, self.training)
        out = self.down(hidden) + x
        mean = out.detach().mean(0)
        dist.all_reduce(mean)
        self.average.data.mul_(0.9).add_(mean, alpha=0.1 / dist.get_world_size())
        return out - self.average


class Data:
    """Batches of one rank: its samples in an order that is drawn anew for each epoch.

    Its state is the position in the epoch and the generators, as a data loader's is.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._samples = torch.randn(4 * 16, WIDTH, generator=self._generator)
        self._order = torch.empty(0, dtype=torch.int64)

    def batch(self) -> Tensor:
        if not len(self._order):
            self._order = torch.randperm(len(self._samples), generator=self._generator)
        chosen, self._order = self._order.tensor_split([4])
        noise = torch.randn(4, WIDTH, generator=self._generator)
        return self._samples[chosen] + noise

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": self._order.tolist(),
            "data": self._generator.get_state(),
            "dropout": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order = torch.tensor(state["order"], dtype=torch.int64)
        self._generator.set_state(state["data"])
        torch.set_rng_state(state["dropout"])


class Weights:
    """Model and optimizer, under the names of the parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class Job:
    """A training job on all ranks of the default group, whose state `state` is."""

    def __init__(self, replicas: int = 2) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(
            "cpu", (replicas, size // replicas // 2, 2), mesh_dim_names=("replicate", "shard", "tp")
        )
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block())
        for block in self.model:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["replicate", "shard"])
        fully_shard(self.model, mesh=mesh["replicate", "shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
        replica = rank // 2  # ranks of tp take the same data, and drop the same
        self.data = Data(seed=100 + replica)
        torch.manual_seed(200 + replica)
        self.state: dict[str, Any] = {
            "weights": Weights(self.model, self.optimizer),
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            f"data of rank {rank}": self.data,  # what each rank has for itself
        }

    def step(self) -> float:
        """Train one step, and return the mean loss over all ranks."""
        losses = torch.zeros(())
        for number in range(MICROBATCHES):
            self.model.set_requires_gradient_sync(number == MICROBATCHES - 1)
            loss = (self.model(self.data.batch()) ** 2).mean()
            self.scaler.scale(loss / MICROBATCHES).backward()
            losses += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        dist.all_reduce(losses)
        return losses.item()


def main(folder: str, losses: str, steps: str, copies: str, replicas: str, seconds: str) -> None:
    """Train until a step, and note each loss as `step loss`.

    The last line of a rank's notes says what it does: nothing while it begins, `load` while it
    loads, a loss while it saves, and else `from ...` or `saved`.
    """
    timeout = timedelta(seconds=float(seconds))
    dist.init_process_group("gloo", timeout=timeout)
    notes = Path(losses)
    notes.mkdir(exist_ok=True, parents=True)
    name = f"{time.time_ns()}.{dist.get_rank()}.{os.getpid()}"
    with (notes / name).open("a", buffering=1) as log:
        job, snapshot = Job(int(replicas)), Snapshot(folder, copies=int(copies))
        log.write("load\n")
        first = snapshot.load(job.state) or 0
        log.write(f"from {first} on {dist.get_world_size()}\n")
        for step in range(first, int(steps)):
            log.write(f"{step} {job.step().hex()}\n")
            snapshot.save(step + 1, job.state)
            log.write("saved\n")
        log.write("end\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
