"""Backend, options and timeouts reach real groups, derived ones too."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from helpers.all_reduce import reached_by
from helpers.crew import WORLD_TIMEOUT_SECONDS, Crew
from meshverse import DeviceMesh, init_device_mesh

_AXES = ("dp", "tp")


def _options(seconds: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    return options


def _timeout(group: dist.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _timeouts() -> dict[str, float]:
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=_AXES, backend_override={"tp": _options(7)}
    )
    flat = mesh.flatten("all", ("gloo", _options(8)))
    view = mesh.unflatten("tp", (2, 1), ("ep", "etp"), backend_override={"ep": _options(9)})
    renamed = mesh.unflatten("tp", (2, 1), ("a", "b"), backend_override={0: _options(7)})
    shared = renamed.get_group("a") is mesh.get_group("tp")
    groups = {
        "world": dist.group.WORLD,
        "tp": mesh.get_group("tp"),
        "all": flat.get_group(),
        "ep": view.get_group("ep"),
        "etp": view.get_group("etp"),
        "dp": mesh.get_group("dp"),
    }
    for group in groups.values():
        assert sum(reached_by(group)) == group.size()
    return {"shared": shared, **{name: _timeout(group) for name, group in groups.items()}}


def test_timeouts_reach_their_groups_and_the_others_inherit_the_worlds(crew: Crew) -> None:
    for timeouts in crew.run(_timeouts, 4):
        assert timeouts == {
            "shared": True,
            "world": WORLD_TIMEOUT_SECONDS,
            "tp": 7,
            "all": 8,
            "ep": 9,
            "etp": WORLD_TIMEOUT_SECONDS,
            "dp": WORLD_TIMEOUT_SECONDS,
        }


def _timeouts_in_force() -> dict[str, float]:
    """Seconds after which a collective that the other ranks never join ends with an error."""
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=_AXES, timeout=timedelta(seconds=1.5), options=_options(9)
    )
    groups = {
        "the mesh": mesh.get_group("dp"),
        "flattened": mesh.flatten("all").get_group(),
        "unflattened": mesh["dp", "tp"]
        .flatten("all")
        .unflatten("all", (4, 1), ("a", "b"), isolate="own")
        .get_group("a"),
    }
    seconds = {}
    for name, group in groups.items():
        dist.barrier()
        if dist.get_rank() == 0:
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
                dist.all_reduce(torch.ones(1), group=group)
            seconds[name] = time.monotonic() - start
    dist.barrier()
    return seconds


def test_the_universes_timeout_is_in_force_on_derived_groups(crew: Crew) -> None:
    mine, *others = crew.run(_timeouts_in_force, 4)
    assert others == [{}, {}, {}]
    assert set(mine) == {"the mesh", "flattened", "unflattened"}
    assert all(1.4 < seconds < 6 for seconds in mine.values()), mine


def _other_backend() -> tuple[list[str], list[list[int]]]:
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=_AXES, backend_override={"dp": "fake", "tp": "cpu:gloo"}
    )
    explained = [group.options for group in mesh.universe.explain().groups]
    return explained, [reached_by(mesh.get_group(axis)) for axis in _AXES]


def test_another_backend_for_one_axis(crew: Crew) -> None:
    for rank, (explained, (along_dp, along_tp)) in enumerate(crew.run(_other_backend, 4)):
        assert "'fake'" in explained[0]
        assert "'cpu:gloo'" in explained[1]
        assert sum(along_dp) == 1  # the fake backend talks to nobody
        assert along_tp == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _unknown_backend_then_a_right_one() -> tuple[str, list[int]]:
    try:
        init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, backend_override={"tp": "nxcl"})
    except ValueError as error:
        message = str(error)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=_AXES)
    return message, reached_by(mesh.get_group("dp"))


def test_a_refused_mesh_leaves_all_ranks_in_step(crew: Crew) -> None:
    for rank, (message, reached) in enumerate(crew.run(_unknown_backend_then_a_right_one, 4)):
        assert "nxcl" in message
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])
