"""Ctrl-C while a group is made: its members can try again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.forked import SECONDS
from helpers.interrupts import is_interrupted_at
from helpers.replaced import replace_everywhere
from helpers.tiers import in_tiers
from helpers.turns import (
    gives_up_after,
    say_when_compared,
    wait_for_comparison,
    wait_until_they_wait,
)
from helpers.versions import AT_LEAST_2_12
from helpers.worlds import fake_world, live_groups
from meshverse import DeviceMesh, Universe, init_device_mesh
from meshverse._torch_compat.c10d_creation import create_c10d_group
from meshverse._torch_compat.c10d_groups import end_group
from meshverse.device_mesh import mesh_warnings
from meshverse.groups import creation
from meshverse.groups.group import Group
from meshverse.universe.world_universes import universes_here
from meshverse.world import World


def _mesh(*, lazy: bool, shape: tuple[int, int] = (2, 2)) -> DeviceMesh:
    timeout = timedelta(seconds=60)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"), lazy=lazy, timeout=timeout)


def _interrupt(*_: Any, **__: Any) -> None:
    signal.raise_signal(signal.SIGINT)  # Python's own handler raises KeyboardInterrupt


class _InterruptsWhenConnected(dist.ProcessGroupGloo):
    """Interrupt a group that connects, as Ctrl-C does: Python handles it after the C++ code."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        _interrupt()


class _InterruptsWhenAllCame:
    """A store: as soon as it has said that all joined, this process is interrupted, once."""

    def __init__(self, store: Any, operation: int = 0) -> None:
        self._store, self._left = store, operation  # after which it is interrupted too
        self._was_interrupted = False

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            answer = getattr(self._store, name)(*arguments)
            self._left -= 1
            if (answer == b"all joined" and not self._was_interrupted) or self._left == 0:
                self._was_interrupted = True
                _interrupt()
            return answer

        return ask


def _connects_in_vain(patch: pytest.MonkeyPatch) -> None:
    """Have this rank wait for seconds only when it connects a group whose member has left."""
    create, limit = create_c10d_group, timedelta(seconds=6)  # short-timeout: it must elapse

    def create_soon(*arguments: Any, **named: Any) -> Any:
        return create(*arguments, **{**named, "timeout": limit})

    replace_everywhere(patch, create, create_soon)


def _waits_in_vain(patch: pytest.MonkeyPatch, axis: str) -> None:
    """Have this rank wait for seconds only for the other member of an axis, which does not come."""
    join = creation._rendezvous

    def join_soon(group: Group, *arguments: Any) -> Any:
        if group.request.axis_name != axis:
            return join(group, *arguments)
        with gives_up_after(6):
            return join(group, *arguments)

    patch.setattr(creation, "_rendezvous", join_soon)


