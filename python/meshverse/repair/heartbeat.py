"""Heartbeats: each process of a job shows that it is alive, and watches one other."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from .membership import Decision, JobStore, Process, Signs, Status, beat_seconds

_log = logging.getLogger(__name__)

_LONGEST_STOP_SECONDS = 5.0  # to wait for the thread when this process exits


class _Watched(NamedTuple):
    """The world that this process is a rank of, and the number of the process that it watches."""

    world: int
    process: int
    n_ranks: int


class Heartbeat:
    """A thread that gives this process's signs of life, and watches the process of the next rank.

    The ranks form a ring, so each lost rank that follows a live one is found by that one. An alarm
    is for all: then each rank learns in `repair()` which of the others are lost. A spare
    watches all ranks in turn, as all of them may be lost at once.

    Each beat takes three operations of the store. The pause between beats grows with the number of
    ranks, so that all ranks together make a bounded number of operations a second.

    Args:
        store: the job's store, with a connection of its own.
        own: this process.
        lost_after: seconds without a sign of life after which a process is lost.
        slow_after: seconds after which this process ends itself if the job is over and its main
            thread does not notice.
        on_alarm: function that is called in the thread, at each beat while there is an alarm, with
            the number of the world and the reason why it must end.
    """

    def __init__(
        self,
        store: JobStore,
        own: Process,
        lost_after: float,
        slow_after: float,
        on_alarm: Callable[[int, str], object],
    ) -> None:
        self._slow_after = slow_after
        self._over_since: float | None = None  # when this thread saw that the job cannot go on
        self._ranks: tuple[int, list[int]] = (-1, [])  # a spare's copy of the current world's
        self._store, self._own, self._on_alarm = store, own, on_alarm
        self._signs = Signs(store, own, lost_after)
        self._watched: _Watched | None = None
        self.is_main_waiting = False  # whether the main thread waits for the next world
        self.alarm_at: tuple[float, str] | None = None  # when to raise the alarm, and why
        self.must_end_at: tuple[float, str] | None = None  # when to end this process, and why
        self._n_beats = 0
        self.why_no_store = ""  # the store's error, once it cannot be reached
        self._is_over = False
        self._wakes = threading.Event()  # ends the pause between two beats
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, name="meshverse-heartbeat", daemon=True)
        self._thread.start()
        # A daemon thread that is in c10d's code while Python exits may crash the process.
        atexit.register(self.stop)

    def follow(self, decision: Decision) -> None:
        """Watch a rank of another world from now on."""
        ranks = decision.processes
        place = ranks.index(self._own.number)
        self._watched = _Watched(decision.world, ranks[(place + 1) % len(ranks)], len(ranks))

    def wake(self) -> None:
        """Look now, as a collective has failed, and not after a pause. Not in large jobs."""
        if self._watched is not None and beat_seconds(self._watched.n_ranks) == beat_seconds(1):
            self._wakes.set()

    def unfollow(self) -> None:
        """Watch all ranks in turn from now on, as a spare does."""
        self._watched = None

    def stop(self, *, has_left: bool = False) -> None:
        """End the thread; the others then find this process lost, unless the job has finished.

        Args:
            has_left: whether to tell the others at once.
        """
        atexit.unregister(self.stop)
        if os.getpid() != self._process_id:  # a fork has no such thread
            return
        self._is_over = True
        self._wakes.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_STOP_SECONDS)
        if has_left and not self.why_no_store:
            with contextlib.suppress(RuntimeError):
                self._store.remove(f"beat/{self._own.number}")

    def _run(self) -> None:
        watched = self._watched
        while True:
            self._wakes.wait(beat_seconds(watched.n_ranks if watched else 1))
            self._wakes.clear()
            if self._is_over:
                return
            watched = self._watched
            try:
                self._beat(watched)
            except SystemError:
                continue  # CPython's, while the main thread searches all objects in `revive`
            except RuntimeError as error:  # also c10d's errors of a lost connection
                self.why_no_store = f"the store of the job cannot be reached: {error}"
                self._report(watched, self.why_no_store)
                return

    def _beat(self, watched: _Watched | None) -> None:
        self._n_beats += 1
        limit = self.must_end_at
        if limit is not None and time.monotonic() > limit[0]:
            self._store.remove(f"beat/{self._own.number}")
            _end_process(limit[1])
        self._store.write(f"beat/{self._own.number}", str(self._n_beats))
        status = self._store.status()
        if watched is None:
            self._watch_as_spare(status)
            return
        if status.world > watched.world:
            decision = self._store.decision(status.world)
            is_in = decision is None or self._own.number in decision.processes
            if not (is_in or self.is_main_waiting):
                end_left_out(watched.world, status.world)
        elif status.over not in ("", "complete"):
            self._report(watched, status.over)
            self._over_since = self._over_since or time.monotonic()
            if time.monotonic() - self._over_since > self._slow_after:
                _end_process(f"The job cannot go on: {status.over}")
        elif status.alarm:
            self._report(watched, status.alarm)
        elif why := self._why_alarm(watched):
            # In a complete job, this only ends the last commit's barrier on ranks still in it.
            self._store.change_status(status, status._replace(alarm=why))
            self._report(watched, why)

    def _why_alarm(self, watched: _Watched) -> str:
        limit = self.alarm_at
        if limit is not None and time.monotonic() > limit[0]:
            return limit[1]
        is_alone = watched.process == self._own.number
        return "" if is_alone else self._signs.why_lost(watched.process)

    def _report(self, watched: _Watched | None, reason: str) -> None:
        if watched is not None:
            self._on_alarm(watched.world, reason)

    def _watch_as_spare(self, status: Status) -> None:
        if status.world < 0 or status.alarm or status.over:
            return
        if self._ranks[0] != status.world:
            decision = self._store.decision(status.world)
            self._ranks = status.world, [] if decision is None else decision.processes
        ranks = self._ranks[1]
        if ranks and (why := self._signs.why_lost(ranks[self._n_beats % len(ranks)])):
            self._store.change_status(status, Status(status.world, why, ""))


def end_left_out(world: int, current: int) -> NoReturn:
    """End this process, which the job goes on without."""
    _end_process(
        f"This process was a rank of world {world} of the job. The others did not hear of it in "
        f"time and went on without it, in world {current}."
    )


def _end_process(why: str) -> NoReturn:
    _log.critical("%s This process ends itself, with status 1. Its threads are here:", why)
    with contextlib.suppress(Exception):  # standard error may not be a file
        faulthandler.dump_traceback()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)  # the main thread may be in a collective that never ends
