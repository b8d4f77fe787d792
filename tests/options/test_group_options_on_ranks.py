"""Backend, options and timeouts reach real groups, derived ones too."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from helpers.all_reduce import reached_by
from helpers.crew import WORLD_TIMEOUT_SECONDS, Crew
from helpers.versions import AT_LEAST_2_15
from meshverse import DeviceMesh, init_device_mesh

_AXES = ("dp", "tp")
_SHORT_SECONDS = 30  # it must elapse, and groups are created within it


def _options(seconds: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    return options


def _timeout(group: dist.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _timeouts() -> dict[str, float]:
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=_AXES, backend_override={"tp": _options(70)}
    )
    flat = mesh.flatten("all", ("gloo", _options(80)))
    view = mesh.unflatten("tp", (2, 1), ("ep", "etp"), backend_override={"ep": _options(90)})
    renamed = mesh.unflatten("tp", (2, 1), ("a", "b"), backend_override={0: _options(70)})
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
            "tp": 70,
            "all": 80,
            "ep": 90,
            "etp": WORLD_TIMEOUT_SECONDS,
            "dp": WORLD_TIMEOUT_SECONDS,
        }


def _timeouts_in_force() -> dict[str, float]:
    """Seconds after which a collective that the other ranks never join ends with an error."""
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=_AXES,
        timeout=timedelta(seconds=_SHORT_SECONDS),
        options=_options(2 * WORLD_TIMEOUT_SECONDS),
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
    dist.barrier()
    if dist.get_rank() == 0:
        start = time.monotonic()
        calls = {  # all at once, so that the timeout elapses once
            name: dist.all_reduce(torch.ones(1), group=group, async_op=True)
            for name, group in groups.items()
        }
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
                call.wait()
            seconds[name] = time.monotonic() - start
    dist.barrier()
    return seconds


@pytest.mark.long
def test_the_universes_timeout_is_in_force_on_derived_groups(crew: Crew) -> None:
    mine, *others = crew.run(_timeouts_in_force, 4)
    assert others == [{}, {}, {}]
    assert set(mine) == {"the mesh", "flattened", "unflattened"}
    least, most = _SHORT_SECONDS - 0.1, WORLD_TIMEOUT_SECONDS - 1
    # duration: which of two timeouts is in force
    assert all(least < seconds < most for seconds in mine.values()), mine


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


class _NcclOptions(FakeProcessGroup.Options):  # type: ignore[misc]
    """In the place of NCCL's, which only a torch with CUDA has."""


# From 2.15 on, "nccl" is another implementation.
_NCCL = "nccl-legacy" if AT_LEAST_2_15 else "nccl"


class _NcclGroup(dist.ProcessGroupGloo):
    """In the place of NCCL's: c10d's own code for it runs, with gloo underneath."""

    Options = _NcclOptions

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)


def _timeouts_beside_options() -> tuple[list[str], dict[str, float], float]:
    before = {name: getattr(c10d, name, None) for name in ("ProcessGroupNCCL", "is_nccl_available")}
    c10d.ProcessGroupNCCL, c10d.is_nccl_available = _NcclGroup, lambda: True
    given = _NcclOptions()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asked = init_device_mesh(
                "cpu",
                (2, 2),
                mesh_dim_names=_AXES,
                timeout=timedelta(seconds=70),
                backend_override=dict.fromkeys(_AXES, (_NCCL, given)),
            )
            inherited = asked.unflatten("tp", (2,), ("own",), {"own": (_NCCL, _said(90))})
            worlds = DeviceMesh(
                "cpu", [0, 1, 2, 3], mesh_dim_names=("all",), backend_override=((_NCCL, given),)
            )
        cuda = torch.device("cuda")
        groups = {
            "asked": asked.get_group("dp"),
            "own": inherited.get_group("own"),
            "the world's": worlds.get_group("all"),
        }
        seconds = {
            name: group._get_backend(cuda).options._timeout.total_seconds()
            for name, group in groups.items()
        }
    finally:
        for name, value in before.items():
            setattr(c10d, name, value)
    return [str(w.message) for w in caught], seconds, given._timeout.total_seconds()


def _said(seconds: float) -> Any:
    options = _NcclOptions()
    options._timeout = timedelta(seconds=seconds)
    return options


def test_c10d_gets_one_timeout_and_does_not_warn(crew: Crew) -> None:
    for warned, seconds, given in crew.run(_timeouts_beside_options, 4):
        assert warned == []
        assert seconds == {"asked": 70, "own": 90, "the world's": WORLD_TIMEOUT_SECONDS}
        assert given == 1800, "c10d wrote to the user's object"


def _timeouts_passed() -> dict[str, tuple[float, float]]:
    """Return the timeouts that a registered backend gets: its own, and that of the options."""
    seen = {}

    def create(common: Any, options: Any) -> Any:
        seen[tuple(common.global_ranks_in_group)] = common.timeout, options._timeout
        return FakeProcessGroup._create_internal(common.group_rank, common.group_size)

    if "noted" not in dist.Backend.backend_list:
        dist.Backend.register_backend("noted", create, extended_api=True, devices=["cpu"])
    options = FakeProcessGroup.Options()
    init_device_mesh(
        "cpu",
        (2,),
        mesh_dim_names=("dp",),
        timeout=timedelta(seconds=70),
        backend_override={"dp": ("noted", options)},
    )
    return {"noted": seen[0, 1], "given": options._timeout}


def test_a_registered_backend_gets_one_timeout(crew: Crew) -> None:
    for seen in crew.run(_timeouts_passed, 2):
        assert seen["noted"] == (timedelta(seconds=70), timedelta(seconds=70))
        assert seen["given"] == timedelta(minutes=30)
