"""Verdicts on stuck process groups: which ranks wait in which call, which are missing, and why.

Each rank numbers its calls in a group. The call that a group is stuck in has the lowest number of
all pending ones. Every rank of the group waits in this call, is past it, or has not begun it: then
it is *missing*.

A missing rank may wait in another stuck group. This gives a wait-for graph: an edge leads from a
group to each group that its missing ranks wait in. The cause is the first of these that applies:

1. *Mismatch*: the ranks made different calls.
2. *Deadlock*: the group is on a cycle.
3. *Follows*: each missing rank waits in another stuck group or in a stuck send or receive, or is
   also missing in a group that this one waits on.
4. *Missing*: some missing rank has no such explanation.
5. *Backend*: no rank is missing, so the backend or the network is stuck.

A send or receive without its partner is reported separately.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .records import Call, GroupSeen, RankRecord

# Beginnings of names of operations whose inputs must have equally many elements on all ranks.
_EVEN = ("all_reduce", "broadcast", "reduce", "all_gather", "_all_gather", "reduce_scatter")
_EVEN_STARTS = (*_EVEN, "_reduce_scatter", "ALLGATHER", "REDUCE_SCATTER", "allreduce")


class Cause(enum.Enum):
    """Why a group is stuck."""

    DEADLOCK = "deadlock"  # groups wait for one another in a cycle
    MISMATCH = "mismatch"  # ranks call different operations, or with different arguments
    MISSING = "missing"  # ranks have not made the call, and wait in no other stuck group
    PARTNER = "partner"  # a send without its receive, or a receive without its send
    BACKEND = "backend"  # all ranks have made the call
    FOLLOWS = "follows"  # missing ranks wait in another stuck group, which has its own cause


class Missing(NamedTuple):
    """A rank that a stuck group waits for.

    Attributes:
        rank: global rank.
        elsewhere: call that the rank waits in instead, or None.
        label: name of that call's group for messages, such as "axis tp".
        last: last collective that the rank called in the stuck group; None if none is known.
        doing: line of the program that the rank's main thread is in; "" if it is not known.
        is_recorded: whether there is a record of this rank.
        was_read: whether this record was read: of many missing ranks, only some are.
    """

    rank: int
    elsewhere: Call | None
    label: str
    last: Call | None
    doing: str
    is_recorded: bool
    was_read: bool = True


@dataclass
class Stuck:
    """A process group that is stuck in a call.

    Attributes:
        group: c10d's name of the group.
        seen: label and ranks of the group.
        is_whole: whether all ranks of the group are known. Otherwise `seen` has only those with a
            recorded call in it.
        call: call of the rank that has waited longest.
        seconds: time for which that rank has waited.
        waiting: calls of the ranks that wait, by global rank.
        past: ranks that have completed the call.
        missing: ranks that have not begun the call.
        differing: differences between the ranks' calls: kind of difference -> value -> ranks.
            Example: {"dtype": {"Float": [0], "Half": [1]}}. The kind is "" for `Call.detail`.
        cause: why the group is stuck.
        waits_on: c10d names of the stuck groups that the missing ranks wait in.
        cycle: c10d names of groups from this one on, each of which waits on the next one, and the
            last on the first: a deadlock, unless there is a mismatch. Empty without a cycle.
    """

    group: str
    seen: GroupSeen
    is_whole: bool
    call: Call
    seconds: float
    waiting: dict[int, Call]
    past: list[int]
    missing: list[Missing]
    differing: dict[str, dict[str, list[int]]]
    cause: Cause = Cause.BACKEND
    waits_on: list[str] = field(default_factory=list)
    cycle: list[str] = field(default_factory=list)


def find_stuck(
    records: Mapping[int, RankRecord], is_stuck: Callable[[Call], bool] | None = None
) -> list[Stuck]:
    """Find the groups that are stuck, in the order of `Cause`.

    Args:
        records: records of ranks, by global rank.
        is_stuck: returns whether a pending call counts as stuck; by default all do.
    """
    records = _with_distinct_names(records)
    by_group: dict[str, dict[int, list[Call]]] = {}
    ranks_of: dict[str, GroupSeen] = {}
    for rank, record in records.items():
        for call in record.calls:
            if not call.is_p2p:
                by_group.setdefault(call.group, {}).setdefault(rank, []).append(call)
        for name, seen in record.groups.items():
            if name not in ranks_of or (ranks_of[name].ranks is None and seen.ranks is not None):
                ranks_of[name] = seen
    found: dict[str, Stuck] = {}
    for name, calls in by_group.items():
        pending = [
            call.number
            for of_rank in calls.values()
            for call in of_rank
            if not call.is_done and (is_stuck is None or is_stuck(call))
        ]
        stuck_in = _stuck(name, min(pending), calls, ranks_of[name], records) if pending else None
        if stuck_in is not None:
            found[name] = stuck_in
    pairs = list(_stuck_pairs(records, ranks_of, is_stuck))
    _find_causes(found, pairs)
    order = [*Cause]
    stuck = [*found.values(), *pairs]
    return sorted(stuck, key=lambda one: (order.index(one.cause), -one.seconds))


def _with_distinct_names(records: Mapping[int, RankRecord]) -> Mapping[int, RankRecord]:
    """Return the records with new names for groups that have the same name but different ranks.

    c10d names a group by a counter of the groups that the process has created, so ranks may give
    different groups the same name.
    """
    first: dict[str, Sequence[int]] = {}
    distinct = {}
    for rank, record in records.items():
        names = {
            name: f"{name} of ranks {seen.ranks[0]} to {seen.ranks[-1]}"
            for name, seen in record.groups.items()
            if seen.ranks and not _are_equal(first.setdefault(name, seen.ranks), seen.ranks)
        }
        distinct[rank] = record if not names else record.renamed(names)
    return distinct


def _are_equal(one: Sequence[int], other: Sequence[int]) -> bool:
    if isinstance(one, range) and isinstance(other, range):
        return one == other  # without iterating over them
    return list(one) == list(other)


def _stuck(
    name: str,
    number: int,
    calls: Mapping[int, Sequence[Call]],
    seen: GroupSeen,
    records: Mapping[int, RankRecord],
) -> Stuck | None:
    """Return which ranks wait in a group's call of this number; None if no member waits there."""
    waiting: dict[int, Call] = {}
    there: dict[int, Call] = {}
    past: list[int] = []
    missing: list[Missing] = []
    members = seen.ranks if seen.ranks is not None else sorted(calls)
    for rank in members:
        own = calls.get(rank, ())
        here = next((call for call in own if call.number == number), None)
        if here is not None:
            there[rank] = here
        if here is not None and not here.is_done:
            waiting[rank] = here
        elif here is not None or (own and own[-1].number > number):
            past.append(rank)
        else:
            missing.append(_missing(rank, name, records.get(rank)))
    if not waiting:
        return None
    first = min(waiting.values(), key=lambda call: call.since)
    now = max(records[rank].time for rank in waiting)
    return Stuck(
        group=name,
        seen=seen._replace(ranks=list(members)),
        is_whole=seen.ranks is not None,
        call=first,
        seconds=max(now - first.since, 0.0),
        waiting=waiting,
        past=past,
        missing=missing,
        differing=_differing(there),
    )


