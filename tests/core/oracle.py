"""The core's results, computed again by enumerating every index: slow and obvious."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from meshverse._core import AxisLayout


def positions(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Position of every index; the rightmost mode varies fastest."""
    indices = itertools.product(*(range(size) for size in sizes))
    return [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]


def row_major(sizes: Sequence[int]) -> list[int]:
    """Strides at which index i is at position i."""
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def positions_of(axis: AxisLayout) -> list[int]:
    """Position at every index of a compiled axis, asked one by one."""
    return [axis(index) for index in range(axis.size)]


def tile(block: Sequence[int], n: int) -> list[int] | None:
    """Offsets at which copies of `block` cover 0..n-1 exactly once, None where they cannot."""
    offsets, covered = [], set()
    for place in range(n):
        if place in covered:
            continue
        copy = {place + position for position in block}
        if len(copy) < len(block) or copy & covered or max(copy) >= n:
            return None
        offsets.append(place)
        covered |= copy
    return offsets


def divide_evenly(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Whether digits of these sizes and of the others break up into the same smaller digits.

    6 = (2, 3) and (6,) do; (2, 3) and (3, 2) do not: 2 indices are no whole number of threes.
    """
    ends = sorted({*row_major(sizes), *row_major(others), math.prod(sizes)})
    return all(end % start == 0 for start, end in itertools.pairwise(ends))


def groups(block: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """Global ranks of every group of an axis with these positions."""
    offsets = tile(block, len(ranks))
    assert offsets is not None
    return [[ranks[offset + position] for position in block] for offset in offsets]


_SIZES = st.integers(1, 5)

# (sizes, strides) of any layout at all: overlapping, unsorted, with broadcast modes.
any_modes = st.lists(st.tuples(_SIZES, st.integers(0, 12)), max_size=4).map(
    lambda modes: ([size for size, _ in modes], [stride for _, stride in modes])
)


def some_axes(max_size: int) -> st.SearchStrategy[list[tuple[list[int], list[int]]]]:
    """Several of these, which together have few enough positions to go through."""
    return st.lists(any_modes, max_size=max_size).filter(
        lambda axes: math.prod(size for sizes, _ in axes for size in sizes) <= 2000
    )


@st.composite
def factors(draw: st.DrawFn, n: int) -> list[int]:
    """Sizes that multiply out to n."""
    sizes: list[int] = []
    while n > 1 and len(sizes) < 4:
        sizes.append(draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])))
        n //= sizes[-1]
    return [*sizes, n]


@st.composite
def digits(draw: st.DrawFn, max_size: int = 5) -> tuple[list[int], list[int]]:
    """(sizes, strides) of the digits of 0..n-1, in any order: a mesh with its axes permuted."""
    sizes = draw(st.lists(_SIZES, min_size=1, max_size=max_size))
    modes = draw(st.permutations(list(zip(sizes, row_major(sizes), strict=True))))
    return [size for size, _ in modes], [stride for _, stride in modes]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """(sizes, strides, n) of an axis that tiles 0..n-1."""
    sizes, strides = draw(digits())
    kept = draw(st.integers(0, len(sizes)))
    return sizes[:kept], strides[:kept], math.prod(sizes)
