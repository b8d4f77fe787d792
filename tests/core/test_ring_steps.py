"""Ring steps between the parts of a cluster, counted by the core and group by group."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import oracle
from meshverse._core import ring_steps

_SHAPES = st.lists(st.integers(1, 4), max_size=4)


def _slow(shape: list[int], parts: list[int], axis: int) -> int:
    """Count the steps of one axis at one level, given the part of each position."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for position, index in enumerate(itertools.product(*map(range, shape))):
        assert position == sum(map(math.prod, zip(index, oracle.row_major(shape), strict=True)))
        groups.setdefault((*index[:axis], *index[axis + 1 :]), set()).add(parts[position])
    return sum(len(group) for group in groups.values() if len(group) > 1)


@given(_SHAPES, st.data())
def test_a_group_on_n_parts_has_n_steps_or_none(shape, data) -> None:
    n_spots = data.draw(st.integers(1, 6))
    lists = st.lists(st.integers(0, n_spots - 1), min_size=n_spots, max_size=n_spots)
    levels = data.draw(st.lists(lists, max_size=3))
    size = math.prod(shape)
    spots = st.lists(st.integers(0, n_spots - 1), min_size=size, max_size=size)
    placements = data.draw(st.lists(spots, max_size=3))
    assert ring_steps(shape, levels, placements) == [
        [
            _slow(shape, [parts[spot] for spot in placement], axis)
            for axis in range(len(shape))
            for parts in levels
        ]
        for placement in placements
    ]


@pytest.mark.parametrize(
    ("shape", "levels", "placement", "said"),
    [
        ([2, 2], [[0, 1]], [0, 1, 1], "a placement of 3 positions for a mesh of 4"),
        ([2], [[0, 1]], [0, 2], "spot 2: there are only those from 0 to 1"),
        ([2], [[0, 1], [0]], [0, 1], "level 1 has the parts of 1 spots, and level 0 of 2"),
        ([2], [[0, 1], [0, 0, 0]], [0, 1], "level 1 has the parts of 3 spots, and level 0 of 2"),
        ([2], [], [-5, 7], "spot -5"),
        ([2], [[0, 5]], [0, 1], "part 5: there are only those from 0 to 1"),
        ([2, 0], [[0]], [], "an axis of size 0"),
    ],
)
def test_what_is_no_placement_raises(shape, levels, placement, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ring_steps(shape, levels, [placement])
