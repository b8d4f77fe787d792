"""Keys in the default group's store: the counts of runs stay, once universes are destroyed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.crew import Crew
from helpers.turns import gives_up_after, wait_until_they_wait
from meshverse import DeviceMesh, RanksDifferError, init_device_mesh
from meshverse.store import Run
from meshverse.universe.universe_groups import share_world_wide
from meshverse.world import World

_AXES = ("dp", "tp")


class _Noting:
    """A store that notes every key that is asked for."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.keys = store, set[str]()

    def __getattr__(self, name: str) -> Any:
        def ask(key: str, *arguments: Any) -> Any:
            self.keys.add(key)
            return getattr(self._store, name)(key, *arguments)

        return ask


def _mesh(shape: tuple[int, ...] = (2, 2), **changed: Any) -> DeviceMesh:
    given = {"mesh_dim_names": _AXES, "timeout": timedelta(seconds=60), **changed}
    return init_device_mesh("cpu", shape, **given)


def _plain() -> list[DeviceMesh]:
    return [_mesh(), _mesh()]


def _not_compared() -> list[DeviceMesh]:
    return [_mesh(check_consistency=False)]


def _derived() -> list[DeviceMesh]:
    mesh = _mesh()
    mesh["dp"].flatten("own", isolate="x")
    mesh.unflatten("dp", (2, 1), ("a", "b"), isolate="y")
    return [mesh]


def _lazy() -> list[DeviceMesh]:
    mesh = _mesh(lazy=True)
    mesh.get_group("tp")
    return [mesh]


def _waited() -> list[DeviceMesh]:
    """One rank is late, so that the others write down where they wait."""
    if dist.get_rank() == 3:
        wait_until_they_wait(0, 1, 2)
    return [_mesh()]


def _failed() -> list[DeviceMesh]:
    """Rendezvous that failed, for groups that are made later or never."""
    mesh = _mesh(lazy=True)
    if dist.get_rank() in (0, 2):
        for axis in _AXES if dist.get_rank() == 0 else ("tp",):
            with gives_up_after(1.5), pytest.raises(RuntimeError, match="could not create"):
                mesh.get_group(axis)
    dist.barrier()
    mesh.get_group("tp")
    return [mesh]


def _shared() -> list[DeviceMesh]:
    """A lazy group is made by another universe than the one that named it."""
    share_world_wide(True)
    try:
        first, second = _mesh(lazy=True), _mesh(lazy=True)
        dist.barrier()
        first.universe.destroy()
        dist.barrier()
        second.get_group("tp")
        return [second]
    finally:
        share_world_wide(False)


_PROGRAMS = {
    "plain": _plain,
    "derived": _derived,
    "not compared": _not_compared,
    "lazy": _lazy,
    "waited": _waited,
    "failed": _failed,
    "shared": _shared,
}


def _left_over(program: str) -> tuple[int, list[str]]:
    """How many keys of ours there were, and which are left once the universes are destroyed.

    The counts of runs are left out: they stay.
    """
    store = World.current().store
    assert World.current().run.number(store) == 1
    noting = _Noting(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "store", noting)
        for _ in range(2):
            meshes = _PROGRAMS[program]()
            dist.barrier()
            there = [key for key in noting.keys if store.check([key])]
            dist.barrier()
            for mesh in meshes:
                mesh.universe.destroy()
            dist.barrier()
            if program == "failed":  # the name of a group that was never created is used again,
                mesh = _mesh()  # with the next attempt, so its keys stay until then
                dist.barrier()
                mesh.universe.destroy()
                dist.barrier()
            left = [key for key in noting.keys if store.check([key])]
            dist.barrier()
    return len(there), left


_WAIT_FOR_SECONDS = ("waited", "failed")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=pytest.mark.long if program in _WAIT_FOR_SECONDS else [])
        for program in _PROGRAMS
    ],
)
def test_nothing_is_left_in_the_store(crew: Crew, program: str) -> None:
    for there, left in crew.run(_left_over, 4, program):
        assert there > 2
        assert left == []


