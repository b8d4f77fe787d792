"""A job that hangs on purpose, and what `meshverse.watch()` says of it: `python examples/hang.py`.

Four processes train on a mesh of (dp=2, tp=2). At step 3 the data of rank 3 do not come. So its
tensor-parallel partner waits in the forward, the others at the end of the step: torch alone would
say nothing for half an hour, and then name a number. After five seconds the watch says which rank
is missing, and the line that it is in. The example ends then, as a job could.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from multiprocessing.synchronize import Event

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import meshverse

_RANKS, _SECONDS = 4, 5


def load_batch(rank: int, step: int) -> torch.Tensor:
    """Return the batch of a step; one of them never comes."""
    if (rank, step) == (3, 3):
        time.sleep(1_000)
    return torch.full((4,), float(step))


def train(mesh: meshverse.DeviceMesh, steps: int) -> None:
    """Do what a step does for its process groups: a sum along tp, and one along dp."""
    for step in range(steps):
        batch = load_batch(mesh.universe.rank, step)
        dist.all_reduce(batch, group=mesh.get_group("tp"))
        dist.all_reduce(batch, group=mesh.get_group("dp"))


def run(rank: int, port: int, reported: Event) -> None:
    """Train on one rank, watched."""
    logging.basicConfig(format="%(message)s")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=_RANKS)

    def end(hang: meshverse.Hang) -> None:
        if hang.groups[0]["cause"] == "missing":
            reported.set()

    meshverse.watch(seconds=_SECONDS, on_stuck=end)
    mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    train(mesh, steps=10)


if __name__ == "__main__":
    context = mp.get_context("spawn")
    event = context.Event()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    ranks = [context.Process(target=run, args=(rank, free_port, event)) for rank in range(_RANKS)]
    for process in ranks:
        process.start()
    event.wait()
    time.sleep(1)  # in which the verdict is printed
    for process in ranks:
        process.kill()
