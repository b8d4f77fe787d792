"""A job of four ranks on NCCL and one GPU: rank 3 leaves out a collective of a flattened axis.

Its arguments are a folder for the store, the mesh's timeout in seconds, and the rank.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import meshverse
from one_gpu import one_gpu_environment

SIZE, ABSENT = 4, 3
_FOREVER = 1000.0


def main() -> None:
    folder, seconds, rank = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    os.environ.update(one_gpu_environment(rank))
    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", SIZE)
    dist.init_process_group(
        "nccl", rank=rank, world_size=SIZE, store=store, timeout=timedelta(minutes=10)
    )
    mesh = meshverse.init_device_mesh(
        "cuda", (2, 2), mesh_dim_names=("dp", "tp"), timeout=timedelta(seconds=seconds)
    )
    group = mesh.flatten("all").get_group()
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    print("begun", flush=True)
    if rank != ABSENT:
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        print("ended", flush=True)
    time.sleep(_FOREVER)  # sleep: until the watchdog or the test ends the process


if __name__ == "__main__":
    main()