def _interrupted(place: str, lazy: bool) -> tuple[str, list[int]]:
    """Rank 0 is interrupted after all members of its group joined; then all ranks try again."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    outcome = "no error"
    mesh, rank = _mesh(lazy=True) if lazy else None, dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0 and place == "creation":
            replace_everywhere(patch, create_c10d_group, _interrupt)
        elif rank == 0 and place == "connected":
            patch.setattr(dist.distributed_c10d, "ProcessGroupGloo", _InterruptsWhenConnected)
        elif rank == 0:
            patch.setattr(World, "store", _InterruptsWhenAllCame(World.current().store))
        elif rank == (1 if lazy else 2) and place == "creation":
            _connects_in_vain(patch)
        elif not lazy and (rank == 1 or (rank == 3 and place == "creation")):
            _waits_in_vain(patch, "tp")
        try:
            if mesh is None:
                _mesh(lazy=False)
            elif rank < 2:
                mesh.get_group("tp")
        except (KeyboardInterrupt, RuntimeError) as error:
            outcome = type(error).__name__
    signal.signal(signal.SIGINT, usual)
    dist.barrier()
    return outcome, reached_by((mesh or _mesh(lazy=False)).get_group("tp"))


@pytest.mark.long
@pytest.mark.parametrize(
    "lazy", [pytest.param(False, id="eager", marks=pytest.mark.long), pytest.param(True, id="lazy")]
)
@pytest.mark.parametrize("place", in_tiers(["rendezvous", "creation", "connected"], ["creation"]))
def test_members_can_try_again_after_one_was_interrupted(
    crew: Crew, place: str, lazy: bool
) -> None:
    for rank, (answer, reached) in enumerate(crew.run(_interrupted, 4, place, lazy)):
        assert reached == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])
        if rank == 0:
            assert answer == "KeyboardInterrupt"
        if rank == (1 if lazy else 2):  # the other member of the group
            assert answer == ("RuntimeError" if place == "creation" else "no error")


def _fails_on_one(lazy: bool) -> list[str]:
    """Rank 2 alone cannot connect a group that rank 3 gets; then all try again."""
    seen, mesh = [], _mesh(lazy=True) if lazy else None
    create, rank, store = create_c10d_group, dist.get_rank(), World.current().store

    def create_together(*arguments: Any, **named: Any) -> Any:
        group = create(*arguments, **named)
        if dist.get_process_group_ranks(group) == [2, 3]:
            # Before one ends its half: the other may be connecting to it still.
            store.set(f"{rank} has created it", "")
            store.wait([f"{other} has created it" for other in (2, 3)])
            if rank == 2:
                end_group(named["name"], abort=False)
                raise dist.DistNetworkError("connection reset by peer")
        return group

    for is_first in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if is_first:
                replace_everywhere(patch, create_c10d_group, create_together)
            try:
                mesh = mesh if lazy and is_first else _mesh(lazy=lazy)
                mesh.get_group("tp")
                seen.append("no error")
            except RuntimeError as error:
                seen.append(type(error).__name__)
        dist.barrier()
        if lazy and is_first:
            mesh.universe.destroy()
    assert reached_by(mesh.get_group("tp")) == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])
    assert reached_by(mesh.get_group("dp")) == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])
    return seen


@pytest.mark.parametrize("lazy", [False, True])
def test_members_can_try_again_after_only_some_got_the_group(crew: Crew, lazy: bool) -> None:
    for rank, (first, again) in enumerate(crew.run(_fails_on_one, 4, lazy)):
        assert again == "no error"
        assert first == ("DistNetworkError" if rank == 2 else "no error")


@pytest.fixture
def _is_interruptible() -> Iterator[None]:
    # Not where pytest was started in the background, by a shell that makes it ignore Ctrl-C.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.usefixtures("_is_interruptible")
def test_a_part_whose_end_was_interrupted_is_freed_with_the_universe() -> None:
    with fake_world(8):
        before = live_groups()
        universe = _mesh(lazy=False, shape=(4, 2)).universe
        first = universe.part([0, 1, 2])
        init_device_mesh("cpu", (3,), universe=first)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                first.destroy()
        again = universe.part([0, 1, 2])
        assert again is not first
        assert universe.parts == (again,)
        again.destroy()
        universe.destroy()
        assert live_groups() == before


class _InterruptsAtLine:
    """Interrupt this thread at the n-th line that it executes while it creates a group."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_name not in (
            "_new_ref",
            "_create_by_members",
            "create_by_members",
            "create_c10d_group",
            "_new_process_group_helper",
        ):
            return None if code.co_filename.startswith("<") else self
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.skipif(
    not AT_LEAST_2_12,
    reason="c10d of 2.11 notes a group's name some lines before it registers the group",
)
@pytest.mark.parametrize("lazy", [False, True])
def test_wherever_it_was_interrupted_the_group_is_whole_at_the_next_try(lazy: bool) -> None:
    usual, line, is_interrupted = sys.gettrace(), 0, True
    while is_interrupted:
        line += 1
        with fake_world(4, rank=3):
            mesh = _mesh(lazy=lazy) if lazy else None
            interrupt = _InterruptsAtLine(line)
            sys.settrace(interrupt)
            try:
                mesh = _mesh(lazy=False) if mesh is None else mesh
                mesh.get_group("tp")
            except BaseException as error:  # noqa: BLE001  # it may be masked by another
                outcome: BaseException | None = error
            else:
                outcome = None
            finally:
                sys.settrace(usual)
            is_interrupted = interrupt.left <= 0
            assert isinstance(outcome, KeyboardInterrupt if is_interrupted else type(None)), line
            if mesh is None:
                mesh = _mesh(lazy=False)
            assert dist.get_process_group_ranks(mesh.get_group("tp")) == [2, 3], line
            mesh.universe.destroy()
            assert len(live_groups()) <= 1, line
    assert line > 20


