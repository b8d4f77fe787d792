"""A job of 8 ranks that hangs in the way that its first argument names.

Each rank writes the verdicts that it gets into the folder of the second argument, and its flight
recorder once there is a file `dump` in it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import meshverse
from helpers import one_gloo_thread
from meshverse import Hang, Watch
from meshverse.hang import write_dump

one_gloo_thread.use_torchs_own()  # a verdict names the line that called torch

FOLDER = Path(sys.argv[2])
ODD = 5  # the rank that does otherwise
# More than a busy machine needs for a call; of tests of the short tier, it is less.
LIMIT_SECONDS = {"trains": 1.0, "is_slow": 3.0, "orders_two_axes_otherwise": 3.0}.get(
    sys.argv[1], 5.0
)
_FOREVER = 1000.0


class Job:
    """The rank's mesh (pp=2, dp=2, tp=2), and what it does before it hangs."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        make = init_device_mesh if "stock" in sys.argv else meshverse.init_device_mesh
        self.mesh = make("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        self.pp, self.dp, self.tp = self.mesh.get_all_groups()
        self.tensor = torch.ones(4)
        for group in (self.pp, self.dp, self.tp):
            for _ in range(3):
                dist.all_reduce(self.tensor, group=group)

    @property
    def is_odd(self) -> bool:
        return self.rank == ODD


def skips(job: Job) -> None:
    if not job.is_odd:
        dist.all_reduce(job.tensor, group=job.tp)
    dist.barrier()


def skips_in_the_third_step(job: Job) -> None:
    parts = [torch.ones(2), torch.ones(2)] if dist.get_rank(job.dp) == 0 else None
    dist.scatter(torch.ones(2), parts, group=job.dp, group_src=0)  # its source alone has inputs
    for step in range(4):
        dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3), group=job.dp)
        dist.all_reduce(torch.ones(2), group=job.dp)
        if step != 2 or not job.is_odd:
            log_loss(job)


def log_loss(job: Job) -> None:
    dist.all_reduce(torch.ones(1), group=job.dp)


def skips_a_barrier_in_the_third_step(job: Job) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(2), group=job.tp)
        dist.all_reduce(torch.ones(3), group=job.dp)
        if step != 2 or not job.is_odd:
            dist.barrier()


def is_out_of_step(job: Job) -> None:
    for step in range(3):
        if step != 1 or not job.is_odd:
            dist.all_reduce(job.tensor, group=job.tp)  # the first of a step
        dist.all_reduce(job.tensor, group=job.tp)  # the second of a step


def is_out_of_step_and_sleeps(job: Job) -> None:
    is_out_of_step(job)
    load_data()


def sleeps(job: Job) -> None:
    if job.is_odd:
        load_data()
    dist.all_reduce(job.tensor)


def load_data() -> None:
    time.sleep(_FOREVER)  # sleep: for ever


def loops(job: Job) -> None:
    while job.is_odd:
        pass
    dist.all_reduce(job.tensor)


def is_stopped(job: Job) -> None:
    if job.is_odd:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(job.tensor)


def is_killed(job: Job) -> None:
    if job.is_odd:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(job.tensor)
    except RuntimeError:  # of gloo, on ranks that were connected to it in this call
        load_data()


def raises_and_goes_on(job: Job) -> None:
    try:
        if job.is_odd:
            raise ValueError("a bad batch")
        dist.all_reduce(job.tensor, group=job.tp)
    except ValueError:
        pass
    time.sleep(_FOREVER)  # sleep: for ever


def orders_two_axes_otherwise(job: Job) -> None:
    groups = [job.tp, job.dp] if job.rank not in (5, 6) else [job.dp, job.tp]
    for group in groups:
        dist.all_reduce(job.tensor, group=group)


def calls_another_operation(job: Job) -> None:
    if job.is_odd:
        dist.broadcast(job.tensor, group=job.tp, group_src=0)
    else:
        dist.all_reduce(job.tensor, group=job.tp)
    time.sleep(_FOREVER)  # sleep: for ever


def has_another_shape(job: Job) -> None:
    if job.rank == 0:  # gloo itself ends a rank that gets more bytes than it expects
        load_data()
    dist.broadcast(torch.ones(5 if job.is_odd else 4), 0)


def has_another_dtype(job: Job) -> None:
    if job.rank == 0:
        load_data()
    dist.broadcast(torch.ones(4, dtype=torch.float64 if job.is_odd else torch.float32), 0)


def has_another_root(job: Job) -> None:
    dist.broadcast(job.tensor, 3 if job.is_odd else 0)
    time.sleep(_FOREVER)  # sleep: for ever


def calls_from_two_threads(job: Job) -> None:
    def reduce() -> None:
        dist.all_reduce(job.tensor, group=job.tp)

    def broadcast() -> None:
        dist.broadcast(job.tensor.clone(), group=job.tp, group_src=0)

    calls = [broadcast, reduce] if job.is_odd else [reduce, broadcast]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        number = job.tp._get_sequence_number_for_group()
        thread.start()
        while job.tp._get_sequence_number_for_group() == number:
            time.sleep(0.01)  # sleep: it looks again
    for thread in threads:
        thread.join()


def loses_a_receive(job: Job) -> None:
    if job.rank >= 4:
        dist.recv(job.tensor, group=job.pp, group_src=0)
    elif job.rank != 1:
        dist.send(job.tensor, group=job.pp, group_dst=1)
    time.sleep(_FOREVER)  # sleep: for ever


