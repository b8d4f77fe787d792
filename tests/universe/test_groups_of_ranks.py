"""`Universe.group` and `groups_of`: process groups of plain lists of ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshverse
from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.differing import TIMEOUT
from helpers.worlds import fake_world, group_names, in_worlds
from meshverse import RanksDifferError, Universe, init_device_mesh

_NOT_A_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


@pytest.fixture
def universe(world) -> Universe:
    return Universe(8)


@pytest.mark.parametrize("first", ["mesh", "list"])
def test_a_list_and_an_axis_share_their_group(universe: Universe, first: str) -> None:
    def axis() -> Any:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"), universe=universe)
        return mesh.get_group("tp")

    def listed() -> Any:
        return universe.group([4, 5])

    one, other = (axis(), listed()) if first == "mesh" else (listed(), axis())
    assert one is other


def test_the_second_call_returns_the_same_group(universe: Universe) -> None:
    group = universe.group([7, 5, 1])
    assert dist.get_process_group_ranks(group) == [1, 5, 7]  # as new_group's
    names = group_names()
    for ranks in ((1, 5, 7), torch.tensor([5, 1, 7]), np.array([7, 1, 5]), range(1, 9, 2)[:1]):
        expected = group if len(ranks) == 3 else _NOT_A_MEMBER
        assert universe.group(ranks) is expected
    assert group_names() == names


def test_all_ranks_with_default_options_are_the_default_group(universe: Universe) -> None:
    assert universe.group(range(8)) is dist.group.WORLD
    assert universe.group(range(8), isolate="own") is not dist.group.WORLD


def test_options_make_groups_of_their_own(universe: Universe) -> None:
    plain = universe.group([4, 5])
    patient = universe.group([4, 5], timeout=timedelta(hours=3))
    isolated = universe.group([4, 5], isolate="own")
    with meshverse.isolate("own"):
        assert universe.group([4, 5]) is isolated
    assert len({plain, patient, isolated}) == 3
    assert universe.group([4, 5], timeout=timedelta(hours=3)) is patient
    explained = {group.options for group in universe.explain().groups}
    assert any("3:00:00" in text or "10800" in text for text in explained), explained


def test_explain_lists_it_by_its_name(universe: Universe) -> None:
    universe.group([4, 5], name="TENSOR_MODEL_PARALLEL_GROUP")
    universe.group([4, 5], name="expert")
    report = universe.explain()
    (group,) = report.groups
    assert group.requests == {"TENSOR_MODEL_PARALLEL_GROUP": 1, "expert": 1}
    assert (group.ranks, report.created, report.saved) == ((4, 5), 1, 1)


def test_other_ranks_have_the_group_of_others(universe: Universe) -> None:
    names = group_names()
    assert universe.group([0, 1]) is _NOT_A_MEMBER
    assert universe.groups_of([[0, 1], [2, 3]]) is _NOT_A_MEMBER
    assert group_names() == names
    assert not universe.parts


@pytest.mark.parametrize(
    "kind", ["lists", "tensor", "array", "ranges", "generator", "sets", "scalars"]
)
def test_of_several_lists_mine_is_made(universe: Universe, kind: str) -> None:
    lists = {
        "lists": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "tensor": torch.arange(8).view(2, 4),
        "array": np.arange(8).reshape(2, 4),
        "ranges": [range(4), range(4, 8)],
        "generator": (list(range(start, start + 4)) for start in (0, 4)),
        "sets": [{0, 1, 2, 3}, {4, 5, 6, 7}],
        "scalars": [list(torch.arange(4)), list(np.arange(4, 8))],
    }[kind]
    before = len(group_names())
    group = universe.groups_of(lists, name="half")
    assert dist.get_process_group_ranks(group) == [4, 5, 6, 7]
    assert len(group_names()) == before + 1


def test_lists_that_share_this_rank_are_refused(universe: Universe) -> None:
    names = group_names()
    with pytest.raises(ValueError, match=r"Rank 5 is in 2 of these lists, such as \[4, 5\] and \["):
        universe.groups_of([[4, 5], [5, 6], [0, 1]])
    assert group_names() == names


@pytest.mark.parametrize(
    "lists",
    [
        [[[4, 5], [6, 7]]],
        [[4, [5]]],
        torch.arange(8).view(2, 2, 2),
        {"tp": [4, 5]},
        ["45"],
        [4, 5],
        torch.tensor([4, 5]),
        np.array([4, 5]),
        5,
        None,
    ],
    ids=[
        *("nested", "nested later", "three dimensions", "dict", "string"),
        *("one list", "one dimension", "an array of one dimension", "a number", "None"),
    ],
)
def test_lists_that_hold_no_ranks_are_refused(universe: Universe, lists) -> None:
    names = group_names()
    with pytest.raises(TypeError, match="pass lists of global ranks"):
        universe.groups_of(lists)
    assert group_names() == names


def test_one_list_instead_of_lists_is_named(universe: Universe) -> None:
    text = r"got 4 of type int as a list of ranks: pass lists .* For one list, call group\(ranks\)"
    with pytest.raises(TypeError, match=text):
        universe.groups_of([4, 5])


@pytest.mark.parametrize("mine", [[], [[4, 5]]], ids=["in no list", "in another list"])
@pytest.mark.parametrize(
    ("others", "text"),
    [
        (
            [0, 99],
            r"ranks 0, 99 cannot be in a universe of ranks 0 to 7, which has no ranks \[99\]",
        ),
        (range(6, 10), r"which has no ranks \[8, 9\]"),
        ([0, -1], "A process group holds global ranks, .* but got -1"),
        ([0, 1.5], "A process group holds global ranks, .* but got 1.5"),
    ],
    ids=["outside", "a range", "negative", "a fraction"],
)
def test_a_list_of_others_with_a_wrong_rank_is_refused_here_too(
    universe: Universe, mine, others, text
) -> None:
    names = group_names()
    with pytest.raises(ValueError, match=text):
        universe.groups_of([*mine, [], others])
    assert group_names() == names
    assert not universe.parts


def test_lists_of_a_universe_of_some_ranks_have_these(world) -> None:
    universe = Universe([7, 5, 3, 1])
    assert dist.get_process_group_ranks(universe.groups_of([[1, 3], [7, 5]])) == [5, 7]
    for lists in ([], [[]], [[1, 3]], [np.array([1, 3])]):
        assert universe.groups_of(lists) is _NOT_A_MEMBER
    with pytest.raises(ValueError, match=r"which has no ranks \[0\]"):
        universe.groups_of([[0, 3], [5, 7]])


@pytest.mark.parametrize(
    ("ranks", "arguments", "error", "text"),
    [
        ([5, 5], {}, ValueError, "5"),
        ([5, -1], {}, ValueError, "A process group holds global ranks, .* but got -1"),
        ([], {}, ValueError, "A process group needs at least one rank"),
        (0, {}, ValueError, "A process group of 0 ranks: it needs at least one"),
        ([5, 8], {}, ValueError, r"which has no ranks \[8\]"),
        ([0, 8], {}, ValueError, r"which has no ranks \[8\]"),  # of others, too
        ("45", {}, TypeError, "Ranks are"),
        ([4, 5], {"timeout": 30}, TypeError, "timedelta"),
        ([4, 5], {"timeout": timedelta(0)}, ValueError, "at least a millisecond"),
        ([4, 5], {"options": object()}, TypeError, "ProcessGroupNCCL.Options"),
        ([4, 5], {"backend": "nope"}, ValueError, "nope"),
        ([4, 5], {"isolate": ""}, ValueError, "at least one character"),
        ([4, 5], {"isolate": {"dp": "x"}}, RuntimeError, "dp"),
    ],
)
def test_bad_input_changes_nothing(universe, ranks, arguments, error, text) -> None:
    names = group_names()
    with pytest.raises(error, match=text):
        universe.group(ranks, **arguments)
    assert group_names() == names
    assert not universe.parts
    assert not universe.explain().groups


def test_of_a_universe_of_some_ranks(world) -> None:
    universe = Universe([1, 3, 5, 7])
    assert dist.get_process_group_ranks(universe.group([7, 5])) == [5, 7]
    with pytest.raises(ValueError, match="which has no ranks"):
        universe.group([5, 6])
    assert not isinstance(universe.group([5]), int)


def test_of_a_lazy_universe_it_is_made_now(world) -> None:
    universe = Universe(8, lazy=True, timeout=timedelta(minutes=7))
    group = universe.group([4, 5])
    assert group.group_name in group_names()
    assert universe.group([4, 5]) is group
    assert "420" in universe.explain().groups[0].options


def test_it_ends_with_the_universe_or_by_itself(universe: Universe) -> None:
    before = group_names()
    group = universe.group([4, 5])
    dist.destroy_process_group(group)
    again = universe.group([4, 5])
    assert again is not group
    universe.destroy()
    assert group_names() == before
    with pytest.raises(RuntimeError, match="was destroyed, and its process groups with it"):
        universe.group([4, 5])


def test_after_its_world_it_raises() -> None:
    with fake_world(8, 5):
        universe = Universe(8)
        universe.group([4, 5])
    with pytest.raises(RuntimeError, match="gone"):
        universe.group([4, 5])
    with fake_world(8, 5), pytest.raises(RuntimeError, match="gone"):
        universe.groups_of([[4, 5]])


@in_worlds((8, 5))
def test_roots_that_share_world_wide_share_lists_too(world) -> None:
    meshverse.install(share="world")
    try:
        one, other = Universe(8), Universe(8)
        assert one.group([4, 5]) is other.group([4, 5])
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        assert mesh.get_group("tp") is one.group([4, 5])
        one.destroy()
        assert other.group([4, 5]).group_name in group_names()
    finally:
        meshverse.uninstall()


def test_threads_make_one_group(universe: Universe) -> None:
    groups: list[Any] = []
    threads = [
        threading.Thread(target=lambda: groups.append(universe.group([4, 5]))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(groups) == 8
    assert len(set(groups)) == 1


# --- on real ranks -------------------------------------------------------------------------------


def _members(*ranks: int) -> list[int]:
    return [int(rank in ranks) for rank in range(4)]


def _use() -> dict[str, Any]:
    rank = dist.get_rank()
    universe = Universe(4, timeout=timedelta(seconds=40))
    answer: dict[str, Any] = {}
    if rank in (1, 3):  # by its members only
        answer["pair"] = reached_by(universe.group([3, 1], name="pair"))
    half = universe.groups_of([[0, 1], [2, 3]], name="half")
    answer["half"] = reached_by(half)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), universe=universe)
    answer["is shared"] = mesh.get_group("tp") is half
    answer["of others"] = universe.group([0, 2]) is _NOT_A_MEMBER
    dist.barrier()
    universe.destroy()
    answer["left"] = len(group_names())
    return answer


def test_groups_reach_their_members(crew: Crew) -> None:
    for rank, answer in enumerate(crew.run(_use, 4)):
        half = (0, 1) if rank < 2 else (2, 3)
        expected = {"half": _members(*half), "is shared": True, "left": 1}
        expected["of others"] = rank in (1, 3)
        if rank in (1, 3):
            expected["pair"] = _members(1, 3)
        assert answer == expected


def _differ() -> str:
    universe = Universe(4, timeout=TIMEOUT)
    minutes = 3 if dist.get_rank() == 1 else 2
    try:
        if dist.get_rank() < 2:
            universe.group([0, 1], timeout=timedelta(minutes=minutes))
    except RanksDifferError as error:
        return str(error)
    return "no error"


def test_members_that_disagree_get_an_error(crew: Crew) -> None:
    answers = crew.run(_differ, 4)
    assert answers[2:] == ["no error", "no error"]
    for text in answers[:2]:
        assert "universe.group" in text
        assert "timeout=120s" in text
        assert "timeout=180s" in text
