"""Records of the calls of each rank in its process groups, from torch's flight recorder.

The format of a dump is documented in torch's tutorial "Flight Recorder for Debugging Stuck Jobs"
and in torch/csrc/distributed/c10d/FlightRecorder.hpp. Versions 1.0 to 2.10 of the format are read,
as pickle or JSON, from NCCL and gloo.
"""

from __future__ import annotations

import enum
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from meshverse.wording import rank_ranges

DEFAULT_GROUP = "the default group"
UNNAMED_GROUP = "an unnamed group"  # which was created without `group_desc`
CREATION = "creation"  # `Call.operation` of the rendezvous in which members create a group
ANY_SOURCE = -1  # `Call.peer` of a receive from any rank of the group
# Completed collectives kept per group, and as many sends and receives; for a history, all that a
# recorder has.
KEPT, HISTORY = 4, 100_000
_P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
# Which Meshverse's groups have: "[3]", "[0-3]", "[0-6:2]"; or "[0-5, 3 ranks]", which is not exact.
_RANKS_IN_DESCRIPTION = re.compile(r"\[(?:(\d+)(?:-(\d+)(?::(\d+))?)?|[^]]*)\]$")
# Parts of paths of files that are not the program's. The dump may be from another machine.
_PACKAGES, _OURS = ("/site-packages/", "/dist-packages/"), ("torch", "meshverse")
_CPP = (".c", ".cc", ".cpp", ".cxx", ".cu", ".h", ".hpp", ".so")
_MOST_CALLERS = 6
CALLED_AT = ", called at "  # between two lines of the program
_BLOCKING = ("send", "recv", "send_object_list", "recv_object_list")  # of torch.distributed
_PYTHONS = ("/lib/python3.", "/python/meshverse/", "/torch/distributed/", "/torch/_", "<")


class Progress(str, enum.Enum):
    """How far a call is, as the record tells.

    Gloo runs a call where it is called. NCCL's ranks enqueue their calls: the GPU runs them later,
    one after the other, unless they are asynchronous. Starts are recorded only with
    TORCH_NCCL_ENABLE_TIMING=1.
    """

    CALLED = "called"  # the backend runs it as soon as all its ranks have called it
    ENQUEUED = "enqueued"  # whether the GPU has started it is not recorded
    NOT_STARTED = "not started"  # enqueued, and the GPU has not reached it
    STARTED = "started"  # the GPU has reached it


class Call(NamedTuple):
    """A collective, a send or a receive, as one rank called it.

    Attributes:
        group: c10d's name of the process group.
        number: number of the collective in its group, from 1. Sends and receives are numbered
            separately; 0 means that the number is not known.
        operation: name of the operation, such as "all_reduce".
        is_done: whether the call is over on this rank.
        since: time of the call, in seconds since the epoch.
        shapes: shapes of the inputs.
        dtype: dtype of the first input; "" if there is none.
        line: file, line and function of the program; "" if that was not recorded.
        peer: rank within the group that a send goes to or a receive comes from, or ANY_SOURCE;
            None for a collective.
        detail: another argument that must be equal on all ranks, such as "root 1"; "" if unknown.
        out_shapes: shapes of the outputs.
        progress: how far it is.
        is_async: whether it is known not to delay the rank's next calls, or may not: `isend`,
            `irecv`, a send or receive whose frames were not recorded, and a collective from which
            its thread has gone on in a running process.
        callers: of a pending call, lines of the program above `line`, innermost first.
        is_retired: whether the backend's own bookkeeping is done with the call, too. Until then,
            NCCL's calls may seem over while the host is still inside NCCL; see `_calls`.
        is_recorded: whether torch has recorded it. Otherwise, it is known by a frame; `operation`
            is the function, which torch may record by another name.
    """

    group: str
    number: int
    operation: str
    is_done: bool
    since: float
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    line: str = ""
    peer: int | None = None
    detail: str = ""
    out_shapes: tuple[tuple[int, ...], ...] = ()
    progress: Progress = Progress.CALLED
    is_async: bool = False
    callers: tuple[str, ...] = ()
    is_retired: bool = True
    is_recorded: bool = True

    @property
    def is_p2p(self) -> bool:
        """Whether it is a send or a receive."""
        return self.peer is not None

    def partner(self, rank: int, ranks: Sequence[int] | None) -> int | None:
        """Return the rank at the other end of a send or receive, or None if it is not known.

        That of a receive from any source is known in a group of two ranks.

        Args:
            rank: global rank that made this call.
            ranks: global ranks of the group, or None if they are not known.
        """
        if self.peer is None or ranks is None or self.peer >= len(ranks):
            return None
        if self.peer != ANY_SOURCE:
            return ranks[self.peer]
        others = [other for other in ranks if other != rank] if len(ranks) == 2 else ()
        return others[0] if len(others) == 1 else None


