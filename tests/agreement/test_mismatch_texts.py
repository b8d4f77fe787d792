"""Differences between two calls are named first, and by what their users call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from meshverse.agreement import ComparedCalls, Description, RanksDifferError
from meshverse.agreement.mismatch import _differences
from meshverse.program_line import program_line
from meshverse.store import Run


def _call(
    rank: int, sizes: dict[str, int], call: str = "init_device_mesh", **facts: str
) -> Description:
    facts = {"groups": "eager", "over": "ranks 0 to 3", "strides": str(sizes), **facts}
    return Description(rank, "digest", call, sizes, facts, f"train.py:{rank}")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (
            _call(0, {"dp": 2, "tp": 2}),
            _call(3, {"dp": 4, "tp": 1}),
            ["axes: (dp=2, tp=2) on rank 0, (dp=4, tp=1) on rank 3"],
        ),
        (
            _call(0, {"dp": 2, "tp": 2}),
            _call(3, {"dp": 2, "cp": 2}),
            ["axes: (dp=2, tp=2) on rank 0, (dp=2, cp=2) on rank 3"],
        ),
        (
            _call(0, {"dp": 2, "tp": 2}, strides="(2, 1)"),
            _call(3, {"tp": 2, "dp": 2}, strides="(2, 1)"),
            ["axes: (dp=2, tp=2) on rank 0, (tp=2, dp=2) on rank 3"],
        ),
        (
            _call(0, {"dp": 4}, groups="lazy"),
            _call(3, {"dp": 4}, call="flatten"),
            [
                "call: init_device_mesh on rank 0, flatten on rank 3",
                "groups: lazy on rank 0, eager on rank 3",
            ],
        ),
        (_call(0, {"dp": 4}), _call(3, {"dp": 4}), []),
    ],
)
def test_differences_are_named(one: Description, other: Description, expected: list[str]) -> None:
    assert sorted(_differences([one, other])) == sorted(expected)


def test_an_error_that_the_program_has_not_got_is_found_again() -> None:
    kept = dist.HashStore()
    mine, theirs = (Run(rank, 4).keys(kept) for rank in range(2))
    here, there = ComparedCalls(), ComparedCalls()
    for name in ("a", "b"):
        here.compare(mine, name, _call(0, {name: 4}), [], n_ranks=2)

    def differ(name: str) -> None:
        other = _call(1, {name: 2})._replace(digest="another")
        with pytest.raises(RanksDifferError):
            there.compare(theirs, name, other, [], n_ranks=2)

    differ("b")
    assert "axes: (b=4)" in str(here.find_mismatch(mine))
    differ("a")
    for name in ("a", "b"):
        error = here.find_mismatch(mine)
        assert error is not None
        assert f"axes: ({name}=4)" in str(error)
        here.note_raised(error)
    assert here.find_mismatch(mine) is None


class _CountedReads:
    """A store that counts how often a value is read."""

    def __init__(self) -> None:
        self._store, self.n_reads = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, *values: str) -> bytes:
        self.n_reads += 1
        return self._store.compare_set(*values)


def test_a_check_is_one_operation_of_the_store_for_any_number_of_sets() -> None:
    store, mine = _CountedReads(), ComparedCalls()
    keys = Run(0, 4).keys(store)
    for number in range(20):
        mine.compare(keys, f"set {number}", _call(0, {"dp": 4}), [], n_ranks=2)
    before = store.n_reads
    assert mine.find_mismatch(keys) is None
    assert store.n_reads - before == 1


def test_the_line_is_that_of_the_program() -> None:
    assert program_line().startswith(f"{__file__}:")
