"""Records of the ranks of a running job, exchanged through the store."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from meshverse._torch_compat.flight_recorder import (
    MONITORED_BARRIER,
    FrameWait,
    creation_of_frame,
    groups_of_process,
    highest_number,
    read_flight_recorders,
    runs_backward,
    sequence_number,
    wait_of_frame,
)
from meshverse.for_extras import (
    Rendezvous,
    World,
    find_group_optional,
    finest_coordinate,
    universes_here,
)
from meshverse.store import StoreKeys

from .records import (
    CREATION,
    KEPT,
    Call,
    GroupSeen,
    Progress,
    RankRecord,
    axes_in_words,
    is_of_cpp,
    label_of,
    line_of,
    record_of,
)

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OF_GLOO = " (gloo)"  # after the name of a group of two backends, for its calls on gloo
_MOST_MISSING = 64  # missing ranks of one group whose records a reporter reads
_MOST_GROUPS = 32  # groups whose calls a reporter reads


def record_here(rank: int, *, with_lines: bool, n_kept: int = KEPT) -> RankRecord:
    """Return the record of this process: recorded calls, and others that its threads are in.

    Args:
        rank: global rank of this process.
        with_lines: whether to include lines of the program.
        n_kept: how many completed calls are kept of each group.
    """
    record = RankRecord(rank, time.time())
    before = _waits(record.time)
    groups = {name: (description, ranks) for name, description, ranks in groups_of_process()}
    threads: dict[str, int] = {}  # by group, the one that made the last call
    for dump in read_flight_recorders(with_lines=with_lines):
        entries = dump["entries"]
        # Calls of an earlier group of the same name do not count: it has another description, or
        # has begun more calls than the group of today.
        earlier = _of_earlier_groups(entries)
        own = [
            entry
            for entry in entries
            if groups.get(entry["process_group"][0], ("",))[0] in ("", entry["process_group"][1])
            and entry["process_group"][0] not in earlier
        ]
        recorded = record_of({**dump, "entries": own}, rank, record.time, n_kept=n_kept)
        recorded.is_cut = bool(entries) and int(entries[0].get("record_id", 0)) > 0
        if with_lines:
            _note_gone_on(recorded, own)
        _add_recorded(record, recorded)
        threads |= {
            entry["process_group"][0]: int(entry["thread_id"])
            for entry in own
            if str(entry.get("thread_id")).isdecimal()
        }
    record.groups = {
        name: GroupSeen(label_of(description), ranks)
        for name, (description, ranks) in groups.items()
    } | {
        name: GroupSeen(f"{seen.label}{_OF_GLOO}", groups[name.removesuffix(_OF_GLOO)][1])
        for name, seen in record.groups.items()
        if name not in groups and name.removesuffix(_OF_GLOO) in groups
    }
    # Drop calls of groups that no longer exist.
    record.calls = [call for call in record.calls if call.group in record.groups]
    if record.is_cut:
        recorded_groups = {call.group for call in record.calls}
        record.begun = {
            name: number
            for name in record.groups.keys() - recorded_groups
            if (number := highest_number(name)) is not None
        }
    _name_groups(record)
    for thread, wait in _waits(record.time).items():
        # A call that has begun or ended meanwhile may be in the dump or not.
        if thread in before and before[thread].frame is wait.frame:
            _add_wait(record, wait)
    frames = sys._current_frames()
    _add_creations(record, frames)
    callers = {*threads.values()}
    main = _joined(threading.main_thread().ident, frames, callers)
    record.doing = _doing(main)
    for group, thread in threads.items():
        frame = _joined(thread, frames, callers)
        if group in record.groups and frame is not None and frame is not main:
            record.doing_in[group] = _doing(frame)
    return record


def _note_gone_on(record: RankRecord, entries: Sequence[Mapping[str, Any]]) -> None:
    """Mark the pending collectives that the backend runs while their threads have gone on."""
    pending: dict[tuple[Any, Any], int] = {
        (call.group, call.number): index
        for index, call in enumerate(record.calls)
        if not (call.is_done or call.is_p2p) and call.progress is Progress.CALLED
    }
    frames = sys._current_frames()
    for entry in entries:
        index = pending.get((entry["process_group"][0], entry.get("collective_seq_id")))
        thread = str(entry.get("thread_id"))
        if index is None or entry.get("is_p2p") or not thread.isdecimal():
            continue
        then = _outside_torch(entry.get("frames") or ())
        now = _outside_torch(_innermost_first(frames.get(int(thread))))
        if None not in (then, now) and then != now:
            record.calls[index] = record.calls[index]._replace(is_async=True)


def _outside_torch(frames: Iterable[Mapping[str, Any]]) -> tuple[str, int] | None:
    """Return file and line of the innermost frame that is not torch's; None if there is none."""
    places = ((str(frame["filename"]), int(frame["line"])) for frame in frames)
    return next((p for p in places if not p[0].startswith(_TORCH) and not is_of_cpp(p[0])), None)


