"""Meshes that go on in the next world, as one rank sees it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshverse
from helpers.interrupts import is_interrupted_at
from helpers.tiers import in_tiers
from helpers.worlds import fake_world, group_names
from meshverse import DeviceMesh, init_device_mesh
from meshverse.groups.group import Group
from meshverse.groups.registry import GroupRegistry
from meshverse.universe.universe_meshes import UniverseMeshes
from meshverse.universe.world_universes import universes_here
from meshverse.world import World
from worlds import start_fake_world


def _mesh(**settings: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), **settings)


def test_without_a_default_group() -> None:
    with pytest.raises(ValueError, match="needs a default process group"):
        meshverse.revive()


def test_without_meshes_there_is_nothing_to_revive() -> None:
    with fake_world(8, 5):
        _mesh()
    with fake_world(8, 5):
        assert meshverse.revive() == ()
    with fake_world(4, 1):
        assert meshverse.revive() == ()


def test_in_a_world_that_goes_on() -> None:
    with fake_world(8, 5):
        mesh = _mesh()
        assert meshverse.revive() == ()
        assert mesh.get_group("tp").size() == 4


def test_as_another_rank() -> None:
    with fake_world(8, 5):
        mesh = _mesh()
    reason = (
        r"nothing has changed:\n  rank 2: this process was rank 5 of 8 and is rank 2 of 4 now\n"
    )
    with fake_world(4, 2), pytest.raises(RuntimeError, match=reason):
        meshverse.revive()
    with fake_world(8, 5):
        assert meshverse.revive() == (mesh.universe,)
        assert mesh.get_local_rank("tp") == 1


def test_a_world_without_meshes_in_between() -> None:
    with fake_world(8, 5):
        mesh = _mesh()
    with fake_world(8, 5):
        assert World.current() is not None
    with fake_world(8, 5):
        assert meshverse.revive() == (mesh.universe,)


def test_what_an_interrupted_call_left_is_not_revived(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with fake_world(8, 5):
        with monkeypatch.context() as patch:
            patch.setattr(UniverseMeshes, "add", interrupt)  # all groups are there
            with pytest.raises(KeyboardInterrupt) as interrupted:
                _mesh()
        mesh = _mesh()
        assert universes_here() == [mesh.universe]
    with fake_world(8, 5):
        assert meshverse.revive() == (mesh.universe,)
        assert universes_here() == [mesh.universe]
    del interrupted  # whose traceback has the other universe


def test_a_fork_that_ends_its_parents_world_has_nothing_to_revive() -> None:
    with fake_world(8, 5):
        mesh = _mesh()
        child = os.fork()
        if child == 0:
            try:
                dist.destroy_process_group()
                start_fake_world(8, 5)
                revived = meshverse.revive()
                sizes = [group.size() for group in _mesh().get_all_groups()]
                os._exit(0 if (revived, sizes) == ((), [2, 4]) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert mesh.get_group("tp").size() == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("owner", "name"),
    [pytest.param(GroupRegistry, "end", marks=pytest.mark.long), (Group, "note_ended")],
)
def test_a_world_whose_end_is_interrupted_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    usual, calls = getattr(owner, name), itertools.count()

    def interrupted(self: object) -> None:
        if next(calls) == 0:
            raise KeyboardInterrupt
        usual(self)

    with fake_world(8, 5):
        mesh = _mesh()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            dist.destroy_process_group()
        assert next(calls) > 1
        with pytest.raises(RuntimeError, match="The default process group of 8 ranks"):
            mesh.get_group("tp")
    with fake_world(8, 4), pytest.raises(RuntimeError, match="this process was rank 5"):
        meshverse.revive()
    with fake_world(8, 5):
        assert meshverse.revive() == (mesh.universe,)
        assert [group.size() for group in mesh.get_all_groups()] == [2, 4]


def test_a_mesh_destroyed_before_the_revival_knows_no_rank_of_a_later_world() -> None:
    with fake_world(8, 5):
        kept = _mesh()
    with fake_world(8, 5):
        destroyed = _mesh()
        destroyed.universe.destroy()
        meshverse.revive()
        assert destroyed.get_coordinate() == kept.get_coordinate() == (1, 1)
    with fake_world(8, 0):
        for mesh in (kept, destroyed):
            with pytest.raises(RuntimeError, match="The default process group of 8 ranks"):
                mesh.get_coordinate()


def test_what_was_destroyed_stays_so() -> None:
    with fake_world(8, 5):
        mesh, other = _mesh(), _mesh()
        dist.destroy_process_group(mesh.get_group("dp"))
        other.universe.destroy()
    with fake_world(8, 5):
        assert meshverse.revive() == (mesh.universe,)
        assert mesh.get_group("tp").size() == 4
        with pytest.raises(RuntimeError, match="was destroyed, by destroy_process_group"):
            mesh.get_group("dp")
        with pytest.raises(RuntimeError, match="was destroyed"):
            other.get_group("dp")
        assert _mesh(universe=mesh.universe).get_group("dp").size() == 2


def test_a_call_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8, 5):
        mesh = _mesh()
        held = nn.Module()
        held.dp, held.tp = mesh.get_group("dp"), mesh.get_group("tp")
    create = dist.distributed_c10d._new_process_group_helper
    with fake_world(8, 5):

        def refuse(size: int, *rest: Any, **named: Any) -> Any:
            if size == 4:
                raise RuntimeError("no more")
            return create(size, *rest, **named)

        monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", refuse)
        with pytest.raises(RuntimeError, match="no more"):
            meshverse.revive(held)
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match=r"a revive\(\) failed in this world"):
            meshverse.revive()
    with fake_world(8, 5):
        assert meshverse.revive(held) == (mesh.universe,)
        assert held.dp is mesh.get_group("dp")
        assert held.tp is mesh.get_group("tp")


def test_what_was_not_given_to_the_first_call_cannot_be_given_to_a_second_one() -> None:
    with fake_world(8, 5):
        mesh = _mesh()
        held = nn.Module()
        held.dp = mesh.get_group("dp")
    with fake_world(8, 5):
        assert meshverse.revive() == (mesh.universe,)
        assert meshverse.revive(nn.Linear(2, 2)) == ()  # holds no groups
        with pytest.raises(RuntimeError, match=r"an earlier call, that call needed this object"):
            meshverse.revive(held)
        with pytest.raises(RuntimeError, match="an object of type object holds"):
            meshverse.revive(object())
        held.dp = mesh.get_group("dp")
        assert meshverse.revive(held) == ()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.long
@pytest.mark.parametrize("step", in_tiers([1, 53], [53], []))
def test_wherever_it_was_interrupted_it_revives_or_says_what_to_do(step: int) -> None:
    place, is_interrupted = 1 - step, True
    while is_interrupted:
        place += step
        with fake_world(8, 5):
            mesh = _mesh()
        with fake_world(8, 5):
            is_interrupted = is_interrupted_at(place, meshverse.revive)
            error = ""
            try:
                meshverse.revive()
            except RuntimeError as raised:
                error = str(raised)
            # Else it was interrupted before it had changed anything, or when it was done.
            assert "end the default group" in error or mesh.get_group("tp").size() == 4, place
        with fake_world(8, 5):
            assert meshverse.revive() == (mesh.universe,), place
            assert mesh.get_group("tp").size() == 4
            mesh.universe.destroy()
    assert place > 200


def test_what_a_failed_call_has_left_in_the_new_world(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8, 5):
        mesh = _mesh()

    def refuse(*_: Any) -> None:
        raise OSError("when its groups are there")

    with fake_world(8, 5):
        with monkeypatch.context() as patch:
            patch.setattr(UniverseMeshes, "add", refuse)
            with pytest.raises(OSError, match="when its groups are there"):
                _mesh()
        left = r"a call that failed has left the process group of axis 'dp' with ranks \[1, 5\]"
        with pytest.raises(RuntimeError, match=left):
            meshverse.revive()
    with fake_world(8, 5):
        assert meshverse.revive() == (mesh.universe,)
        assert mesh.get_group("tp").size() == 4


@contextlib.contextmanager
def _world_on(store: dist.Store) -> Iterator[None]:
    """A world of one rank, which waits for no others, on a store that may allow no rendezvous."""
    dist.init_process_group("fake", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _mesh_of_one(**settings: Any) -> DeviceMesh:
    names = ("dp", "tp")
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=names, isolate="x", **settings)


def _make_calls_that_ranks_compare(mesh: DeviceMesh, tag: str) -> None:
    mesh.flatten("all", isolate=tag)
    mesh.unflatten("tp", (1, 1), ("x", "y"), isolate=tag)
    _mesh_of_one(universe=mesh.universe)


def test_on_a_store_in_which_ranks_cannot_compare_calls_and_on_one_in_which_they_can() -> None:
    can = []
    for store in (dist.HashStore(), FakeStore(), dist.HashStore()):
        with _world_on(store):
            if not can:
                mesh, ended = _mesh_of_one(), _mesh_of_one()
            else:
                assert mesh.universe in meshverse.revive()
            can.append(mesh.universe.groups.calls.is_compared)
            _make_calls_that_ranks_compare(mesh, f"tag {len(can)}")
            if len(can) == 2:
                ended.universe.destroy()
            if len(can) == 3:
                mesh.universe.destroy()
                assert store.num_keys() == 2  # the counts of runs
    assert can == [True, False, True]


def test_a_universe_that_was_not_freed_is_freed_on_a_store_without_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _world_on(dist.HashStore()):
        mesh, ended = _mesh_of_one(), _mesh_of_one()

        def refuse(*_: object) -> None:
            raise RuntimeError("the connection is gone")

        with monkeypatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", refuse)
            with pytest.raises(RuntimeError, match="the connection is gone"):
                ended.universe.destroy()
    with _world_on(FakeStore()):
        assert meshverse.revive() == (mesh.universe,)
        ended.universe.destroy()
        assert ended.universe.groups.is_freed


def test_with_a_default_group_whose_groups_all_ranks_must_create_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_world(8, 5):
        mesh = _mesh()
    reason = (
        r"all ranks would have to create the process group of axis 'dp' with ranks \[1, 5\] "
        "together now: TORCH_DIST_INIT_BARRIER=1\n"
    )
    with fake_world(8, 5), monkeypatch.context() as patch:
        patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        with pytest.raises(RuntimeError, match=reason):
            meshverse.revive()
    with fake_world(8, 5):
        assert meshverse.revive() == (mesh.universe,)


def test_with_a_default_group_that_can_be_reconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8, 5):
        mesh = _mesh()
    reason = "the default group can be reconfigured now, and could not when the meshes were created"
    with monkeypatch.context() as patch:
        patch.setattr("meshverse.world.can_be_reconfigured", lambda group: True)
        with fake_world(8, 5), pytest.raises(RuntimeError, match=reason):
            meshverse.revive()
    with fake_world(8, 5):
        assert meshverse.revive() == (mesh.universe,)


def test_the_axes_of_the_default_group_are_still_known() -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    with fake_world(8, 5):
        meshverse.revive()
        with pytest.warns(UserWarning, match="called with the group of axis 'dp'"):
            dist.destroy_process_group(mesh.get_group("dp"))


@pytest.mark.long
def test_nothing_grows() -> None:
    with fake_world(8, 5):
        kept = _mesh()
    numbers = []
    for _ in range(4):
        with fake_world(8, 5):
            meshverse.revive()
            _mesh().get_group("tp")
            world = World.current()
            assert world is kept.universe.world
            numbers.append((len(list(world.state(GroupRegistry))), len(group_names())))
    assert numbers == [numbers[0]] * 4


def test_what_was_not_given_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with fake_world(8, 5):
        mesh = _mesh()
        kept = [mesh.get_group("tp")]
    with fake_world(8, 5), caplog.at_level(logging.WARNING, logger="meshverse"):
        meshverse.revive()
    assert kept
    (line,) = [record.getMessage() for record in caplog.records if "revive()" in record.message]
    words = "still refers to the ended process group of axis 'tp' with ranks [4, 5, 6, 7]"
    assert words in line


def test_the_environment_of_a_group_is_kept() -> None:
    """A mesh, its slices, their hashes and what explain() counts are the same."""
    with fake_world(8, 5):
        mesh = _mesh()
        tp, before = mesh["tp"], (hash(mesh), mesh.universe.explain().to_dict())
    with fake_world(8, 5):
        meshverse.revive()
        assert (hash(mesh), mesh.universe.explain().to_dict()) == before
        assert mesh["tp"] is tp
        assert mesh == _mesh()
