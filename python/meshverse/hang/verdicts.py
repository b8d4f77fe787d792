"""Verdicts on stuck calls: which ranks wait in which call, for which ranks, and why.

A stuck call is a collective of a group, a send and receive of two ranks, or a receive from any
rank, which waits for nobody in particular. The collective that a
group is stuck in has the lowest number of all pending ones. Every rank of the group waits in it, is
past it, or has not called it: then it is *missing*. With NCCL, where ranks enqueue their calls, a
rank that waits may be *held*: it has enqueued the call behind another one that is not over.

This gives a wait-for graph. A rank waits in its fronts (`RankRecord.fronts`), and each of these
waits for its missing and held ranks. A rank is *deadlocked* if each of its fronts waits for a
deadlocked rank. Roots of the graph are calls and ranks that wait for nobody. The cause of a stuck
call is the first of these that applies:

1. *Mismatch*: its ranks made different calls.
2. *Deadlock*: it is on a cycle of deadlocked ranks.
3. *Follows*: each rank that it waits for waits in another stuck call, or is also missing in a call
   that this one waits on.
4. *Missing*, or *partner* for a send or receive: it waits for a rank that waits for nobody.
5. *Late*: nobody is missing, and the GPUs of some ranks have not reached the call.
6. *Unknown*: nobody is missing, and the records show no more.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .records import ANY_SOURCE, Call, GroupSeen, Progress, RankRecord, group_in_words

# Beginnings of names of operations whose inputs must have equally many elements on all ranks.
_EVEN = ("all_reduce", "broadcast", "reduce", "all_gather", "_all_gather", "reduce_scatter")
_EVEN_STARTS = (*_EVEN, "_reduce_scatter", "ALLGATHER", "REDUCE_SCATTER", "allreduce")
_EXCHANGES = ("all_to_all", "alltoall")  # all ranks together send as much as they receive


class Cause(enum.Enum):
    """Why a call is stuck."""

    DEADLOCK = "deadlock"  # calls wait for one another in a cycle
    MISMATCH = "mismatch"  # ranks call different operations, or with different arguments
    MISSING = "missing"  # ranks have not made the call, and wait in no other stuck call
    PARTNER = "partner"  # a send without its receive, or a receive without its send
    LATE = "late"  # all ranks have enqueued the call, and some GPUs have not reached it
    UNKNOWN = "unknown"  # all ranks have made the call
    FOLLOWS = "follows"  # its ranks wait for another stuck call, which has its own cause


class Missing(NamedTuple):
    """A rank that a stuck call waits for.

    Attributes:
        rank: global rank.
        elsewhere: call that the rank waits in instead, or None.
        label: name of that call's group for messages, such as "axis tp".
        where: name of the stuck call that `elsewhere` belongs to; "" if there is none.
        last: last collective that the rank called in the stuck group; None if none is known.
        latest: last call that the rank made in any group, if it waits nowhere; else None.
        latest_label: name of that call's group for messages.
        doing: line of the program that the rank is in, or its thread that called `elsewhere`; "" if
            it is not known.
        caller: line of the rank's thread that is likely to make the call, if that is not the one
            that called `elsewhere`, and waits in no call: the thread that made the rank's last call
            in the stuck group, else the main one. "" if there is none.
        is_recorded: whether there is a record of this rank.
        was_read: whether this record was read: of many missing ranks, only some are.
        is_cut: whether the rank's older calls are gone, so that it may have made the call.
        is_older: whether the record is older than the call, which the rank may have made since.
        may_have_sent: whether its last call is a completed send to the rank that waits to receive.
            That may be the one it waits for: NCCL's small sends end before they are received.
    """

    rank: int
    elsewhere: Call | None = None
    label: str = ""
    where: str = ""
    last: Call | None = None
    latest: Call | None = None
    latest_label: str = ""
    doing: str = ""
    caller: str = ""
    is_recorded: bool = True
    was_read: bool = True
    is_cut: bool = False
    is_older: bool = False
    may_have_sent: bool = False


class Skip(NamedTuple):
    """A call that ranks skipped, by what they and the others called before and after.

    Attributes:
        ranks: ranks that skipped it.
        others: ranks that called it.
        call: the call of these; of several skipped ones, the first.
        seen: its group.
        n_skipped: how many calls were skipped; None if it may be several numbers.
        is_by_rounds: whether earlier rounds of the same calls show it; otherwise, later calls do.
    """

    ranks: list[int]
    others: list[int]
    call: Call
    seen: GroupSeen
    n_skipped: int | None
    is_by_rounds: bool


class OutOfStep(NamedTuple):
    """The first collective of a group for which two ranks made calls of different lines.

    Each rank calls from both lines, so they are not two branches of the program, one for each rank.

    Attributes:
        number: number of the collective in the group.
        calls: call of each of the two ranks.
    """

    number: int
    calls: dict[int, Call]


@dataclass
class Stuck:
    """A call that ranks of a process group are stuck in.

    Attributes:
        name: of a collective, c10d's name of the group; of a send and receive, also the ranks.
        group: c10d's name of the group.
        seen: label and ranks of the group; of a send and receive, their two ranks.
        is_whole: whether all ranks of the group are known. Otherwise `seen` has only those with a
            recorded call in it.
        call: call of the rank that has waited longest.
        seconds: time for which that rank has waited.
        waiting: calls of the ranks that wait, by global rank.
        past: ranks that have completed the call.
        missing: ranks that have not called it.
        held: ranks that have enqueued it behind another call, which is not over.
        may_send: of a receive from any rank, the other ranks of the group.
        differing: differences between the ranks' calls: kind of difference -> value -> ranks.
            Example: {"dtype": {"Float": [0], "Half": [1]}}. The kind is "" for `Call.detail`.
        cause: why it is stuck.
        waits_on: names of the stuck calls that the missing and held ranks wait in.
        cycle: names of stuck calls from this one on, each of which waits on the next one, and the
            last on the first. Empty if this one is in no deadlock.
        via: if it follows: a rank that it waits for, and the name of the stuck call which that rank
            waits in, on the way to the cause.
        skip: call that ranks skipped; None if that is not sure, or was not examined.
        out_of_step: of a deadlock or a missing rank, where two of the ranks were first out of step;
            None if that is not known, or was not examined.
        histories: of a mismatch, the recorded collectives of some ranks in the group, by rank.
    """

    name: str
    group: str
    seen: GroupSeen
    is_whole: bool
    call: Call
    seconds: float
    waiting: dict[int, Call]
    past: list[int]
    missing: list[Missing]
    held: list[Missing]
    differing: dict[str, dict[str, list[int]]]
    may_send: list[Missing] = field(default_factory=list)
    cause: Cause = Cause.UNKNOWN
    waits_on: list[str] = field(default_factory=list)
    cycle: list[str] = field(default_factory=list)
    via: tuple[int, str] | None = None
    skip: Skip | None = None
    out_of_step: OutOfStep | None = None
    histories: dict[int, list[Call]] = field(default_factory=dict)

    @property
    def awaited(self) -> Iterator[Missing]:
        """The ranks that it waits for."""
        yield from self.missing
        yield from self.held


def find_stuck(records: Mapping[int, RankRecord], shortest: float = 0.0) -> list[Stuck]:
    """Find the stuck calls, in the order of `Cause`.

    Args:
        records: records of ranks, by global rank.
        shortest: time, in seconds, after which a call that is pending in a record counts as stuck.
            It ends with the record: the call may have been over since.
    """
    graph = _WaitForGraph(_with_distinct_names(records), shortest)
    graph.add_collectives()
    graph.add_pairs()
    graph.find_causes()
    order = [*Cause]
    found = graph.found.values()
    return sorted(found, key=lambda one: (order.index(one.cause), -one.seconds))


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


class _WaitForGraph:
    """Ranks, the calls that they wait in, and the ranks that these calls wait for.

    Args:
        records: records of ranks, by global rank; a name is that of one group.
        shortest: time, in seconds, after which a pending call counts as stuck.
    """

    def __init__(self, records: Mapping[int, RankRecord], shortest: float) -> None:
        self.found: dict[str, Stuck] = {}
        self._records, self._shortest = records, shortest
        self._fronts = {rank: record.fronts() for rank, record in records.items()}
        self._seen: dict[str, GroupSeen] = {}
        for record in records.values():
            for name, seen in record.groups.items():
                if name not in self._seen or (self._seen[name].ranks is None and seen.ranks):
                    self._seen[name] = seen

    # --- stuck calls --------------------------------------------------------------------------

    def add_collectives(self) -> None:
        """Add the collective that each group is stuck in."""
        by_group: dict[str, dict[int, list[Call]]] = {}
        for rank, record in self._records.items():
            for call in record.calls:
                if not call.is_p2p:
                    by_group.setdefault(call.group, {}).setdefault(rank, []).append(call)
        for name, calls in by_group.items():
            pending = [
                call.number
                for rank, of_rank in calls.items()
                for call in of_rank
                if not call.is_done and self._is_stuck(rank, call)
            ]
            if pending:
                self._add_collective(name, min(pending), calls)

    def _is_stuck(self, rank: int, call: Call) -> bool:
        return self._records[rank].age_of(call) >= self._shortest

    def _add_collective(self, name: str, number: int, calls: Mapping[int, Sequence[Call]]) -> None:
        waiting: dict[int, Call] = {}
        there: dict[int, Call] = {}
        past: list[int] = []
        missing: list[int] = []
        seen = self._seen[name]
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
                missing.append(rank)
        if waiting:
            is_whole = seen.ranks is not None and not seen.is_guess
            differing = _differing(there, is_complete=is_whole and len(there) == len(members))
            whole = seen._replace(ranks=list(members))
            self._add(name, name, whole, waiting, past, missing, differing, is_whole)
            if name in self.found:
                self.found[name].missing = [
                    each._replace(is_cut=each.is_cut and not self._lacks(each.rank, name, number))
                    for each in self.found[name].missing
                ]

    def _lacks(self, rank: int, name: str, number: int) -> bool:
        """Return whether a group's own count of calls shows that the rank has not made this one."""
        record = self._records.get(rank)
        return record is not None and record.begun.get(name, number) < number

    def add_pairs(self) -> None:
        """Add the pending sends and receives. The first ones of two ranks belong together."""
        pairs: dict[tuple[str, int, int], dict[int, Call]] = {}
        for rank, record in self._records.items():
            for call in record.pending():
                if (pair := self._pair(rank, call)) is not None:
                    pairs.setdefault(pair, {}).setdefault(rank, call)
                elif call.peer == ANY_SOURCE and self._is_stuck(rank, call):
                    self._add_receive_from_any(rank, call)
        for (group, sender, receiver), waiting in pairs.items():
            if any(self._is_stuck(rank, call) for rank, call in waiting.items()):
                both = sorted((sender, receiver))
                missing = [rank for rank in both if rank not in waiting]
                differing = {} if missing else _differing(waiting, is_complete=True)
                seen = GroupSeen(self._seen[group].label, both)
                name = _pair_name(group, sender, receiver)
                self._add(name, group, seen, waiting, [], missing, differing, True)
                if missing == [sender] and name in self.found:
                    found = self.found[name]
                    found.missing = [self._with_last_send(found.missing[0], group, receiver)]

    def _with_last_send(self, sender: Missing, group: str, receiver: int) -> Missing:
        last = sender.latest
        is_known_over = last is not None and last.is_done and last.progress is not Progress.CALLED
        pair = self._pair(sender.rank, last) if last is not None and is_known_over else None
        return sender._replace(may_have_sent=pair == (group, sender.rank, receiver))

    def _add_receive_from_any(self, rank: int, call: Call) -> None:
        seen, name = self._seen[call.group], _receive_name(call.group, rank)
        self._add(name, call.group, seen, {rank: call}, [], [], {}, seen.ranks is not None)
        if name in self.found:
            others = (other for other in seen.ranks or () if other != rank)
            self.found[name].may_send = [self._missing(other, call.group) for other in others]

    def _pair(self, rank: int, call: Call) -> tuple[str, int, int] | None:
        """Return a call's group, sender and receiver; None if it has no partner that is known."""
        ranks = self._seen[call.group].ranks
        partner = call.partner(rank, ranks)
        if ranks is None or partner is None or rank not in ranks:
            return None
        return (call.group, *((rank, partner) if call.operation == "send" else (partner, rank)))

    def _add(
        self,
        name: str,
        group: str,
        seen: GroupSeen,
        waiting: dict[int, Call],
        past: list[int],
        missing: list[int],
        differing: dict[str, dict[str, list[int]]],
        is_whole: bool,
    ) -> None:
        held = [rank for rank, call in waiting.items() if call not in self._fronts[rank]]
        if len(held) == len(waiting) and not missing:
            return  # each rank has enqueued it behind another call, which tells more
        first = min(waiting.values(), key=lambda call: call.since)
        records = self._records
        now = max(records[rank].time for rank in waiting)
        self.found[name] = Stuck(
            name=name,
            group=group,
            seen=seen,
            is_whole=is_whole,
            call=first,
            seconds=max(now - first.since, 0.0),
            waiting=waiting,
            past=past,
            missing=[
                each._replace(is_older=each.is_recorded and records[each.rank].time < first.since)
                for each in (self._missing(rank, group) for rank in missing)
            ],
            held=[self._missing(rank, group) for rank in held],
            differing=differing,
        )

    def _missing(self, rank: int, group: str) -> Missing:
        record = self._records.get(rank)
        if record is None:
            return Missing(rank, is_recorded=False)
        front = next(iter(self._fronts[rank]), None)
        latest = record.calls[-1] if record.calls and front is None else None
        waits_in = group if front is None else front.group
        doing = record.doing_in.get(waits_in, record.doing)
        caller = record.doing_in.get(group, record.doing)
        waiting_at = {doing, *(call.line for call in self._fronts[rank])}
        return Missing(
            rank,
            elsewhere=front,
            label="" if front is None else group_in_words(record.groups[front.group]),
            last=record.last(group),
            latest=latest,
            latest_label="" if latest is None else group_in_words(record.groups[latest.group]),
            doing=doing,
            caller="" if front is None or caller in waiting_at else caller,
            was_read=record.was_read,
            is_cut=record.is_cut and not self._seen[group].is_new,
        )

    # --- causes -------------------------------------------------------------------------------

    def find_causes(self) -> None:
        """Set the cause of each stuck call, the calls that it waits on, its cycle and its `via`."""
        where = {
            rank: [self._name_of(rank, call) for call in fronts]
            for rank, fronts in self._fronts.items()
        }
        deadlocked = self._deadlocked(where)
        graph: dict[str, set[str]] = {}  # through deadlocked ranks only
        for name, stuck in self.found.items():
            stuck.missing = [_placed(each, where) for each in stuck.missing]
            stuck.held = [_placed(each, where) for each in stuck.held]
            stuck.may_send = [_placed(each, where) for each in stuck.may_send]
            waits_on = [other for each in stuck.awaited for other in where.get(each.rank, ())]
            stuck.waits_on = [one for one in dict.fromkeys(waits_on) if one not in (name, "")]
            graph[name] = {each.where for each in stuck.awaited if each.rank in deadlocked}
        may_be_on_cycle = _on_cycles(graph)
        for name, stuck in self.found.items():
            if name in may_be_on_cycle:
                stuck.cycle = _cycle(name, graph)
            stuck.cause = self._cause(stuck)
        self._find_ways(where)

    def _name_of(self, rank: int, call: Call) -> str:
        """Return the name of the stuck call that a rank's call belongs to; "" if there is none."""
        if (pair := self._pair(rank, call)) is not None:
            name = _pair_name(*pair)
        else:
            name = _receive_name(call.group, rank) if call.is_p2p else call.group
        return name if name in self.found else ""

    def _deadlocked(self, where: Mapping[int, Sequence[str]]) -> set[int]:
        """Return the ranks that wait for one another, or for such ranks, and for nothing else.

        Repeatedly removes ranks with a call that waits for no remaining rank.
        """
        left = {rank for rank, names in where.items() if names and "" not in names}
        waiting_in: dict[str, list[int]] = {}
        for rank in left:
            for name in where[rank]:
                waiting_in.setdefault(name, []).append(rank)
        waited_for_in: dict[int, list[str]] = {}
        n_awaited: dict[str, int] = {}
        for name, stuck in self.found.items():
            awaited = {each.rank for each in stuck.awaited if each.rank in left}
            n_awaited[name] = 0 if stuck.differing else len(awaited)
            for rank in awaited if not stuck.differing else ():
                waited_for_in.setdefault(rank, []).append(name)
        ends = [name for name, count in n_awaited.items() if not count]
        while ends:
            for rank in waiting_in.get(ends.pop(), ()):
                if rank in left:
                    left.remove(rank)
                    for name in waited_for_in.get(rank, ()):
                        n_awaited[name] -= 1
                        if not n_awaited[name]:
                            ends.append(name)
        return left

    def _cause(self, stuck: Stuck) -> Cause:
        if stuck.differing:
            return Cause.MISMATCH
        if stuck.cycle:
            return Cause.DEADLOCK
        if stuck.missing or stuck.held:
            # A missing rank that waits nowhere may also be missing in a call that this one waits
            # on: then that call's verdict names it.
            there = {one.rank for name in stuck.waits_on for one in self.found[name].missing}
            is_explained = all(each.where or each.rank in there for each in stuck.awaited)
            is_pair = stuck.call.is_p2p
            alone = Cause.PARTNER if is_pair else Cause.MISSING
            return Cause.FOLLOWS if is_explained else alone
        if any(call.progress is Progress.NOT_STARTED for call in stuck.waiting.values()):
            return Cause.LATE
        return Cause.UNKNOWN

    def _find_ways(self, where: Mapping[int, Sequence[str]]) -> None:
        """Set `via` of each call that follows, on a shortest way to a cause, a known one if any."""
        came_from: dict[str, list[tuple[int, str]]] = {}
        for name, stuck in self.found.items():
            for each in stuck.awaited:
                for other in where.get(each.rank, ()):
                    came_from.setdefault(other, []).append((each.rank, name))
        for is_known in (True, False):
            queue = deque(
                name
                for name, stuck in self.found.items()
                if stuck.cause is not Cause.FOLLOWS
                and (stuck.cause is not Cause.UNKNOWN) == is_known
            )
            while queue:
                to = queue.popleft()
                for rank, name in came_from.get(to, ()):
                    stuck = self.found[name]
                    if stuck.cause is Cause.FOLLOWS and stuck.via is None and name != to:
                        stuck.via = rank, to
                        queue.append(name)


