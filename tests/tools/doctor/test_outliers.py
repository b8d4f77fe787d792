"""Outliers that the doctor finds in the measurements of all ranks: wrong or slow."""

from __future__ import annotations

import pytest

from meshverse.tools.doctor.examination import (
    clock_offsets,
    differing,
    slow_groups,
    slow_ranks,
    stragglers,
)


def test_lines_that_differ_are_found_with_their_ranks() -> None:
    same = {"torch": "2.13", "LOCAL_WORLD_SIZE": "8", "NCCL_DEBUG": "INFO"}
    odd = {"torch": "2.12", "LOCAL_WORLD_SIZE": "4"}
    assert differing([same, odd, same]) == {
        "torch": {"2.13": [0, 2], "2.12": [1]},
        "NCCL_DEBUG": {"INFO": [0, 2], "not set": [1]},
    }
    assert differing([same, same]) == {}


def test_clocks_are_compared_at_the_same_moments() -> None:
    assert clock_offsets([[10, 20, 30], [12, 22, 39], [10, 20, 30]]) == [0, 2, 0]


def test_a_rank_is_slow_beside_the_median() -> None:
    assert slow_ranks([1.0, 1.1, 2.5, 0.9]) == [2]
    assert slow_ranks([1.0, 1.0]) == []


def test_a_group_is_slow_beside_the_others_of_its_axis() -> None:
    seconds = {(0, 1): 1.0, (2, 3): 1.2, (4, 5): 9.0, (6, 7): 1.1}
    assert slow_groups(seconds) == [(4, 5)]
    assert slow_groups({(0, 1): 1.0, (2, 3): 9.0}) == []  # which of the two is wrong?


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ([], []),
        ([[(4, 5)], []], []),
        ([[(4, 5)], [(1, 5, 9)]], [5]),
        ([[(4, 5), (6, 7)], [(1, 5, 9)], [(3, 7)]], [5, 7]),
    ],
)
def test_stragglers_are_what_slow_groups_have_in_common(slow, expected: list[int]) -> None:
    assert stragglers(slow) == expected
