"""Runs of the job on processes that replace a lost rank without a restart, and one undisturbed.

`python -m suites.repair_jobs WAY PLAN` runs one. Ranks and spares are forks of a process that has
torch loaded. For each rank that was lost, a new spare is started once the job goes on.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch
import torch._dynamo  # as a spare that waits can have loaded everything
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as stock_mesh

import meshverse
from meshverse import repair
from meshverse.repair import job as repair_job
from meshverse.repair.membership import Membership
from suites.repair_model import RANKS, Plan, build, load, note, save
from suites.repair_torchrun import train

__all__ = ["WAYS"]

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=10)  # of collectives, and Meshverse's default of `lost_after`
_SETTLED_SECONDS = 0.5  # until a spare that has come waits


class Launcher:
    """Starts the ranks and the spares of a job, and sees which ones end.

    Attributes:
        n_started: number of processes that were started.
    """

    def __init__(self, way: str, plan: Plan) -> None:
        self._way, self._plan, self.n_started = way, plan, 0
        self.store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["suites.repair_jobs"])
        self._processes: dict[int, Any] = {}  # by sentinel

    def start(self) -> None:
        process = self._context.Process(
            target=_work,
            args=(self._way, self.n_started, self.store.port, self._plan),
            daemon=True,
        )
        process.start()
        self._processes[process.sentinel] = self.n_started, process
        self.n_started += 1

    def ended(self) -> list[tuple[int, int]]:
        """Wait a moment; return the numbers and the exit codes of processes that have ended."""
        found = []
        for sentinel in wait(list(self._processes), timeout=0.05):
            number, process = self._processes.pop(sentinel)
            process.join()
            found.append((number, process.exitcode))
        return found

    def run(self) -> None:
        """Run a job to its end, and replace what is lost."""
        has_spares = self._way != "undisturbed"
        ranks, world = list(range(RANKS)), 0
        self.store.set("world/0", json.dumps(ranks))
        for _ in range(RANKS + has_spares):
            self.start()
        n_done = 0
        while n_done < RANKS:
            for number, code in self.ended():
                if code == 0:
                    n_done += number in ranks  # not a spare
                elif number not in ranks or code > 0:
                    raise RuntimeError(f"process {number} ended with status {code}")
                else:
                    spare = max({*range(self.n_started)} - {*ranks})
                    ranks[ranks.index(number)] = spare
                    world += 1
                    self.store.set(f"world/{world}", json.dumps(ranks))
            if self.n_started == RANKS + world and has_spares and self._goes_on(world):
                self.start()
        for _, process in self._processes.values():  # the last spare
            process.kill()

    def _goes_on(self, world: int) -> bool:
        return bool(self.store.check([f"goes on/{world}"]))


def _work(way: str, number: int, port: int, plan: Plan) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=600))
    WAYS[way](number, store, plan)


def _undisturbed(number: int, store: dist.TCPStore, plan: Plan) -> None:
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    train(plan, number)
    dist.destroy_process_group()


def _before_step(store: dist.TCPStore, plan: Plan, step: int) -> None:
    """Wait for the spare, if a rank is about to be lost."""
    if plan.is_next(step):
        store.wait([f"spare/{sorted(plan.losses).index(step)}"])
        time.sleep(_SETTLED_SECONDS)


def _after_step(store: dist.TCPStore, plan: Plan, step: int, rank: int) -> None:
    """Ask for the next spare, if the step had to be repeated."""
    if rank == 0 and step in plan.losses:
        store.set(f"goes on/{sorted(plan.losses).index(step) + 1}", "")


def _is_ready(store: dist.TCPStore, number: int) -> None:
    if number >= RANKS:
        store.set(f"spare/{number - RANKS}", "")


# --- with meshverse.repair ------------------------------------------------------------------------


def _ours(number: int, store: dist.TCPStore, plan: Plan) -> None:
    _note_after(plan, Membership, "next_world", "decided")
    _note_after(plan, dist, "init_process_group", "default group")
    _note_after(plan, repair_job, "revive_with_new_ranks", "revived")
    built: Any = None

    def build_here() -> tuple[Any, Any]:
        nonlocal built
        built = build(meshverse.init_device_mesh, plan.compiled)
        note(plan, "built")
        return built.model, built.optimizer

    _is_ready(store, number)
    with repair.join(
        f"{_HOST}:{store.port}",
        ranks=RANKS,
        build=build_here,
        rank=number if number < RANKS else None,
        backend="gloo",
        timeout=_TIMEOUT,
    ) as job:
        note(plan, "state")
        while job.step < plan.steps:
            try:
                step, rank = job.step, job.rank
                _before_step(store, plan, step)
                loss = built.forward_backward(step, partial(plan.maybe_die, step, rank))
                job.commit(built.optimizer.step)
                built.optimizer.zero_grad()
                plan.keep(rank, step, loss)
                _after_step(store, plan, step, rank)
            except job.LOST:  # noqa: PERF203 - as in a user's program
                note(plan, "noticed")
                job.repair()
                note(plan, "state")


def _note_after(plan: Plan, owner: Any, name: str, event: str) -> None:
    """Have a function note when it has returned."""
    function = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note(plan, event)
        return result

    setattr(owner, name, noting)


# --- in process, with torch alone -----------------------------------------------------------------


def _in_process(number: int, store: dist.TCPStore, plan: Plan) -> None:
    """Run the job; after a loss, all build everything again and load the last checkpoint.

    The launcher, which sees at once who has died, says which processes are the ranks of a world.
    """
    world = 0
    _is_ready(store, number)
    while True:
        ranks = json.loads(store.get(f"world/{world}"))
        if number in ranks:
            _wait_for_all(store, world)
            note(plan, "decided")
            rank = ranks.index(number)
            try:
                _train_world(store, plan, world, rank)
                break
            except RuntimeError:
                note(plan, "noticed")
            gc.collect()
            dist.destroy_process_group()
            gc.collect()
            note(plan, "ended")
        world += 1
    dist.destroy_process_group()


def _wait_for_all(store: dist.TCPStore, world: int) -> None:
    """Wait for all ranks of a world, which come late by up to the timeout of the last one."""
    if store.add(f"come/{world}", 1) == RANKS:
        store.set(f"all/{world}", "")
    store.wait([f"all/{world}"])


def _train_world(store: dist.TCPStore, plan: Plan, world: int, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"groups/{world}", store),
        rank=rank,
        world_size=RANKS,
        timeout=_TIMEOUT,
    )
    note(plan, "default group")
    built = build(stock_mesh, plan.compiled)
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(_TIMEOUT, group)  # new groups have 30 minutes
    note(plan, "built")
    first = load(plan, built, rank)
    note(plan, "state")
    for step in range(first, plan.steps):
        if plan.is_next(step):
            dist.barrier()
            save(plan, built, rank, step)
            dist.barrier()
        _before_step(store, plan, step)
        loss = built.forward_backward(step, partial(plan.maybe_die, step, rank))
        built.optimizer.step()
        built.optimizer.zero_grad()
        plan.keep(rank, step, loss)
        _after_step(store, plan, step, rank)


WAYS: dict[str, Callable[[int, dist.TCPStore, Plan], None]] = {
    "undisturbed": _undisturbed,
    "Meshverse": _ours,
    "in process": _in_process,
}

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    Launcher(sys.argv[1], Plan.read(sys.argv[2])).run()
