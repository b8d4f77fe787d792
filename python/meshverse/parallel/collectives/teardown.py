"""The end of a training program: its process groups, destroyed whatever the user presses.

Example:
    >>> destroy_dist_connection()  # without a process group, nothing
"""

from __future__ import annotations

import signal
import threading

import torch.distributed as dist

__all__ = ["destroy_dist_connection"]


def destroy_dist_connection() -> None:
    """Destroy the default process group and all others, not to be interrupted by Ctrl-C.

    The previous handler of SIGINT is back afterwards, also if it fails. Without a process group
    nothing is done. Python lets only the main thread handle signals; elsewhere SIGINT is as ever.
    """
    if not dist.is_initialized():
        return
    if threading.current_thread() is not threading.main_thread():
        dist.destroy_process_group()
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        dist.destroy_process_group()
    finally:
        # None stands for a handler that Python did not install, and cannot restore.
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
