"""Repeats in rows of group numbers: rows of the same pattern are folded into runs.

Two rows have the same pattern if one is the other plus a constant, their offset. A run repeats a
part several times, and each time increases the offset by the same step. The part is a row, a block
of several parts, or itself a run. Unfolding returns the rows that were folded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

_LONGEST_PERIOD = 64


@dataclass(frozen=True)
class Row:
    """One row, as numbers relative to its first number."""

    numbers: tuple[int, ...]
    span: int = 1


@dataclass(frozen=True)
class Run:
    """A part repeated `count` times, its offset increased by `step` each time; `span` rows."""

    part: Part
    count: int
    step: int
    span: int


@dataclass(frozen=True)
class Block:
    """A sequence of parts, each with its offset; `span` rows."""

    parts: tuple[tuple[Part, int], ...]
    span: int


Part = Row | Run | Block
Folded = list[tuple[Part, int]]
"""A sequence of parts, each with its offset."""

_Same = Callable[[Hashable, Part], Part]


def fold(rows: Sequence[Sequence[int]], seams: Sequence[int] = ()) -> Folded:
    """Fold rows. O(number of rows).

    Args:
        rows: rows of at least one number each.
        seams: numbers of rows, ascending. Runs are first joined only between multiples of the first
            seam, then of the second, and so on: rows that happen to continue across a multiple must
            not hide a repeat.
    """
    known: dict[Hashable, Part] = {}

    def same(key: Hashable, part: Part) -> Part:  # equal parts become one object
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
    """Join items into blocks, if all items but a remainder at the end repeat one block."""
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
