"""Many processes that form one gloo world on this machine, forked off one that has torch loaded."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["in_crew"]

# Loading torch takes seconds of processor time: once, not once for each of 32 processes.
_PRELOADED = ["torch", "torch.distributed.tensor", "meshverse"]
_LEAVE_SECONDS = 20


def in_crew(size: int, function: Callable[..., Any], *args: Any, limit_s: float) -> list[Any]:
    """Run a function in new processes of this machine that have a store in common.

    Args:
        size: number of processes.
        function: called in each as `function(rank, store, *args)`; importable by name. The store is
            a real TCPStore, kept by this process.
        args: of the function, the same in all.
        limit_s: seconds to wait before ending all processes; also the store's timeout.

    Returns:
        What the function returned, by rank.

    Raises:
        RuntimeError: a process raised or died; holds its traceback.
        TimeoutError: some were not done in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, ranks = [], {}
    for rank in range(size):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(theirs, rank, server.port, limit_s, function, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        ranks[mine] = rank
    try:
        results = _collect(ranks, limit_s)
    except BaseException:
        for process in processes:  # the others may be waiting for one that failed
            process.kill()
        raise
    finally:
        for pipe in ranks:
            pipe.close()  # a process that is done leaves
        _end(processes)
    return results


def _end(processes: list[Any]) -> None:
    # A process that is killed cannot take back what it has of the system, such as the semaphore of
    # a progress bar's lock: so it is let go by itself, unless it hangs.
    deadline = time.monotonic() + _LEAVE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _collect(ranks: dict[Any, int], limit_s: float) -> list[Any]:
    deadline = time.monotonic() + limit_s
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        pending = [pipe for pipe, rank in ranks.items() if rank not in results]
        ready: list[Any] = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            left = sorted(ranks[pipe] for pipe in pending)
            raise TimeoutError(f"Ranks {left} were not done after {limit_s:.0f} seconds.")
        for pipe in ready:
            try:
                error, result = pipe.recv()
            except EOFError:
                error, result = "The process died.", None
            if error is not None:
                raise RuntimeError(f"Rank {ranks[pipe]} failed:\n{error}")
            results[ranks[pipe]] = result
    return [results[rank] for rank in sorted(results)]


def _work(
    pipe: Any, rank: int, port: int, limit_s: float, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)  # the processes share the machine's cores
    if sys.platform == "linux":  # the host's name need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=limit_s)
        )
        pipe.send((None, function(rank, store, *args)))
    except Exception:  # noqa: BLE001 - whatever it is, the parent shall show it
        pipe.send((traceback.format_exc(), None))
    pipe.poll(limit_s)  # the parent lets all go at once, so that none loses its peers
