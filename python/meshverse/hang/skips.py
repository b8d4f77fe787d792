"""Which rank skipped which call: the calls of two ranks, compared one by one.

The ranks of a group make the same calls, so after a skipped one, the calls of its rank equal those
of the others shifted by one or more. Two things show who skipped: calls after that one, or earlier
rounds (such as training steps) in which the same calls repeat. A skip is named only if nothing else
explains the calls as well: that another rank skipped one, or that this rank made an extra call.
Without earlier rounds, an extra call of one rank looks like a skip of the others, so only fewer
ranks than half of them are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .records import Call, RankRecord
from .verdicts import Cause, OutOfStep, Skip, Stuck, has_even_inputs

_MOST_RANKS = 8  # of each kind of call, whose histories are read
_FEWEST_REPEATED = 3  # calls that equal those a round earlier
_ROOTED = ("broadcast", "gather", "reduce", "scatter")
_FEWEST_EQUAL = 2  # calls after a skip that equal those of the other ranks

HistoryOf = Callable[[int], RankRecord | None]
"""Function of a rank that returns a record with all its recorded calls; None if there is none."""


class _Made(NamedTuple):
    """Values of a call that are compared. The label stands for the groups along one axis.

    Inputs count if ranks must have equal ones: of a scatter, for example, only its source has any.
    """

    label: str
    operation: str
    sizes: tuple[int, ...]
    dtype: str
    line: str


class _Found(NamedTuple):
    skipper: int  # 0 or 1: which of the two ranks skipped a call
    at: int  # index of the first call that it skipped
    n_skipped: int | None  # None if it may be several numbers
    is_by_rounds: bool


def find_skips(about: Sequence[Stuck], stuck: Sequence[Stuck], history_of: HistoryOf) -> None:
    """Set `skip`, `out_of_step` and `histories` of stuck calls: a rank may have skipped a call.

    Args:
        about: stuck calls to examine.
        stuck: all stuck calls.
        history_of: function that returns the history of a rank; of few ranks, it is called.
    """
    by_name = {one.name: one for one in stuck}
    for one in about:
        if one.call.is_p2p:
            continue
        if one.cause is Cause.MISMATCH:
            _find_in_group(one, history_of)
        elif one.cause is Cause.DEADLOCK and one.skip is None:
            cycle = [by_name[name] for name in one.cycle if name in by_name]
            if not any(each.call.is_p2p for each in cycle):
                skip = _find_on_cycle(cycle, history_of)
                for each, following in _steps(cycle):
                    each.skip = skip
                    missing = _missing_in(each, following)
                    if missing is not None:
                        each.out_of_step = _find_out_of_step(each, missing, history_of)
        elif one.cause is Cause.MISSING:
            missing = next((each.rank for each in one.missing if each.is_recorded), None)
            if missing is not None:
                one.out_of_step = _find_out_of_step(one, missing, history_of)


def _find_in_group(one: Stuck, history_of: HistoryOf) -> None:
    partitions = [sorted(values.values()) for values in one.differing.values()]
    read = {
        rank: history
        for ranks in partitions[0]
        for rank in ranks[:_MOST_RANKS]
        if (history := history_of(rank)) is not None
    }
    one.histories = {rank: _in_group(history, one.group) for rank, history in read.items()}
    if any(each != partitions[0] for each in partitions) or len(partitions[0]) != 2:
        return
    found: set[_Found | None] = set()
    for rank in partitions[0][0][:_MOST_RANKS]:
        for other in partitions[0][1][:_MOST_RANKS]:
            if rank not in read or other not in read:
                return
            both = (
                {call.number: _made(call, read[each]) for call in one.histories[each]}
                for each in (rank, other)
            )
            found.add(_compare(*both))
    if len(found) != 1 or (skip := found.pop()) is None:
        return
    ranks, others = partitions[0][skip.skipper], partitions[0][1 - skip.skipper]
    is_sure = skip.is_by_rounds or len(ranks) < len(others)
    if is_sure and len(ranks) <= _MOST_RANKS:  # all of them were compared
        call = next(call for call in one.histories[others[0]] if call.number == skip.at)
        one.skip = Skip(ranks, others, call, one.seen, skip.n_skipped, skip.is_by_rounds)


def _find_on_cycle(cycle: Sequence[Stuck], history_of: HistoryOf) -> Skip | None:
    """Return the skip by which ranks wait for one another; None if none is sure."""
    found: dict[tuple[int, str, int], Skip] = {}
    for one, following in _steps(cycle):
        missing = _missing_in(one, following)
        rank = next(iter(one.waiting))
        if missing is None or rank == missing:
            continue
        mine, theirs = history_of(rank), history_of(missing)
        if mine is None or theirs is None:
            continue
        # Also groups that are not on the cycle: their calls tell rounds apart from repeated calls.
        labels = set.intersection(
            *({seen.label for seen in history.groups.values()} for history in (mine, theirs))
        )
        calls = [
            [c for c in history.calls if not c.is_p2p and history.groups[c.group].label in labels]
            for history in (mine, theirs)
        ]
        begins = _aligned(calls, [mine, theirs], one)
        if begins is None:
            continue
        of_index = [
            {index - begin: call for index, call in enumerate(each)}
            for each, begin in zip(calls, begins, strict=True)
        ]
        skip = _compare(
            *(
                {index: _made(call, history) for index, call in each.items()}
                for each, history in zip(of_index, (mine, theirs), strict=True)
            )
        )
        if skip is None:
            continue
        skipper, other = (missing, rank) if skip.skipper else (rank, missing)
        call = of_index[1 - skip.skipper][skip.at]
        where = next((each for each in cycle if each.group == call.group), None)
        if where is not None and skipper in (where.seen.ranks or ()):
            others = [
                rank
                for rank, own in where.waiting.items()
                if rank != skipper and (own.number, own.line) == (call.number, call.line)
            ]
            if not skip.is_by_rounds and len(others) < 2:
                continue
            said = Skip(
                [skipper], others or [other], call, where.seen, skip.n_skipped, skip.is_by_rounds
            )
            found[skipper, call.group, call.number] = said
    return next(iter(found.values())) if len(found) == 1 else None


def _steps(cycle: Sequence[Stuck]) -> Iterator[tuple[Stuck, Stuck]]:
    """Yield each stuck call of a cycle with the one that it waits on."""
    return zip(cycle, [*cycle[1:], *cycle[:1]], strict=True)


def _missing_in(one: Stuck, following: Stuck) -> int | None:
    """Return a rank that a stuck call waits for and that waits in the following one."""
    return next((each.rank for each in one.awaited if each.where == following.name), None)


def _find_out_of_step(one: Stuck, missing: int, history_of: HistoryOf) -> OutOfStep | None:
    """Return where a rank that waits in a stuck call and a missing one were first out of step."""
    rank = next((rank for rank in one.waiting if rank != missing), None)
    mine, theirs = (None if each is None else history_of(each) for each in (rank, missing))
    if rank is None or mine is None or theirs is None:
        return None
    both = [{call.number: call for call in _in_group(each, one.group)} for each in (mine, theirs)]
    lines = [{call.line for call in calls.values()} for calls in both]
    for number in sorted(both[0].keys() & both[1].keys()):
        here, there = (calls[number] for calls in both)
        # Of a call with a root, ranks in turn may be the root, which calls from a line of its own.
        is_rooted = here.operation == there.operation and here.operation in _ROOTED
        differ = here.line != there.line and here.line and there.line and not is_rooted
        if differ and here.line in lines[1] and there.line in lines[0]:
            return OutOfStep(number, {rank: here, missing: there})
    return None


def _aligned(
    calls: Sequence[Sequence[Call]], histories: Sequence[RankRecord], stuck: Stuck
) -> list[int] | None:
    """Return the indices of the last collective before a stuck one that both ranks have made.

    Both are 0 if there is none, and no older calls are gone; None if that is not known.
    """
    indices = [
        {
            call.number: index
            for index, call in enumerate(each)
            if call.group == _own_name(stuck.group, history) and call.number < stuck.call.number
        }
        for each, history in zip(calls, histories, strict=True)
    ]
    both = indices[0].keys() & indices[1].keys()
    if both:
        return [each[max(both)] for each in indices]
    return None if any(history.is_cut for history in histories) else [0, 0]


def _in_group(history: RankRecord, group: str) -> list[Call]:
    name = _own_name(group, history)
    return [call for call in history.calls if call.group == name and not call.is_p2p]


def _own_name(group: str, history: RankRecord) -> str:
    """Return c10d's name of a group, which verdicts may have completed by its ranks."""
    return group if group in history.groups else group.rpartition(" of ranks ")[0]


