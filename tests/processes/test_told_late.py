"""Ranks that learn of a difference after they, or others, have gone on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from helpers.crew import Crew
from meshverse import DeviceMesh, init_device_mesh

_ODD_RANK = 2
_NOW, _EARLIER = "Ranks are building different meshes", "Ranks were building different meshes in an"


def _mesh(shape: tuple[int, ...] = (2, 2), **changed: Any) -> DeviceMesh:
    given = {"mesh_dim_names": ("dp", "tp"), "timeout": timedelta(seconds=6), **changed}
    return init_device_mesh("cpu", shape, **given)


def _said(build: Callable[[], Any]) -> str:
    try:
        build()
    except RuntimeError as error:
        return str(error)
    return "no error"


def _told_late(calls: int) -> list[str]:
    """Ranks that wait for nobody make some calls; then the odd one differs in the first of them.

    All go on after that: the odd one after a second attempt, the others after they were told.
    """
    said = []
    is_odd = dist.get_rank() == _ODD_RANK
    first = partial(init_device_mesh, "cpu", (4,), lazy=True)
    if is_odd:
        time.sleep(1)
        said.append(_said(partial(first, mesh_dim_names=("odd",))))
    for _ in range(calls):
        first(mesh_dim_names=("dp",))
    dist.barrier()
    if not is_odd:
        said.append(_said(_mesh))
    dist.barrier()
    for _ in range(2):
        meshes: list[DeviceMesh] = []
        said.append(_said(lambda made=meshes: made.append(_mesh())))
        said.append(_said(lambda made=meshes: made[0].flatten("all", isolate="x")))
    return said


@pytest.mark.parametrize("calls", [1, 3])
def test_ranks_that_are_told_late_go_on_with_the_others(crew: Crew, calls: int) -> None:
    for rank, (told, *others) in enumerate(crew.run(_told_late, 4, calls)):
        assert told.startswith(_NOW if rank == _ODD_RANK else _EARLIER)
        assert others == ["no error"] * 4


def _told_after_others_cleaned_up() -> str:
    """One rank is late; the others are told, and destroy what they had before."""
    before = _mesh()
    rank = dist.get_rank()
    dist.barrier()
    time.sleep(4 if rank == 3 else 0)
    said = _said(partial(_mesh, (4, 1) if rank == _ODD_RANK else (2, 2), isolate="x"))
    before.universe.destroy()
    return said


def test_a_late_rank_is_told_though_others_have_cleaned_up(crew: Crew) -> None:
    for told in crew.run(_told_after_others_cleaned_up, 4):
        assert told.startswith(_NOW)
