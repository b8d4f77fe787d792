"""The states of a process group: every state, and everything that can happen to it in each."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from helpers.forks import status_of_fork
from helpers.replaced import replace_everywhere
from helpers.turns import wait_until
from helpers.worlds import in_worlds
from meshverse import init_device_mesh
from meshverse._torch_compat import c10d_suspension
from meshverse._torch_compat.c10d_groups import find_c10d_group
from meshverse._torch_compat.c10d_suspension import backends_to_suspend
from meshverse.groups.creation import create_by_members
from meshverse.groups.group import Group, State
from meshverse.groups.registry import GroupRegistry
from meshverse.locks import state_changed
from meshverse.world import World
from worlds import start_fake_world

in_a_world = in_worlds((8, 5))


def _create(group: Group) -> Any:
    return create_by_members(group, World.current())


def _planned() -> Group:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), lazy=True)
    group = World.current().state(GroupRegistry).find(mesh.group_names[1])
    assert group is not None
    return group


def _live() -> Group:
    group = _planned()
    assert group.make(_create)
    return group


def _suspended() -> Group:
    group = _live()
    assert group.suspend()
    return group


def _destroyed() -> Group:
    group = _live()
    dist.destroy_process_group(group.live_handle())
    return group


def _ended() -> Group:
    group = _live()
    group.end(abort=False)
    return group


def _destroy(group: Group) -> None:
    handle = find_c10d_group(group.name)
    if handle is not None:
        dist.destroy_process_group(handle)


_STATES: dict[State, Callable[[], Group]] = {
    State.PLANNED: _planned,
    State.LIVE: _live,
    State.SUSPENDED: _suspended,
    State.DESTROYED: _destroyed,
    State.ENDED: _ended,
}
_EVENTS: dict[str, Callable[[Group], Any]] = {
    "make": lambda group: group.make(_create),
    "suspend": lambda group: group.suspend(),
    "resume": lambda group: group.resume(),
    "destroyed by others": _destroy,
    "end": lambda group: group.end(abort=False),
    "abort": lambda group: group.end(abort=True),
}
_P, _L, _S, _D, _E = _STATES
_AFTER = {  # by event: the state that each of the states above becomes; None for an error
    "make": (_L, _L, None, None, None),
    "suspend": (None, _S, _S, None, None),
    "resume": (None, _L, _L, None, None),
    "destroyed by others": (_P, _D, _D, _D, _E),
    "end": (_E, _E, _E, _E, _E),
    "abort": (_E, _E, _E, _E, _E),
}


@pytest.fixture
def suspending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends of this process can be suspended: the one of fake worlds cannot."""
    backends: dict[str, list[_Backend]] = {}
    replace_everywhere(
        monkeypatch,
        backends_to_suspend,
        lambda handle: backends.setdefault(handle.group_name, [_Backend(), _Backend()]),
    )


class _Backend:
    """A backend that cannot be suspended twice, nor resumed twice."""

    def __init__(self) -> None:
        self.is_suspended = self.fails = False

    def suspend(self) -> None:
        self._become(True)

    def resume(self) -> None:
        self._become(False)

    def _become(self, suspended: bool) -> None:
        if self.fails:
            raise RuntimeError("NCCL error")
        assert self.is_suspended is not suspended
        self.is_suspended = suspended


@in_a_world
@pytest.mark.usefixtures("world", "suspending")
@pytest.mark.parametrize("event", _EVENTS)
@pytest.mark.parametrize("before", _STATES, ids=lambda state: state.name)
def test_every_event_in_every_state(before: State, event: str) -> None:
    group = _STATES[before]()
    assert group.state is before
    after = _AFTER[event][list(_STATES).index(before)]
    if after is None:
        with pytest.raises(RuntimeError, match="process group of axis"):
            _EVENTS[event](group)
    else:
        _EVENTS[event](group)
    assert group.state is (after or before)
    is_live = group.state is State.LIVE
    assert (group.handle is not None) == is_live
    assert all((group.name in use.process_groups) == is_live for use in group.refs.alive())
    assert (find_c10d_group(group.name) is not None) == (group.state in (_L, _S))