class GroupSeen(NamedTuple):
    """A process group, as a rank or its dump describes it.

    Attributes:
        label: name for messages, such as "axis tp".
        ranks: global ranks, in group-rank order; None if they are not known.
        is_guess: whether there may be more ranks, see `complete_default_group`.
        is_new: whether its members are creating it: its only call is the `CREATION`.
    """

    label: str
    ranks: Sequence[int] | None
    is_guess: bool = False
    is_new: bool = False


@dataclass
class RankRecord:
    """The last calls of one rank.

    Attributes:
        rank: global rank.
        time: time of the record, in seconds since the epoch.
        calls: last calls in each group, and all pending calls, in the order of the calls.
        groups: the rank's process groups, by c10d's name.
        doing: line of the program that the rank's main thread is in; "" if it is not known.
        doing_in: by group, the line of the thread that made the rank's last call in it, if that is
            another thread.
        begun: by group, the number of the last collective that the rank has begun, where it is
            known and no call of the group is recorded any more.
        was_read: whether the rank's record was read: of many missing ranks, only some are.
        is_cut: whether older calls are gone, as the recorder keeps only the last ones.
        has_p2p: whether sends and receives would be recorded: gloo's are not.
    """

    rank: int
    time: float
    calls: list[Call] = field(default_factory=list)
    groups: dict[str, GroupSeen] = field(default_factory=dict)
    doing: str = ""
    doing_in: dict[str, str] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    was_read: bool = True
    is_cut: bool = False
    has_p2p: bool = True

    def age_of(self, call: Call) -> float:
        """Return the time from a pending call to this record, in seconds."""
        return max(self.time - call.since, 0.0)  # the clock may have been set

    def pending(self) -> list[Call]:
        """Return the calls that are not over, oldest first."""
        return [call for call in self.calls if not call.is_done]

    def fronts(self) -> list[Call]:
        """Return the pending calls that no other call of this rank is known to hold up.

        The others are enqueued behind one of them. There are several if the rank has started
        several, or if sends and receives may be asynchronous: then the rank waits in one of them.
        """
        found: list[Call] = []
        # Calls of one lane run in their order on any backend: a group's collectives, and the sends
        # and receives of one pair of ranks, unless one launch has them.
        first_of_lane: dict[tuple[str, int | None], int] = {}
        is_held = False
        for call in self.pending():
            first = first_of_lane.setdefault((call.group, call.peer), call.number)
            may_run = {
                Progress.CALLED: True,
                Progress.STARTED: True,
                Progress.NOT_STARTED: not found,
                Progress.ENQUEUED: not is_held,
            }
            if first == call.number and may_run[call.progress]:
                found.append(call)
            is_held = is_held or (call.progress is Progress.ENQUEUED and not call.is_async)
        return found

    def last(self, group: str) -> Call | None:
        """Return the last collective that this rank called in a group, or None."""
        return next((c for c in reversed(self.calls) if c.group == group and not c.is_p2p), None)

    def shortened(self, n_kept: int) -> RankRecord:
        """Return this record with the last completed calls only; see `record_of`."""
        left: dict[tuple[str, bool], int] = {}
        kept = []
        for call in reversed(self.calls):
            lane = call.group, call.is_p2p
            if call.is_done and not left.setdefault(lane, n_kept):
                continue
            left[lane] = left.get(lane, n_kept) - call.is_done
            kept.append(call)
        return replace(self, calls=kept[::-1])

    def renamed(self, names: Mapping[str, str]) -> RankRecord:
        """Return this record with other names for some groups."""
        groups = {names.get(name, name): seen for name, seen in self.groups.items()}
        calls = [call._replace(group=names.get(call.group, call.group)) for call in self.calls]
        doing_in = {names.get(name, name): line for name, line in self.doing_in.items()}
        begun = {names.get(name, name): number for name, number in self.begun.items()}
        return replace(self, groups=groups, calls=calls, doing_in=doing_in, begun=begun)


