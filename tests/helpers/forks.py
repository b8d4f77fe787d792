"""Forks of the process of a test."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

__all__ = ["status_of_fork"]

_LONGEST_SECONDS = 60


def status_of_fork(program: Callable[[], object]) -> int:
    """Return the exit status of a fork that calls a program: 0 unless the program raises.

    The fork is killed after a minute.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            program()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            raise
        finally:
            os._exit(status)
    deadline, ended = time.monotonic() + _LONGEST_SECONDS, (0, 0)
    while ended[0] == 0 and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)  # sleep: it looks again
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended[1])
