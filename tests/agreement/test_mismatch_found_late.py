"""Ranks that learn of a difference after they, or others, have gone on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from helpers.crew import Crew
from meshverse import DeviceMesh, init_device_mesh

_ODD_RANK = 2
_NOW = "Ranks are building different meshes"


def _mesh(shape: tuple[int, ...] = (2, 2), **changed: Any) -> DeviceMesh:
    given = {"mesh_dim_names": ("dp", "tp"), "timeout": timedelta(seconds=60), **changed}
    return init_device_mesh("cpu", shape, **given)


def _said(build: Callable[[], Any]) -> str:
    try:
        build()
    except RuntimeError as error:
        return str(error)
    return "no error"


def _error_later(calls: int) -> list[str]:
    """Ranks that wait for nobody make some calls; then the odd one differs in the first of them."""
    is_odd, store = dist.get_rank() == _ODD_RANK, dist.distributed_c10d._get_default_store()
    first = partial(_mesh, lazy=True)
    if is_odd:
        store.wait([f"{rank} is ahead" for rank in range(4) if rank != _ODD_RANK])
        said = [_said(partial(first, mesh_dim_names=("odd", "tp")))]
    else:
        for _ in range(calls):
            first()
        store.set(f"{dist.get_rank()} is ahead", "")
        said = [_said(_mesh)]
    return [*said, _said(_mesh), _said(partial(_mesh, lazy=True))]


@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.long), 3])
def test_ranks_that_are_ahead_get_the_error_where_they_wait_and_ever_after(
    crew: Crew, calls: int
) -> None:
    for answer in crew.run(_error_later, 4, calls):
        assert len(set(answer)) == 1
        assert answer[0].startswith(_NOW)
        assert "axes: (" in answer[0]
        assert f"on rank {_ODD_RANK}" in answer[0]


def _waits_for_nobody() -> str:
    """Ranks that are ahead and wait for nobody get the mismatch error at their next call."""
    is_odd, store = dist.get_rank() == _ODD_RANK, dist.distributed_c10d._get_default_store()
    if is_odd:
        store.wait([f"{rank} is ahead" for rank in range(4) if rank != _ODD_RANK])
        said = _said(partial(_mesh, (4, 1), lazy=True))
        store.set("mismatch", "")
        return said
    _mesh(lazy=True)
    store.set(f"{dist.get_rank()} is ahead", "")
    store.wait(["mismatch"])
    return _said(partial(_mesh, lazy=True))


def test_ranks_that_wait_for_nobody_get_the_error_at_their_next_call(crew: Crew) -> None:
    for answer in crew.run(_waits_for_nobody, 4):
        assert answer.startswith(_NOW)
        assert "axes: (dp=" in answer


def _errors_of_a_repeated_call() -> list[str]:
    world = _mesh((4,), mesh_dim_names=("world",))
    names = ("odd" if dist.get_rank() == _ODD_RANK else "dp", "tp")
    unflatten = partial(world.unflatten, "world", (2, 2), names)
    return [_said(unflatten), _said(unflatten)]


def test_the_same_call_again_raises_the_same_error(crew: Crew) -> None:
    for first, again in crew.run(_errors_of_a_repeated_call, 4):
        assert first.startswith(_NOW)
        assert again == first


def _errors_of_lazy_groups() -> list[str]:
    """The odd rank differs, and creates no group; two others use lazy groups that need it."""
    mesh, rank = _mesh(lazy=True, timeout=timedelta(seconds=60)), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    said = []
    if rank == _ODD_RANK:
        store.wait([f"{other} is ahead" for other in range(4) if other != _ODD_RANK])
        said = [_said(partial(mesh["dp", "tp"].flatten, "odd"))]
    else:
        mesh["dp", "tp"].flatten("all")
        store.set(f"{rank} is ahead", "")
    if rank in (0, 3):
        with_the_odd_rank = "dp" if rank == 0 else "tp"
        said = [_said(partial(mesh.get_group, with_the_odd_rank)) for _ in range(2)]
    dist.barrier()
    return said


def test_each_use_of_a_lazy_group_raises_the_error(crew: Crew) -> None:
    answers = crew.run(_errors_of_lazy_groups, 4)
    assert [len(errors) for errors in answers] == [2, 0, 1, 2]
    for errors in answers:
        assert all(error.startswith(_NOW) for error in errors), errors


def _error_after_others_cleaned_up() -> str:
    """One rank is late; the others get an error, and destroy what they had before."""
    before = _mesh()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 3:
        store.wait([f"{other} has cleaned up" for other in range(3)])
    said = _said(partial(_mesh, (4, 1) if rank == _ODD_RANK else (2, 2), isolate="x"))
    before.universe.destroy()
    store.set(f"{rank} has cleaned up", "")
    return said


@pytest.mark.long
def test_a_late_rank_gets_the_error_though_others_have_cleaned_up(crew: Crew) -> None:
    for answer in crew.run(_error_after_others_cleaned_up, 4):
        assert answer.startswith(_NOW)