def test_the_next_run_on_a_store_has_the_next_number_whatever_was_destroyed() -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh, store = _mesh((1, 1), isolate="x"), World.current().store
        assert World.current().run.number(store) == 1
        mesh.universe.destroy()
        assert Run(0, 1).number(store) == 2
    finally:
        dist.destroy_process_group()


# --- while the universe lives --------------------------------------------------------------------

_N_CALLS = 200
_MOST_KEYS = 2 * 64 + 4  # the calls of a slice are compared by two sets of ranks


def _group(mesh: DeviceMesh, number: int) -> None:
    mesh.universe.group([0, 1, 2, 3], name=f"name {number}")


def _unflatten(mesh: DeviceMesh, number: int) -> None:
    mesh.unflatten("dp", (2, 1), (f"a{number}", f"b{number}"))


def _of_slice(mesh: DeviceMesh, number: int) -> None:
    mesh["dp"].unflatten("dp", (1, 2), (f"one{number}", f"dp{number}"))


_FRESH = {"group": _group, "unflatten": _unflatten, "of a slice": _of_slice}


def _keys_of_calls_with_fresh_names(call: str) -> tuple[int, int, str]:
    """Return numbers of added keys, then once one rank made its calls late; and a mismatch."""
    store, mesh = dist.distributed_c10d._get_default_store(), _mesh()
    _FRESH[call](mesh, 0)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for number in range(1, _N_CALLS):
        _FRESH[call](mesh, number)
    dist.barrier()
    added = store.num_keys() - before
    dist.barrier()
    if dist.get_rank() == 3:  # late: it finds the description of each call
        store.wait([f"{rank} went on" for rank in range(3)])
    for number in range(_N_CALLS, 2 * _N_CALLS):
        _FRESH[call](mesh, number)
    store.set(f"{dist.get_rank()} went on", "")
    dist.barrier()
    added_later = store.num_keys() - before
    dist.barrier()
    last = "own" if dist.get_rank() == 3 else "others"
    errors = []
    for name in (last, "after"):  # at the latest, the first call that no rank had made raises
        try:
            mesh.universe.group([0, 1, 2, 3], name=name)
        except RanksDifferError as error:
            errors.append(str(error))
        dist.barrier()
    return added, added_later, errors[0]


@pytest.mark.parametrize("call", _FRESH)
def test_calls_with_fresh_names_leave_a_bounded_number_of_keys(crew: Crew, call: str) -> None:
    for added, added_later, error in crew.run(_keys_of_calls_with_fresh_names, 4, call):
        assert added <= _MOST_KEYS
        assert added_later <= _MOST_KEYS + 4
        assert "others" in error


# --- an end that fails ---------------------------------------------------------------------------


def _end_with_one_that_fails() -> list[str]:
    """Return the groups ended when the end of one failed, and those ended by a second call."""
    mesh = _mesh((2, 2, 1), mesh_dim_names=("dp", "tp", "one"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    ended: list[str] = []
    usual = dist.destroy_process_group
    with pytest.MonkeyPatch.context() as patch:

        def end(group: Any) -> None:
            if group is tp and "failed" not in ended:
                ended.append("failed")
                raise RuntimeError("the connection is gone")
            ended.append("dp" if group is dp else "tp" if group is tp else "one")
            usual(group)

        patch.setattr(dist, "destroy_process_group", end)
        dist.barrier()
        with pytest.raises(RuntimeError) as failed:
            mesh.universe.destroy()
        ended.append(str(failed.value))
        mesh.universe.destroy()
        mesh.universe.destroy()
        with pytest.raises(RuntimeError, match="was destroyed"):
            mesh.get_group("dp")
    return ended


def test_an_end_that_fails_for_one_group_still_ends_the_others(crew: Crew) -> None:
    for ended in crew.run(_end_with_one_that_fails, 4):
        # Last made, first ended.
        assert ended == ["one", "failed", "dp", "the connection is gone", "tp"]
