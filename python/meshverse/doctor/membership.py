"""Membership and health check of a job's ranks, through its store; one rank reports for all.

Every rank writes the step that it begins, and a thread of it counts up a number: its heartbeat. The
first rank that fails, or has waited too long, looks for the ranks that the others wait for: those
whose heartbeat has stopped, or else those that are behind. It reports them, and then all ranks
raise the same error.

Example: ranks 0, 1 and 3 write step 2, "axis dp". Rank 2 has written step 1. The others wait in the
all-reduce until the timeout. One of them reads the steps and reports: rank 2 on host n1 is still in
step 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_FAILED, _REPORTER, _READ = "failed", "reporter", "errors read"  # keys
_SECONDS_TO_REPORT = 30.0  # that others wait for a rank that prints
_BEATS_TO_WAIT = 10  # before a rank without a heartbeat counts as silent
_SECONDS_BETWEEN_LOOKS = 0.02

Report = Callable[[Any], None]


class NotAllHereError(RuntimeError):
    """Some ranks did not answer in time. The message names them."""


# The store's server on rank 0, kept until its process ends: when rank 0 leaves the examination,
# other ranks may already be in their next call, or in init_process_group, on the same server.
_hosted: list[dist.Store] = []


def rank_from_environment() -> tuple[int, int]:
    """Return this rank and the number of ranks, as torchrun or another launcher gives them.

    Raises:
        ValueError: variables that are missing or no numbers.
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
    value = int(text) if text.isdecimal() else -1
    if value < smallest or (largest is not None and value > largest):
        limit = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise ValueError(
            f"{name}={os.environ[name]!r} in the environment: the launcher has to give an int "
            f"{limit}."
        )
    return value