def _made(call: Call, history: RankRecord) -> _Made:
    label = history.groups[call.group].label
    if not has_even_inputs(call.operation):
        return _Made(label, call.operation, (), "", call.line)
    sizes = tuple(map(math.prod, call.shapes))
    return _Made(label, call.operation, sizes, call.dtype, call.line)


def _compare(one: Mapping[int, _Made], other: Mapping[int, _Made]) -> _Found | None:
    """Return which of two ranks skipped a call; None if it is not sure.

    Args:
        one: calls of a rank, by index.
        other: those of another rank. Calls of equal index belong together before the skip.
    """
    both = sorted(one.keys() & other.keys())
    at = next((index for index in both if one[index] != other[index]), None)
    if at is None or not (one[at].line and other[at].line):
        return None
    begin = at
    while begin - 1 in one and begin - 1 in other:
        begin -= 1
    before = [one[index] for index in range(begin, at)]
    after = [[made for index, made in sorted(each.items()) if index >= at] for each in (one, other)]
    n_round = _round(before)
    if n_round is not None:
        usual = before[-n_round:]
        skipper = 1 if _follows(after[0], usual, 0) else 0
        counts = [k for k in range(1, n_round) if _follows(after[skipper], usual, k)]
        # To skip k calls of a round is to repeat all but k, which is the likelier for a large k.
        is_sure = _follows(after[1 - skipper], usual, 0) and bool(counts)
        if not is_sure or 2 * max(counts) >= n_round:
            return None
        return _Found(skipper, at, counts[0] if len(counts) == 1 else None, True)
    shifts = [
        (skipper, n_skipped)
        for skipper in (0, 1)
        for n_skipped in range(1, len(after[1 - skipper]))
        if _n_equal(after[skipper], after[1 - skipper][n_skipped:]) >= _FEWEST_EQUAL
    ]
    return _Found(*shifts[0][:1], at, shifts[0][1], False) if len(shifts) == 1 else None


def _round(before: Sequence[_Made]) -> int | None:
    """Return after how many calls they repeat; None unless the last round equals the one before.

    That is the distance to the earlier place whose past is equal to the present one for longest.
    """
    numbers: dict[_Made, int] = {}
    made = [numbers.setdefault(each, len(numbers)) for each in reversed(before)]
    best, n_best, is_tied = 0, 0, False
    for distance in range(1, len(made)):
        n_equal = 0
        for mine, earlier in zip(made, made[distance:], strict=False):
            if mine != earlier:
                break
            n_equal += 1
        if n_equal >= n_best:
            is_tied = n_equal == n_best and best != 0
            if n_equal > n_best:
                best, n_best = distance, n_equal
    if is_tied or n_best < max(best, _FEWEST_REPEATED):
        return None
    return best


def _follows(after: Sequence[_Made], usual: Sequence[_Made], begin: int) -> bool:
    return all(made == usual[(begin + i) % len(usual)] for i, made in enumerate(after))


def _n_equal(after: Sequence[_Made], others: Sequence[_Made]) -> int:
    """Return how many calls are equal one by one; 0 if any is not."""
    pairs = list(zip(after, others, strict=False))
    return len(pairs) if all(mine == theirs for mine, theirs in pairs) else 0
