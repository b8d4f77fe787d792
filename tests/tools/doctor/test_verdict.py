"""The doctor's verdict on measurements: each problem by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshverse.tools.doctor.examination import judge
from meshverse.tools.planner import plan

PLAN = plan(["dp=4,tp=2"], backend="gloo")


def _measured() -> list[dict[str, Any]]:
    """Eight ranks on two hosts of four, all well."""

    def group(ranks: list[int]) -> dict[str, Any]:
        return {
            "ranks": ranks,
            "is_right": True,
            "small_seconds": 1e-4,
            "large_seconds": 1e-2,
            "large_bytes": 1_000_000,
        }

    return [
        {
            "host": f"n{rank // 4}",
            "environment": {"torch": "2.13", "meshverse": "0.1", "LOCAL_WORLD_SIZE": "4"},
            "store_seconds": 1e-4,
            "clock": [float(second) for second in range(5)],
            "compute_seconds": 1e-3,
            "groups": [
                group(list(range(rank % 2, 8, 2))),
                group([rank - rank % 2, rank - rank % 2 + 1]),
            ],
        }
        for rank in range(8)
    ]


def test_all_is_well() -> None:
    found = judge(PLAN, _measured())
    assert (found.problems, found.notes, found.stragglers, found.is_well) == ([], [], [], True)
    dp, tp = found.axes
    assert (dp.nodes, dp.planned_nodes, tp.nodes, tp.planned_nodes) == (2, 2, 1, 1)
    assert dp.bytes_per_second == pytest.approx(2 * 3 / 4 * 1_000_000 / 1e-2)
    assert "No problem." in str(found)


def test_a_wrong_sum_is_a_problem() -> None:
    measured = _measured()
    measured[5]["groups"][1]["is_right"] = False
    found = judge(PLAN, measured)
    assert found.problems == ["An all-reduce along axis tp gave a wrong sum."]
    assert not found.is_well
    assert "WRONG" in str(found)
    assert str(found).endswith("\n1 problem.")


def test_a_clock_that_is_off_is_a_problem() -> None:
    measured = _measured()
    measured[6]["clock"] = [second + 90.0 for second in range(5)]
    assert judge(PLAN, measured).problems == [
        "The clock of rank 6 on n1 is +90.0 s off that of rank 0."
    ]


def test_ranks_that_are_not_in_blocks_raise() -> None:
    measured = _measured()
    for rank, each in enumerate(measured):
        each["host"] = f"n{rank % 2}"
    found = judge(PLAN, measured)
    assert found.notes == [
        f"A group of axis {axis} spans up to {real}. With LOCAL_WORLD_SIZE consecutive ranks "
        f"on each host, it would span {meant}."
        for axis, real, meant in (("dp", "1 host", 2), ("tp", "2 hosts", 1))
    ]
    assert found.is_well


def test_without_local_world_size_nothing_is_said_of_blocks() -> None:
    measured = _measured()
    for each in measured:
        del each["environment"]["LOCAL_WORLD_SIZE"]
    found = judge(PLAN, measured)
    assert found.notes == []
    assert [(axis.nodes, axis.planned_nodes) for axis in found.axes] == [(2, None), (1, None)]


def test_stragglers_are_named_by_rank_and_host() -> None:
    measured = _measured()
    measured[7]["compute_seconds"] = 1e-2
    found = judge(PLAN, measured)
    assert found.stragglers == [7]
    assert found.notes == [
        "Rank 7 on n1 is slow: it multiplies matrices in 10.0 times the median time."
    ]


def test_a_rank_that_slow_groups_have_in_common_is_named() -> None:
    four = plan(["a=3,b=3"], backend="gloo")
    like = _measured()[0]
    measured = []
    for rank in range(9):
        each = copy.deepcopy(like)
        for index, ranks in enumerate(
            ([rank % 3, rank % 3 + 3, rank % 3 + 6], [rank // 3 * 3 + i for i in range(3)])
        ):
            slow = 10 if 4 in ranks else 1
            each["groups"][index] |= {"ranks": ranks, "large_seconds": 1e-2 * slow}
        measured.append(each)
    found = judge(four, measured)
    assert found.stragglers == [4]
    assert found.notes[-1] == "Rank 4 on n0 is in slow groups of several axes."
    assert "1, 4, 7" in str(found)