def receives_from_any(job: Job) -> None:
    if job.is_odd:
        dist.recv(job.tensor, group=job.mesh["dp", "tp"].flatten("ep").get_group())
    else:
        job.mesh["dp", "tp"].flatten("ep")
    load_data()


def skips_a_group(job: Job) -> None:
    if not job.is_odd:
        dist.new_group([4, 5, 6, 7])
    dist.barrier()


class _Stage(torch.nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self._job = job

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._job.is_odd:
            load_data()
        return x * self.weight


def skips_a_mesh(job: Job) -> None:
    if job.is_odd:
        load_data()
    mesh = meshverse.init_device_mesh("cpu", (4, 2), mesh_dim_names=("edp", "ep"))
    dist.all_reduce(job.tensor, group=mesh.get_group("ep"))


def sleeps_in_a_pipeline(job: Job) -> None:
    index = dist.get_rank(job.pp)
    stage = PipelineStage(_Stage(job), index, 2, torch.device("cpu"), group=job.pp)
    targets = torch.zeros(4, 4)
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    if index == 0:
        schedule.step(torch.ones(4, 4))
    else:
        schedule.step(target=targets)
    time.sleep(_FOREVER)  # sleep: for ever


def exchanges_without_one(job: Job) -> None:
    experts = job.mesh["dp", "tp"].flatten("ep").get_group()
    if not job.is_odd:  # which has no tokens for the others, and forgets that they have some
        dist.all_to_all_single(torch.empty(4), job.tensor, group=experts)
    time.sleep(_FOREVER)  # sleep: for ever


def is_slow(job: Job) -> None:
    if job.is_odd:
        while not any(FOLDER.glob("verdict*")):
            time.sleep(0.1)  # sleep: it looks again
    dist.all_reduce(job.tensor)
    time.sleep(_FOREVER)  # sleep: for ever


def trains(job: Job) -> None:
    end = time.monotonic() + float(sys.argv[3])
    step = n_long = 0  # long: half the limit or more, as when the machine is busy
    go_on = torch.ones(1)
    while go_on.item():
        for group in (job.pp, job.dp, job.tp, None):
            begin = time.monotonic()
            dist.all_reduce(job.tensor, group=group)
            n_long += time.monotonic() - begin >= LIMIT_SECONDS / 2
        # Others wait in a step out of fifty, and that is no hang. sleep: the work of a step
        time.sleep(LIMIT_SECONDS / 3 if step % 50 == job.rank else 0.05)
        step += 1
        go_on.fill_(time.monotonic() < end or step < 100)
        begin = time.monotonic()
        dist.broadcast(go_on, 0)
        n_long += time.monotonic() - begin >= LIMIT_SECONDS / 2
    (FOLDER / f"long{job.rank}").write_text(str(n_long))


JOBS: dict[str, Callable[[Job], None]] = {
    job.__name__: job
    for job in (
        skips,
        skips_in_the_third_step,
        skips_a_barrier_in_the_third_step,
        is_out_of_step,
        is_out_of_step_and_sleeps,
        sleeps,
        loops,
        is_stopped,
        is_killed,
        raises_and_goes_on,
        orders_two_axes_otherwise,
        calls_another_operation,
        has_another_shape,
        has_another_dtype,
        has_another_root,
        calls_from_two_threads,
        loses_a_receive,
        receives_from_any,
        skips_a_group,
        skips_a_mesh,
        sleeps_in_a_pipeline,
        exchanges_without_one,
        is_slow,
        trains,
    )
}


def _write(hang: Hang) -> None:
    number = len(list(FOLDER.glob("*")))
    rank, logged = dist.get_rank(), "verdict" if hang.is_logged_here else "heard"
    text = json.dumps(asdict(hang))
    (FOLDER / f".{rank}").write_text(text)
    (FOLDER / f".{rank}").rename(FOLDER / f"{logged}_{rank}_{number}.json")


def _dump_when_asked(job: Job) -> None:
    while not (FOLDER / "dump").exists():
        time.sleep(0.1)  # sleep: it looks again
    write_dump(FOLDER / "dumps")
    if job.rank == 4 and isinstance(job.mesh, meshverse.DeviceMesh):
        (FOLDER / "mesh.json").write_text(job.mesh.universe.explain().to_json())
    (FOLDER / f"dumped{dist.get_rank()}").touch()


def _has_looked(watch: Watch) -> bool:
    """Return whether a watch has used the store, with its own connection."""
    watched = watch._watched
    return watched is not None and watched._next_alarm is not None


def _main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    dist.init_process_group("gloo")
    job = Job()
    threading.Thread(target=_dump_when_asked, args=(job,), daemon=True).start()
    watch = meshverse.watch(LIMIT_SECONDS, on_stuck=_write)
    assert watch is not None
    while not _has_looked(watch):
        time.sleep(0.01)  # sleep: it looks again
    (FOLDER / f"watching{job.rank}").touch()
    # Only what each rank does on purpose may keep others waiting, however busy the machine is.
    while len(list(FOLDER.glob("watching*"))) < dist.get_world_size():
        time.sleep(0.01)  # sleep: it looks again
    JOBS[sys.argv[1]](job)
    dist.barrier()
    watch.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
