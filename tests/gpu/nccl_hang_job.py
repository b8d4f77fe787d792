"""A job of four ranks on NCCL and one GPU that hangs in the way that its first argument names.

The ranks write the watch's verdicts, and their dumps, into the folder of the second argument.
The third is the rank. Then the process ends, whatever the GPU waits for.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import meshverse
from meshverse import Hang
from meshverse.hang import write_dump
from one_gpu import one_gpu_environment

SIZE, ODD = 4, 3  # ODD: the rank that does otherwise
LIMIT_SECONDS, LONGEST_SECONDS = 3.0, 60.0
NAME, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
_FOREVER = 1000.0
_CYCLES = 200_000_000_000  # of the GPU's clock, about 2 GHz: longer than the job


class Job:
    """The rank's mesh (dp=2, tp=2), with groups that have been used, unless the first use hangs."""

    def __init__(self) -> None:
        self.mesh = meshverse.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        self.dp, self.tp = self.mesh.get_all_groups()
        self.tensor = torch.ones(4, device="cuda")

    @property
    def is_odd(self) -> bool:
        return RANK == ODD

    def use_all(self) -> None:
        for group in (self.dp, self.tp, None):
            for _ in range(3):
                dist.all_reduce(self.tensor, group=group)
        torch.cuda.synchronize()


def load_data() -> None:
    time.sleep(_FOREVER)  # sleep: for ever


def sleeps(job: Job) -> None:
    if job.is_odd:
        load_data()
    dist.all_reduce(job.tensor, group=job.tp)
    torch.cuda.synchronize()


def is_in_a_kernel(job: Job) -> None:
    if job.is_odd:
        torch.cuda._sleep(_CYCLES)
    dist.all_reduce(job.tensor, group=job.tp)
    torch.cuda.synchronize()


def calls_another_operation(job: Job) -> None:
    if job.is_odd:
        dist.all_gather_into_tensor(torch.empty(16, device="cuda"), job.tensor)
    else:
        dist.all_reduce(job.tensor)
    torch.cuda.synchronize()
    dist.all_reduce(job.tensor)
    torch.cuda.synchronize()


def has_another_shape(job: Job) -> None:
    dist.all_reduce(torch.ones(1 << 22 if job.is_odd else 4, device="cuda"))
    torch.cuda.synchronize()


def crosses_two_groups(job: Job) -> None:
    groups = [job.tp, job.dp] if RANK in (0, 3) else [job.dp, job.tp]
    for group in groups:
        dist.all_reduce(job.tensor, group=group)
    torch.cuda.synchronize()


def dies(job: Job) -> None:
    if job.is_odd:
        os._exit(0)
    dist.all_reduce(job.tensor)
    torch.cuda.synchronize()


def skips_then_barrier(job: Job) -> None:
    if not job.is_odd:
        dist.all_reduce(job.tensor, group=job.tp)
    dist.barrier()
    torch.cuda.synchronize()


def lacks_a_send(job: Job) -> None:
    peer = RANK ^ 1
    for turn in range(2):
        operations = []
        if turn == 0 or not job.is_odd:
            there = {"group_peer": peer % 2, "group": job.tp}
            operations = [
                dist.P2POp(dist.isend, job.tensor, **there),
                dist.P2POp(dist.irecv, torch.empty_like(job.tensor), **there),
            ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    if job.is_odd:
        load_data()
    torch.cuda.synchronize()


def receives_first(job: Job) -> None:
    if job.is_odd:
        load_data()
    if RANK == 2:
        dist.recv(torch.empty_like(job.tensor), group=job.tp, group_src=1)
    torch.cuda.synchronize()
    load_data()


def is_absent_from_the_first_call(job: Job) -> None:
    if job.is_odd:
        load_data()
    dist.all_reduce(job.tensor, group=job.tp)
    torch.cuda.synchronize()


def is_absent_from_the_first_call_as_its_first_rank(job: Job) -> None:
    if RANK == 2:
        load_data()
    dist.all_reduce(job.tensor, group=job.tp)
    torch.cuda.synchronize()


FIRST_USES = {
    receives_first,
    is_absent_from_the_first_call,
    is_absent_from_the_first_call_as_its_first_rank,
}
JOBS: dict[str, Callable[[Job], None]] = {
    job.__name__: job
    for job in (
        sleeps,
        is_in_a_kernel,
        calls_another_operation,
        has_another_shape,
        crosses_two_groups,
        dies,
        skips_then_barrier,
        lacks_a_send,
        *FIRST_USES,
    )
}


def _write(hang: Hang) -> None:
    number = len(list(FOLDER.glob("*")))
    logged = "verdict" if hang.is_logged_here else "heard"
    (FOLDER / f".{RANK}").write_text(json.dumps(asdict(hang)))
    (FOLDER / f".{RANK}").rename(FOLDER / f"{logged}_{RANK}_{number}.json")


def _finish(job: Job) -> None:
    """Wait for a verdict, or long enough; then write dumps, and end."""
    end = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < end and not any(FOLDER.glob("verdict*")):
        time.sleep(0.2)  # sleep: it looks again
    time.sleep(2 * LIMIT_SECONDS)  # sleep: further verdicts come meanwhile
    write_dump(FOLDER / "dumps")
    (FOLDER / f"dumped{RANK}").touch()
    if RANK == 0:
        (FOLDER / "mesh.json").write_text(job.mesh.universe.explain().to_json())
        if shutil.which("ncclras") is not None:
            command = [sys.executable, "-m", "meshverse", "hang", "--live", "localhost"]
            with open(FOLDER / "ras.txt", "w") as out:
                subprocess.run(command, stdout=out, stderr=out, check=False)
        (FOLDER / "looked").touch()
    while not (FOLDER / "looked").exists() and time.monotonic() < end + 90:
        time.sleep(0.1)  # sleep: it looks again
    os._exit(0)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    os.environ.update(one_gpu_environment(RANK))
    torch.cuda.set_device(0)
    store = dist.FileStore(str(FOLDER / "store"), SIZE)
    dist.init_process_group(
        "nccl", rank=RANK, world_size=SIZE, store=store, timeout=timedelta(minutes=5)
    )
    job = Job()
    if JOBS[NAME] not in FIRST_USES:
        job.use_all()
    (FOLDER / f"begun{RANK}").touch()
    while len(list(FOLDER.glob("begun*"))) < SIZE:
        time.sleep(0.01)  # sleep: it looks again
    watch = meshverse.watch(LIMIT_SECONDS, on_stuck=_write)
    assert watch is not None
    threading.Thread(target=_finish, args=(job,), daemon=True).start()
    JOBS[NAME](job)
    print(f"rank {RANK} went through: {job.tensor.tolist()}", file=sys.stderr)
    time.sleep(_FOREVER)  # sleep: until _finish ends the process


if __name__ == "__main__":
    main()
