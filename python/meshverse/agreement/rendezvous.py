"""Rendezvous: ranks wait in the store until all of them have joined.

c10d waits for all members too, for some backends, but it cannot say why they do not come. Here each
member counts itself in, and the last one to join writes the outcome. The others read the outcome
until it is there. Members may bring a text each: then the outcome has all of them.

A rendezvous can be tried again, so attempts are numbered. Each attempt has one outcome, which never
changes: whoever writes it first decides. A member that times out, is interrupted or finds a
deadlock (see `deadlock`) decides that the attempt has failed. All who have joined it get that
outcome; a member that joins later goes on to the next attempt, or gets that outcome too where the
members bring texts.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from meshverse.wording import rank_list
from meshverse.world.run_store import RunStore
from meshverse.world.world import World, WorldState

from .deadlock import Wait, find_deadlock, note_key, read_wait
from .program_line import program_line

_log = logging.getLogger(__name__)

_ALL_JOINED = "all joined"  # begins the outcome of an attempt that succeeded; then come the texts
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.5
_CHECK_SECONDS = 1.0  # between two calls of `check`
_FIRST_LOOK_SECONDS = 1.0  # until a rank notes that it waits, and the first one looks for deadlocks
_LONGEST_LOOK_SECONDS = 30.0  # between two looks; each takes twice as long to come
_WARNING_SECONDS = 5.0
_NAMED = 16  # members that a message names
_MOST_READ = 1_000  # members that are looked for, where each has brought a text


class Joined(NamedTuple):
    """A rendezvous that all have joined.

    Attributes:
        attempt: number of the attempt, from 0.
        texts: what the members brought, in their order; empty if they brought nothing.
    """

    attempt: int
    texts: list[str]


class Rendezvous(WorldState):
    """The rendezvous of this rank with others in one world."""

    def __init__(self) -> None:
        self._next_attempts: dict[str, int] = {}  # by name
        self._joined_first: dict[str, list[str]] = {}  # keys of attempts, by name
        self._is_main_thread_only = True  # no other thread has waited so far

    def join(
        self,
        world: World,
        name: str,
        label: str,
        ranks: Sequence[int],
        timeout: timedelta | None,
        *,
        check: Callable[[], None] | None = None,
        text: str | None = None,
    ) -> Joined:
        """Wait until all members have joined.

        It takes two operations of the store, and more while this rank waits or brings a text.

        Args:
            world: with a store; this rank is a member.
            name: the same on all members, and of nothing else.
            label: the group that is to be made, for messages.
            ranks: global ranks of the members, in the same order on all of them.
            timeout: how long to wait; None for as long as it takes.
            check: called about once a second; it raises if there is no use in waiting.
            text: of this rank, where all members bring one.

        Raises:
            RuntimeError: members wait for each other in a deadlock, some did not join in time, or
                one left. All who had joined get the same text.
        """
        store = world.run_store
        assert store is not None
        if len(ranks) == 1:
            return Joined(0, [] if text is None else [text])
        if threading.current_thread() is not threading.main_thread():
            self._is_main_thread_only = False
        while True:
            number = self._next_attempts.get(name, 0)
            attempt = _Attempt(self, store, world, f"rendezvous/{name}/{number}", label, ranks)
            try:
                outcome, is_late = attempt.hold(timeout, check, text)
            finally:
                if attempt.is_first:
                    self._joined_first.setdefault(name, []).append(attempt.key)
                self._next_attempts[name] = number + 1
            if outcome.startswith(_ALL_JOINED):
                return Joined(number, _unpacked(outcome.removeprefix(_ALL_JOINED)))
            if text is not None or not is_late:
                raise RuntimeError(outcome)

    def begin_again(self) -> None:
        """Number the attempts from 0 again."""
        self._next_attempts.clear()
        self._joined_first.clear()

    def may_note(self) -> bool:
        """Return whether this rank may note where it waits: if it can join nothing else then."""
        return self._is_main_thread_only

    def remove_from_store(self, store: RunStore, name: str) -> None:
        """Remove what the rendezvous of a name have left in the store; no member waits any more."""
        self._next_attempts.pop(name, None)
        for key in self._joined_first.pop(name, ()):
            store.remove(f"{key}/outcome")
            store.remove(f"{key}/joined")


def _packed(texts: list[str]) -> str:
    """Return texts as a short one, which all ranks read: each different text stands there once."""
    numbers: dict[str, int] = {}
    of_rank = [numbers.setdefault(text, len(numbers)) for text in texts]
    packed = zlib.compress(json.dumps([list(numbers), of_rank]).encode())
    return base64.b64encode(packed).decode()


def _unpacked(packed: str) -> list[str]:
    if not packed:
        return []
    different, of_rank = json.loads(zlib.decompress(base64.b64decode(packed)))
    return [different[number] for number in of_rank]


class _OverError(Exception):
    """The outcome came while this rank was reading something else."""


class _Attempt:
    """One attempt of a rank to wait for the other members. Arguments as of `Rendezvous.join`."""

    def __init__(
        self,
        own: Rendezvous,
        store: RunStore,
        world: World,
        key: str,
        label: str,
        ranks: Sequence[int],
    ) -> None:
        self._own, self._store, self._world = own, store, world
        self._rank, self._ranks = world.rank, ranks
        self.key, self._label = key, label
        self.is_first = False
        self._is_noted = self._has_texts = False

    def hold(
        self, timeout: timedelta | None, check: Callable[[], None] | None, text: str | None
    ) -> tuple[str, bool]:
        """Join, wait for the other members, and leave.

        Returns:
            The outcome, and whether it was there before this rank joined.
        """
        try:
            if text is not None:
                self._has_texts = True
                self._store.write(f"{self.key}/{self._rank}", text)
            place = self._store.count(f"{self.key}/joined")
            self.is_first = place == 1
            if place == len(self._ranks):
                return self._decide(_ALL_JOINED + self._take_texts(text)), True
            if outcome := self._outcome():
                return outcome, True
            return self._wait(timeout, check), False
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # of the store
                self._decide(self._left(error))
            raise
        finally:
            if self._is_noted:
                with contextlib.suppress(RuntimeError):  # of the store, whose failure was raised
                    self._store.remove(note_key(self._rank))

    def _left(self, error: BaseException) -> str:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"rank {self._rank} left it: {why}"

    def _take_texts(self, text: str | None) -> str:
        if text is None:
            return ""
        keys = [f"{self.key}/{rank}" for rank in self._ranks]
        texts = self._store.read_all(keys)
        for key in keys:
            self._store.remove(key)
        return _packed(texts)

    def _decide(self, outcome: str) -> str:
        """Return the outcome of this attempt: this one, unless it is decided already."""
        return self._store.put_first(f"{self.key}/outcome", outcome)

    def _outcome(self) -> str:
        return self._store.read(f"{self.key}/outcome")

    def _wait(self, timeout: timedelta | None, check: Callable[[], None] | None) -> str:
        start, waited = time.monotonic(), 0.0
        next_check, next_look, look = _CHECK_SECONDS, _FIRST_LOOK_SECONDS, _FIRST_LOOK_SECONDS
        has_warned = False
        while True:
            # The pause delays a rank by at most a quarter of the time it has waited already.
            wanted = max(waited / 4, _FIRST_PAUSE_SECONDS)
            self._store.pause(min(wanted, _LONGEST_PAUSE_SECONDS))
            if outcome := self._outcome():
                return outcome
            waited = time.monotonic() - start
            if self._world.is_over:
                _ = self._world.default_group  # which raises: another thread has ended the world
            with contextlib.suppress(_OverError):
                if timeout is not None and waited > timeout.total_seconds():
                    return self._decide(f"rank {self._rank} waited {timeout}: {self._missing()}")
                if check is not None and waited > next_check:
                    next_check = waited + _CHECK_SECONDS
                    self._store.pause()
                    try:
                        check()
                    except RuntimeError as error:
                        # If all have joined meanwhile, the others act on that: so does this rank,
                        # and its next call raises.
                        outcome = self._decide(self._left(error))
                        if not outcome.startswith(_ALL_JOINED):
                            raise
                        return outcome
                if waited > next_look:
                    look = min(2 * look, _LONGEST_LOOK_SECONDS)
                    next_look = waited + look
                    self._look_for_deadlock()
                if waited > _WARNING_SECONDS and self.is_first and not has_warned:
                    has_warned = True  # one line for all members
                    _log.warning(
                        "Rank %d has waited %g s to make %s with ranks [%s]: %s",
                        *(self._rank, _WARNING_SECONDS, self._label, rank_list(self._ranks)),
                        self._missing(),
                    )

    def _read(self, key: str) -> str:
        """Read a text that is not urgent: the outcome is read before it."""
        self._store.pause()
        if self._outcome():
            raise _OverError
        self._store.pause()
        return self._store.read(key)

    # --- where the others are -------------------------------------------------------------------

    def _look_for_deadlock(self) -> None:
        if not self._is_noted and self._own.may_note():
            self._is_noted = True
            self._store.pause()
            note = Wait(self._rank, self.key, self._label, program_line(), self._ranks)
            self._store.write(note_key(self._rank), note.to_text())
        waits = find_deadlock(self.key, self._ranks, self._read) if self.is_first else []
        if not waits or any(self._read(f"{wait.rendezvous}/outcome") for wait in waits):
            return
        text = (
            f"ranks wait for one another, which is a deadlock: {'; '.join(map(str, waits))} (found "
            f"by rank {self._rank}). All ranks of a mesh must make it, over the same ranks, and "
            "make and first use meshes in the same order; mesh.universe.warm_up() makes lazy "
            "groups ahead of time."
        )
        for wait in waits:
            self._store.put_first(f"{wait.rendezvous}/outcome", text)

    def _missing(self) -> str:
        """Say who has not joined, and where they are as far as they noted it."""
        self._store.pause()
        joined = self._store.count(f"{self.key}/joined", 0)
        missing: dict[int, Wait | None] = {}
        for rank in self._ranks[:_MOST_READ] if self._has_texts else self._ranks[:_NAMED]:
            if self._has_texts:
                if not self._read(f"{self.key}/{rank}"):
                    missing[rank] = None
            elif rank != self._rank:
                wait = read_wait(rank, self._read)
                if wait is None or wait.rendezvous != self.key:
                    missing[rank] = wait
            if len(missing) == _NAMED:
                break
        elsewhere = "".join(f"; {wait}{self._whom(wait)}" for wait in missing.values() if wait)
        name, _, number = self.key.rpartition("/")
        before = self._read(f"{name}/{int(number) - 1}/outcome")
        return (
            f"{joined} of {len(self._ranks)} members joined; not seen were "
            f"{f'ranks {list(missing)}' if missing else 'others'}{elsewhere}. Those that did not "
            "join have died, or are building other meshes: all ranks of a mesh must make it, over "
            "the same ranks, and use its lazy groups, and all ranks of a job must run with "
            "meshverse.install() or none."
            + (
                f" The attempt before failed: {before}"
                if before and not before.startswith(_ALL_JOINED)
                else ""
            )
        )

    def _whom(self, wait: Wait) -> str:
        """Say for which ranks another one waits elsewhere; "" where none is missing."""
        absent = []
        for rank in wait.ranks[:_NAMED]:
            note = read_wait(rank, self._read)
            if rank != wait.rank and (note is None or note.rendezvous != wait.rendezvous):
                absent.append(rank)
        return f", for rank{'s' * (len(absent) > 1)} {rank_list(absent)}" if absent else ""