def report_once(error: Exception, report: Report) -> None:
    """Report on one rank what is wrong with a command that all ranks were given; the others wait.

    If the launcher's variables or the store are missing, each rank reports it.
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


class Membership:
    """The ranks of a job: which of them are there, and in which step each one is.

    The constructor does not wait for other ranks: torch's own rendezvous does, and cannot say which
    rank is missing.

    Args:
        rank: this one.
        world_size: number of ranks.
        timeout: how long to wait for the store, and for another rank.
        call: how many examinations this process did before. Each has keys of its own.
        report: called on one rank, with the error that all ranks raise.

    Attributes:
        store: of the job.

    Raises:
        NotAllHereError: no store answers at the job's address.
    """

    def __init__(
        self, rank: int, world_size: int, timeout: timedelta, call: int, report: Report
    ) -> None:
        self._rank, self._size, self._timeout, self._report = rank, world_size, timeout, report
        self._step = 0
        # In a large world, each rank writes less often.
        self._beat_seconds = max(0.5, world_size / 2000)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._is_host = rank == 0 and not is_torchruns
        try:
            store = dist.TCPStore(
                *(host, port, world_size, self._is_host, timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except dist.DistError as error:
            raise NotAllHereError(
                f"Rank {rank} found no store at MASTER_ADDR={host}, MASTER_PORT={port} within "
                f"{timeout.total_seconds():g} s. Rank 0, or torchrun, has to run there and be "
                f"reachable: {str(error).splitlines()[0]}"
            ) from None
        if self._is_host and not _hosted:
            _hosted.append(store)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"meshverse doctor {restarts} {call}", store)

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Write this rank's heartbeat meanwhile, from a thread with a connection of its own."""
        store: dist.Store = self.store.clone()  # type: ignore[attr-defined]  # its stub lacks it
        is_over = threading.Event()

        def beat() -> None:
            number = 0
            with contextlib.suppress(dist.DistError):  # when the store's host has ended
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
        """Write that this rank begins a step."""
        self._step += 1
        note = {"step": self._step, "what": step, "host": host}
        self.store.set(f"note {self._rank}", json.dumps(note))

    def gather(self, name: str, mine: Any) -> list[Any] | None:
        """Gather the values of all ranks on rank 0, in order of rank; return None on the others.

        Raises:
            NotAllHereError: on rank 0, a rank did not give its value in time; a rank has failed.
        """
        self.store.set(f"{name} {self._rank}", json.dumps(mine))
        if self._rank:
            return None
        keys = [f"{name} {rank}" for rank in range(self._size)]
        self._wait(keys, self._timeout.total_seconds())
        values = [json.loads(text) for text in self.store.multi_get(keys)]
        for key in keys:  # nobody else reads them, and the store may outlive the examination
            self.store.delete_key(key)
        return values

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Send a value of rank 0 to all ranks, and return it. Rank 0 does not wait for them.

        Raises:
            NotAllHereError: rank 0 sent nothing in time, or a rank has failed.
        """
        if self._rank == 0:
            self.store.set(name, json.dumps(value))
            return value
        # Rank 0 may have waited for another rank until the timeout, and then print.
        self._wait([name], 2 * self._timeout.total_seconds() + _SECONDS_TO_REPORT)
        return json.loads(self.store.get(name))

    def _wait(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            while not self.store.check(keys):
                if time.monotonic() > deadline or self.store.check([_FAILED]):
                    raise self.failure(f"Rank {self._rank} waited {seconds:g} s for others")
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except dist.DistError as error:
            raise self._lost(f"Rank {self._rank}", error) from None

    # --- what is wrong --------------------------------------------------------------------------

    def failure(self, what: str, reason: str = "") -> NotAllHereError:
        """Return the error that all ranks raise, once one of them has reported it.

        Args:
            what: which rank failed, and in what; the ranks that are behind are added.
            reason: a sentence to end with.
        """

        def diagnosed() -> tuple[Exception, list[int]]:
            behind, silent = self._behind()
            return NotAllHereError(f"{what}: {behind or 'no rank is behind'}.{reason}"), silent

        return NotAllHereError(self.fail(what, diagnosed))

    def fail(self, what: str, diagnosed: Callable[[], tuple[Exception, list[int]]]) -> str:
        """Report an error if this is the first rank to fail; else wait until that one has.

        Args:
            what: reported if the store is lost.
            diagnosed: gives the error, and ranks that will not read it.

        Returns:
            The message of the error that was reported.
        """
        try:
            reporter = self.store.compare_set(_REPORTER, "", str(self._rank)).decode()
            if reporter == str(self._rank):
                error, silent = diagnosed()
                self._report(error)
                self.store.set(_FAILED, json.dumps([str(error), silent]))
            elif not self._poll(lambda: self.store.check([_FAILED])):
                raise dist.DistError(
                    f"rank {reporter} was to report which rank is missing, and has not"
                )
            message, silent = json.loads(self.store.get(_FAILED))
            self.store.add(_READ, 1)
            if self._is_host:  # it leaves last: when all ranks that can have read the error
                self._poll(lambda: self.store.add(_READ, 0) >= self._size - len(silent))
            return str(message)
        except dist.DistError as lost:
            return str(self._lost(what, lost))

    def _lost(self, what: str, error: Exception) -> NotAllHereError:
        why = str(error).splitlines()[0]
        lost = NotAllHereError(f"{what}, and lost the store, which ends with rank 0: {why}")
        self._report(lost)
        return lost

    def _poll(self, is_done: Callable[[], bool]) -> bool:
        """Wait for another rank to report or to read, for a bounded time."""
        longest = _SECONDS_TO_REPORT + self._timeout.total_seconds()
        deadline = time.monotonic() + longest + _BEATS_TO_WAIT * self._beat_seconds
        while not (done := is_done()) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return done

    def _behind(self) -> tuple[str, list[int]]:
        """Return the ranks that the others wait for, in words, and those without a heartbeat.

        A rank without a heartbeat holds up others, which then are behind too: those are not named.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        notes = {rank: self._read(f"note {rank}") for rank in others}
        absent = [rank for rank in others if notes[rank] is None]
        silent = self._without_heartbeat(rank for rank in others if notes[rank] is not None)
        names = {rank: f"rank {rank} on {note['host']}" for rank, note in notes.items() if note}
        behind = [f"rank {rank} has not started" for rank in absent]
        behind += [
            f"{names[rank]} gives no sign of life in: {notes[rank]['what']}" for rank in silent
        ]
        if not behind:
            behind = [
                f"{names[rank]} is still in: {note['what']}"
                for rank, note in notes.items()
                if note["step"] < self._step
            ]
        return "; ".join(behind), absent + silent

    def _without_heartbeat(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks whose heartbeat has stopped for ten beats."""
        first = {rank: self._read(f"life {rank}") for rank in ranks}
        for _ in range(2 * _BEATS_TO_WAIT):
            if not first:
                break
            time.sleep(self._beat_seconds / 2)
            first = {rank: n for rank, n in first.items() if self._read(f"life {rank}") == n}
        return list(first)

    def _read(self, key: str) -> Any:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None
