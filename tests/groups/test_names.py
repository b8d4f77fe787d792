"""Names of groups: the same on all members, whatever failed or ended on some of them before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.turns import gives_up_after, wait_until_they_wait
from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh
from meshverse.groups.group import Group

_TIMEOUT = timedelta(seconds=60)


def _mesh(size: int, **settings: Any) -> DeviceMesh:
    return init_device_mesh(
        "cpu", (size,), mesh_dim_names=("dp",), isolate="x", timeout=_TIMEOUT, **settings
    )


def _names_after(destroy: Callable[[list[DeviceMesh]], object]) -> list[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        destroy([_mesh(1, lazy=True) for _ in range(3)])
        return [_mesh(1).get_group().group_name.rpartition("-")[2] for _ in range(2)]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_lazy_groups_that_were_never_used_free_their_names_in_any_order(
    order: tuple[int, ...],
) -> None:
    def destroy(meshes: list[DeviceMesh]) -> None:
        for index in order:
            meshes[index].universe.destroy()

    assert _names_after(destroy) == ["0", "1"]


def test_a_name_below_one_in_use_is_not_given_again() -> None:
    def destroy(meshes: list[DeviceMesh]) -> None:
        for mesh in meshes[:2]:
            mesh.universe.destroy()

    assert _names_after(destroy) == ["3", "4"]


def _some_end_them_in_another_order() -> list[int]:
    meshes = [_mesh(2, lazy=True) for _ in range(2)]
    dist.barrier()
    for mesh in meshes if dist.get_rank() else meshes[::-1]:
        mesh.universe.destroy()
    dist.barrier()
    return reached_by(_mesh(2).get_group())


def test_members_that_end_meshes_in_different_orders_meet_again(crew: Crew) -> None:
    assert crew.run(_some_end_them_in_another_order, 2) == [[1, 1]] * 2


def test_the_name_of_a_group_whose_making_was_interrupted_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with fake_world(8, 5):
        with monkeypatch.context() as patch:
            patch.setattr(Group, "__init__", interrupt)
            with pytest.raises(KeyboardInterrupt):
                _mesh(8)
        assert _mesh(8).get_group().group_name.endswith("-0")


def _one_waits_in_vain_and_all_begin_again() -> list[int]:
    """Rank 0 waits in vain for a lazy group; it ends its mesh when rank 1 waits for the next."""
    rank = dist.get_rank()
    mesh = _mesh(2, lazy=True)
    if rank == 0:
        with gives_up_after(0.2), pytest.raises(RuntimeError, match="1 of 2"):
            mesh.get_group("dp")
    dist.barrier()
    if rank == 0:
        wait_until_they_wait(1)
    mesh.universe.destroy()
    return reached_by(_mesh(2, lazy=True).get_group("dp"))


def test_members_that_failed_meet_again_after_they_destroyed_their_meshes(crew: Crew) -> None:
    assert crew.run(_one_waits_in_vain_and_all_begin_again, 2) == [[1, 1]] * 2
