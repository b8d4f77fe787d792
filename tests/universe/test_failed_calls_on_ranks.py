"""A call that fails gives back what it made: groups, threads, descriptors, keys.

It keeps a group that other members may have, for the next call.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.held import grown, held, held_after
from meshverse import init_device_mesh, isolate
from meshverse.groups.registry import GroupRegistry
from meshverse.world import World

_SHORT = timedelta(seconds=0.2)  # short-timeout: it must elapse
_AXES = ("dp", "tp")
_COUNTED = ("groups", "groups in the registry")


def _held() -> dict[str, int]:
    registry = World.current().state(GroupRegistry)
    return {**held(), "groups in the registry": len(list(registry))}


def _second_axis_fails() -> list[dict[str, int]]:
    """Five calls whose first axis is made and whose second one cannot be; then one that can."""
    ways = {"dp": ("gloo", dist.ProcessGroupGloo._Options()), "tp": "gloo"}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    dist.barrier()  # a group may be ended when all its members have made it
    mesh.universe.destroy()
    dist.barrier()
    counts = [_held()]
    made = dist.distributed_c10d._new_process_group_helper

    def refuse(size: int, rank: int, ranks: list[int], *rest: Any, **named: Any) -> Any:
        if ranks in ([0, 1], [2, 3]):
            raise RuntimeError("no more of these")
        return made(size, rank, ranks, *rest, **named)

    for _ in range(5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "_new_process_group_helper", refuse)
            with pytest.raises(RuntimeError, match="no more of these"):
                init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, backend_override=ways)
        dist.barrier()
        counts.append(_held())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, backend_override=ways)
    reached = [reached_by(mesh.get_group(axis)) for axis in _AXES]
    rank = dist.get_rank()
    assert reached[0] == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])
    assert reached[1] == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])
    dist.barrier()
    mesh.universe.destroy()
    held_after({name: counts[0][name] for name in ("groups", "threads", "descriptors")})
    return [*counts, _held()]


@pytest.mark.long
def test_a_call_that_fails_on_its_second_axis_keeps_the_first_for_the_next_call(
    crew: Crew,
) -> None:
    for before, first, *later, at_the_end in crew.run(_second_axis_fails, 4):
        assert first["groups"] == before["groups"] + 1
        for each in later:
            assert [each[name] for name in _COUNTED] == [first[name] for name in _COUNTED]
        # gloo's sockets and threads come and go by themselves: each call would leave one or more.
        more = grown(first, later[-1])
        assert all(now - then < len(later) for then, now in more.values()), more
        assert grown(before, at_the_end) == {}


def _groups_of_one_rank() -> list[dict[str, int]]:
    """Rank 0 alone makes a mesh again and again, two of whose axes share a group of one rank."""
    counts: list[dict[str, int]] = []
    for _ in range(3):
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="1 of 2 members joined"):
                init_device_mesh("cpu", (1, 1, 2), isolate="x", timeout=_SHORT)
        counts.append(held_after(counts[0]) if counts else held())
    return counts


def test_groups_of_one_rank_are_given_back_too(fresh_crew: Crew) -> None:
    for first, *later in fresh_crew.run(_groups_of_one_rank, 2):
        assert [each["groups"] for each in (first, *later)] == [1] * 3
        assert [grown(first, each) for each in later] == [{}] * 2


def _retried_after_two_that_failed() -> list[int]:
    """Creations under two tags fail as one rank is late; then both are made, time and again."""
    rank = dist.get_rank()
    for turn in range(5):
        tags = [f"a{turn}", f"b{turn}"]
        if rank == 0:
            for tag in tags:
                with pytest.raises(RuntimeError, match="1 of 3 members joined"):
                    init_device_mesh("cpu", (3,), ranks=[0, 1, 2], isolate=tag, timeout=_SHORT)
        dist.barrier()
        meshes = []
        if rank < 3:
            meshes = [init_device_mesh("cpu", (3,), ranks=[0, 1, 2], isolate=tag) for tag in tags]
            assert [reached_by(mesh.get_group()) for mesh in meshes] == [[1, 1, 1, 0]] * 2
        dist.barrier()
        for mesh in meshes:
            mesh.universe.destroy()
        dist.barrier()
    return [held()["groups"], World.current().store.num_keys()]


@pytest.mark.long
def test_what_failed_under_several_tags_can_be_made_after_all(crew: Crew) -> None:
    for n_groups, _ in crew.run(_retried_after_two_that_failed, 4):
        assert n_groups == 1


def _one_axis_of_a_tagged_root() -> list[int]:
    """The first pipeline stage reads one axis of the root under a tag, while the other does not."""
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("pp", "dp"), timeout=timedelta(seconds=60)
    )
    if dist.get_rank() > 1:
        return []
    with isolate("x"):
        own = mesh["dp"]
    return reached_by(own._get_root_mesh().get_group("dp"))


def test_a_tagged_root_makes_no_groups_of_axes_that_nobody_reads(crew: Crew) -> None:
    assert crew.run(_one_axis_of_a_tagged_root, 4) == [[1, 1, 0, 0]] * 2 + [[]] * 2
