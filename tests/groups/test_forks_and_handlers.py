"""Forks and signal handlers that come while a thread changes what Meshverse shares."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import meshverse
from helpers.forks import status_of_fork
from helpers.worlds import fake_world, live_groups
from meshverse import DeviceMesh, dropin, init_device_mesh
from meshverse._core import Layout, RankMap
from meshverse.groups.registry import GroupRegistry
from meshverse.layouts.rank_views import RankViews, rank_views
from meshverse.universe import universe_groups
from meshverse.universe.universe import Universe
from meshverse.universe.universe_meshes import UniverseMeshes
from meshverse.universe.world_universes import WorldUniverses
from meshverse.world import World

_NAMES = ("dp", "tp")


def _mesh(**more: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES, **more)


class _Kept(list[Universe]):
    """The universes that a world keeps."""

    def append(self, universe: Universe) -> None:
        super().append(universe)


# What a thread calls, and the function in the middle of it, between two changes that belong
# together.
_PLACES: dict[str, tuple[tuple[Any, str], Callable[[DeviceMesh], object]]] = {
    "a group's name": ((GroupRegistry, "_next_name"), lambda mesh: _mesh()),
    "the root mesh": (
        (UniverseMeshes, "_root_of"),
        lambda mesh: _mesh(universe=mesh.universe, isolate="a"),
    ),
    "universes": ((_Kept, "append"), lambda mesh: _mesh()),
    "a part": ((Universe, "_over"), lambda mesh: mesh.universe.part([0, 2, 4])),
    "views of ranks": (
        (RankViews, "__init__"),
        lambda mesh: rank_views(RankMap.from_ranks([0, 5, 3])),
    ),
    "install": ((dropin, "_update_hooks"), lambda mesh: meshverse.uninstall()),
    "a group": ((universe_groups, "create_by_members"), lambda mesh: _mesh()),
}
_at_each_place = pytest.mark.parametrize("place", _PLACES)


def _in_the_middle(patch: pytest.MonkeyPatch, place: str, act: Callable[[], object]) -> None:
    """Have the first call of the function at this place do something before it begins."""
    owner, name = _PLACES[place][0]
    call, calls = getattr(owner, name), iter([act])

    @functools.wraps(call)
    def acting(*arguments: Any, **named: Any) -> Any:
        for act in calls:
            act()
        return call(*arguments, **named)

    patch.setattr(owner, name, acting)


def _use_everything(mesh: DeviceMesh) -> None:
    """Call, in a forked process, whatever may wait for another thread."""
    assert mesh["tp"].get_local_rank() == 1
    assert mesh["dp"].get_local_rank() == 1
    assert pickle.loads(pickle.dumps(mesh)) == mesh == copy.deepcopy(mesh)
    rank_views(RankMap.from_ranks([5, 0, 3]))
    assert "fork" in str(mesh.universe.explain())
    with pytest.raises(RuntimeError, match="do not survive a fork"):
        mesh.get_group("tp")
    with pytest.raises(RuntimeError, match="do not survive a fork"):
        mesh.universe.part([1, 3])
    with meshverse.installed():
        pass
    mesh.universe.abort()
    mesh.universe.destroy()
    dist.destroy_process_group()
    with fake_world(8, 5):
        meshverse.install()
        assert _mesh().get_group("tp").size() == 4
        own = _mesh(isolate="b")
        assert own.universe.part([1, 5]).size == 2
        own.universe.destroy()


@pytest.fixture
def at_a_fork() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Something to call at a fork in this process, before other handlers of the fork."""
    acts: list[Callable[[], object]] = []

    def call() -> None:
        while acts:
            acts.pop()()

    os.register_at_fork(before=call)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no thread goes on before this one waits for something
    yield acts.append
    sys.setswitchinterval(usual)


_forks_with_threads = pytest.mark.filterwarnings(
    "ignore:This process.*is multi-threaded:DeprecationWarning"
)


