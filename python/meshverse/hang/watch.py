"""The watch of a job: a thread on each rank that finds out why collectives are stuck.

Every few seconds, the thread checks whether its rank has been in a collective, a send or receive,
or the rendezvous in which members create a group, for longer than the limit. If so, it raises an
alarm in the store. At an alarm, the threads of all ranks write where their ranks are, also on ranks
that wait in no collective. In each stuck group, one rank is the reporter: it reads these records
and logs the verdict.

An operation of the store cannot time out. While one gets no answer, as when the store's host has
lost power, a second thread reports the calls of this rank alone.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from meshverse._torch_compat.flight_recorder import flight_recorder_status, not_recording_reason
from meshverse.for_extras import World, on_world_started
from meshverse.locks import state_lock
from meshverse.store import StoreKeys

from .live import Alarm, live_coordinates, longest_wait, record_here
from .records import KEPT, Call, GroupSeen, RankRecord
from .report import NoRecord, ReportFormatter
from .skips import find_skips
from .verdicts import Cause, Stuck, find_stuck

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

_VARIABLE = "MESHVERSE_WATCH"
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1.0, 7 * 24 * 3600.0
_LONGEST_PAUSE_SECONDS = 5.0
_LOOKS_A_SECOND = 2_000  # most looks of all ranks together, which limits the store's load
_SECONDS_TO_STOP = 2.0
_SECONDS_TO_ANSWER, _LONGEST_SECONDS_TO_ANSWER = 0.5, 8.0  # for the other ranks, at an alarm
_SECONDS_TO_REPORT = 10.0  # for the reporter, once ranks have answered or had their time
_HISTORY = 512  # completed collectives of each group, among which a skipped one is looked for
_SECONDS_TO_KEEP = 120.0  # keys in the store that a rank wrote at an alarm
_SECONDS_FOR_STORE = 20.0  # to answer: afterwards, this rank reports alone


@dataclass(frozen=True)
class Hang:
    """A hang that the watch found; the argument of `on_stuck`.

    Attributes:
        text: verdict, as it is logged.
        groups: the same as data: for each reported group, its ranks, call, missing ranks and cause,
            which is "deadlock", "mismatch", "missing", "partner", "late", "unknown" or "follows".
        is_logged_here: whether this rank logs the verdict. One rank of the group does; without the
            store, each rank logs its own.
    """

    text: str
    groups: list[dict[str, Any]]
    is_logged_here: bool


class Watch:
    """The watch of this process. `stop` ends it, as does the end of a `with` block.

    Args:
        seconds: time after which a collective counts as stuck.
        on_stuck: function that is called with a `Hang`, or None.
    """

    def __init__(self, seconds: float, on_stuck: Callable[[Hang], object] | None) -> None:
        self.seconds = seconds
        self.on_stuck = on_stuck
        self._is_over = threading.Event()
        self._watched: _WatchedWorld | None = None
        self._store_wait = _StoreWait()
        self._has_logged_why_off = False
        self._threads = [
            threading.Thread(target=self._run, name="meshverse watch", daemon=True),
            threading.Thread(target=self._run_alone, name="meshverse watch, alone", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the watch, also in processes that are forked later. Further calls do nothing."""
        global _current
        with state_lock.held:
            if _current is self:
                _current = None
            if self in _of_parent:
                _of_parent.remove(self)
        self._is_over.set()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join(_SECONDS_TO_STOP)

    def __enter__(self) -> Self:
        """Return the watch itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the watch."""
        self.stop()

    def _run(self) -> None:
        pause = 0.0
        while not self._is_over.wait(pause):
            pause = self._pause
            try:
                world = World.current()
                if world is None or world.size == 1:
                    self._watched = None
                    continue
                if why := not_recording_reason():
                    self._log_why_off(world, why)
                    continue
                if self._watched is None or self._watched.place != (world, world.run):
                    self._watched = _WatchedWorld(
                        world, self.seconds, self.on_stuck, self._store_wait
                    )
                pause = max(pause, world.size / _LOOKS_A_SECOND)
                self._watched.look(pause, self._is_over)
            except Exception as error:  # noqa: BLE001  # a watch never ends a job
                _log.info("Meshverse's watch failed and tries again: %s", error)

    @property
    def _pause(self) -> float:
        """Time between two looks, in seconds."""
        return min(self.seconds / 4, _LONGEST_PAUSE_SECONDS)

    def _run_alone(self) -> None:
        """Report the calls of this rank while `_run` waits for the store."""
        alone: _WatchedWorld | None = None
        while not self._is_over.wait(self._pause):
            watched, why = self._watched, self._store_wait.why_alone()
            if watched is None or not why:
                alone = None
                continue
            try:
                if alone is None or alone.place != watched.place:
                    alone = _WatchedWorld(watched.world, self.seconds, self.on_stuck)
                    alone.go_on_alone(watched, why)
                alone.look(self._pause, self._is_over)
            except Exception as error:  # noqa: BLE001  # a watch never ends a job
                _log.info("Meshverse's watch failed and tries again: %s", error)

    def _log_why_off(self, world: World, why: str) -> None:
        if not self._has_logged_why_off:
            self._has_logged_why_off = True
            _log.log(
                logging.WARNING if world.rank == 0 else logging.INFO,
                "Meshverse's watch cannot find stuck collectives: %s.",
                why,
            )


