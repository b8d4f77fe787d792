"""Parts of one universe on real processes: who a group reaches, ranks that disagree, the recipe."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.differing import TIMEOUT, error_of
from helpers.worlds import group_names
from meshverse import init_device_mesh, init_mesh_partition

_PARTS: dict[str, Any] = {
    "trainer": {
        "mesh_shape": (2, 2),
        "mesh_dim_names": ("dp", "tp"),
        "ranks": [6, 2, 4, 0],
        "preserve_rank_order": False,
    },
    "rollout": {"mesh_shape": (1, 3), "mesh_dim_names": ("dp", "tp"), "ranks": [1, 3, 5]},
}


def _members(*ranks: int) -> list[int]:
    return [int(rank in ranks) for rank in range(8)]


def _shared() -> dict[str, Any]:
    job = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pair", "parity"), timeout=TIMEOUT)
    before = group_names()
    parts = init_mesh_partition("cpu", _PARTS, universe=job.universe)
    # Ranks that overlap with both, and which only they make.
    if dist.get_rank() in (3, 4):
        both = init_device_mesh("cpu", (2,), ranks=[3, 4], universe=job.universe)
        assert reached_by(both.get_group()) == _members(3, 4)
    mine = [mesh for mesh in parts.values() if mesh.get_coordinate() is not None]
    answer: dict[str, Any] = {"all": [], "made": len(group_names() - before)}
    for mesh in mine:
        flat = mesh.flatten("all")
        answer["all"] = reached_by(flat.get_group())
        answer["axes"] = [reached_by(mesh.get_group(axis)) for axis in ("dp", "tp")]
        answer["is shared"] = flat.get_group() is job.get_group("pair")
    dist.barrier()
    job.universe.destroy()
    answer["left"] = len(group_names())
    return answer


def test_groups_reach_their_members_and_end_together(crew: Crew) -> None:
    answers = crew.run(_shared, 8)
    for rank, answer in enumerate(answers):
        if rank == 7:
            assert answer == {"all": [], "made": 0, "left": 1}
            continue
        is_trainer = rank % 2 == 0
        assert answer["all"] == (_members(0, 2, 4, 6) if is_trainer else _members(1, 3, 5))
        assert answer["is shared"] == is_trainer
        assert answer["left"] == 1
    assert answers[2]["axes"] == [_members(2, 0), _members(6, 2)]


def _differ(how: str) -> dict[str, Any]:
    job = init_device_mesh("cpu", (8,), mesh_dim_names=("job",), timeout=TIMEOUT)
    is_odd = dist.get_rank() == 2
    parts = {name: dict(part) for name, part in _PARTS.items()}
    arguments: dict[str, Any] = {"universe": job.universe}
    if is_odd and how == "shape":
        parts["trainer"]["mesh_shape"] = (4, 1)
    if is_odd and how == "apart":
        arguments = {"timeout": TIMEOUT}
    if how == "ranks":  # those of rank 2's other list are waited for until the timeout
        parts["trainer"]["timeout"] = timedelta(seconds=8)  # short-timeout: it must elapse
    if is_odd and how == "ranks":
        parts["trainer"] |= {"ranks": [6, 2, 4, 7]}
    error = error_of(lambda: init_mesh_partition("cpu", parts, **arguments))
    return {"error": error}


@pytest.mark.parametrize("how", ["shape", "apart"])
def test_ranks_that_disagree_about_a_part_get_an_error(crew: Crew, how: str) -> None:
    answers = crew.run(_differ, 8, how)
    says = {
        "shape": "axes: (dp=",
        "apart": "part of: ",
    }[how]
    for rank, answer in enumerate(answers):
        text = answer["error"]
        if rank not in (0, 2, 4, 6):
            assert text == "no error"
            continue
        assert says in text
        assert "on rank 2" in text
        assert f"{Path(__file__).name}:" in text


@pytest.mark.long
def test_ranks_that_disagree_about_the_ranks_of_a_part_get_an_error(crew: Crew) -> None:
    answers = crew.run(_differ, 8, "ranks")
    seen = [rank for rank in range(8) if answers[rank]["error"] != "no error"]
    assert {0, 2, 4, 6}.issubset(seen)
    assert not {1, 3, 5} & set(seen)
