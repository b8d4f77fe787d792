"""Correct programs whose ranks did different things before: no mismatch, the same universes."""

from __future__ import annotations

import pickle
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.sleeping import sleep
from helpers.turns import gives_up_after
from meshverse import DeviceMesh, init_device_mesh
from meshverse.groups import creation
from meshverse.store import StoreKeys

_AXES = ("dp", "tp")


def _groups_of(lists: list[list[int]]) -> dist.ProcessGroup:
    groups = [dist.new_group(ranks) for ranks in lists]
    return groups[next(i for i, ranks in enumerate(lists) if dist.get_rank() in ranks)]


def _given_groups_and_a_stage(how: str) -> Any:
    """A mesh on given groups, of which one stage derives alone before all ranks do."""
    groups = [_groups_of([[0, 2], [1, 3]]), _groups_of([[0, 1], [2, 3]])]
    mesh = DeviceMesh.from_group(
        groups, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("pp", "dp")
    )
    if dist.get_rank() < 2:
        mesh["dp"].unflatten("dp", (1, 2), ("a", "b"))
    if how == "its root":
        return reached_by(mesh.unflatten("dp", (2, 1), ("c", "d")).get_group("c"))
    first, second = (init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES) for _ in range(2))
    second["dp"].unflatten("dp", (1, 2), ("a", "b"))
    if how == "another mesh":
        return reached_by(second.get_group("tp"))
    sent = [pickle.dumps(second["tp"])]
    dist.broadcast_object_list(sent, src=2)
    loaded = pickle.loads(sent[0])
    assert loaded is second["tp"]
    assert loaded is not first["tp"]
    return reached_by(loaded.get_group())


@pytest.mark.parametrize("how", ["its root", "another mesh", "a mesh that is sent"])
def test_a_stage_may_derive_alone_from_a_mesh_of_given_groups(crew: Crew, how: str) -> None:
    for rank, reached in enumerate(crew.run(_given_groups_and_a_stage, 4, how)):
        assert reached == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _universes_of_threads_in_another_order() -> list[int]:
    """A thread makes its mesh before the main one on some ranks, and after it on the others."""

    def work() -> None:
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"), isolate="worker", lazy=True)

    thread, is_early = threading.Thread(target=work), dist.get_rank() < 2
    if is_early:
        thread.start()
        thread.join(30)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, lazy=True)
    if not is_early:
        thread.start()
        thread.join(30)
    return reached_by(mesh["dp"].unflatten("dp", (1, 2), ("a", "b")).get_group("b"))


def test_threads_may_number_universes_in_another_order(crew: Crew) -> None:
    for rank, reached in enumerate(crew.run(_universes_of_threads_in_another_order, 4)):
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])


def _again_after_some_failed(folder: str) -> tuple[str, list[int]]:
    """Ranks 0 and 1 fail, the others destroy what they made; all make it again, and in a new world.

    Ranks 0 and 1 cannot know that the others have destroyed the groups that they all got.
    """
    limit = timedelta(seconds=60)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() < 2:
            join, calls = creation._rendezvous, list[int]()

            def fail_second(*arguments: Any) -> Any:
                calls.append(1)
                if len(calls) == 2:
                    raise OSError("trouble on this rank")
                return join(*arguments)

            patch.setattr(creation, "_rendezvous", fail_second)
        mesh = None
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, timeout=limit)
        except OSError:
            assert dist.get_rank() < 2
    # A group may be ended when all its members have made it, not before.
    dist.barrier()
    if mesh is not None:
        assert dist.get_rank() > 1
        mesh.universe.destroy()
    dist.barrier()
    error = ""
    try:
        with gives_up_after(4):
            init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, timeout=limit)
    except RuntimeError as raised:
        error = str(raised)
    sleep(folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    return error, reached_by(mesh["dp"].unflatten("dp", (1, 2), ("a", "b")).get_group("b"))


@pytest.mark.long
def test_a_group_that_only_some_have_destroyed_is_an_error_until_the_next_world(
    crew: Crew, tmp_path: Path
) -> None:
    # If a failed rank calls again first, the other one waits for it until the timeout.
    texts = "which this rank has destroyed or never got. A group that only|1 of 2 members joined"
    for rank, (error, reached) in enumerate(crew.run(_again_after_some_failed, 4, str(tmp_path))):
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])
        assert rank < 2 or re.search(texts, error), error


def _interrupted_in_the_comparison() -> list[int]:
    """Rank 0 is interrupted while calls are compared; the others destroy theirs; all go on."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:

            def interrupted(*_: Any) -> str:
                raise KeyboardInterrupt

            patch.setattr(StoreKeys, "put_first", interrupted)
        try:
            init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, lazy=True).universe.destroy()
        except KeyboardInterrupt:
            assert dist.get_rank() == 0
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, lazy=True)
    mesh.flatten("all")
    return reached_by(mesh.get_group("dp"))


def test_lazy_groups_have_one_name_after_one_rank_was_interrupted(crew: Crew) -> None:
    for rank, reached in enumerate(crew.run(_interrupted_in_the_comparison, 4)):
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])
