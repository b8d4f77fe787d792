"""Processes that a failed test has left behind."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

from helpers.crew import Crew

__all__ = ["end_those_since", "now"]

_SECONDS_APART = 0.1  # at least: the system counts the start of a process in ticks of some 10 ms


def now() -> float:
    """Return the time on the clock by which the system notes the start of processes, in seconds.

    On Linux, it counts from the boot. psutil adds the time of the boot in whole seconds, so what it
    returns may be off by one.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time()


def _started(process: psutil.Process) -> float:
    if sys.platform != "linux":
        return process.create_time()
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
    except OSError:
        raise psutil.NoSuchProcess(process.pid) from None
    ticks = int(text.rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def end_those_since(moment: float) -> list[int]:
    """End all processes that this process, or what it started, has started since a moment.

    All but those that serve later tests too: crews, and the server whose forks they are.

    Args:
        moment: result of `now`.

    Returns:
        The numbers of the processes.
    """
    kept = {pid for crew in Crew.all for pid in crew.pids}
    kept |= {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    ended = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in kept and _started(process) > moment - _SECONDS_APART:
                process.kill()
                ended.append(process.pid)
    return ended
