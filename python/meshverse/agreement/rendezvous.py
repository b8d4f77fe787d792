"""Rendezvous: the members of a group wait in the store until all of them have joined.

For some backends, c10d also waits for all members, but its error cannot say why some are missing.
Here each member increments a counter. The last one to join writes the outcome; the others poll the
key of the outcome. If each member contributes a string, the outcome contains all strings, and the
last member removes their keys; after a failure, each member removes its own.

A rendezvous that failed can be tried again, so attempts are numbered. Each attempt has one outcome,
which never changes: the first that is written. A member that times out, is interrupted or finds a
deadlock (see `deadlock`) writes a failure as the outcome, and all members that have joined the
attempt get it. A member that joins later continues with the next attempt; if members contribute
strings, it gets the failure too.

A call may fail on a member that has got the group, for example because of a Ctrl-C right after.
That group is a *leftover*. If the member calls again, it cannot know whether the others will. So it
uses the leftover, without waiting, and writes this as the outcome of the rendezvous for the next
group like it. If others call again, they use that group too.

On members that have gone on, the next group may be one that a lazy universe has planned. That one
stays a group of its own, as meshes have its name already. Or it is one with other options, such as
another timeout, which names do not contain. So all its members ignore this outcome, whether they
are waiting or join later, and go on with the next attempt.
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
from typing import TYPE_CHECKING, NamedTuple

from meshverse.store import StoreKeys
from meshverse.wording import rank_list
from meshverse.world import World, WorldState

if TYPE_CHECKING:
    from .deadlock import Wait

# `deadlock` is imported by a rank that has waited for a while.
_log = logging.getLogger(__name__)

_ALL_JOINED = "all joined"  # begins the outcome of a success; the members' strings follow
_LEFTOVER = "leftover "  # begins the outcome if a member uses a leftover, whose name follows
_CHECK_SECONDS = 1.0  # between two calls of `check`
_FIRST_LOOK_SECONDS = 1.0  # until a rank writes its note, and the first search for a deadlock
_LONGEST_LOOK_SECONDS = 30.0  # between two searches; the interval doubles up to this
_WARNING_SECONDS = 5.0  # until the rank that joined first logs which members are missing
_NAMED = 16  # most members that a message names
_MOST_READ = 1_000  # most members whose strings are looked up to find missing members


def _without_leftover(outcome: str) -> str:
    """Return an outcome as an error of a member that lacks the leftover of another one."""
    if not outcome.startswith(_LEFTOVER):
        return outcome
    _, name, who = outcome.split(" ", 2)
    return (
        f"another member goes on with {name} ({who}), which this rank has destroyed or never got. "
        "A group that only some members have cannot be used again: call destroy_process_group() "
        "and init_process_group() on all ranks"
    )


def _as_attempt_before(outcome: str) -> str:
    """Return a sentence on the attempt before, from its outcome; "" if that says nothing."""
    if not outcome or outcome.startswith(_ALL_JOINED):
        return ""
    if not outcome.startswith(_LEFTOVER):
        return f" The attempt before failed: {outcome.removesuffix('.')}."
    _, name, who = outcome.split(" ", 2)
    return f" The attempt before ended as another member called again and uses {name} ({who})."


class Joined(NamedTuple):
    """A rendezvous that all members have joined.

    Attributes:
        attempt: number of the attempt, from 0.
        texts: strings that the members contributed, in the order of the ranks; empty if they
            contributed none.
    """

    attempt: int
    texts: list[str]


class Waiting(NamedTuple):
    """A rendezvous that a thread of this process has joined, which may wait for other members.

    Attributes:
        key: name of the attempt: the same on all members, and of no other one.
        label: description of the group that the members create, for messages.
        ranks: global ranks of the members.
        since: time at which it joined, in seconds since the epoch.
    """

    key: str
    label: str
    ranks: Sequence[int]
    since: float


class LeftoverError(Exception):
    """Signal that the members of a rendezvous use a leftover: a group that they have already.

    Attributes:
        name: c10d name of that group.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Rendezvous(WorldState):
    """All rendezvous of this rank in one world, and the way to join one.

    Attributes:
        waits: the rendezvous that threads are in, by the identifier of the thread.
    """

    def __init__(self) -> None:
        self.waits: dict[int, Waiting] = {}
        self._next_attempts: dict[str, int] = {}  # number of the next attempt, by name
        self._joined_first: dict[str, list[str]] = {}  # keys of attempts to remove, by name
        self._complete: dict[str, int] = {}  # last attempt that all members joined, by name
        self._is_main_thread_only = True  # no other thread has joined so far

    def join(
        self,
        world: World,
        name: str,
        label: str,
        ranks: Sequence[int],
        timeout: timedelta | None,
        *,
        check: Callable[[], RuntimeError | None] | None = None,
        text: str | None = None,
        has_group: Callable[[str], bool | None] | None = None,
    ) -> Joined:
        """Join a rendezvous, and wait until all members have joined.

        Two store operations; more if this rank waits or contributes a string.

        Args:
            world: world of the members, one of which is this rank. It must have a store.
            name: name of the rendezvous: the same on all members, and used for no other one.
            label: description of the group that the members create, for messages.
            ranks: global ranks of the members, in the same order on all of them.
            timeout: longest time to wait; None for no limit.
            check: function that is called about once a second. If waiting is pointless, it returns
                the error that says why.
            text: string that this rank contributes. All members must pass one, or none.
            has_group: function that returns whether this rank has the group of a c10d name; None if
                that has other options than are wanted. Then, and if no function is passed, the
                leftover is ignored: this rank goes on with the next attempt. All members must pass
                one, or none.

        Raises:
            LeftoverError: a member uses a leftover that this rank has too.
            RuntimeError: the members are in a deadlock, some did not join in time, or one left. All
                members that waited get the same message.
            What `check` returns; the other members get a RuntimeError that quotes it.
        """
        store = world.run_keys
        assert store is not None
        if len(ranks) == 1:
            return Joined(0, [] if text is None else [text])
        if threading.current_thread() is not threading.main_thread():
            self._is_main_thread_only = False
        while True:
            number = self._next_attempts.get(name, 0)
            key = f"rendezvous/{name}/{number}"
            attempt = _Attempt(self, store, world, key, label, ranks, text)
            # A signal handler may join one while its thread waits in another.
            thread, outer = threading.get_ident(), self.waits.get(threading.get_ident())
            self.waits[thread] = Waiting(key, label, ranks, time.time())
            try:
                outcome, was_immediate = attempt.join_and_wait(timeout, check)
            finally:
                self.waits.pop(thread, None)
                if outer is not None:
                    self.waits[thread] = outer
                if attempt.joined_first:
                    self._joined_first.setdefault(name, []).append(attempt.key)
                if attempt.is_complete:
                    self._complete[name] = number
                self._next_attempts[name] = number + 1
            if outcome.startswith(_LEFTOVER):
                leftover = outcome.split(" ")[1]
                has_it = None if has_group is None else has_group(leftover)
                if has_it is None:
                    continue
                if has_it:
                    self._next_attempts[name] = number  # it has this outcome for later calls too
                    raise LeftoverError(leftover)
            if outcome.startswith(_ALL_JOINED):
                return Joined(number, _unpacked(outcome.removeprefix(_ALL_JOINED)))
            if text is not None or not was_immediate:
                raise RuntimeError(_without_leftover(outcome))

    def set_leftover(self, world: World, name: str, leftover: str) -> None:
        """Have the other members of a rendezvous use a group that they have; see the module.

        One store operation; more if attempts have failed.

        Args:
            world: world of the members.
            name: name of the rendezvous.
            leftover: c10d name of the group, which this rank uses.
        """
        store = world.run_keys
        assert store is not None
        who = f"on rank {world.rank}, which got this group in a call that failed"
        outcome = f"{_LEFTOVER}{leftover} {who}"
        while True:
            number = self._next_attempts.get(name, 0)
            key = f"rendezvous/{name}/{number}"
            found = store.put_first(f"{key}/outcome", outcome)
            # Not another leftover, of the same ranks but with a timeout or handles of its own.
            if found.startswith(_LEFTOVER) and found.split(" ")[1] == leftover:
                if key not in self._joined_first.get(name, ()):
                    self._joined_first.setdefault(name, []).append(key)
                return
            self._next_attempts[name] = number + 1

    def on_revive(self, current: World) -> None:
        """Take over the rendezvous of `current`; see `WorldState.on_revive`."""
        its = current.state(Rendezvous)
        self._next_attempts, self._joined_first = its._next_attempts, its._joined_first
        self._complete = its._complete

    def reset_after_fork(self) -> None:
        """Forget, in a forked process, what threads of the parent wait for."""
        self.waits.clear()

    def complete_attempt(self, name: str) -> int | None:
        """Return the number of the last attempt that all members joined, the same on all of them.

        None if there is none.
        """
        return self._complete.get(name)

    def may_note(self) -> bool:
        """Return whether this rank may write a note that it waits; see `deadlock`.

        False once a thread other than the main one has joined a rendezvous: this rank can then join
        one while it waits in another.
        """
        return self._is_main_thread_only

    def remove_from_store(self, store: StoreKeys, name: str) -> None:
        """Forget a rendezvous, and remove the keys of attempts that this rank joined first.

        No member may still be waiting in it. If it was never complete, its name is used again, and
        the members go on with the next attempt: then nothing is forgotten.
        """
        if name not in self._complete:
            return
        self._next_attempts.pop(name, None)
        self._complete.pop(name, None)
        for key in self._joined_first.pop(name, ()):
            store.remove(f"{key}/outcome")
            store.remove(f"{key}/joined")


