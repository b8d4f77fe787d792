"""What ranks may do differently without being told that they build different meshes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.differing import AXES, ODD_RANK, ending_of, small_mesh
from meshverse import (
    DeviceMesh,
    init_device_mesh,
    load_mesh,
    save_mesh,
)
from meshverse.universe.consistency import RootOrders
from meshverse.world.world import World


def _histories_of_their_own() -> list[int]:
    rank = dist.get_rank()
    if rank < 2:
        init_device_mesh("cpu", (2,), mesh_dim_names=("part",))
    if rank in (1, 3):
        DeviceMesh("cpu", [1, 3], mesh_dim_names=("other",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    return reached_by(mesh.get_group("dp"))


def _known_views_on_one_rank() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    if dist.get_rank() == 0:
        mesh["tp"].flatten("alias")
        mesh.unflatten("dp", (2,), ("renamed",))
    mesh.flatten("all")
    return reached_by(mesh.get_group("dp"))


def _loaded_on_one_rank() -> list[int]:
    if dist.get_rank() == 0:
        state = save_mesh(DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False))
        load_mesh(state)
    return reached_by(small_mesh().get_group("dp"))


def _a_thread_on_one_rank() -> list[int]:
    if dist.get_rank() == 0:
        thread = threading.Thread(target=small_mesh)
        thread.start()
        thread.join(30)
    else:
        small_mesh()
    return reached_by(small_mesh(mesh_dim_names=("x", "y")).get_group("x"))


def _told_and_tried_again() -> list[int]:
    """All ranks are told, twice, and try again with the right mesh."""
    long = timedelta(seconds=30)
    is_odd = dist.get_rank() == ODD_RANK
    with pytest.raises(RuntimeError, match="building different meshes"):
        small_mesh((4, 1) if is_odd else (2, 2), timeout=long)
    mesh = small_mesh(timeout=long)
    with pytest.raises(RuntimeError, match="building different meshes"):
        mesh["dp", "tp"].flatten("all", isolate="wrong" if is_odd else "x")
    mesh["dp", "tp"].flatten("all", isolate="x")
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    assert (
        World.current()
        .state(RootOrders)
        .of(again.universe.rank_map.fingerprint, is_first=False)
        .is_compared()
    )
    return reached_by(again.get_group("ep"))


@pytest.mark.parametrize(
    "program",
    [
        _histories_of_their_own,
        _known_views_on_one_rank,
        _loaded_on_one_rank,
        _a_thread_on_one_rank,
        _told_and_tried_again,
    ],
)
def test_what_ranks_may_do_differently(crew: Crew, program: Callable[[], list[int]]) -> None:
    for rank, reached in enumerate(crew.run(program, 4)):
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])


def _late_for_one_of_several() -> list[str]:
    """Every other group of an axis fails, as a member is late; then all go on."""
    mesh = small_mesh(timeout=timedelta(seconds=2))
    dist.barrier()
    if dist.get_rank() == ODD_RANK:
        time.sleep(4)
    said = []
    for name in "xyz":
        said.append(ending_of(partial(mesh["dp"].flatten, name, isolate=name)).message)
        dist.barrier()
    return said


def test_a_call_that_failed_on_some_ranks_is_no_difference(crew: Crew) -> None:
    for rank, (first, *others) in enumerate(crew.run(_late_for_one_of_several, 4)):
        assert others == ["no error"] * 2
        assert (first == "no error") == (rank % 2 == 1)