def record_of(dump: Mapping[str, Any], rank: int, time: float, *, n_kept: int = KEPT) -> RankRecord:
    """Return the record in a dump of torch's flight recorder.

    Args:
        dump: unpickled or parsed content of the dump.
        rank: global rank of the process.
        time: time of the dump, in seconds since the epoch.
        n_kept: how many completed calls are kept of each group; pending calls are all kept.

    Raises:
        ValueError: `dump` is not a dump of a flight recorder.
    """
    entries, config = dump.get("entries", []), dump.get("pg_config", {})
    if "version" not in dump or not isinstance(entries, list) or not isinstance(config, Mapping):
        raise ValueError("it is not a dump of torch's flight recorder: no version or entries")
    try:
        groups = dict(_configured(config))
        # In a process that has had several worlds, a name can be that of several groups. Only the
        # calls of the last one count.
        ids = {entry["process_group"][0]: entry.get("pg_id") for entry in entries}
        for entry in entries:
            name, description = entry["process_group"]
            if name not in groups:
                groups[str(name)] = _described(description, rank)
        last = [entry for entry in entries if entry.get("pg_id") == ids[entry["process_group"][0]]]
        is_cut = bool(entries) and int(entries[0].get("record_id", 0)) > 0
        calls = _calls(last, n_kept, is_cut=is_cut)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"an entry is not as torch writes it: {error!r}") from None
    has_p2p = any(not _is_gloos(entry) for entry in entries)
    return RankRecord(rank, time, calls, groups, is_cut=is_cut, has_p2p=has_p2p)


def label_of(description: str) -> str:
    """Return a group's name for messages, from c10d's description of the group."""
    if description.startswith("mesh_"):
        axes = _RANKS_IN_DESCRIPTION.sub("", description.removeprefix("mesh_")).split("+")
        return axes_in_words(axes)
    if description == "undefined":  # c10d's default
        return UNNAMED_GROUP
    return DEFAULT_GROUP if description == "default_pg" else f"group {description!r}"


def group_in_words(seen: GroupSeen) -> str:
    """Return a group's label; of an unnamed group, its ranks."""
    if seen.ranks:
        return seen.label.replace(UNNAMED_GROUP, f"the group of ranks {rank_ranges(seen.ranks)}")
    return seen.label


def _described(description: str, rank: int) -> GroupSeen:
    """Return a group whose ranks the dump does not list, with those in its description, if any.

    Args:
        description: c10d's description of the group.
        rank: global rank of the dump, which is in the group.
    """
    label = label_of(description)
    found = _RANKS_IN_DESCRIPTION.search(description) if description.startswith("mesh_") else None
    if found is None:
        return GroupSeen(label, None)
    first, last, step = (int(text or 0) for text in found.groups())
    ranks = range(first, max(first, last) + 1, step or 1)
    if found[1] is None or rank not in ranks:
        return GroupSeen(f"{label} {found[0]}", None)  # as it is: that says more than nothing
    return GroupSeen(label, ranks)


def axes_in_words(axes: Sequence[str]) -> str:
    """Return the axes of a group, for messages: "axis tp (shared with ep)"."""
    first, *others = axes or ("unnamed",)
    return f"axis {first}" + (f" (shared with {', '.join(others)})" if others else "")


def axes_of(label: str) -> list[str]:
    """Return the axes in such a label; [] of a group without axes."""
    if not label.startswith("axis "):
        return []
    first, _, others = label.removeprefix("axis ").removesuffix(")").partition(" (shared with ")
    return [first, *filter(None, others.split(", "))]


def world_size_of(records: Mapping[int, RankRecord]) -> int | None:
    """Return the number of ranks of the default group; None if the records do not have its ranks.

    With gloo they have not, unless `complete_default_group` has set them.
    """
    for record in records.values():
        for seen in record.groups.values():
            if seen.label == DEFAULT_GROUP and seen.ranks:
                return len(seen.ranks)
    return None


def complete_default_group(
    records: Mapping[int, RankRecord], largest_rank: int, *, is_guess: bool = False
) -> None:
    """Set the ranks of the default group, from 0 to the largest one, if a dump lacks them.

    Args:
        records: records of ranks, by global rank.
        largest_rank: largest rank that is known.
        is_guess: whether there may be larger ones, which died without a dump.
    """
    for record in records.values():
        for name, seen in record.groups.items():
            if seen.label == DEFAULT_GROUP and not seen.ranks:
                ranks = range(largest_rank + 1)
                record.groups[name] = seen._replace(ranks=ranks, is_guess=is_guess)