@overload
def watch(seconds: float = 60.0, *, on_stuck: Callable[[Hang], object] | None = None) -> Watch: ...


@overload
def watch(seconds: None, *, on_stuck: Callable[[Hang], object] | None = None) -> None: ...


@overload
def watch(
    seconds: float | None, *, on_stuck: Callable[[Hang], object] | None = None
) -> Watch | None: ...


def watch(
    seconds: float | None = 60.0, *, on_stuck: Callable[[Hang], object] | None = None
) -> Watch | None:
    """Watch this process: log why a collective is stuck, with the ranks, axes and lines of code.

    Call it on all ranks, before or after `init_process_group`; or set MESHVERSE_WATCH=60. It needs
    torch's flight recorder, which is on unless TORCH_FR_BUFFER_SIZE is 0. The watch never raises
    an error in the program, and never uses a process group.

    Args:
        seconds: time after which a collective, a send or receive, or the wait for the members of a
            new group counts as stuck, from 1 s to 7 days; None ends the watch.
        on_stuck: function that is called with a `Hang` on each rank that waits in a stuck group, in
            a thread of the watch: for example to end the job, or to page somebody. It does not
            run on the ranks that these wait for. If the store answers only later, it is called
            again, with the whole verdict. Its errors are logged.

    Returns:
        The watch, which replaces an earlier one; `stop()` ends it. None for `seconds=None`.

    Raises:
        ValueError: `seconds` is outside 1 s to 7 days.
        TypeError: `seconds` is not a number, or `on_stuck` cannot be called.

    Example:
        >>> import meshverse
        >>> with meshverse.watch(seconds=60):
        ...     pass  # train
    """
    if seconds is not None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"seconds={seconds!r}: pass a number, or None to end the watch.")
        if not _SHORTEST_SECONDS <= seconds <= _LONGEST_SECONDS:
            raise ValueError(f"seconds={seconds!r}: pass 1 to {_LONGEST_SECONDS:,.0f}.")
    if on_stuck is not None and not callable(on_stuck):
        raise TypeError(f"on_stuck={on_stuck!r} cannot be called: pass a function of a Hang.")
    _replace(None)  # ends the earlier watch: both would log a hang that comes now
    new = None if seconds is None else Watch(float(seconds), on_stuck)
    _replace(new)
    return new


def _replace(new: Watch | None) -> None:
    global _current
    with state_lock.held:
        old, _current = _current, new
        _of_parent.clear()
    if old is not None:
        old.stop()