def _missing(rank: int, group: str, record: RankRecord | None) -> Missing:
    if record is None:
        return Missing(rank, None, "", None, "", False)
    elsewhere = next((call for call in record.pending() if call.group != group), None)
    label = "" if elsewhere is None else record.groups[elsewhere.group].label
    last = record.last(group)
    return Missing(rank, elsewhere, label, last, record.doing, True, record.was_read)


def _differing(there: Mapping[int, Call]) -> dict[str, dict[str, list[int]]]:
    """Return the differences between the calls of one number; see `Stuck.differing`."""
    found: dict[str, dict[str, list[int]]] = {}

    def compare(what: str, value_of: Callable[[Call], str]) -> None:
        values: dict[str, list[int]] = {}
        for rank, call in there.items():
            if value := value_of(call):  # "" if it is not known
                values.setdefault(value, []).append(rank)
        if len(values) > 1:
            found[what] = values

    compare("operation", lambda call: call.operation)
    if not found:
        compare("dtype", lambda call: call.dtype)
        compare("", lambda call: call.detail)
        counts = {tuple(map(math.prod, call.shapes)) for call in there.values() if call.shapes}
        is_even = next(iter(there.values())).operation.startswith(_EVEN_STARTS)
        if is_even and len(counts) > 1:
            compare("shape", lambda call: shapes_in_words(call.shapes))
    return found


def shapes_in_words(shapes: Iterable[Sequence[int]]) -> str:
    """Return shapes for messages, such as "(4, 8), (2,)"."""
    return ", ".join(str(tuple(shape)) for shape in shapes)


# --- sends and receives ---------------------------------------------------------------------------