def _configured(config: Mapping[str, Any]) -> Iterator[tuple[str, GroupSeen]]:
    for value in config.values():
        ranks = value["ranks"]
        ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
        if value["name"] and ranks:  # gloo's groups have neither
            yield str(value["name"]), GroupSeen(label_of(str(value["desc"])), _as_range(ranks))


def _as_range(ranks: list[int]) -> Sequence[int]:
    """Return ranks as a range if possible, to save memory: each of 10,240 dumps lists all ranks."""
    first, *others = ranks
    step = others[0] - first if others else 1
    if step > 0:
        as_range = range(first, first + step * len(ranks), step)
        if list(as_range) == ranks:
            return as_range
    return tuple(map(int, ranks))


Entry = Mapping[str, Any]


def _calls(entries: Sequence[Entry], n_kept: int, *, is_cut: bool) -> list[Call]:
    """Return the calls of entries to keep, in order: the last ones and all pending ones.

    Args:
        entries: in the order of the recorder.
        n_kept: how many completed calls are kept of each group.
        is_cut: whether older entries are gone.
    """
    # Several coalesced operations are one launch: they have the same number, and an entry after
    # them, whose state alone the recorder updates. That of sends and receives says of itself that
    # it is none of them, and has the number of the collective before it.
    launches: dict[tuple[str, bool, int], list[Entry]] = {}
    p2p: dict[str, Entry] = {}  # the last send or receive of each group
    has_timing, groups_seen = False, set()
    for entry in entries:
        group, is_whole = str(entry["process_group"][0]), _is_of_several(entry)
        has_timing = has_timing or _has_started(entry)
        if is_whole and group not in groups_seen and is_cut and _is_done(entry):
            continue  # the recorder no longer has its operations
        groups_seen.add(group)
        part = p2p.get(group) if is_whole else None
        launch = _launch(part if part is not None and _is_whole_of(entry, part) else entry)
        launches.setdefault(launch, []).append(entry)
        if entry.get("is_p2p") and not is_whole:
            p2p[group] = entry
    # While the host is still inside a call, as when NCCL connects ranks, torch has "completed" for
    # it: CUDA takes an event that was not recorded yet for over. Only a retired call is sure to be.
    # NCCL runs the collectives of a group in order: all before a retired one are over, and none
    # after a pending one is. Sends and receives end in any order.
    last_done: dict[str, int] = {}
    for (group, is_p2p, number), inside in launches.items():
        state = inside[-1]
        if not (is_p2p or _is_gloos(state)) and _is_done(state) and state.get("retired", True):
            last_done[group] = max(last_done.get(group, 0), number)
    first_pending: dict[str, int] = {}
    for (group, is_p2p, number), inside in launches.items():
        is_over = is_p2p or _is_gloos(inside[-1]) or number <= last_done.get(group, 0)
        if not is_over and not _is_done(inside[-1]):
            first_pending[group] = min(first_pending.get(group, number), number)
    left: dict[tuple[str, bool], int] = {}
    kept: list[Call] = []
    for (group, is_p2p, number), inside in reversed(launches.items()):
        is_over = not is_p2p and number <= last_done.get(group, 0)
        is_behind = not is_p2p and number > first_pending.get(group, number)
        for entry, state in reversed(_operations(inside)):
            is_done = is_over or (_is_done(state) and not is_behind)
            n_left = left.setdefault((group, is_p2p), n_kept)
            if is_done and not n_left:
                continue
            call = _call(entry, number, is_done, _progress(state, has_timing))
            if call is not None:
                left[group, is_p2p] = max(n_left - is_done, 0)
                kept.append(call._replace(is_retired=bool(state.get("retired", True))))
    kept.reverse()
    return kept


def _launch(entry: Entry) -> tuple[str, bool, int]:
    is_p2p = bool(entry.get("is_p2p"))
    number = entry["p2p_seq_id"] if is_p2p else entry.get("collective_seq_id", entry.get("seq_id"))
    return str(entry["process_group"][0]), is_p2p, int(number)