def test_an_interrupt_is_not_lost_if_the_creation_fails_as_well() -> None:
    main, was_interrupted = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt(*_: Any) -> None:
        was_interrupted.set()
        raise KeyboardInterrupt

    def create() -> Any:
        signal.pthread_kill(main, signal.SIGINT)
        assert was_interrupted.wait(SECONDS)
        raise RuntimeError("connection refused")

    usual = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            creation._uninterrupted(create, lambda: None)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert str(raised.value.__context__) == "connection refused"


@pytest.mark.skipif(
    sys.version_info >= (3, 14),
    reason="an interrupt can leave threading's own locks taken: python/cpython#148874",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_the_wait_for_a_creation_is_interrupted_it_ends() -> None:
    place, is_interrupted = 0, True
    while is_interrupted:
        place, made = place + 1, list[bool]()

        def create(made: list[bool] = made) -> None:
            made.append(True)

        def wait(create: Callable[[], None] = create) -> None:
            with contextlib.suppress(RuntimeError):  # an interrupted `Thread.start` may raise it
                creation._uninterrupted(create, lambda: None)

        is_interrupted = is_interrupted_at(place, wait, also_in=threading.__file__)
        assert len(made) <= 1, place
    assert place > 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_destroy_was_interrupted_a_second_call_ends_all_groups() -> None:
    place, is_interrupted = 0, True
    while is_interrupted:
        place += 1
        with fake_world(4, rank=3):
            universe = _mesh(lazy=False).universe
            is_interrupted = is_interrupted_at(place, universe.destroy)
            universe.destroy()
            assert len(live_groups()) == 1, place
    assert place > 20


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("lazy", [False, True])
def test_wherever_creation_was_interrupted_a_second_call_gets_all_groups(lazy: bool) -> None:
    place, is_interrupted, meshes = 0, True, list[DeviceMesh]()

    def create() -> None:
        meshes.append(_mesh(lazy=lazy))
        meshes[-1].get_group("tp")

    while is_interrupted:
        place += 1
        with fake_world(4, rank=3):
            is_interrupted = is_interrupted_at(place, create)
            create()
            if len(meshes) == 1:  # as on the other members, which were not interrupted
                assert meshes[0].get_group("tp").group_name.endswith("-0"), place
            for mesh in meshes:  # of both calls, if the first one got so far
                assert dist.get_process_group_ranks(mesh.get_group("tp")) == [2, 3], place
            for mesh in meshes:
                mesh.universe.destroy()
            assert len(live_groups()) == 1, place
            meshes.clear()
    assert place > 200


def _interrupted_at(operation: int) -> list[str]:
    """Rank 0 is interrupted after an operation of the store; then all ranks try again."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = []
    for is_first in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if is_first and dist.get_rank() == 0:
                store = _InterruptsWhenAllCame(World.current().store, operation)
                patch.setattr(World, "store", store)
            elif is_first and dist.get_rank() == 2:  # the other member of rank 0's first group
                _waits_in_vain(patch, "dp")
                _connects_in_vain(patch)
            elif is_first and dist.get_rank() != 0:
                _waits_in_vain(patch, "tp")
            try:
                _mesh(lazy=False)
                seen.append("no error")
            except (KeyboardInterrupt, RuntimeError) as error:
                seen.append(type(error).__name__)
        dist.barrier()
    signal.signal(signal.SIGINT, usual)
    return seen


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(number, marks=pytest.mark.long if number in (2, 5) else pytest.mark.sweep)
        for number in (1, 2, 3, 4, 5)
    ],
)
def test_all_can_try_again_wherever_one_was_interrupted(crew: Crew, operation: int) -> None:
    first, *others = crew.run(_interrupted_at, 4, operation)
    assert first == ["KeyboardInterrupt", "no error"]
    assert [again for _, again in others] == ["no error"] * 3


def _interrupted_before_ranks_differ() -> list[str]:
    """Rank 0 is interrupted in a rendezvous; then rank 2 differs from the others; all try again."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, store, seen = dist.get_rank(), World.current().store, []
    for attempt in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if attempt == 0:
                say_when_compared(patch)
                if rank == 2:
                    store.wait(["0 was interrupted"])
                elif rank != 1:  # 1, 3, 0, 2
                    wait_for_comparison(1 if rank == 3 else 3)
            if attempt == 0 and rank == 0:
                interrupting = _InterruptsWhenAllCame(store, operation=5)
                patch.setattr(World, "store", interrupting)
            try:
                _mesh(lazy=False, shape=(4, 1) if attempt == 0 and rank == 2 else (2, 2))
                seen.append("no error")
            except (KeyboardInterrupt, RuntimeError) as error:
                seen.append(type(error).__name__)
            if rank == 0:
                store.set("0 was interrupted", "")
        dist.barrier()
    signal.signal(signal.SIGINT, usual)
    return seen


@pytest.mark.long
def test_one_that_was_interrupted_gets_the_mismatch_at_its_next_call(crew: Crew) -> None:
    first, *others = crew.run(_interrupted_before_ranks_differ, 4)
    assert first == ["KeyboardInterrupt", *["RanksDifferError"] * 2]
    assert others == [["RanksDifferError"] * 3] * 3


class _PreemptedError(RuntimeError):
    def __init__(self, number: int, frame: object) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def _raise_preempted(number: int, frame: object) -> None:
    raise _PreemptedError(number, frame)


def _preempted(lazy: bool) -> tuple[str, list[int]]:
    """Rank 0's handler raises an error of its own while it waits for rank 1."""
    build = partial(
        *(init_device_mesh, "cpu", (2,)),
        mesh_dim_names=("dp",),
        isolate="a",
        lazy=lazy,
        timeout=timedelta(minutes=5),
    )
    mesh = build() if lazy else None
    store, outcome, rank = World.current().store, "no error", dist.get_rank()
    usual = signal.signal(signal.SIGUSR1, _raise_preempted)
    store.set(f"process of {rank}", str(os.getpid()))
    if rank == 1:
        wait_until_they_wait(0)
        os.kill(int(store.get("process of 0")), signal.SIGUSR1)
        store.wait(["rank 0 has left"])
    else:
        with pytest.raises(_PreemptedError) as caught:
            (mesh or build()).get_group("dp")
        outcome = f"{caught.value}, {caught.value.number == signal.SIGUSR1}"
        store.set("rank 0 has left", "")
    signal.signal(signal.SIGUSR1, usual)
    dist.barrier()
    return outcome, reached_by((mesh or build()).get_group("dp"))


@pytest.mark.parametrize("lazy", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_error_that_a_handler_raises_is_raised_as_it_is(crew: Crew, lazy: bool) -> None:
    (outcome, reached), (other, _) = crew.run(_preempted, 2, lazy)
    assert (outcome, other) == (f"signal {int(signal.SIGUSR1)}, True", "no error")
    assert reached == [1, 1]


class _Stop(BaseException):
    """Exception of a signal handler."""


def _stop(*_: object) -> None:
    raise _Stop


_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGUSR1: _stop}
_GROUPS = {"its first group": "dp", "its last group": "tp"}


def _tries_again_alone(number: signal.Signals, place: str, others_too: bool) -> list[str]:
    """Rank 0 gets a group or the whole mesh, and is interrupted; then it alone tries again."""
    usual = signal.signal(number, _HANDLERS[number])
    rank, seen, mesh, connected = dist.get_rank(), [], None, list[str]()

    class InterruptsOnce(dist.ProcessGroupGloo):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            connected.append("dp" if not connected else "tp")
            if connected[-1] == _GROUPS.get(place):
                signal.raise_signal(number)

    def interrupted(*_: object) -> None:
        signal.raise_signal(number)

    for is_first in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if is_first and rank == 0 and place in _GROUPS:
                patch.setattr(dist.distributed_c10d, "ProcessGroupGloo", InterruptsOnce)
            elif is_first and rank == 0:
                patch.setattr(mesh_warnings, "register_root", interrupted)
            try:
                if mesh is None or others_too:
                    mesh = _mesh(lazy=False)
                    seen.append("no error")
            except (KeyboardInterrupt, _Stop) as error:
                seen.append(type(error).__name__)
    signal.signal(number, usual)
    assert _reached(mesh) == _reached_by_rank(rank)
    for _ in range(2):  # each in a universe of its own
        assert _reached(_mesh(lazy=False)) == _reached_by_rank(rank)
    dist.barrier()
    for universe in universes_here():
        universe.destroy()
    dist.barrier()
    assert len(live_groups()) == 1
    for _ in range(2):
        assert _reached(_mesh(lazy=False)) == _reached_by_rank(rank)
    return seen


def _reached(mesh: DeviceMesh) -> list[list[int]]:
    return [reached_by(mesh.get_group(axis)) for axis in ("dp", "tp")]


def _reached_by_rank(rank: int) -> list[list[int]]:
    dp = [1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1]
    return [dp, [1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("number", "place", "others_too"),
    [
        (signal.SIGUSR1, "its last group", False),
        (signal.SIGINT, "the mesh", True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (signal.SIGINT, "its first group", False),  # the others wait for it meanwhile
                (signal.SIGINT, "its last group", False),
                (signal.SIGUSR1, "its last group", True),
                (signal.SIGUSR1, "the mesh", False),
            )
        ),
    ],
)
def test_one_that_got_a_group_and_was_interrupted_keeps_it(
    crew: Crew, number: signal.Signals, place: str, others_too: bool
) -> None:
    """Whether it tries again alone, as the others have their meshes, or all of them do."""
    first, *others = crew.run(_tries_again_alone, 4, number, place, others_too)
    error = "KeyboardInterrupt" if number == signal.SIGINT else "_Stop"
    assert first == [error, "no error"]
    assert others == [["no error"] * (2 if others_too else 1)] * 3


def _aborted_by_a_handler(lazy: bool) -> tuple[str, int]:
    """Rank 0 waits for rank 1 in a group that its handler then aborts; rank 1 makes it too late."""
    universe = Universe(2, lazy=lazy, timeout=timedelta(minutes=5))
    build = partial(init_device_mesh, "cpu", (2,), mesh_dim_names=("dp",), isolate="a")
    mesh = build(universe=universe) if lazy else None
    store, outcome, rank = World.current().store, "no error", dist.get_rank()
    usual = signal.signal(signal.SIGUSR1, lambda *_: universe.abort())
    store.set(f"process of {rank}", str(os.getpid()))
    if rank == 1:
        wait_until_they_wait(0)
        os.kill(int(store.get("process of 0")), signal.SIGUSR1)
        store.wait(["rank 0 has left"])
    else:
        with pytest.raises(RuntimeError) as caught:
            (mesh or build(universe=universe)).get_group("dp")
        outcome = str(caught.value)
        store.set("rank 0 has left", "")
    signal.signal(signal.SIGUSR1, usual)
    dist.barrier()
    universe.abort()
    return outcome, sum(reached_by(build().get_group("dp")))


@pytest.mark.parametrize("lazy", [True, False])
def test_a_handler_ends_a_group_that_its_rank_waits_for(crew: Crew, lazy: bool) -> None:
    (outcome, reached), other = crew.run(_aborted_by_a_handler, 2, lazy)
    assert "could not create the process group of axis 'dp'" in outcome
    assert "was destroyed" in outcome
    assert (reached, other) == (2, ("no error", 2))
