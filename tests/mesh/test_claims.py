"""How two ranks differ is said first, and by what they call it."""

from __future__ import annotations

import pytest

from meshverse.agreement.claims import Claim, Statement, differences, users_line


def _claim(rank: int, sizes: dict[str, int], call: str = "init_device_mesh", **facts: str) -> Claim:
    facts = {"made": "at once", "over": "ranks 0 to 3", "strides": str(sizes), **facts}
    return Claim(rank, "digest", Statement(call, sizes, facts, f"train.py:{rank}"))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (
            _claim(0, {"dp": 2, "tp": 2}),
            _claim(3, {"dp": 4, "tp": 1}),
            ["axis dp: 2 on rank 0, 4 on rank 3", "axis tp: 2 on rank 0, 1 on rank 3"],
        ),
        (
            _claim(0, {"dp": 2, "tp": 2}),
            _claim(3, {"dp": 2, "cp": 2}),
            [
                "axis tp: 2 on rank 0, none on rank 3",
                "order of axes: dp, tp on rank 0, dp, cp on rank 3",
                "axis cp: none on rank 0, 2 on rank 3",
            ],
        ),
        (
            _claim(0, {"dp": 2, "tp": 2}, strides="(2, 1)"),
            _claim(3, {"tp": 2, "dp": 2}, strides="(2, 1)"),
            ["order of axes: dp, tp on rank 0, tp, dp on rank 3"],
        ),
        (
            _claim(0, {"dp": 4}, made="lazy"),
            _claim(3, {"dp": 4}, call="flatten"),
            [
                "call: init_device_mesh on rank 0, flatten on rank 3",
                "made: lazy on rank 0, at once on rank 3",
            ],
        ),
        (_claim(0, {"dp": 4}), _claim(3, {"dp": 4}), []),
    ],
)
def test_differences_are_named(one: Claim, other: Claim, expected: list[str]) -> None:
    assert sorted(differences([one, other])) == sorted(expected)


def test_a_claim_is_one_line_and_is_read_back() -> None:
    claim = _claim(3, {'a "b"\n': 2}, over="ranks\n0")
    assert "\n" not in claim.to_line()
    assert Claim.read(claim.to_line()) == claim


def test_the_users_line_is_that_of_the_program() -> None:
    assert users_line().startswith(f"{__file__}:")
