"""State of the subpackages for a world: one object each, dropped when the world ends."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

from helpers.forks import status_of_fork
from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse import world as world_module
from meshverse.agreement import ComparedCalls
from meshverse.groups.group import State
from meshverse.groups.registry import GroupRegistry
from meshverse.universe.world_universes import WorldUniverses
from meshverse.world import World, WorldState
from worlds import start_fake_world


class _Kept(WorldState):
    def __init__(self) -> None:
        self.is_over = False

    def end(self) -> None:
        self.is_over = True


def _current() -> World:
    world = World.current()
    assert world is not None
    return world


def test_a_world_has_one_state_of_each_class() -> None:
    with fake_world(4):
        world = _current()
        assert world.state(_Kept) is world.state(_Kept)
        assert type(world.state(GroupRegistry)) is GroupRegistry
        assert world.state(GroupRegistry) is not world.state(ComparedCalls)


def test_another_world_has_another_state_and_ends_the_first() -> None:
    with fake_world(4):
        first = _current().state(_Kept)
        assert not first.is_over
        dist.destroy_process_group()
        assert first.is_over
        start_fake_world(4)
        second = _current().state(_Kept)
        assert second is not first
        assert not second.is_over


def test_a_world_that_ends_keeps_no_universe_and_no_group() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        universes = _current().state(WorldUniverses)
        assert universes.with_groups == [mesh.universe]
        assert mesh.universe.process_groups
        dist.destroy_process_group()
        assert universes.with_groups == []
        assert not mesh.universe.process_groups


def test_groups_that_were_lazy_are_planned_until_they_are_used() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), lazy=True)
        registry = _current().state(GroupRegistry)
        assert [group.name for group in registry] == list(mesh.group_names or ())
        assert {group.state for group in registry} == {State.PLANNED}
        for axis in ("dp", "tp"):
            mesh.get_group(axis)
        assert {group.state for group in registry} == {State.LIVE}
        mesh.universe.destroy()
        assert list(registry) == []


def test_threads_that_see_a_world_first_get_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks the default group about itself, which is not done under the lock."""
    usual, both_ask = world_module.can_be_reconfigured, threading.Barrier(2)

    def ask(group: dist.ProcessGroup) -> bool:
        both_ask.wait(30)
        return usual(group)

    with fake_world(4):
        before = _current()
        dist.destroy_process_group()
        monkeypatch.setattr(world_module, "can_be_reconfigured", ask)
        start_fake_world(4)
        seen: list[World] = []
        threads = [threading.Thread(target=lambda: seen.append(_current())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [_current()] * 2
        assert _current().generation == before.generation + 1


def test_a_function_that_fails_at_a_worlds_start_is_logged_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []

    def fail() -> None:
        called.append("first")
        raise RuntimeError("no more threads")

    monkeypatch.setattr(world_module, "_called_at_start", [])
    for function in (fail, lambda: called.append("second")):
        world_module.on_world_started(function)
    with fake_world(4):
        init_device_mesh("cpu", (4,))
        init_device_mesh("cpu", (4,))
    assert called == ["first", "second"]
    assert caplog.text.count("RuntimeError: no more threads") == 1


def test_a_fork_does_not_use_the_default_group_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create() -> None:
        called: list[str] = []
        monkeypatch.setattr(world_module, "_called_at_start", [lambda: called.append("")])
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"fork of process {parent}, whose process gr"):
                init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert not called
        dist.destroy_process_group()
        start_fake_world(4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert dist.get_process_group_ranks(mesh.get_group("tp")) == [0, 1]
        assert called

    parent = os.getpid()
    with fake_world(4, 0):  # without a mesh: there is no `World` of it yet
        assert status_of_fork(create) == 0
