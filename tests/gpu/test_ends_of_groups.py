"""Groups that are isolated, destroyed, aborted while something is stuck in them, or suspended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by, reached_ranks
from helpers.at_platforms import at
from helpers.platforms import World, world_at
from helpers.worlds import live_groups
from meshverse import init_device_mesh, isolate

_AXES = ("dp", "tp")


def _lines(rank: int) -> dict[str, list[int]]:
    return {
        "dp": [int(other % 2 == rank % 2) for other in range(4)],
        "tp": [int(other // 2 == rank // 2) for other in range(4)],
    }


def _outcome_of(call: Callable[[], object]) -> str:
    try:
        return f"gave {call()}"
    except RuntimeError as error:
        return str(error)


def _isolated(wanted: World) -> dict[str, Any]:
    with world_at(wanted) as platform:
        mesh = init_device_mesh(platform.device, (2, 2), mesh_dim_names=_AXES)
        with isolate("apart"):
            apart = mesh["dp", "tp"]
        groups = [m.get_group(axis) for m in (mesh, apart) for axis in _AXES]
        return {
            "distinct": len({group.group_name for group in groups}),
            "reached": [reached_ranks(m, platform.device) for m in (mesh, apart)],
            "both at once": _both_at_once(groups[1], groups[3], platform.device),
        }


def _both_at_once(one: Any, other: Any, device: str) -> list[float]:
    """The sums over two groups of the same ranks that are in use at the same time."""
    totals = [torch.ones(2, device=device), torch.full((2,), 10.0, device=device)]
    pairs = list(zip((one, other), totals, strict=True))
    works = [dist.all_reduce(total, group=group, async_op=True) for group, total in pairs]
    for work in works:
        work.wait()
    return [total[1].item() for total in totals]


@at("gloo", "splitting bound", "nccl", "nccl bound")
def test_isolated_groups_are_communicators_of_their_own(
    world: World, run: Callable[..., list[Any]]
) -> None:
    for rank, seen in enumerate(run(_isolated, 4, world)):
        assert seen["distinct"] == 4
        assert seen["reached"] == [_lines(rank)] * 2
        assert seen["both at once"] == [2, 20]


def _destroyed(wanted: World) -> dict[str, Any]:
    with world_at(wanted) as platform:
        mesh = init_device_mesh(platform.device, (2, 2), mesh_dim_names=_AXES)
        before = reached_ranks(mesh, platform.device)
        had = len(live_groups())
        reached_by(dist.group.WORLD, platform.device)  # gloo's peers are done
        mesh.universe.destroy()
        left = len(live_groups())
        again = init_device_mesh(platform.device, (2, 2), mesh_dim_names=_AXES)
        return {
            "groups": (had, left),
            "reached": [before, reached_ranks(again, platform.device)],
            "world": reached_by(dist.group.WORLD, platform.device),
            "use": _outcome_of(lambda: mesh.get_group("tp")),
        }


@at("gloo", "splitting", "splitting bound", "nccl", "nccl bound", "nccl bound mixed")
def test_a_destroyed_universe_leaves_the_default_group(
    world: World, run: Callable[..., list[Any]]
) -> None:
    for rank, seen in enumerate(run(_destroyed, 4, world)):
        assert seen["groups"] == (3, 1)
        assert seen["reached"] == [_lines(rank)] * 2
        assert seen["world"] == [1, 1, 1, 1]
        assert "was destroyed" in seen["use"]


def _aborted_while_stuck(wanted: World) -> dict[str, Any]:
    with world_at(wanted._replace(survives=True)) as platform:
        mesh = init_device_mesh(platform.device, (2, 2), mesh_dim_names=_AXES)
        before = reached_ranks(mesh, platform.device)
        stuck = None
        if dist.get_rank() == 1:  # its peer, rank 0, never comes
            total = torch.ones(2, device=platform.device)
            stuck = dist.all_reduce(total, group=mesh.get_group("tp"), async_op=True)
        mesh.universe.abort()
        ended = ""
        if platform.device == "cuda":  # gloo leaves the collective behind, until its timeout
            ended = "" if stuck is None else _outcome_of(stuck.wait)
            torch.cuda.synchronize()  # returns, as the kernel that waited was ended
        again = init_device_mesh(platform.device, (2, 2), mesh_dim_names=_AXES)
        return {
            "ended": ended,
            "reached": [before, reached_ranks(again, platform.device)],
            "world": reached_by(dist.group.WORLD, platform.device),
            "use": _outcome_of(lambda: mesh.get_group("tp")),
        }


@at("gloo", "nccl", "nccl bound")
def test_abort_ends_a_stuck_collective_and_nothing_else(
    world: World, run: Callable[..., list[Any]]
) -> None:
    for rank, seen in enumerate(run(_aborted_while_stuck, 4, world)):
        assert seen["reached"] == [_lines(rank)] * 2
        assert seen["world"] == [1, 1, 1, 1]
        assert "was aborted" in seen["use"]


def _suspended(wanted: World) -> dict[str, Any]:
    with world_at(wanted) as platform:
        mesh = init_device_mesh(platform.device, (2, 2), mesh_dim_names=_AXES)
        universe, before = mesh.universe, reached_ranks(mesh, platform.device)
        active = universe.memory_stats(["tp"])
        if not active:
            return {}
        universe.suspend(["tp"])
        seen = {
            "use": _outcome_of(lambda: mesh.get_group("tp")),
            "stats": [one.suspended for one in (*active, *universe.memory_stats(["tp"]))],
            "other": reached_by(mesh.get_group("dp"), platform.device),
        }
        universe.resume()
        return {**seen, "reached": [before, reached_ranks(mesh, platform.device)]}


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Backend, "suspend"),
    reason="torch can suspend a backend from 2.12 on",
)
@at("splitting", "splitting bound", "nccl", "nccl bound")
def test_a_suspended_axis_resumes_with_the_right_sums(
    world: World, run: Callable[..., list[Any]]
) -> None:
    answers = run(_suspended, 4, world)
    if world.platform == "nccl" and not any(answers):
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} cannot suspend a communicator")
    for rank, seen in enumerate(answers):
        assert "is suspended" in seen["use"]
        assert seen["stats"] == [False, True]
        assert seen["other"] == _lines(rank)["dp"]
        assert seen["reached"] == [_lines(rank)] * 2