def _packed(texts: list[str]) -> str:
    """Return one short string that contains these, each different one once: all ranks read it."""
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
    """Signal that the attempt has an outcome, so that other keys need not be read any more."""


class _Attempt:
    """One attempt of this rank at a rendezvous. Arguments as for `Rendezvous.join`."""

    def __init__(
        self,
        own: Rendezvous,
        store: StoreKeys,
        world: World,
        key: str,
        label: str,
        ranks: Sequence[int],
        text: str | None,
    ) -> None:
        self._own, self._store, self._world = own, store, world
        self._rank, self._ranks = world.rank, ranks
        self.key, self._label, self._text = key, label, text
        self.joined_first = self.is_complete = self._is_noted = False

    def join_and_wait(
        self, timeout: timedelta | None, check: Callable[[], RuntimeError | None] | None
    ) -> tuple[str, bool]:
        """Join, and wait for the other members.

        Returns:
            The outcome, and whether this rank got it without waiting. If so, and the outcome is a
            failure, the attempt failed before this rank joined.
        """
        outcome = ""
        try:
            outcome, was_immediate = self._join(timeout, check)
            return outcome, was_immediate
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the store failed; `error` is raised
                outcome = self._decide(self._left(error))
            raise
        finally:
            self.is_complete = outcome.startswith(_ALL_JOINED)
            with contextlib.suppress(RuntimeError):  # the store failed and has raised already
                if self._is_noted:
                    from .deadlock import note_key

                    self._store.remove(note_key(self._rank))
                if self._text is not None and outcome and not self.is_complete:
                    self._store.remove(f"{self.key}/{self._rank}")

    def _join(
        self, timeout: timedelta | None, check: Callable[[], RuntimeError | None] | None
    ) -> tuple[str, bool]:
        if self._text is not None:
            self._store.write(f"{self.key}/{self._rank}", self._text)
        n_joined = self._store.count(f"{self.key}/joined")
        self.joined_first = n_joined == 1
        if n_joined == len(self._ranks):
            return self._decide(_ALL_JOINED + self._take_texts()), True
        if outcome := self._outcome():
            return outcome, True
        return self._wait(timeout, check), False

    def _left(self, error: BaseException) -> str:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"rank {self._rank} left it: {why}"

    def _take_texts(self) -> str:
        if self._text is None:
            return ""
        keys = [f"{self.key}/{rank}" for rank in self._ranks]
        # `read` does not block on a missing key: if the attempt has failed, some members have
        # removed their strings, and `_decide` then returns that failure.
        texts = [self._store.read(key) for key in keys]
        for key in keys:
            self._store.remove(key)
        return _packed(texts)

    def _decide(self, outcome: str) -> str:
        """Write the outcome, unless the attempt has one; return the one that it has then."""
        return self._store.put_first(f"{self.key}/outcome", outcome)

    def _outcome(self) -> str:
        return self._store.read(f"{self.key}/outcome")

    def _wait(
        self, timeout: timedelta | None, check: Callable[[], RuntimeError | None] | None
    ) -> str:
        start, waited = time.monotonic(), 0.0
        next_check, next_look, look = _CHECK_SECONDS, _FIRST_LOOK_SECONDS, _FIRST_LOOK_SECONDS
        has_warned = False
        while True:
            self._store.pause_between_looks(waited)
            if outcome := self._outcome():
                return outcome
            waited = time.monotonic() - start
            if self._world.is_over:
                _ = self._world.default_group  # raises: another thread has ended the world
            with contextlib.suppress(_OverError):
                if timeout is not None and waited > timeout.total_seconds():
                    return self._decide(f"rank {self._rank} waited {timeout}: {self._missing()}")
                if check is not None and waited > next_check:
                    next_check = waited + _CHECK_SECONDS
                    self._store.pause()
                    if (error := check()) is not None:
                        # If all have joined meanwhile, the others go on to create the group. So
                        # does this rank; its next wait or compared call raises.
                        outcome = self._decide(self._left(error))
                        if not outcome.startswith(_ALL_JOINED):
                            raise error
                        return outcome
                if waited > next_look:
                    look = min(2 * look, _LONGEST_LOOK_SECONDS)
                    next_look = waited + look
                    self._look_for_deadlock()
                if waited > _WARNING_SECONDS and self.joined_first and not has_warned:
                    from meshverse.program_line import program_line

                    has_warned = True  # one line for all members
                    _log.warning(
                        "Rank %d has waited %g s to create %s with ranks [%s]: %s This rank waits "
                        "at %s; meshverse.watch() logs where the missing ones are.",
                        self._rank,
                        _WARNING_SECONDS,
                        self._label,
                        rank_list(self._ranks),
                        self._missing(),
                        program_line(),
                    )

    def _read(self, key: str) -> str:
        """Return the value of a key, "" if it has none; raise _OverError if there is an outcome."""
        self._store.pause()
        if self._outcome():
            raise _OverError
        self._store.pause()
        return self._store.read(key)

    # --- where other members wait ---------------------------------------------------------------

    def _look_for_deadlock(self) -> None:
        from meshverse.program_line import program_line

        from .deadlock import Wait, find_deadlock, note_key, read_wait

        if not self._is_noted and self._own.may_note():
            self._is_noted = True
            self._store.pause()
            ranks = self._ranks
            note = Wait(self._rank, self.key, self._label, program_line(), ranks, len(ranks))
            self._store.write(note_key(self._rank), note.to_text())
        waits = find_deadlock(self.key, self._ranks, self._read) if self.joined_first else []
        if not waits or any(read_wait(wait.rank, self._read) != wait for wait in waits):
            return
        if any(self._read(f"{wait.rendezvous}/outcome") for wait in waits):
            return
        failure = (
            f"deadlock: {'; '.join(map(str, waits))} (found by rank {self._rank}). All ranks of a "
            "mesh must make it over the same ranks, and make and first use meshes in the same "
            "order. mesh.universe.warm_up() creates lazy groups ahead of time."
        )
        for wait in waits:
            self._store.put_first(f"{wait.rendezvous}/outcome", failure)

    def _missing(self) -> str:
        """Describe which members have not joined, and where those with a note wait instead."""
        from .deadlock import read_wait

        self._store.pause()
        joined, has_texts = self._store.count(f"{self.key}/joined", 0), self._text is not None
        missing: dict[int, Wait | None] = {}
        for rank in self._ranks[:_MOST_READ] if has_texts else self._ranks[:_NAMED]:
            if has_texts:
                if not self._read(f"{self.key}/{rank}"):
                    missing[rank] = None
            elif rank != self._rank:
                wait = read_wait(rank, self._read)
                if wait is None or wait.rendezvous != self.key:
                    missing[rank] = wait
            if len(missing) == _NAMED:
                break
        unseen = [rank for rank, wait in missing.items() if wait is None]
        elsewhere = [f"{wait}{self._whom(wait)}" for wait in missing.values() if wait]
        n_absent = len(self._ranks) - joined - len(elsewhere)
        found = [f"{joined} of {len(self._ranks)} members joined"]
        if n_absent > 0 and not unseen:  # they are not among the ranks that were looked up
            found.append(f"missing: {n_absent} others")
        elif n_absent > 0 and len(self._ranks) > _NAMED and not has_texts:
            found.append(f"possibly missing: ranks {unseen}")  # or they have no note yet
        elif 0 < n_absent < len(unseen):
            found.append(f"missing: {n_absent} of ranks {unseen}")  # the others have no note yet
        elif n_absent > 0:
            n_more = n_absent - len(unseen)
            found.append(f"missing: ranks {unseen}{f' and {n_more} others' if n_more else ''}")
        name, _, number = self.key.rpartition("/")
        before = self._read(f"{name}/{int(number) - 1}/outcome")
        return (
            f"{'; '.join(found + elsewhere)}. Those that joined may have made an extra "
            "call; the others may be slow, dead, or building other meshes. All ranks of a mesh "
            "must make it over the same ranks, and make the same calls that create or first use "
            "its groups. If one rank calls meshverse.install(), all must."
            + _as_attempt_before(before)
        )

    def _whom(self, wait: Wait) -> str:
        """Describe for which ranks a rank waits elsewhere; "" if none of them is missing there."""
        from .deadlock import read_wait

        absent = []
        for rank in wait.ranks[:_NAMED]:
            note = read_wait(rank, self._read)
            if rank != wait.rank and (note is None or note.rendezvous != wait.rendezvous):
                absent.append(rank)
        return f", for rank{'s' * (len(absent) > 1)} {rank_list(absent)}" if absent else ""
