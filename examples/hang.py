"""A job that hangs on purpose, and what `meshverse.watch()` says of it: `python examples/hang.py`.

Four processes train on a mesh of (dp=2, tp=2). At step 3 the data of rank 3 do not come. So its
tensor-parallel partner waits in the forward, the others at the end of the step: torch alone would
say nothing for half an hour, and then name a number. After five seconds the watch says which rank
is missing, and the line that it is in. The example ends then, as a job could; or when a rank ends.
"""

from __future__ import annotations

import logging
import time
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import meshverse

_RANKS, _SECONDS = 4, 5


def load_batch(rank: int, step: int) -> torch.Tensor:
    """Return the batch of a step; one of them never comes."""
    if (rank, step) == (3, 3):
        time.sleep(1_000)  # sleep: what this example is about
    return torch.full((4,), float(step))


def train(mesh: meshverse.DeviceMesh, steps: int) -> None:
    """Do what a step does for its process groups: a sum along tp, and one along dp."""
    for step in range(steps):
        batch = load_batch(mesh.universe.rank, step)
        dist.all_reduce(batch, group=mesh.get_group("tp"))
        dist.all_reduce(batch, group=mesh.get_group("dp"))


def run(rank: int, port: int, reported: Connection) -> None:
    """Train on one rank, watched."""
    logging.basicConfig(format="%(message)s")
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)

    def note(hang: meshverse.Hang) -> None:
        if hang.groups[0]["cause"] == "missing":
            reported.send(True)

    meshverse.watch(seconds=_SECONDS, on_stuck=note)
    mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    train(mesh, steps=10)


if __name__ == "__main__":
    context = mp.get_context("spawn")
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=run, args=(rank, host.port, sender)) for rank in range(_RANKS)]
    for process in ranks:
        process.start()
    is_found = receiver in wait([receiver, *(process.sentinel for process in ranks)])
    time.sleep(1)  # sleep: often enough for the verdict on the other group, which may be missing
    for process in ranks:
        process.kill()
    raise SystemExit(None if is_found else "A rank has ended before the hang was found.")