def _of_earlier_groups(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of groups whose last recorded collective is not of this world's group."""
    last = {
        entry["process_group"][0]: int(entry.get("collective_seq_id", 0))
        for entry in entries
        if not entry.get("is_p2p")
    }
    begun = {name: highest_number(name) for name in last}
    return {
        name
        for name, number in last.items()
        if (limit := begun[name]) is not None and number > limit
    }


def _waits(now: float) -> dict[int, FrameWait]:
    """Return the calls of torch.distributed that threads of this process are in, by thread."""
    found = {}
    for thread, frame in sys._current_frames().items():
        if (wait := wait_of_frame(frame, now)) is not None:
            found[thread] = wait
    return found


def _creations() -> dict[int, Any]:
    """Return the waits of this process for members that create a group with it, by thread."""
    world = World.current()
    return {} if world is None else dict(world.state(Rendezvous).waits)


def longest_wait() -> float:
    """Return for how many seconds a thread waits to create a group, or in torch.distributed.

    A call of torch.distributed counts from when it was first seen.
    """
    now = time.time()
    waits = [*_waits(now).values(), *_creations().values()]
    return max((now - wait.since for wait in waits), default=0.0)


def _add_creations(record: RankRecord, frames: Mapping[int, FrameType]) -> None:
    """Add a call for each thread that waits for members which create a group with it."""
    for thread, wait in _creations().items():
        line = line_of(_innermost_first(frames.get(thread)))
        call = Call(wait.key, 0, CREATION, False, wait.since, line=line)
        record.calls.append(call._replace(is_recorded=False))
        record.groups[wait.key] = GroupSeen(wait.label, list(wait.ranks), is_new=True)


def _name_groups(record: RankRecord) -> None:
    """Set the axes of the groups in this process's record, from its universes."""
    for name, seen in record.groups.items():
        found = find_group_optional(name)
        # Ranks compare these labels, and may have different universes that created no groups.
        if found is not None and found.universe.groups.had_own_groups:
            record.groups[name] = seen._replace(label=axes_in_words(found.axes))


def live_coordinates(rank: int) -> dict[str, int]:
    """Return a rank's coordinates in the first universe that has it, by its most axes; else {}."""
    for universe in universes_here():
        position = universe.rank_map.position_of(rank)
        if found := finest_coordinate(universe, position):
            return found
    return {}


def _add_recorded(record: RankRecord, other: RankRecord) -> None:
    """Add what a further recorder has. A group of two backends has calls of its name in both."""
    names = {
        name: f"{name}{_OF_GLOO}"
        for name in other.groups
        if any(call.group == name for call in record.calls)
    }
    other = other.renamed(names)
    record.groups |= other.groups
    record.calls = sorted([*record.calls, *other.calls], key=lambda call: call.since)
    record.is_cut = record.is_cut or other.is_cut


def _doing(frame: FrameType | None) -> str:
    """Return the line of the program that a frame is at, and what it waits for there, if known."""
    line, creation = line_of(_innermost_first(frame)), creation_of_frame(frame)
    return f"{line}, waiting for other ranks in torch's {creation}()" if creation else line


def _joined(
    thread: int | None, frames: Mapping[int, FrameType], callers: Collection[int]
) -> FrameType | None:
    """Return the innermost frame of a thread, or of the one that it waits for.

    It waits in `join`, or in a backward that torch's own thread runs, as on GPUs.

    Args:
        thread: identifier of the thread.
        frames: innermost frames, by thread.
        callers: threads that have made recorded calls. One of them that Python's `threading` has
            not started is torch's, if there is no other one.
    """
    innermost = frame = frames.get(thread or 0)
    others = {one: other for one, other in frames.items() if one != thread}
    while frame is not None:
        if runs_backward(frame):
            others.pop(threading.main_thread().ident or 0, None)
            called = [other for one, other in others.items() if one in callers]
            of_torch = [other for other in called if not _is_of_threading(other)]
            return of_torch[0] if len(of_torch) == 1 else innermost
        if frame.f_code is threading.Thread.join.__code__:
            return _joined(frame.f_locals["self"].ident, others, callers) or innermost
        frame = frame.f_back
    return innermost


def _is_of_threading(frame: FrameType) -> bool:
    """Return whether a thread with this frame was started by Python's `threading`."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "threading"


def _add_wait(record: RankRecord, wait: FrameWait) -> None:
    """Add what a frame says to the record: a call that torch has not recorded, or a call's root."""
    names = (wait.group, wait.group + _OF_GLOO)
    pending = [call for call in record.pending() if call.group in names]
    line = line_of(_innermost_first(wait.frame))
    call = Call(wait.group, 0, wait.operation, False, wait.since, line=line, peer=wait.peer)
    call = call._replace(is_recorded=False)
    if call.is_p2p:
        if not any(one.is_p2p for one in pending):
            record.calls.append(call)
    elif wait.operation == MONITORED_BARRIER:
        # The numbers that it takes of its group depend on the rank. No rank is past it.
        last = record.last(call.group)
        record.calls.append(call._replace(number=1 if last is None else last.number + 1))
    elif all(one.is_p2p for one in pending):
        _add_unrecorded(record, call, sequence_number(call.group))
    elif wait.root is not None:
        for index, one in reversed([*enumerate(record.calls)]):
            if (one.group, one.operation, one.is_done) == (wait.group, wait.operation, False):
                record.calls[index] = one._replace(detail=f"root {wait.root}")
                return


def _add_unrecorded(record: RankRecord, call: Call, sequence: int) -> None:
    """Add a collective that a thread is in, and of which torch has recorded no pending call.

    With NCCL, that is the first one of a group or a device, while it creates the communicator; or
    the last recorded one, which seems over while the host is inside NCCL.

    Args:
        record: that of this rank.
        call: as its frame tells.
        sequence: number of the last collective that the group has begun; 0 if it is not known.
    """
    last = record.last(call.group)
    if last is not None and not last.is_retired:
        index = record.calls.index(last)
        record.calls[index] = last._replace(is_done=False, progress=Progress.CALLED)
    elif last is not None and (last.since >= call.since or 0 < sequence <= last.number):
        return  # the recorded call is the one that the thread is in, and is just over
    else:
        number = sequence or (0 if last is None else last.number + 1)
        record.calls.append(call._replace(number=number))


def _innermost_first(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    while frame is not None:
        code = frame.f_code
        yield {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
        frame = frame.f_back


# --- the store ------------------------------------------------------------------------------------


class Alarm(NamedTuple):
    """An alarm of a stuck rank, at which every rank writes its record to the store.

    Each rank also appends its pending calls to a list for each call's group. So the rank that
    reports on a group reads one list, and only the records of the ranks that are not in it.

    Attributes:
        store: store of the default group, with the keys of this run.
        number: number of the alarm in this run, from 0.
    """

    store: StoreKeys
    number: int

    def raise_it(self, rank: int) -> None:
        """Raise this alarm, unless another rank has raised it.

        Args:
            rank: global rank of this process.
        """
        self.store.put_first(self._key("raised", "by"), str(rank))

    def is_raised(self) -> bool:
        """Return whether a rank has raised this alarm."""
        return bool(self.store.read(self._key("raised", "by")))

    def is_answered(self, rank: int) -> bool:
        """Return whether a rank has answered this alarm. Each rank keeps its last answer."""
        return bool(self.store.read(self._key("rank", rank)))

    def answer(self, record: RankRecord) -> list[str]:
        """Write this rank's record and pending calls; return the keys, to be removed later.

        All ranks with a pending call in a group append to the same key of that group.
        """
        keys = [self._key("rank", record.rank)]
        self.store.write(keys[0], _to_text(record))
        pending: dict[str, list[Call]] = {}
        for call in record.pending():
            pending.setdefault(call.group, []).append(call)
        fronts = record.fronts()
        for group, calls in pending.items():
            lines = (
                json.dumps([record.rank, call in fronts, *_aged(call, record.time)])
                for call in calls
            )
            key = self._key("group", _identity(group, record.groups[group]))
            self.store.append(key, "".join(f"{line}\n" for line in lines))
            keys.append(key)
        return keys

    def write_history(self, history: RankRecord) -> str:
        """Write the collectives that a rank has made; return the key, to be removed later."""
        key = self._key("history", history.rank)
        self.store.write(key, _packed(history))
        return key

    def history(self, rank: int) -> RankRecord | None:
        """Return the collectives that another rank has made; None if it has not written them."""
        text = self.store.read(self._key("history", rank))
        return _unpacked(text, rank) if text else None

    def claim(self, group: str, record: RankRecord) -> bool:
        """Return whether this rank becomes the reporter of a group: the first to ask does.

        The reporter logs the verdict on the group, for all its ranks.
        """
        key = self._key("reporter", _identity(group, record.groups[group]))
        return self.store.put_first(key, str(record.rank)) == str(record.rank)

    def verdict_key(self, group: str, record: RankRecord) -> str:
        """Return the key in the store for the verdict on a group of a record."""
        return self._key("verdict", _identity(group, record.groups[group]))

    def collect(self, group: str, mine: RankRecord) -> dict[int, RankRecord]:
        """Return the records of a group's ranks, by global rank.

        Also those of the ranks of groups in which others wait: ranks that are missing, or that have
        enqueued their call behind another one.

        Args:
            group: c10d's name of the group.
            mine: record of this rank.
        """
        records = {mine.rank: mine}
        left = [group, *(call.group for call in mine.fronts())]
        read: set[str] = set()
        whole: set[int] = set()  # ranks whose whole records were read
        while left and len(read) < _MOST_GROUPS:
            name = left.pop(0)
            if name in read:
                continue
            read.add(name)
            seen = next((r.groups[name] for r in records.values() if name in r.groups), None)
            in_front = self._read_group(name, seen, records)
            members = () if seen is None else seen.ranks or ()
            known = {mine.rank, *in_front, *whole}
            missing = [rank for rank in members if rank not in known]
            peers = {one.partner(mine.rank, members) for one in mine.calls if one.group == name}
            # Partners of this rank's sends and receives first: only _MOST_MISSING records are read.
            missing.sort(key=lambda rank: rank not in peers)
            for rank in missing[:_MOST_MISSING]:
                if text := self.store.read(self._key("rank", rank)):
                    records[rank] = record = _from_text(text)
                    whole.add(rank)
                    left += [call.group for call in record.fronts()]
            for rank in missing[_MOST_MISSING:]:
                records.setdefault(rank, RankRecord(rank, mine.time, was_read=False))
        return records

    def _read_group(
        self, name: str, seen: GroupSeen | None, records: dict[int, RankRecord]
    ) -> set[int]:
        """Add a group's pending calls to the records; return the ranks that wait in one of them.

        The others have enqueued theirs behind a call in another group.
        """
        in_front, now = set(), time.time()
        known = {rank: {call[:3] for call in one.calls} for rank, one in records.items()}
        key = self._key("group", _identity(name, seen))
        for line in self.store.read(key).splitlines():
            rank, is_in_front, *values = json.loads(line)
            record = records.setdefault(rank, RankRecord(rank, now))
            call = _call(values, now)
            if is_in_front:
                in_front.add(rank)
            if seen is not None:
                record.groups.setdefault(name, seen)
            if call[:3] not in known.setdefault(rank, set()):
                known[rank].add(call[:3])
                record.calls.append(call)
        return in_front

    def _key(self, what: str, which: object) -> str:
        return f"watch/{self.number}/{what}/{which}"


def _identity(group: str, seen: GroupSeen | None) -> str:
    """Return a key for a group. c10d's name alone may be that of another group on other ranks."""
    ranks = () if seen is None else seen.ranks or ()
    return f"{group}/{ranks[0]}-{ranks[-1]}/{len(ranks)}" if ranks else group


def _to_text(record: RankRecord) -> str:
    pending = {call.group for call in record.pending()}
    groups = {
        name: [seen.label, _runs(seen.ranks or ()) if name in pending else [], seen.is_new]
        for name, seen in record.groups.items()
    }
    calls = [_aged(call, record.time) for call in record.calls]
    lines = {name: line for name, line in record.doing_in.items() if name in groups}
    begun = {name: number for name, number in record.begun.items() if name in groups}
    return json.dumps([record.rank, calls, groups, record.doing, lines, begun, record.is_cut])


def _from_text(text: str) -> RankRecord:
    rank, calls, groups, doing, lines, begun, is_cut = json.loads(text)
    now = time.time()
    seen = {
        name: GroupSeen(label, [one for run in runs for one in range(*run)] or None, is_new=is_new)
        for name, (label, runs, is_new) in groups.items()
    }
    restored = [_call(call, now) for call in calls]
    return RankRecord(rank, now, restored, seen, doing, lines, begun, is_cut=is_cut)


def _packed(history: RankRecord) -> str:
    """Return a history as a short text: the same calls are made again and again."""
    kinds: dict[tuple[object, ...], int] = {}
    calls = []
    for call in history.calls:
        if not call.is_p2p:
            kind = (call.group, call.operation, call.shapes, call.dtype, call.line)
            calls.append([kinds.setdefault(kind, len(kinds)), call.number, call.is_done])
    labels = {name: seen.label for name, seen in history.groups.items()}
    text = json.dumps([labels, [*kinds], calls, history.is_cut])
    return base64.b85encode(zlib.compress(text.encode())).decode()


def _unpacked(text: str, rank: int) -> RankRecord:
    labels, kinds, calls, is_cut = json.loads(zlib.decompress(base64.b85decode(text)))
    record = RankRecord(rank, 0.0, is_cut=is_cut)
    record.groups = {name: GroupSeen(label, None) for name, label in labels.items()}
    for index, number, is_done in calls:
        group, operation, shapes, dtype, line = kinds[index]
        call = Call(group, number, operation, is_done, 0.0, dtype=dtype, line=line)
        record.calls.append(call._replace(shapes=tuple(map(tuple, shapes))))
    return record


def _aged(call: Call, now: float) -> Call:
    """Return a call with its age, in seconds, as `since`: the clocks of hosts may differ."""
    return call._replace(since=now - call.since)


def _call(values: list[Any], now: float) -> Call:
    aged = Call(*values)
    shapes, out_shapes = (
        tuple(tuple(shape) for shape in each) for each in (aged.shapes, aged.out_shapes)
    )
    return aged._replace(
        since=now - aged.since,
        shapes=shapes,
        out_shapes=out_shapes,
        progress=Progress(aged.progress),
        callers=tuple(aged.callers),
    )


def _runs(ranks: Any) -> list[list[int]]:
    """Return ranks as arguments of `range`: start, stop, step."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank - runs[-1][1] == runs[-1][2]:
            runs[-1][1] = rank
        elif runs and runs[-1][0] == runs[-1][1] and rank > runs[-1][0]:
            runs[-1][1:] = [rank, rank - runs[-1][0]]
        else:
            runs.append([rank, rank, 1])
    return [[first, last + step, step] for first, last, step in runs]