def _pair_name(group: str, sender: int, receiver: int) -> str:
    return f"{group}: {sender} to {receiver}"


def _receive_name(group: str, receiver: int) -> str:
    return f"{group}: any to {receiver}"


def _placed(missing: Missing, where: Mapping[int, Sequence[str]]) -> Missing:
    return missing._replace(where=next(filter(None, where.get(missing.rank, ())), ""))


# --- differences ----------------------------------------------------------------------------------


def _differing(there: Mapping[int, Call], *, is_complete: bool) -> dict[str, dict[str, list[int]]]:
    """Return the differences between the calls of one number; see `Stuck.differing`.

    Args:
        there: calls by rank.
        is_complete: whether these are the calls of all ranks.
    """
    found: dict[str, dict[str, list[int]]] = {}

    def compare(what: str, value_of: Callable[[Call], str]) -> None:
        values: dict[str, list[int]] = {}
        for rank, call in there.items():
            if value := value_of(call):  # "" if it is not known
                values.setdefault(value, []).append(rank)
        if len(values) > 1:
            found[what] = values

    first = next(iter(there.values()))
    if not first.is_p2p:
        compare("operation", lambda call: call.operation if call.is_recorded else "")
    if not found:
        compare("dtype", lambda call: call.dtype)
        compare("", lambda call: call.detail)
        if first.is_p2p or has_even_inputs(first.operation):
            counts = {tuple(map(math.prod, call.shapes)) for call in there.values() if call.shapes}
            if len(counts) > 1:
                compare("shape", lambda call: shapes_in_words(call.shapes))
    if not found and is_complete and first.operation.startswith(_EXCHANGES):
        sent = sum(math.prod(shape) for call in there.values() for shape in call.shapes)
        received = sum(math.prod(shape) for call in there.values() for shape in call.out_shapes)
        if sent != received and all(call.out_shapes for call in there.values()):
            for rank, call in there.items():
                sizes = f"{shapes_in_words(call.shapes)} to {shapes_in_words(call.out_shapes)}"
                found.setdefault("split sizes", {}).setdefault(sizes, []).append(rank)
    return found


def has_even_inputs(operation: str) -> bool:
    """Return whether the inputs of a collective have equally many elements on all ranks."""
    return operation.startswith(_EVEN_STARTS)


def shapes_in_words(shapes: Iterable[Sequence[int]]) -> str:
    """Return shapes for messages, such as "(4, 8), (2,)"."""
    return ", ".join(str(tuple(shape)) for shape in shapes)


# --- cycles ---------------------------------------------------------------------------------------


def _on_cycles(graph: Mapping[str, set[str]]) -> set[str]:
    """Return the nodes that are on a cycle, or on a path between two cycles.

    Repeatedly removes nodes without a following one. Then it does the same in the reversed graph,
    with nodes that none leads to.
    """
    left = {name: set(following) for name, following in graph.items()}
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


def _cycle(start: str, graph: Mapping[str, set[str]]) -> list[str]:
    """Return a shortest cycle through a node, beginning with it; [] if there is none."""
    came_from: dict[str, str] = {}
    level = [start]
    while level:
        following = []
        for name in level:
            for other in sorted(graph[name]):
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