@_at_each_place
@_forks_with_threads
def test_a_fork_while_a_thread_is_in_the_middle(
    place: str, at_a_fork: Any, monkeypatch: pytest.MonkeyPatch, uninstalled_afterwards: None
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    with fake_world(8, 5):
        mesh = _mesh(isolate="mine")
        World.current().state(WorldUniverses).with_groups = _Kept([mesh.universe])

        def pause() -> None:
            reached.set()
            assert go_on.wait(60)

        _in_the_middle(monkeypatch, place, pause)
        thread = threading.Thread(target=_PLACES[place][1], args=(mesh,), daemon=True)
        thread.start()
        assert reached.wait(60)
        if place != "a group":  # which takes long: a fork does not wait for it
            at_a_fork(go_on.set)
        status = status_of_fork(lambda: _use_everything(mesh))
        go_on.set()
        thread.join(60)
        assert not thread.is_alive()
        assert status == 0


@_at_each_place
def test_a_handler_ends_meshes_in_the_middle(
    place: str, monkeypatch: pytest.MonkeyPatch, uninstalled_afterwards: None
) -> None:
    with fake_world(8, 5):
        mesh, seen = _mesh(isolate="mine"), list[object]()
        World.current().state(WorldUniverses).with_groups = _Kept([mesh.universe])

        def handle(number: int, frame: object) -> None:
            _mesh(isolate="of a handler").abort()
            mesh.abort()
            seen.append(number)

        usual = signal.signal(signal.SIGUSR1, handle)
        _in_the_middle(monkeypatch, place, lambda: signal.raise_signal(signal.SIGUSR1))
        try:
            _PLACES[place][1](_mesh(isolate="other"))
        finally:
            signal.signal(signal.SIGUSR1, usual)
        assert seen == [signal.SIGUSR1]
        with pytest.raises(RuntimeError, match="was aborted"):
            mesh.get_group("tp")


def test_an_abort_does_not_wait_for_a_thread_that_makes_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a handler of SIGTERM, while a thread waits for ranks that have died."""
    begun, go_on, seen = threading.Event(), threading.Event(), list[str]()

    def pause() -> None:
        begun.set()
        assert go_on.wait(60)

    def use(mesh: DeviceMesh) -> None:
        with pytest.raises(RuntimeError, match="was destroyed") as caught:
            mesh.get_group("tp")
        seen.append(str(caught.value))

    with fake_world(8, 5):
        before, mesh = live_groups(), _mesh(lazy=True)
        _in_the_middle(monkeypatch, "a group", pause)
        thread = threading.Thread(target=use, args=(mesh,), daemon=True)
        thread.start()
        assert begun.wait(60)
        ender = threading.Thread(target=mesh.abort, daemon=True)
        ender.start()
        ender.join(60)
        assert not ender.is_alive()
        assert mesh.universe.is_over
        go_on.set()
        thread.join(60)
        assert len(seen) == 1
        assert live_groups() == before


@_forks_with_threads
def test_a_fork_while_threads_wait_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four threads that make the same mesh, one makes its groups."""
    begun, go_on, answers = threading.Event(), threading.Event(), list[object]()

    def pause() -> None:
        begun.set()
        assert go_on.wait(120)

    def make(universe: Universe) -> None:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES, universe=universe)
        answers.append(mesh.get_group("tp"))

    def use(universe: Universe) -> None:
        cache, layout = universe.groups._by_axis, Layout.from_shape((2, 4))
        key = universe.groups._builder.default_key
        for axis in layout:  # not one of them waits for a thread of the parent
            assert (
                cache.get_or_create(axis, key, lambda: "made in the child") == "made in the child"
            )
        universe.abort()
        assert len(cache) == 0

    with fake_world(8, 5):
        universe = Universe(8)
        _in_the_middle(monkeypatch, "a group", pause)
        threads = [threading.Thread(target=make, args=(universe,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        status = status_of_fork(lambda: use(universe))
        go_on.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert status == 0
        assert len(set(map(id, answers))) == 1
        universe.destroy()