def watch_by_environment() -> None:
    """Watch this process if MESHVERSE_WATCH is set to a number of seconds other than 0.

    Raises:
        ValueError: the variable is not a number of seconds from 1 s to 7 days.
    """
    text = os.environ.get(_VARIABLE, "").strip()
    if text in ("", "0"):
        return
    try:
        watch(float(text))
    except ValueError:
        raise ValueError(
            f"{_VARIABLE}={text!r}: set it to a number of seconds from 1 to "
            f"{_LONGEST_SECONDS:,.0f}, such as 60, or to 0 for no watch."
        ) from None


_current: Watch | None = None


def _stop() -> None:
    # A daemon thread that is in c10d's code while Python exits may crash the process.
    if _current is not None:
        _current.stop()


def _reset_after_fork() -> None:
    global _current
    if _current is not None:  # its thread is not in this process
        _of_parent.append(_current)
    _current = None


def _go_on() -> None:
    # Once a forked process has its own world, it is a rank (unlike a data loader's worker), so it
    # gets the same watch as its parent had.
    if _of_parent:
        parents = _of_parent.pop()
        watch(parents.seconds, on_stuck=parents.on_stuck)


_of_parent: list[Watch] = []  # in a forked process, its parent's watch

atexit.register(_stop)
os.register_at_fork(after_in_child=_reset_after_fork)
on_world_started(_go_on)


class _Reported(NamedTuple):
    """A call of this rank that was reported as stuck.

    Attributes:
        what: the call and its group, in words.
        since: time of the call, in seconds since the epoch.
        level: level at which this rank has logged the report; None if another rank reports.
        again_at: monotonic time at which to examine the call again, as the report had no cause of
            its own, or as another rank was to report; None if it had one, or that rank has.
        key: key in the store for the verdict of another rank; "" if this rank reports.
    """

    what: str
    since: float
    level: int | None
    again_at: float | None
    key: str = ""


class _StoreWait:
    """The wait of one thread for an answer of the store, for other threads to see."""

    def __init__(self) -> None:
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def why_alone(self) -> str:
        """Return why ranks cannot use the store now; "" if it answers."""
        since = self._since
        if since is None or time.monotonic() - since < _SECONDS_FOR_STORE:
            return ""
        return f"the store has not answered for {time.monotonic() - since:.0f} s"


class _TimedStore:
    """A store whose operations set the wait of their thread."""

    def __init__(self, store: Any, wait: _StoreWait) -> None:
        self._store, self._wait = store, wait

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._store, name)

        def timed(*given: Any) -> Any:
            with self._wait:
                return operation(*given)

        return timed


