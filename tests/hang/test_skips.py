"""Skipped calls: whoever is named did skip the call, in any program that repeats its calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshverse.hang.records import Call, GroupSeen, RankRecord
from meshverse.hang.skips import _compare, _Made, find_skips
from meshverse.hang.verdicts import Cause, find_stuck

_CALLS = [_Made("axis dp", "all_reduce", (n,), "Float", f"train.py:{n}") for n in range(5)]
_ROUNDS = st.lists(st.sampled_from(_CALLS), min_size=3, max_size=7)


def _found(one: list[_Made], other: list[_Made]):
    return _compare(dict(enumerate(one, 1)), dict(enumerate(other, 1)))


@given(_ROUNDS, st.data())
def test_the_rank_that_skipped_a_call_is_named_or_nobody(calls: list[_Made], data) -> None:
    whole = calls * 4
    at = data.draw(st.integers(2 * len(calls), len(whole) - 1))
    skipping = whole[:at] + whole[at + 1 :]
    n_known = [data.draw(st.integers(at + 1, len(whole))) for _ in range(2)]
    found = _found(whole[: n_known[0]], skipping[: n_known[1]])
    back = _found(skipping[: n_known[1]], whole[: n_known[0]])
    assert (found is None) == (back is None)
    if found is not None and back is not None:
        assert (found.skipper, back.skipper) == (1, 0)
        assert found.n_skipped in (1, None)


@given(_ROUNDS, st.data())
def test_a_call_repeated_at_once_is_no_skip(calls: list[_Made], data) -> None:
    whole = calls * 4
    at = data.draw(st.integers(2 * len(calls), len(whole) - 1))
    repeating = [*whole[:at], whole[at - 1], *whole[at:]]
    n_known = [data.draw(st.integers(at + 1, len(whole))) for _ in range(2)]
    assert _found(whole[: n_known[0]], repeating[: n_known[1]]) is None


def test_a_call_of_many_rounds_is_found_whatever_its_place() -> None:
    for at in range(2 * len(_CALLS), 3 * len(_CALLS)):
        whole = _CALLS * 4
        found = _found(whole[: at + 1], (whole[:at] + whole[at + 1 :])[: at + 1])
        assert found is not None
        assert (found.skipper, found.at, found.n_skipped) == (1, at + 1, 1)
        assert found.is_by_rounds


def _out_of_step(
    waiting: list[str], missing: list[str], operation: str = "all_reduce"
) -> tuple[int, dict[int, str]] | None:
    """Return where two ranks were out of step; the first one waits in its last call.

    Args:
        waiting: line of each call of rank 0; "" if it is not known.
        missing: the same of rank 1.
        operation: of all calls.
    """
    records = {}
    for rank, lines in enumerate([waiting, missing]):
        records[rank] = record = RankRecord(rank, 100.0)
        record.groups["g"] = GroupSeen("axis dp", [0, 1])
        record.calls = [
            Call("g", number, operation, number < len(waiting), 0.0, line=line)
            for number, line in enumerate(lines, 1)
        ]
    (stuck,) = find_stuck(records)
    find_skips([stuck], [stuck], records.get)
    assert stuck.cause is Cause.MISSING
    found = stuck.out_of_step
    return found and (found.number, {rank: call.line for rank, call in found.calls.items()})


@pytest.mark.parametrize(
    ("waiting", "missing", "found"),
    [
        (["a", "b", "a", "b", "a"], ["a", "b", "b", "a"], (3, {0: "a", 1: "b"})),
        (["a", "b", "a", "b", "a"], ["b", "a", "b", "a"], (1, {0: "a", 1: "b"})),
        (["a", "b", "a", "b", "a"], ["a", "b", "a", "b"], None),
        (["a", "c", "a", "c", "a"], ["b", "c", "b", "c"], None),  # a and b are branches
        (["a", "a", "b", "a", "b"], ["c", "a", "b", "a"], None),
        (["a", "", "a", "", "a"], ["", "a", "", "a"], None),
    ],
)
def test_calls_of_different_lines_with_one_number_are_out_of_step(waiting, missing, found) -> None:
    assert _out_of_step(waiting, missing) == found


@pytest.mark.parametrize("operation", ["broadcast", "scatter", "gather", "reduce"])
def test_ranks_that_are_the_root_in_turn_are_in_step(operation: str) -> None:
    """The root calls from a line of its own, as with `if rank == source`."""
    assert _out_of_step(["a", "b", "b"], ["b", "a"], operation) is None
    assert _out_of_step(["a", "b", "b"], ["b", "a"]) is not None
