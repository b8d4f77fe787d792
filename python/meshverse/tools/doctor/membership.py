"""Membership and health check of a job's ranks, through its store; one rank reports for all.

Every rank writes to the store which step it begins, and a thread of the rank increments a counter
there: its heartbeat. The first rank that fails or times out looks for the ranks that the others
wait for: those that have not started or whose heartbeat has stopped, or else those in an earlier
step. It reports them, and then all ranks raise the same error.

Example: ranks 0, 1 and 3 have written step 2, "axis dp", but rank 2 only step 1. Ranks 0, 1 and 3
wait in the all-reduce until the timeout. The first of them to fail reads the steps and reports that
rank 2 on host n1 is still in step 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshverse.store import StoreKeys
from meshverse.wording import counted, rank_ranges

_FAILED, _REPORTER, _READ = "failed", "reporter", "errors read"  # keys
_SECONDS_TO_REPORT = 30.0  # that the other ranks allow for `report`, which may print
# In which torch's own error comes, after its timeout: it waits longer and longer between attempts
# to connect.
_SECONDS_OF_TORCH = 10.0
_MOST_NAMED = 8  # ranks in a message
_BEATS_TO_WAIT = 10  # missed heartbeats after which a rank counts as stopped

Report = Callable[[Any], None]


class NotAllHereError(RuntimeError):
    """Error of a rank that did not answer in time, or failed. The message names it."""


# The store's server on rank 0, kept until the process ends: when rank 0 leaves the examination,
# other ranks may already use the same server, for their next call or in init_process_group.
_hosted: list[dist.Store] = []


def rank_from_environment() -> tuple[int, int]:
    """Return this rank and the number of ranks, from the launcher's environment variables.

    Raises:
        ValueError: a variable is missing, not an integer or out of range.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"{', '.join(missing)} not set: start one process for each rank, such as with torchrun "
            "--nproc-per-node 4 -m meshverse doctor dp=2,tp=2."
        )
    world_size = _variable("WORLD_SIZE", 1, None)
    rank = _variable("RANK", 0, world_size - 1)
    _variable("MASTER_PORT", 1, 2**16 - 1)
    for name, smallest in (("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
        if name in os.environ:
            _variable(name, smallest, None)
    return rank, world_size


def _variable(name: str, smallest: int, largest: int | None) -> int:
    text = os.environ[name].strip()
    # At most 12 digits: no variable has more, and int() refuses numbers of very many.
    value = int(text) if re.fullmatch("[0-9]{1,12}", text) else -1
    if value < smallest or (largest is not None and value > largest):
        limit = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise ValueError(
            f"{name}={os.environ[name][:40]!r} in the environment: the launcher must set it to an "
            f"int {limit}."
        )
    return value


def report_once(error: Exception, report: Report) -> None:
    """Report on one rank an error of a command that all ranks run, while the others wait for it.

    If the launcher's variables are missing or no store answers, each rank reports the error.
    """
    with contextlib.suppress(ValueError, NotAllHereError):
        rank, world_size = rank_from_environment()
        if world_size > 1:
            membership = Membership(
                rank, world_size, timedelta(seconds=_SECONDS_TO_REPORT), 0, report
            )
            membership.fail(str(error), lambda: (error, []))
            return
    report(error)


def _store_at(
    host: str, port: int, world_size: int, is_host: bool, timeout: timedelta
) -> dist.Store | None:
    """Return the store at an address; None if neither a store nor an error came in time.

    Raises:
        DistError: nothing accepts connections there, or what does is no store.
    """
    ends: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            store = dist.TCPStore(
                *(host, port, world_size, is_host, timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except Exception as error:  # noqa: BLE001  (raised again by the caller)
            ends.append(error)
        else:
            ends.append(store)

    # torch's timeout ends when a connection is accepted: it waits for the first answer for ever.
    thread = threading.Thread(target=connect, name="meshverse doctor's store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _SECONDS_OF_TORCH)
    if not ends:
        return None
    if isinstance(ends[0], Exception):
        raise ends[0]
    return ends[0]


class Membership:
    """Ranks of a job: which ones have started, and the step that each one is in.

    The constructor does not wait for other ranks, unlike torch's rendezvous, which cannot say which
    rank is missing.

    Args:
        rank: this process's rank.
        world_size: number of ranks.
        timeout: how long to wait for the store, and for another rank.
        call: number of earlier examinations in this process. Each one has its own keys.
        report: function that one rank calls with the error that all ranks raise.

    Attributes:
        store: store of the job, with a prefix for this examination.

    Raises:
        NotAllHereError: no store answers at the job's address.
    """

    def __init__(
        self, rank: int, world_size: int, timeout: timedelta, call: int, report: Report
    ) -> None:
        self._rank, self._size, self._timeout, self._report = rank, world_size, timeout, report
        self._step = 0
        # In a large world, each rank writes less often: at most 2000 writes per second in all.
        self._beat_seconds = max(0.5, world_size / 2000)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._is_host = rank == 0 and not is_torchruns
        try:
            store = _store_at(host, port, world_size, self._is_host, timeout)
        except dist.DistError as error:
            raise NotAllHereError(
                f"Rank {rank} found no store at MASTER_ADDR={host}, MASTER_PORT={port} within "
                f"{timeout.total_seconds():g} s. Rank 0 or torchrun must run there and be "
                f"reachable. The error was: {str(error).splitlines()[0]}"
            ) from None
        if store is None:
            raise NotAllHereError(
                f"Rank {rank} found no store at MASTER_ADDR={host}, MASTER_PORT={port} within "
                f"{timeout.total_seconds():g} s: nothing there has answered as a store. Another "
                "program may use the port, or rank 0 may be stopped."
            )
        if self._is_host and not _hosted:
            _hosted.append(store)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"meshverse doctor {restarts} {call}"
        self.store = dist.PrefixStore(prefix, store)
        self._keys = StoreKeys(store, prefix, world_size)

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Write this rank's heartbeat during the block, from a thread with its own connection."""
        store: dist.Store = self.store.clone()  # type: ignore[attr-defined]  # its stub lacks it
        is_over = threading.Event()

        def beat() -> None:
            number = 0
            with contextlib.suppress(dist.DistError):  # the store's host has ended
                while not is_over.wait(self._beat_seconds):
                    number += 1
                    store.set(f"life {self._rank}", str(number))

        thread = threading.Thread(target=beat, name="meshverse doctor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def begin(self, step: str, host: str) -> None:
        """Record in the store that this rank begins a step."""
        self._step += 1
        note = {"step": self._step, "what": step, "host": host}
        self._keys.write(f"note {self._rank}", json.dumps(note))

    def gather(self, name: str, mine: Any) -> list[Any] | None:
        """Gather the values of all ranks on rank 0, in order of rank; return None on the others.

        Raises:
            NotAllHereError: on rank 0, if a rank did not send its value in time or has failed.
        """
        self._keys.write(f"{name} {self._rank}", json.dumps(mine))
        if self._rank:
            return None
        keys = [f"{name} {rank}" for rank in range(self._size)]
        self._wait(keys, self._timeout.total_seconds())
        values = [json.loads(text) for text in self.store.multi_get(keys)]
        for key in keys:  # only rank 0 reads them, and the store may outlive the examination
            self._keys.remove(key)
        return values

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Send a value of rank 0 to all ranks, and return it. Rank 0 does not wait for the others.

        Raises:
            NotAllHereError: rank 0 did not send a value in time, or a rank has failed.
        """
        if self._rank == 0:
            self._keys.write(name, json.dumps(value))
            return value
        # Rank 0 may wait for another rank until the timeout, and then print.
        self._wait([name], 2 * self._timeout.total_seconds() + _SECONDS_TO_REPORT)
        return json.loads(self._keys.read(name))

    def _wait(self, keys: list[str], seconds: float) -> None:
        began = time.monotonic()
        try:
            while not self._keys.have_all(keys):
                self._keys.pause()
                waited = time.monotonic() - began
                if waited > seconds or self._keys.read(_FAILED):
                    raise self.failure(f"Rank {self._rank} waited {seconds:g} s for others")
                self._keys.pause_between_looks(waited)
        except dist.DistError as error:
            raise self._lost(f"Rank {self._rank}", error) from None

    # --- failures -------------------------------------------------------------------------------

    def failure(self, what: str, reason: str = "") -> NotAllHereError:
        """Return the error that all ranks raise, after one of them has reported it.

        Args:
            what: this rank, and what it failed in; the ranks that are behind are added.
            reason: last sentence of the message.
        """

        def diagnosed() -> tuple[Exception, list[int]]:
            behind, silent = self._behind()
            return NotAllHereError(f"{what}: {behind or 'no rank is behind'}.{reason}"), silent

        return NotAllHereError(self.fail(what, diagnosed))

    def own_failure(self, what: str, reason: str) -> NotAllHereError:
        """Return the error of a step that this rank takes alone, which all ranks raise."""
        error = NotAllHereError(f"{what}. {reason}")
        return NotAllHereError(self.fail(what, lambda: (error, [])))

    def fail(self, what: str, diagnosed: Callable[[], tuple[Exception, list[int]]]) -> str:
        """Report an error if this is the first rank to fail; else wait for that rank's report.

        Args:
            what: first words of the error if the store is lost.
            diagnosed: function that returns the error, and the ranks that cannot read it.

        Returns:
            Message of the error that was reported.
        """
        unreported: Exception | None = None
        try:
            reporter = self._keys.put_first(_REPORTER, str(self._rank))
            if reporter == str(self._rank):
                error, silent = diagnosed()
                try:
                    self._report(error)
                except Exception as why:  # noqa: BLE001  (raised when the others know the error)
                    unreported = why
                self._keys.write(_FAILED, json.dumps([str(error), silent]))
            elif not self._poll(lambda: bool(self._keys.read(_FAILED))):
                raise dist.DistError(
                    f"rank {reporter} had to report which rank is missing, but did not"
                )
            message, silent = json.loads(self._keys.read(_FAILED))
            self._keys.count(_READ)
            if self._is_host:  # it leaves after all other ranks that can have read the error
                self._poll(lambda: self._keys.count(_READ, 0) >= self._size - len(silent))
        except dist.DistError as lost:
            return str(self._lost(what, lost))
        if unreported is not None:
            raise unreported
        return str(message)

    def _lost(self, what: str, error: Exception) -> NotAllHereError:
        why = str(error).splitlines()[0]
        lost = NotAllHereError(f"{what}, and lost the store, which ends with rank 0: {why}")
        self._report(lost)
        return lost

    def _poll(self, is_done: Callable[[], bool]) -> bool:
        """Wait until `is_done` is true, for a bounded time; return whether it is."""
        longest = _SECONDS_TO_REPORT + self._timeout.total_seconds()
        longest += _BEATS_TO_WAIT * self._beat_seconds
        began = time.monotonic()
        while not (done := is_done()) and (waited := time.monotonic() - began) < longest:
            self._keys.pause_between_looks(waited)
        return done

    def _behind(self) -> tuple[str, list[int]]:
        """Describe the ranks that the others wait for; also return those that have stopped.

        If some ranks have not started or have stopped, only these are described: others may be
        behind only because they wait for these.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        notes = {rank: self._read(f"note {rank}") for rank in others}
        absent = [rank for rank in others if notes[rank] is None]
        silent = self._without_heartbeat(rank for rank in others if notes[rank] is not None)
        names = {rank: f"rank {rank} on {note['host']}" for rank, note in notes.items() if note}
        behind = []
        if absent:
            have = "have" if len(absent) > 1 else "has"
            behind.append(f"rank{'s' * (len(absent) > 1)} {rank_ranges(absent)} {have} not started")
        behind += [
            f"{names[rank]} has not responded during: {notes[rank]['what']}" for rank in silent
        ]
        if not behind:
            behind = [
                f"{names[rank]} is still in: {note['what']}"
                for rank, note in notes.items()
                if note["step"] < self._step
            ]
        if len(behind) > _MOST_NAMED:
            behind[_MOST_NAMED:] = [f"and {counted(len(behind) - _MOST_NAMED, 'more rank')}"]
        return "; ".join(behind), absent + silent

    def _without_heartbeat(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks whose heartbeat stays the same for ten beats."""
        first = {rank: self._read(f"life {rank}") for rank in ranks}
        for _ in range(2 * _BEATS_TO_WAIT):
            if not first:
                break
            time.sleep(self._beat_seconds / 2)
            first = {rank: n for rank, n in first.items() if self._read(f"life {rank}") == n}
        return list(first)

    def _read(self, key: str) -> Any:
        text = self._keys.read(key)
        return json.loads(text) if text else None
