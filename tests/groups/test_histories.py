"""Ranks that made other groups before, or different ones, agree all the same and do not hang."""

from __future__ import annotations

import os

import numpy as np
import torch.distributed as dist

from helpers.all_reduce import Reached, expected_ranks, reached_by, reached_ranks
from helpers.crew import Crew
from meshverse import DeviceMesh, init_device_mesh

_AXES = ("dp", "tp")


def _expected(shape: tuple[int, ...], rank: int) -> Reached:
    ranks = np.arange(np.prod(shape)).reshape(shape)
    return expected_ranks(ranks, _AXES, rank, ranks.size)


def _after_groups_of_some() -> list[Reached]:
    rank = dist.get_rank()
    if rank in (0, 1):
        dist.new_group([0, 1], use_local_synchronization=True)
    if rank in (2, 3):
        for _ in range(3):
            dist.new_group([2, 3], use_local_synchronization=True)
    if rank in (0, 3):
        DeviceMesh("cpu", [3, 0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    return [reached_ranks(mesh), reached_ranks(other)]


def test_some_ranks_made_groups_before(crew: Crew) -> None:
    for rank, reached in enumerate(crew.run(_after_groups_of_some, 4)):
        assert reached == [_expected((2, 2), rank)] * 2


def _mesh_of_members_only() -> tuple[Reached, Reached]:
    rank = dist.get_rank()
    mine: Reached = {}
    if rank in (1, 2, 5, 6):
        mesh = DeviceMesh("cpu", [[6, 1], [2, 5]], mesh_dim_names=_AXES)
        mine = {**reached_ranks(mesh), **reached_ranks(mesh.flatten("all"))}
    mesh_of_all = init_device_mesh("cpu", (4, 2), mesh_dim_names=_AXES)
    return mine, reached_ranks(mesh_of_all)


def test_a_mesh_made_by_its_members_only_then_one_by_all(crew: Crew) -> None:
    ranks = np.array([[6, 1], [2, 5]])
    for rank, (mine, of_all) in enumerate(crew.run(_mesh_of_members_only, 8)):
        assert of_all == _expected((4, 2), rank)
        expected = expected_ranks(ranks, _AXES, rank, 8)
        if expected:
            expected |= expected_ranks(ranks.reshape(1, 4), ("", "all"), rank, 8)
            del expected[""]
        assert mine == expected


def _overlapping_universes() -> dict[str, Reached]:
    rank = dist.get_rank()
    reached = {}
    for name, ranks in {"low": [0, 1, 2, 3], "high": [2, 3, 4, 5], "ends": [0, 5]}.items():
        if rank in ranks:
            mesh = DeviceMesh("cpu", [ranks], mesh_dim_names=_AXES)
            reached[name] = reached_ranks(mesh)
            if len(ranks) == 4:
                halves = mesh.unflatten("tp", (2, 2), ("outer", "inner"))
                reached[name] |= reached_ranks(halves)
    whole = init_device_mesh("cpu", (3, 2), mesh_dim_names=_AXES)
    return {**reached, "whole": reached_ranks(whole)}


def test_universes_over_overlapping_ranks(crew: Crew) -> None:
    for rank, reached in enumerate(crew.run(_overlapping_universes, 6)):
        assert reached["whole"] == _expected((3, 2), rank)
        for name, ranks in {"low": [0, 1, 2, 3], "high": [2, 3, 4, 5]}.items():
            expected = expected_ranks(np.array([ranks]), _AXES, rank, 6)
            halves = np.array(ranks).reshape(1, 2, 2)
            expected |= expected_ranks(halves, ("dp", "outer", "inner"), rank, 6)
            assert reached.get(name, {}) == expected
        assert reached.get("ends", {}) == expected_ranks(np.array([[0, 5]]), _AXES, rank, 6)


def _same_group_again_and_again() -> tuple[list[list[int]], list[str]]:
    rank = dist.get_rank()
    groups = []
    if rank in (0, 1):
        groups = [DeviceMesh("cpu", [0, 1]).get_group() for _ in range(3)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    groups.append(mesh.get_group("tp"))
    return [reached_by(group) for group in groups], [group.group_name for group in groups]


def test_the_same_group_made_again_and_again(crew: Crew) -> None:
    answers = crew.run(_same_group_again_and_again, 4)
    low, high = [1, 1, 0, 0], [0, 0, 1, 1]
    assert [reached for reached, _ in answers] == [[low] * 4, [low] * 4, [high], [high]]
    names = [names for _, names in answers]
    assert names[0] == names[1]
    assert len(set(names[0])) == 4
    assert names[2] == names[3]


def _with_init_barrier() -> tuple[Reached, Reached, set[str]]:
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # c10d then wants every rank at every group
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
        part = DeviceMesh("cpu", [[1, 3]], mesh_dim_names=_AXES, universe=None)
    finally:
        del os.environ["TORCH_DIST_INIT_BARRIER"]
    mine = reached_ranks(part) if part.get_coordinate() else {}
    return reached_ranks(mesh), mine, {group.how for group in mesh.universe.explain().groups}


def test_where_members_only_is_not_safe_all_ranks_take_part(crew: Crew) -> None:
    for rank, (reached, part, how) in enumerate(crew.run(_with_init_barrier, 4)):
        assert reached == _expected((2, 2), rank)
        assert part == expected_ranks(np.array([[1, 3]]), _AXES, rank, 4)
        assert how == {"created by all ranks (TORCH_DIST_INIT_BARRIER=1)"}


def _with_new_group_replaced() -> Reached:
    """Replace `torch.distributed.new_group`, as slime does. torch's own meshes do not go by it."""
    new_group, os.environ["TORCH_DIST_INIT_BARRIER"] = dist.new_group, "1"
    dist.new_group = lambda *args, **kwargs: dist.ProcessGroup(0, 1)
    try:
        return reached_ranks(init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES))
    finally:
        dist.new_group = new_group
        del os.environ["TORCH_DIST_INIT_BARRIER"]


def test_a_replaced_new_group_does_not_reach_meshes(crew: Crew) -> None:
    for rank, reached in enumerate(crew.run(_with_new_group_replaced, 4)):
        assert reached == _expected((2, 2), rank)


def _a_world_anew() -> Reached:
    return reached_ranks(init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES))


def test_one_world_after_another_in_the_same_processes(crew: Crew) -> None:
    for _ in range(3):
        for rank, reached in enumerate(crew.run(_a_world_anew, 4)):
            assert reached == _expected((2, 2), rank)
