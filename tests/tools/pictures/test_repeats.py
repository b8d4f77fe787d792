"""Rows fold into what repeats, and unfold to themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshverse.tools.pictures.repeats import Block, Row, Run, fold, unfold

_NUMBERS = st.lists(st.integers(0, 5), min_size=1, max_size=3)


@given(st.lists(_NUMBERS, max_size=40), st.lists(st.integers(1, 12), max_size=3).map(sorted))
def test_any_rows_unfold_to_themselves(rows: list[list[int]], seams: list[int]) -> None:
    folded = fold(rows, seams)
    assert list(unfold(folded)) == [tuple(row) for row in rows]
    assert sum(part.span for part, _ in folded) == len(rows)


def test_nodes_with_a_group_each_are_one_run() -> None:
    [(run, first)] = fold([[node] * 8 for node in range(1_280)])
    assert (run, first) == (Run(Row((0,) * 8), 1_280, 1, 1_280), 0)


def test_stages_of_nodes_with_the_same_groups_are_a_run_of_runs() -> None:
    stages = [[8 * stage + i for i in range(8)] for stage in range(8) for _ in range(160)]
    [(run, _)] = fold(stages)
    assert run == Run(Run(Row(tuple(range(8))), 160, 0, 160), 8, 8, 1_280)


def test_a_seam_keeps_apart_what_goes_on_by_chance() -> None:
    """Groups 0 to 3 twice, then 4 to 7 twice: the second 0 to 3 goes on to 4 without a gap."""
    rows = [[4 * half + i] for half in range(2) for _ in range(2) for i in range(4)]
    [(run, _)] = fold(rows, [4, 8])
    inner = Run(Row((0,)), 4, 1, 4)
    assert run == Run(Run(inner, 2, 0, 8), 2, 4, 16)


def test_groups_that_do_not_fit_the_nodes_repeat_in_blocks() -> None:
    """Groups of 6 on nodes of 8: the same three kinds of node again and again."""
    numbers = [position // 6 for position in range(240)]
    [(run, _)] = fold([numbers[start : start + 8] for start in range(0, 240, 8)])
    assert isinstance(run, Run)
    assert isinstance(run.part, Block)
    assert (run.count, run.step, run.part.span) == (10, 4, 3)
