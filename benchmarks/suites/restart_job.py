"""A job that torchrun restarts: rank 0 kills itself at a step, and notes how long all took.

    torchrun ... restart_job.py FOLDER SIDE STEPS BETWEEN

Attributes of what it notes in FOLDER, as JSON: see `Noted` in `restarts.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from meshverse import init_device_mesh
from meshverse.parallel import Snapshot

WIDTH, LAYERS, BATCH = 256, 4, 64


class Training:
    """Model, optimizer and step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(
            zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True)
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def main(folder: Path, side: str, kill_at: int, between: int) -> None:
    """Train until one step after the kill."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"training": Training(model, optimizer)}
    snapshot = Snapshot(folder / "memory") if side == "Meshverse" else None
    checkpoints = folder / "checkpoints"
    if snapshot:
        first = snapshot.load(state) or 0
    else:
        first = max((int(path.parent.name) for path in checkpoints.glob("*/.metadata")), default=0)
        if first:
            dcp.load(state, checkpoint_id=checkpoints / str(first))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    began = time.monotonic_ns()
    for step in range(first, kill_at + 1):
        if step == kill_at and attempt == 0:
            _note(folder, "killed", step_ns=(time.monotonic_ns() - began) / kill_at)
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        if snapshot:
            snapshot.save(step + 1, state)
        elif (step + 1) % between == 0:
            dcp.save(state, checkpoint_id=checkpoints / str(step + 1))
    _note(folder, "resumed", first=first, loss=total.item())
    dist.barrier()
    dist.destroy_process_group()


def _note(folder: Path, name: str, **values: float) -> None:
    if dist.get_rank() == 0:
        (folder / name).write_text(json.dumps({"at_ns": time.monotonic_ns(), **values}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
