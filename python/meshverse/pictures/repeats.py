"""Repeats of rows of group numbers: rows that are alike are folded into runs.

Rows are alike if their numbers are the same but for a number that is added to all of them. A run
repeats one part several times, a constant number further each time; the part is a row, a block of
several, or a run itself. Unfolding returns the rows that were folded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

_LONGEST_PERIOD = 64


@dataclass(frozen=True)
class Row:
    """One row: its numbers, relative to the first of them."""

    numbers: tuple[int, ...]
    span: int = 1


@dataclass(frozen=True)
class Run:
    """The same part `count` times, each `step` further than the one before; `span` rows in all."""

    part: Part
    count: int
    step: int
    span: int


@dataclass(frozen=True)
class Block:
    """Different parts after each other, each with the number that is added to it."""

    parts: tuple[tuple[Part, int], ...]
    span: int


Part = Row | Run | Block
Folded = list[tuple[Part, int]]
"""Parts after each other, each with the number that is added to it."""

_Same = Callable[[Hashable, Part], Part]


def fold(rows: Sequence[Sequence[int]], seams: Sequence[int] = ()) -> Folded:
    """Fold rows. O(number of rows).

    Args:
        rows: of numbers, at least one each.
        seams: numbers of rows after which something may begin anew, ascending. First no run crosses
            a multiple of the first, then of the second, and so on; so numbers that happen to go on
            there do not hide what repeats.
    """
    known: dict[Hashable, Part] = {}

    def same(key: Hashable, part: Part) -> Part:  # so that equal parts are one object
        return known.setdefault(key, part)

    items: Folded = []
    for row in rows:
        numbers = tuple(number - row[0] for number in row)
        items.append((same(numbers, Row(numbers)), row[0]))
    for seam in seams:
        items = list(_runs(items, same, seam))
    while True:
        n_items = len(items)
        items = list(_runs(items, same, len(rows) + 1))
        if len(items) == n_items:
            items = _blocks(items, same)
        if len(items) == n_items:
            return items


def _runs(items: Folded, same: _Same, seam: int) -> Iterator[tuple[Part, int]]:
    """Join items into runs, none of which crosses a multiple of `seam` rows."""
    start = row = 0
    while start < len(items):
        part, first = items[start]
        most = max(1, (seam - row % seam) // part.span)
        stop, step = start + 1, 0
        if stop < len(items) and items[stop][0] is part:
            step = items[stop][1] - first
            while (
                stop < len(items)
                and stop - start < most
                and items[stop][0] is part
                and items[stop][1] == first + step * (stop - start)
            ):
                stop += 1
        count = stop - start
        if count == 1:
            yield part, first
        else:
            run = Run(part, count, step, count * part.span)
            yield same(("run", id(part), count, step), run), first
        start, row = stop, row + count * part.span


def _blocks(items: Folded, same: _Same) -> Folded:
    """Join items into blocks, if all of it but an end is one block again and again."""
    for period in range(2, min(_LONGEST_PERIOD, len(items) // 2) + 1):
        whole = len(items) // period * period
        starts = range(0, whole, period)
        if all(_relative(items, at, period) == _relative(items, 0, period) for at in starts):
            parts = _relative(items, 0, period)
            key = ("block", tuple((id(part), add) for part, add in parts))
            block = same(key, Block(parts, sum(part.span for part, _ in parts)))
            return [*((block, items[at][1]) for at in starts), *items[whole:]]
    return items


def _relative(items: Folded, start: int, count: int) -> tuple[tuple[Part, int], ...]:
    first = items[start][1]
    return tuple((part, add - first) for part, add in items[start : start + count])


def unfold(folded: Folded) -> Iterator[tuple[int, ...]]:
    """Yield the rows that were folded."""
    for part, add in folded:
        if isinstance(part, Row):
            yield tuple(number + add for number in part.numbers)
        elif isinstance(part, Run):
            yield from unfold([(part.part, add + part.step * k) for k in range(part.count)])
        else:
            yield from unfold([(inner, add + more) for inner, more in part.parts])