def _stuck_pairs(
    records: Mapping[int, RankRecord],
    ranks_of: Mapping[str, GroupSeen],
    is_stuck: Callable[[Call], bool] | None,
) -> Iterable[Stuck]:
    """Find pending sends and receives: a missing partner, or a pair that the backend keeps stuck.

    If both sides of a pair are pending, only the send is reported.
    """
    for rank, record in records.items():
        for call in record.pending():
            if not call.is_p2p or (is_stuck is not None and not is_stuck(call)):
                continue
            seen = ranks_of[call.group]
            assert call.peer is not None
            if seen.ranks is None or rank not in seen.ranks or call.peer >= len(seen.ranks):
                continue  # the partner's global rank is not known
            partner = seen.ranks[call.peer]
            other = records.get(partner)
            missing = [_partner(partner, other)]
            theirs = () if other is None else other.pending()
            wanted = "recv" if call.operation == "send" else "send"
            me = list(seen.ranks).index(rank)
            if any(
                (one.group, one.operation, one.peer) == (call.group, wanted, me) for one in theirs
            ):
                missing = []
                if call.operation == "recv":  # reported with the send
                    continue
            yield Stuck(
                group=call.group,
                seen=GroupSeen(seen.label, sorted((rank, partner))),
                is_whole=True,
                call=call,
                seconds=max(record.time - call.since, 0.0),
                waiting={rank: call},
                past=[],
                missing=missing,
                differing={},
                cause=Cause.PARTNER if missing else Cause.BACKEND,
            )


def _partner(rank: int, record: RankRecord | None) -> Missing:
    if record is None:
        return Missing(rank, None, "", None, "", False)
    elsewhere = next(iter(record.pending()), None)
    label = "" if elsewhere is None else record.groups[elsewhere.group].label
    return Missing(rank, elsewhere, label, None, record.doing, True, record.was_read)


# --- causes ---------------------------------------------------------------------------------------


def _find_causes(found: Mapping[str, Stuck], pairs: Sequence[Stuck]) -> None:
    """Set the cause of each stuck group, the groups that it waits on, and its cycle."""
    for name, stuck in found.items():
        elsewhere = [missing.elsewhere.group for missing in stuck.missing if missing.elsewhere]
        stuck.waits_on = [one for one in dict.fromkeys(elsewhere) if one in found and one != name]
    in_pairs = {rank for pair in pairs for rank in pair.waiting}
    may_be_on_cycle = _on_cycles(found)
    for name, stuck in found.items():
        stuck.cycle = _cycle(name, found) if name in may_be_on_cycle else []
        if stuck.differing:
            stuck.cause = Cause.MISMATCH
        elif stuck.cycle:
            stuck.cause = Cause.DEADLOCK
        elif stuck.missing:
            # A missing rank that waits nowhere may also be missing in a group that `stuck` waits
            # on: then that group's verdict names it.
            missing_there = {each.rank for other in stuck.waits_on for each in found[other].missing}
            is_explained = all(
                missing.rank in in_pairs
                or (missing.elsewhere is not None and missing.elsewhere.group in stuck.waits_on)
                or missing.rank in missing_there
                for missing in stuck.missing
            )
            stuck.cause = Cause.FOLLOWS if is_explained else Cause.MISSING


def _on_cycles(found: Mapping[str, Stuck]) -> set[str]:
    """Return the groups that are on a cycle, or on a path between two cycles.

    Repeatedly removes groups that wait on no remaining group. Then it does the same in the reversed
    graph, with groups that no remaining group waits on.
    """
    left = {name: set(stuck.waits_on) for name, stuck in found.items()}
    for _ in range(2):
        came_from: dict[str, set[str]] = {name: set() for name in left}
        for name, following in left.items():
            for other in following:
                came_from[other].add(name)
        ends = [name for name, following in left.items() if not following]
        while ends:
            end = ends.pop()
            del left[end]
            for name in came_from[end]:
                left[name].discard(end)
                if not left[name]:
                    ends.append(name)
        left = {name: came_from[name] & left.keys() for name in left}  # reversed
    return set(left)


def _cycle(start: str, found: Mapping[str, Stuck]) -> list[str]:
    """Return a shortest cycle through a group, beginning with that group; [] if there is none."""
    came_from: dict[str, str] = {}
    level = [start]
    while level:
        following = []
        for name in level:
            for other in found[name].waits_on:
                if other == start:
                    path = [name]
                    while path[-1] != start:
                        path.append(came_from[path[-1]])
                    return path[::-1]
                if other not in came_from:
                    came_from[other] = name
                    following.append(other)
        level = following
    return []