class _WatchedWorld:
    """The watch in one world, by one of its threads.

    Args:
        world: the world.
        seconds, on_stuck: as in `Watch`.
        store_wait: set while the thread waits for the store.
    """

    def __init__(
        self,
        world: World,
        seconds: float,
        on_stuck: Callable[[Hang], object] | None,
        store_wait: _StoreWait | None = None,
    ) -> None:
        self.world, self.place = world, (world, world.run)
        self._seconds, self._on_stuck = seconds, on_stuck
        self._store_wait = store_wait or _StoreWait()
        # Other calls stuck for the same reason may have begun a little later than the one that
        # raises an alarm: at an alarm, calls older than half the limit are included.
        self._shortest = seconds / 2
        self._next_alarm: int | None = None  # None until the first look
        # Status of each group of the recorders, since when, and when no recorded call was pending.
        self._unchanged: dict[tuple[int, str], tuple[object, float]] = {}
        self._settled: dict[tuple[int, str], object] = {}
        self._reported: dict[tuple[object, ...], _Reported] = {}  # pending ones, by identity
        self._own_keys: list[tuple[float, str]] = []  # keys in the store, and since when
        self._awaited: dict[str, float] = {}  # keys of verdicts of other ranks, and until when
        self._last_raised = float("-inf")
        self._why_alone = ""

    def look(self, pause: float, is_over: threading.Event) -> None:
        """Look once: raise an alarm if this rank is stuck, and answer an alarm that is raised."""
        stuck = self._find_stuck()
        if self._reported:
            self._log_ended()
        try:
            store = None if self._why_alone else self._store_keys()
            if store is None:
                self._report_alone(stuck)
                return
            if self._next_alarm is None:
                self._next_alarm = _number_of_alarms(store)
                self._answer_late(store, self._next_alarm - 1)
            alarm = Alarm(store, self._next_alarm)
            stuck = [call for call in stuck if not self._is_reported_elsewhere(store, call)]
            now = time.monotonic()
            if stuck and now - self._last_raised > self._seconds:
                self._last_raised = now
                alarm.raise_it(self.world.rank)
            if alarm.is_raised():
                self._next_alarm += 1
                self._answer(alarm, pause, is_over)
            self._pass_on_verdicts(store)
        except RuntimeError as error:
            if self.world.is_over:
                return
            # The store is not used again, as c10d would print a warning each time.
            self._why_alone = f"the store does not answer ({str(error).splitlines()[0]})"
            self._report_alone(stuck)

    def go_on_alone(self, other: _WatchedWorld, why: str) -> None:
        """Take over what another thread has reported, and use no store."""
        self._reported, self._why_alone = dict(other._reported), why

    def _store_keys(self) -> StoreKeys | None:
        with self._store_wait:  # a thread's first use of the store connects to it
            store = self.world.store
            if store is None:
                return None
            self.world.run.number(store)
        return self.world.run.keys(_TimedStore(store, self._store_wait))

    # --- this rank ----------------------------------------------------------------------------

    def _find_stuck(self) -> list[Call]:
        """Return the calls of this rank that are older than the limit and are to be reported."""
        now = time.monotonic()
        status = flight_recorder_status()
        for group, numbers in status.items():
            if self._unchanged.get(group, (None, 0.0))[0] != numbers:
                self._unchanged[group] = numbers, now
        is_suspect = any(
            now - since >= self._seconds and self._settled.get(group) != numbers
            for group, (numbers, since) in self._unchanged.items()
        )
        if longest_wait() < self._seconds and not is_suspect:
            return []
        record = self._record(with_lines=False)
        if not any(call.number for call in record.pending()):  # of those that are recorded
            self._settled |= {group: numbers for group, (numbers, _) in self._unchanged.items()}
        return [
            call
            for call in record.pending()
            if record.age_of(call) >= self._seconds and self._is_due(call)
        ]

    def _record(self, *, with_lines: bool, n_kept: int = KEPT) -> RankRecord:
        return record_here(self.world.rank, with_lines=with_lines, n_kept=n_kept)

    def _is_due(self, call: Call) -> bool:
        """Return whether a call was not reported, or has to be examined again."""
        reported = self._reported.get(_identity(call))
        if reported is None:
            return True
        return reported.again_at is not None and time.monotonic() >= reported.again_at

    def _is_reported_elsewhere(self, store: StoreKeys, call: Call) -> bool:
        """Return whether another rank, which was to report a call, has; it may have died since."""
        reported = self._reported.get(_identity(call))
        if reported is None or not reported.key or not store.read(reported.key):
            return False
        self._reported[_identity(call)] = reported._replace(again_at=None)
        return True

    # --- an alarm -----------------------------------------------------------------------------

    def _answer_late(self, store: StoreKeys, number: int) -> None:
        """Answer the last alarm before this watch began: its reporters may still be waiting.

        If not, nobody reads this answer. This rank's own calls are reported at a later alarm.
        """
        alarm = Alarm(store, number)
        if number >= 0 and not alarm.is_answered(self.world.rank):  # by an earlier watch
            self._write_record(alarm)

    def _write_record(self, alarm: Alarm) -> RankRecord:
        history, now = self._record(with_lines=True, n_kept=_HISTORY), time.monotonic()
        record = history.shortened(KEPT)
        self._own_keys += [(now, key) for key in alarm.answer(record)]
        # Also if it waits in no call: the others may wait for this rank.
        self._own_keys.append((now, alarm.write_history(history)))
        return record

    def _answer(self, alarm: Alarm, pause: float, is_over: threading.Event) -> None:
        self._remove_old_keys(alarm.store)
        record, now = self._write_record(alarm), time.monotonic()
        # After this time, the other ranks have seen the alarm.
        if is_over.wait(pause + _SECONDS_TO_ANSWER):
            return
        waiting = [call for call in record.pending() if record.age_of(call) >= self._shortest]
        mine = {call.group: call for call in reversed(waiting)}
        reporters: dict[str, bool] = {}
        earlier = dict(self._reported)
        for group, call in mine.items():
            if self._is_due(call):
                reporters[group] = alarm.claim(group, record)
                what = _in_words(call, record)
                reported = _Reported(what, call.since, None, None)
                if not reporters[group]:
                    again_at = now + pause + _LONGEST_SECONDS_TO_ANSWER + _SECONDS_TO_REPORT
                    key = alarm.verdict_key(group, record)
                    reported = reported._replace(again_at=again_at, key=key)
                self._reported[_identity(call)] = reported
        # One for all groups: the other ranks answer at the same time, and wait for this one's
        # answer to the next alarm.
        deadline = time.monotonic() + pause + _LONGEST_SECONDS_TO_ANSWER
        for group, is_reporter in reporters.items():
            if is_reporter:
                identity = _identity(mine[group])
                self._own_keys.append((now, alarm.verdict_key(group, record)))
                is_again = identity in earlier
                cause, level = self._report(alarm, group, record, deadline, is_over, is_again)
                has_own_cause = cause not in (None, Cause.FOLLOWS)
                self._reported[identity] = self._reported[identity]._replace(
                    level=earlier[identity].level if level is None and is_again else level,
                    again_at=None if has_own_cause else time.monotonic() + self._seconds,
                )
        if self._on_stuck is not None:
            self._awaited |= {
                alarm.verdict_key(group, record): now + _SECONDS_TO_KEEP
                for group, is_reporter in reporters.items()
                if not is_reporter
            }

    def _remove_old_keys(self, store: StoreKeys) -> None:
        """Remove the keys that this rank wrote at alarms more than `_SECONDS_TO_KEEP` ago."""
        oldest = time.monotonic() - _SECONDS_TO_KEEP
        for since, key in self._own_keys:
            if since < oldest:
                store.remove(key)
        self._own_keys = [(since, key) for since, key in self._own_keys if since >= oldest]

    def _report(
        self,
        alarm: Alarm,
        group: str,
        record: RankRecord,
        deadline: float,
        is_over: threading.Event,
        is_again: bool,
    ) -> tuple[Cause | None, int | None]:
        """Log the verdict on a group, for all its ranks, and write it to the store.

        Args:
            alarm: the alarm.
            group: c10d's name of the group.
            record: that of this rank.
            deadline: monotonic time until which to wait for the answers of the group's ranks.
            is_over: set when the watch ends.
            is_again: whether an earlier report of the call had no cause of its own. Then one that
                still has none is not logged.

        Returns:
            The cause, and the level at which it was logged; None for what there is not, such as if
            the call has ended meanwhile.
        """
        while True:
            records = alarm.collect(group, record)
            ranks = record.groups[group].ranks or ()
            if all(rank in records for rank in ranks) or time.monotonic() > deadline:
                break
            if is_over.wait(_SECONDS_TO_ANSWER):
                return None, None
        stuck = find_stuck(records, self._shortest)
        own = next((one for one in stuck if one.group == group), None)
        if own is None or (is_again and own.cause is Cause.FOLLOWS):
            return None, None
        # Pairs of ranks in a group may be stuck for different causes.
        about = [own, *(one for one in stuck if one is not own and _goes_with(one, own))]
        find_skips(about, stuck, alarm.history)
        formatter = ReportFormatter(live_coordinates, NoRecord.NO_ANSWER)
        text, data = formatter.text(stuck, about), formatter.data(stuck, about)
        alarm.store.write(alarm.verdict_key(group, record), json.dumps([text, data]))
        # Of the groups in a deadlock, one logs an error.
        first = min([*own.cycle, own.name])
        is_first = any(one.name == first for one in stuck if one.group == group)
        is_cause = own.cause is not Cause.FOLLOWS and is_first
        level = logging.ERROR if is_cause else logging.INFO
        _log.log(level, "Rank %d: A collective is stuck.\n%s", self.world.rank, text)
        self._call(Hang(text, data, True))
        return own.cause, level

    def _pass_on_verdicts(self, store: StoreKeys) -> None:
        """Call `on_stuck` with the verdicts that other ranks have logged since the last look."""
        for key, until in list(self._awaited.items()):
            verdict = store.read(key)
            if verdict or time.monotonic() > until:
                del self._awaited[key]
            if verdict:
                text, data = json.loads(verdict)
                self._call(Hang(text, data, False))

    def _report_alone(self, stuck: list[Call]) -> None:
        """Log what this rank knows without the other ranks' records."""
        new = [
            call
            for call in stuck
            if (known := self._reported.get(_identity(call))) is None or known.level is None
        ]
        if not new:
            return
        record = self._record(with_lines=True)
        found = find_stuck({self.world.rank: record}, self._seconds)
        formatter = ReportFormatter(live_coordinates, NoRecord.NO_STORE)
        for call in new:
            what = _in_words(call, record)
            self._reported[_identity(call)] = _Reported(what, call.since, logging.ERROR, None)
        text = formatter.text(found)
        _log.error(
            "Rank %d: A collective is stuck, and ranks cannot exchange where they are: %s.\n%s",
            self.world.rank,
            self._why_alone or "this world has no store for all ranks",
            text,
        )
        self._call(Hang(text, formatter.data(found), True))

    def _call(self, hang: Hang) -> None:
        if self._on_stuck is None:
            return
        try:
            self._on_stuck(hang)
        except Exception:  # noqa: BLE001  # any error of the user's function
            _log.exception("on_stuck= of meshverse.watch() failed")

    def _log_ended(self) -> None:
        """Log which of the calls that were reported as stuck are no longer pending."""
        pending = {_identity(call) for call in self._record(with_lines=False).pending()}
        for identity, reported in list(self._reported.items()):
            if identity in pending:
                continue
            del self._reported[identity]
            if reported.level is not None:
                _log.log(
                    min(reported.level, logging.WARNING),
                    "Rank %d: %s is no longer stuck, %.0f s after it was called: it completed, or "
                    "its process group ended.",
                    self.world.rank,
                    reported.what,
                    time.time() - reported.since,
                )


def _goes_with(one: Stuck, reported: Stuck) -> bool:
    """Return whether a stuck call is reported together with another one."""
    is_other_cause = one.group == reported.group and one.cause is not Cause.FOLLOWS
    return one.name in reported.cycle or is_other_cause


def _number_of_alarms(store: StoreKeys) -> int:
    return next(number for number in itertools.count() if not Alarm(store, number).is_raised())


def _identity(call: Call) -> tuple[object, ...]:
    # Sends, receives and calls that torch has not recorded may have no number: one that follows an
    # equal one began later.
    began = None if call.number else call.since
    return call.group, call.number, call.operation, call.peer, began


def _in_words(call: Call, record: RankRecord) -> str:
    """Return a call of this rank and its group, as the report names them."""
    seen = record.groups.get(call.group)
    if seen is None:  # it has ended meanwhile
        seen = GroupSeen(call.group, None)
    if (partner := call.partner(record.rank, seen.ranks)) is not None:
        seen = seen._replace(ranks=sorted((record.rank, partner)))
    return ReportFormatter(live_coordinates).call(call, seen)
