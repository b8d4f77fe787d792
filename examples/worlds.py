"""Worlds to try meshes in: one process that plays a rank of a huge world, or real processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["fake_world", "in_fresh_process", "run_ranks", "start_fake_world"]

Result = TypeVar("Result")


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """A world of `size` ranks of which this process plays one; its collectives do nothing.

    Leaving it destroys the world with all its process groups.
    """
    hook = sys.excepthook  # torch wraps it once more in every world
    start_fake_world(size, rank)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook


def start_fake_world(size: int, rank: int = 0) -> None:
    """Start a fake world; the caller destroys it."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


def in_fresh_process(function: Callable[..., Result], *args: Any, limit_s: float) -> Result:
    """Call a function in a new Python process, which nothing has warmed or changed.

    Args:
        function: importable by name, as its arguments and result cross by pickle.
        args: of the function.
        limit_s: seconds to wait before giving up.

    Raises:
        multiprocessing.TimeoutError: it took longer, or the process died.
        Exception: whatever the function raised.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, args).get(limit_s)


def run_ranks(
    function: Callable[..., None],
    *args: Any,
    processes: int,
    receive: Callable[[Any], None],
    limit_s: float,
) -> None:
    """Run a function on every rank of a gloo world of new processes on this machine.

    Args:
        function: called on each rank as `function(send, *args)`; importable by name. What it passes
            to `send` arrives here.
        args: of the function, the same on all ranks.
        processes: number of ranks.
        receive: called here with each message, in order of arrival.
        limit_s: seconds to wait before ending all processes; also the limit of one collective.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; holds its traceback.
        torch.multiprocessing.ProcessExitedException: a rank died.
        TimeoutError: some ranks were not done in time.
    """
    # The store is made here on a port of the system's choice, so no two runs can want the same one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    messages = torch.multiprocessing.get_context("spawn").SimpleQueue()
    deadline = time.monotonic() + limit_s
    world = torch.multiprocessing.start_processes(
        _run_rank,
        (processes, store.port, limit_s, messages, function, args),
        nprocs=processes,
        join=False,
        start_method="spawn",
    )
    try:
        done = False
        while not done:
            done = world.join(timeout=0.1)  # short-timeout: to read messages in between
            while not messages.empty():
                receive(messages.get())
            if not done and time.monotonic() > deadline:
                running = [rank for rank, one in enumerate(world.processes) if one.is_alive()]
                raise TimeoutError(f"Ranks {running} were not done after {limit_s:.0f} seconds.")
    finally:
        for process in world.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _run_rank(
    rank: int,
    processes: int,
    port: int,
    limit_s: float,
    messages: Any,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)  # ranks share the machine's cores
    if sys.platform == "linux":  # the host's name need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=limit_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", rank=rank, world_size=processes, store=store, timeout=limit)
    try:
        function(messages.put, *args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    print("A module, not a program: examples/demo.py and the benchmarks import it.")