def _operations(inside: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    """Return the operations of a launch, each with the entry that has its state."""
    *operations, whole = inside
    if not operations or not _is_of_several(whole):
        return [(entry, entry) for entry in inside]
    if operations[0].get("is_p2p"):
        return [(entry, whole) for entry in operations]
    # Coalesced collectives are compared with those of other ranks as one.
    names = dict.fromkeys(str(entry["profiling_name"]).rpartition(":")[2] for entry in operations)
    one = dict(operations[0])
    one["profiling_name"] = " and ".join(names)
    for key in ("input_sizes", "output_sizes"):
        one[key] = [size for entry in operations for size in entry.get(key, ())]
    return [(one, whole)]


def _is_of_several(entry: Entry) -> bool:
    """Return whether an entry is that of a launch of several operations, after their own."""
    return str(entry["profiling_name"]).endswith(":coalesced")


def _is_whole_of(entry: Entry, part: Entry) -> bool:
    """Return whether a launch of several operations has this send or receive as its last one."""
    keys = ("p2p_seq_id", "op_id")
    return [entry.get(key) for key in keys] == [part.get(key) for key in keys]


def _is_gloos(entry: Entry) -> bool:
    return str(entry["profiling_name"]).startswith("gloo:")


def _is_done(entry: Entry) -> bool:
    # With gloo, a call is over once it is retired; there is no other sign. NCCL's watchdog also
    # retires calls that timed out.
    return bool(entry["retired"]) if _is_gloos(entry) else entry["state"] == "completed"


def _has_started(entry: Entry) -> bool:
    return bool(entry.get("time_discovered_started_ns")) or entry["state"] == "started"


def _progress(entry: Entry, has_timing: bool) -> Progress:
    if _is_gloos(entry):
        return Progress.CALLED
    if _has_started(entry) or _is_done(entry):
        return Progress.STARTED
    return Progress.NOT_STARTED if has_timing else Progress.ENQUEUED


def _call(entry: Entry, number: int, is_done: bool, progress: Progress) -> Call | None:
    """Return the call of an entry; None if the entry stands for several sends and receives."""
    operation = _text(entry["profiling_name"]).rpartition(":")[2]
    p2p = _P2P.match(operation) if entry.get("is_p2p") else None
    if entry.get("is_p2p") and p2p is None:
        return None
    frames = entry.get("frames") or ()
    n_lines = 1 if is_done else 1 + _MOST_CALLERS
    line, *callers = [*itertools.islice(_program_lines(frames), n_lines)] or [""]
    return Call(
        group=str(entry["process_group"][0]),
        number=number,
        operation=operation if p2p is None else p2p[1],
        is_done=is_done,
        since=int(entry["time_created_ns"]) / 1e9,
        shapes=_shapes(entry["input_sizes"]),
        dtype=_text(next(iter(entry.get("input_dtypes") or ()), "")),
        line=line,
        peer=None if p2p is None else int(p2p[3]),
        out_shapes=_shapes(entry.get("output_sizes") or ()),
        progress=progress,
        is_async=p2p is not None and not any(_is_blocking(frame) for frame in frames),
        callers=tuple(callers),
    )


def _shapes(sizes: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, size)) for size in sizes)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value


def _is_blocking(frame: Mapping[str, Any]) -> bool:
    return frame["name"] in _BLOCKING and str(frame["filename"]).endswith("distributed_c10d.py")


def line_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line of the program among frames; "" if there is none.

    If no frame is outside Python and installed packages, the program itself is a package. Then this
    is the innermost line in a package other than torch and meshverse.

    Args:
        frames: frames, innermost first, each with filename, line and name of the function.
    """
    return next(_program_lines(frames), "")


def _program_lines(frames: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the program among frames, innermost first; see `line_of`."""
    in_package = []
    is_found = False
    for frame in frames:
        file = str(frame["filename"])
        line = f"{file}:{frame['line']} in {frame['name']}"
        if is_of_cpp(file):
            continue
        if any(part in file for part in _PACKAGES):
            is_torchs = any(f"{part}{name}/" in file for part in _PACKAGES for name in _OURS)
            if not is_torchs:
                in_package.append(line)
        elif not any(part in file for part in _PYTHONS):
            is_found = True
            yield line
    if not is_found:
        yield from in_package


def is_of_cpp(file: str) -> bool:
    """Return whether a recorded frame is one of C++, as with TORCH_FR_CPP_STACK=1."""
    return file == "??" or file.endswith(_CPP)


def short_line(line: str) -> str:
    """Return a line with the last two parts of each file's path."""
    places = []
    for place in line.split(CALLED_AT):
        file, colon, rest = place.partition(":")
        places.append("/".join(file.split("/")[-2:]) + colon + rest)
    return CALLED_AT.join(places)
