"""Calls that may differ between ranks without a mismatch error."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.differing import AXES, ODD_RANK, error_of, small_mesh
from helpers.turns import gives_up_after
from meshverse import (
    DeviceMesh,
    init_device_mesh,
    load_mesh,
    save_mesh,
)
from meshverse.world import World


def _histories_of_their_own() -> list[int]:
    rank = dist.get_rank()
    if rank < 2:
        init_device_mesh("cpu", (2,), mesh_dim_names=("part",))
    if rank in (1, 3):
        DeviceMesh("cpu", [1, 3], mesh_dim_names=("other",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    return reached_by(mesh.get_group("dp"))


def _no_groups_on_one_rank() -> list[int]:
    """Calls that make no group, which rank 0 alone makes: meshes over the default group, slices."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    if dist.get_rank() == 0:
        init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        DeviceMesh("cpu", [0, 1, 2, 3])
        assert mesh["tp"].get_coordinate() == (0,)
    return reached_by(small_mesh(mesh_dim_names=("x", "y")).get_group("x"))


def _other_calls_after_one_that_is_repeated() -> list[int]:
    """A view that is made again, on one rank, counts once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    for _ in range(3 if dist.get_rank() == 0 else 1):
        mesh.unflatten("dp", (2, 1), ("replicate", "shard"))
        mesh.flatten("all")
    return reached_by(small_mesh(mesh_dim_names=("x", "y")).get_group("x"))


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


@pytest.mark.parametrize(
    "program",
    [
        _histories_of_their_own,
        _no_groups_on_one_rank,
        _other_calls_after_one_that_is_repeated,
        _loaded_on_one_rank,
        _a_thread_on_one_rank,
    ],
)
def test_what_ranks_may_do_differently(crew: Crew, program: Callable[[], list[int]]) -> None:
    for rank, reached in enumerate(crew.run(program, 4)):
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])


def _late_for_one_of_several() -> list[str]:
    """Every other group of an axis fails, as a member is late; then all go on."""
    mesh = small_mesh()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == ODD_RANK:
        store.wait(["another has failed"])
    said = []
    for name in "xyz":
        is_in_vain = name == "x" and dist.get_rank() in (0, ODD_RANK)
        with gives_up_after(6) if is_in_vain else contextlib.nullcontext():
            said.append(error_of(partial(mesh["dp"].flatten, name, isolate=name)))
        if said[0] != "no error":
            store.set("another has failed", "")
        dist.barrier()
    return said


@pytest.mark.long
def test_a_call_that_failed_on_some_ranks_is_no_difference(crew: Crew) -> None:
    for rank, (first, *others) in enumerate(crew.run(_late_for_one_of_several, 4)):
        assert others == ["no error"] * 2
        assert (first == "no error") == (rank % 2 == 1)


def _throw_away_meshes() -> int:
    store = World.current().run_keys
    before = World.current().store.num_keys()
    for _ in range(3_000):
        init_device_mesh("cpu", (2,), mesh_dim_names=("world",))
    dist.barrier()
    assert store is not None
    return World.current().store.num_keys() - before


def test_meshes_that_need_no_group_leave_no_keys(crew: Crew) -> None:
    assert max(crew.run(_throw_away_meshes, 2)) < 10
