"""Runs of a move: one after the other, at once or in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch

__all__ = ["ReshardWork", "start"]


class ReshardWork:
    """A run that is under way, as `Reshard(...)(async_op=True)` gives it.

    Until it has been waited for, sources must not be changed and targets not be used.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._ready: torch.Event | None = None

    def is_completed(self) -> bool:
        """Whether the run has ended, well or not. Does not wait."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the targets have the new values.

        Args:
            timeout: how long at most; by default until the run ends, which its own timeout bounds.

        Raises:
            TimeoutError: it is still under way. It goes on.
            RuntimeError: the run failed; the message says in which condition the targets are.
        """
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(f"The move is still under way after {timeout}. It goes on.")
        if self._error is not None:
            raise self._error
        if self._ready is not None:
            self._ready.wait()


def start(run: Callable[[], None], device: torch.device) -> ReshardWork:
    """Run something in a thread, on a stream of its own where the device has streams."""
    work = ReshardWork()
    is_cpu = device.type == "cpu"
    begun = None if is_cpu else torch.Event(device=device)
    if begun is not None:
        begun.record()

    def body() -> None:
        try:
            if begun is None:
                run()
            else:
                with torch.Stream(device=device):
                    begun.wait()
                    run()
                    work._ready = torch.Event(device=device)
                    work._ready.record()
        except BaseException as error:  # noqa: BLE001  (`wait` raises it)
            work._error = error
        finally:
            work._done.set()

    threading.Thread(target=body, name="meshverse reshard", daemon=True).start()
    return work
