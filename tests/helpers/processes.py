"""Processes that a failed test has left behind."""

from __future__ import annotations

import contextlib
from multiprocessing import forkserver, resource_tracker

import psutil

from helpers.crew import Crew

__all__ = ["end_those_since"]


def end_those_since(moment: float) -> list[int]:
    """End all processes that this process, or what it started, has started since a moment.

    All but those that serve later tests too: crews, and the server whose forks they are.

    Args:
        moment: of the system's clock, in seconds.

    Returns:
        The numbers of the processes.
    """
    kept = {pid for crew in Crew.all for pid in crew.pids}
    kept |= {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    ended = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            # The system counts a process's age in ticks of some 10 ms.
            if process.pid not in kept and process.create_time() > moment - 0.1:
                process.kill()
                ended.append(process.pid)
    return ended
