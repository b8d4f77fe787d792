"""Ctrl-C while a group is made: its members can try again."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from meshverse import DeviceMesh, init_device_mesh
from meshverse import _torch_compat as compat
from meshverse.world import World


def _mesh(*, lazy: bool) -> DeviceMesh:
    timeout = timedelta(seconds=1)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), lazy=lazy, timeout=timeout)


def _interrupt(*_: Any, **__: Any) -> None:
    signal.raise_signal(signal.SIGINT)  # Python's own handler raises KeyboardInterrupt


class _InterruptsWhenAllCame:
    """A store: as soon as it has said that all came, this process is interrupted."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            answer = getattr(self._store, name)(*arguments)
            if answer == b"all came":
                _interrupt()
            return answer

        return ask


def _interrupted(place: str, lazy: bool) -> tuple[str, list[int]]:
    """Rank 0 is interrupted after all members of its group came; then all ranks try again."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    told = "no error"
    mesh = _mesh(lazy=True) if lazy else None
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0 and place == "creation":
            patch.setattr(compat, "create_by_members", _interrupt)
        elif dist.get_rank() == 0:
            patch.setattr(World, "store", _InterruptsWhenAllCame(World.current().store))
        try:
            if mesh is None:
                _mesh(lazy=False)
            elif dist.get_rank() < 2:
                mesh.get_group("tp")
        except (KeyboardInterrupt, RuntimeError) as error:
            told = type(error).__name__
    signal.signal(signal.SIGINT, usual)
    dist.barrier()
    return told, reached_by((mesh or _mesh(lazy=False)).get_group("tp"))


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("place", ["meeting", "creation"])
def test_members_can_try_again_after_one_was_interrupted(
    crew: Crew, place: str, lazy: bool
) -> None:
    for rank, (told, reached) in enumerate(crew.run(_interrupted, 4, place, lazy)):
        assert reached == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])
        if rank == 0:
            assert told == "KeyboardInterrupt"
        if rank == (1 if lazy else 2):  # the other member of the group
            assert told == "RuntimeError"