@in_a_world
@pytest.mark.usefixtures("world")
def test_threads_wait_for_the_one_that_makes_it() -> None:
    group, begun, go = _planned(), threading.Event(), threading.Event()
    made: list[bool] = []

    def slow(group: Group) -> Any:
        begun.set()
        assert go.wait(30)
        return _create(group)

    threads = [threading.Thread(target=lambda: made.append(group.make(slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    assert group.state is State.BEING_MADE
    assert made == []
    go.set()
    for thread in threads:
        thread.join(30)
    assert sorted(made) == [False, False, False, True]
    assert group.state is State.LIVE


@in_a_world
@pytest.mark.usefixtures("world")
def test_a_group_that_cannot_be_made_is_planned_again_and_the_next_thread_tries() -> None:
    group, tries = _planned(), list[int]()

    def fail_first(group: Group) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("not yet")
        return _create(group)

    with pytest.raises(RuntimeError, match="not yet"):
        group.make(fail_first)
    assert group.state is State.PLANNED
    assert group.make(fail_first)


@in_a_world
@pytest.mark.usefixtures("world")
def test_use_in_the_middle_of_making_it_is_an_error() -> None:
    """As a signal handler of the thread that makes it would."""
    group = _planned()

    def uses_it(group: Group) -> Any:
        with pytest.raises(RuntimeError, match="being created, and cannot be used"):
            group.make(_create)
        return _create(group)

    assert group.make(uses_it)


@in_a_world
@pytest.mark.usefixtures("world")
def test_a_world_that_ends_ends_its_groups() -> None:
    group = _live()
    dist.destroy_process_group()
    assert group.state is State.ENDED
    assert group.handle is None


@in_a_world
@pytest.mark.usefixtures("world")
def test_the_end_leaves_it_to_the_thread_that_makes_it() -> None:
    group, begun, go = _planned(), threading.Event(), threading.Event()
    seen: list[str] = []

    def slow(group: Group) -> Any:
        begun.set()
        assert go.wait(60)
        return _create(group)

    def make() -> None:
        try:
            group.make(slow)
        except RuntimeError as error:
            seen.append(str(error))

    maker = threading.Thread(target=make)
    maker.start()
    assert begun.wait(60)
    group.end(abort=False)
    assert group.state is State.ENDED
    go.set()
    maker.join(60)
    assert not maker.is_alive()
    assert group.state is State.ENDED
    assert find_c10d_group(group.name) is None
    assert "was destroyed" in seen[0]


@in_a_world
@pytest.mark.usefixtures("world")
def test_an_end_in_the_middle_of_making_it_ends_it() -> None:
    """As a signal handler of the thread that makes it would."""
    group = _planned()

    def ends_it(group: Group) -> Any:
        group.end(abort=False)
        return _create(group)

    with pytest.raises(RuntimeError, match="was destroyed"):
        group.make(ends_it)
    assert group.state is State.ENDED
    assert find_c10d_group(group.name) is None


@in_a_world
@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_may_end_a_group_that_a_thread_of_its_parent_is_making() -> None:
    group, begun, go = _planned(), threading.Event(), threading.Event()

    def slow(group: Group) -> Any:
        begun.set()
        assert go.wait(60)
        return _create(group)

    maker = threading.Thread(target=lambda: group.make(slow))
    maker.start()
    assert begun.wait(30)

    def end() -> None:
        group.end(abort=False)
        assert group.state is State.ENDED

    status = status_of_fork(end)
    go.set()
    maker.join(30)
    assert status == 0
    assert group.state is State.LIVE


@in_a_world
@pytest.mark.usefixtures("world", "suspending")
def test_a_group_whose_suspension_was_interrupted_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    group, drop = _live(), Group._drop_handle
    handle = group.live_handle()

    def drop_and_interrupt(self: Group) -> None:
        drop(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Group, "_drop_handle", drop_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            group.suspend()
    assert group.live_handle() is handle
    assert group.suspend()
    assert group.resume()


@in_a_world
@pytest.mark.usefixtures("world", "suspending")
def test_if_one_backend_fails_the_others_are_as_before() -> None:
    group = _live()
    first, second = c10d_suspension.backends_to_suspend(group.live_handle())
    second.fails = True
    with pytest.raises(RuntimeError, match="NCCL error"):
        group.suspend()
    assert group.state is State.LIVE
    assert not first.is_suspended
    second.fails = False
    assert group.suspend()
    second.fails = True
    with pytest.raises(RuntimeError, match="NCCL error"):
        group.resume()
    assert group.state is State.SUSPENDED
    assert first.is_suspended
    second.fails = False
    assert group.resume()
    assert group.state is State.LIVE


@in_a_world
@pytest.mark.usefixtures("world")
def test_a_group_is_what_its_backends_are_when_a_handler_raises_as_they_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As a backend's methods, in C: a signal that comes meanwhile is handled when they return.
    raise_signal = partial(ctypes.CDLL(None)["raise"], signal.SIGUSR1)
    backend = SimpleNamespace(suspend=raise_signal, resume=raise_signal)
    replace_everywhere(monkeypatch, backends_to_suspend, lambda group: [backend])
    group = _live()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            group.suspend()
        assert group.state is State.SUSPENDED
        with pytest.raises(KeyboardInterrupt):
            group.resume()
        assert group.state is State.LIVE
    finally:
        signal.signal(signal.SIGUSR1, usual)


@in_a_world
@pytest.mark.usefixtures("world")
def test_a_thread_whose_creation_failed_leaves_that_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, settle, go = _planned(), Group._settle, threading.Event()
    made: list[bool] = []
    settled: list[Group] = []

    def fail(_: Group) -> Any:
        thread.start()
        raise RuntimeError("failed")

    def slow(group: Group) -> Any:
        assert go.wait(60)
        return _create(group)

    def settle_and_wait(self: Group, *given: Any) -> None:
        settle(self, *given)
        settled.append(self)
        if len(settled) == 1:
            wait_until(lambda: self.state is State.BEING_MADE)  # in the other thread

    thread = threading.Thread(target=lambda: made.append(group.make(slow)))
    with monkeypatch.context() as patch:
        patch.setattr(Group, "_settle", settle_and_wait)
        with pytest.raises(RuntimeError, match="failed"):
            group.make(fail)
    state = group.state
    go.set()
    thread.join(60)
    assert state is State.BEING_MADE
    assert made == [True]
    assert group.live_handle() is find_c10d_group(group.name)


@in_a_world
@pytest.mark.usefixtures("world")
def test_those_that_wait_for_a_group_hear_of_its_end_at_once() -> None:
    group, begun, go = _planned(), threading.Event(), threading.Event()
    heard: list[str] = []

    def slow(group: Group) -> Any:
        begun.set()
        assert go.wait(60)
        return _create(group)

    def make(create: Callable[[Group], Any]) -> None:
        with pytest.raises(RuntimeError, match="was destroyed") as raised:
            group.make(create)
        heard.append(str(raised.value))

    maker, waiter = (threading.Thread(target=make, args=[each]) for each in (slow, _create))
    maker.start()
    assert begun.wait(60)
    waiter.start()
    wait_until(lambda: bool(state_changed._waiters))  # type: ignore[attr-defined]
    group.end(abort=True)
    waiter.join(60)
    assert not waiter.is_alive()
    assert maker.is_alive()
    go.set()
    maker.join(60)
    assert len(heard) == 2


@in_a_world
@pytest.mark.usefixtures("world", "suspending")
@pytest.mark.parametrize("how", ["destroyed", "ended"])
def test_a_group_that_ends_while_it_is_resumed_stays_ended(how: str) -> None:
    group = _suspended()
    name = group.name
    first, _ = c10d_suspension.backends_to_suspend(find_c10d_group(name))
    resume = first.resume

    def resume_and_end() -> None:
        resume()
        if how == "ended":
            group.end(abort=False)
        else:
            dist.destroy_process_group(find_c10d_group(name))
            group.note_destroyed()

    first.resume = resume_and_end
    with pytest.raises(RuntimeError, match="was destroyed"):
        group.resume()
    assert group.state is (State.ENDED if how == "ended" else State.DESTROYED)
    assert group.handle is None


@in_a_world
@pytest.mark.usefixtures("world")
def test_a_creation_that_outlives_its_world_leaves_the_next_worlds_group() -> None:
    """As a signal handler of the thread that makes it would end the world, and begin the next."""
    group, later = _planned(), list[Group]()

    def begin_again(_: Group) -> Any:
        dist.destroy_process_group()
        start_fake_world(8, 5)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        found = World.current().state(GroupRegistry).find(mesh.group_names[1])
        assert found is not None
        later.append(found)
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        group.make(begin_again)
    assert later[0].name == group.name
    assert group.state is State.ENDED
    assert later[0].state is State.LIVE
    assert find_c10d_group(group.name) is later[0].live_handle()
