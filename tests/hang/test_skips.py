"""Skipped calls: whoever is named did skip the call, in any program that repeats its calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshverse.hang.skips import _compare, _Made

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
