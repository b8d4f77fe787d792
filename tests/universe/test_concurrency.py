"""Threads that use one universe at once; on a free-threaded Python, truly so."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import meshverse
from helpers.lock_order import CREATES_ENTRY, MAKES_GROUP, STATE_LOCK, recorded
from helpers.worlds import fake_world, group_names, groups_created, live_groups
from meshverse import DeviceMesh, init_device_mesh, installed
from meshverse import world as world_module
from meshverse._core import RankMap
from meshverse.groups.group import Group, GroupRef
from meshverse.locks import state_lock
from meshverse.universe import universe_groups
from meshverse.universe.universe import Universe
from meshverse.universe.universe_meshes import UniverseMeshes
from meshverse.universe.world_universes import WorldUniverses, find_universe
from meshverse.world import World

_THREADS = 8
_ROUNDS = 20
_NAMES = ("pp", "dp", "tp")


def _at_once(program: Callable[[int], Any]) -> list[Any]:
    """Return the result of each of the threads; raise what one of them raises."""
    answers: dict[int, Any] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(_THREADS)

    def run(number: int) -> None:
        start.wait(60)
        try:
            answers[number] = program(number)
        except Exception as error:  # noqa: BLE001  # raised in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return [answers[number] for number in range(_THREADS)]


def _derive(mesh: DeviceMesh, number: int) -> list[DeviceMesh]:
    """The same meshes in every thread, each beginning with another one."""
    ways: list[Callable[[], DeviceMesh]] = [
        lambda: mesh["tp"],
        lambda: mesh["pp", "tp"],
        lambda: mesh["dp", "tp"].flatten("dp_tp"),
        lambda: mesh.unflatten("dp", (2, 2), ("outer", "inner")),
        lambda: mesh.unflatten("tp", (2, 2), ("a", "b"))["a"],
        lambda: init_device_mesh("cpu", (2, 16), mesh_dim_names=("x", "y"), universe=mesh.universe)[
            "y"
        ],
    ]
    made = {}
    for step in range(len(ways)):
        index = (step + number) % len(ways)
        made[index] = ways[index]()
        assert made[index].get_coordinate() is not None
        assert len({group.group_name for group in made[index].get_all_groups()}) == made[index].ndim
    return [made[index] for index in range(len(ways))]


def test_threads_get_the_same_meshes_on_groups_made_once() -> None:
    with fake_world(32, 21):
        alone = init_device_mesh("cpu", (2, 4, 4), mesh_dim_names=_NAMES)
        _derive(alone, 0)
        made_alone = len(group_names())
        for _ in range(_ROUNDS):
            mesh = init_device_mesh("cpu", (2, 4, 4), mesh_dim_names=_NAMES)
            before = len(group_names())
            first, *others = _at_once(lambda number, mesh=mesh: _derive(mesh, number))
            for other in others:
                assert all(one is same for one, same in zip(first, other, strict=True))
            # The default group and the root's three groups are counted in `made_alone` too.
            assert len(group_names()) - before == made_alone - 1 - 3
            mesh.universe.destroy()


def _three_meshes(number: int) -> list[DeviceMesh]:
    names, lazy = ("dp", "tp"), number % 2 == 1
    return [init_device_mesh("cpu", (4, 8), mesh_dim_names=names, lazy=lazy) for _ in range(3)]


def test_threads_make_universes_of_their_own() -> None:
    with fake_world(32, 21):
        for _ in range(_ROUNDS):
            meshes = _at_once(_three_meshes)
            universes = [mesh.universe for own in meshes for mesh in own]
            assert len({id(universe) for universe in universes}) == 3 * _THREADS
            names = [name for universe in universes for name in universe.root.group_names]
            assert len(set(names)) == 2 * 3 * _THREADS
            assert find_universe(RankMap.identity(32), universes[5].serial) is universes[5]
            _at_once(lambda number, meshes=meshes: [m.universe.destroy() for m in meshes[number]])
            assert len(group_names()) == 1


def test_threads_that_make_a_universes_first_mesh_make_one_root() -> None:
    with fake_world(32, 21), switching_often():
        for _ in range(_ROUNDS):
            universe = Universe(32)
            meshes = _at_once(lambda number, universe=universe: _of_sizes(universe, 2**number))
            roots = [mesh for mesh in meshes if mesh._get_root_mesh() is mesh]
            assert roots == [universe.root]
            assert {id(mesh._get_root_mesh()) for mesh in meshes} == {id(universe.root)}
            universe.destroy()
            assert World.current().state(WorldUniverses).with_groups == []


def _of_sizes(universe: Universe, inner: int) -> DeviceMesh:
    shape = (32 // min(inner, 32), min(inner, 32))
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"), universe=universe)


def test_threads_share_groups_that_others_are_ending() -> None:
    meshverse.install(share="world")
    try:
        with fake_world(32, 21), switching_often():

            def make_and_end(number: int) -> None:
                for _ in range(3 * _ROUNDS):
                    mesh = init_device_mesh("cpu", (4, 8), mesh_dim_names=("dp", "tp"))
                    assert mesh.get_group("tp").size() == 8
                    mesh.universe.destroy()

            _at_once(make_and_end)
            assert len(group_names()) == 1
    finally:
        meshverse.uninstall()


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _change_and_read(universe: Universe, number: int, times: int) -> None:
    """One thread in four flattens, one makes roots, one makes groups, one reads all of that."""
    root = universe.root
    assert root is not None
    for step in range(times):
        own = f"{number}_{step}"
        if number % 4 == 0:
            root["pp", "dp"].flatten(f"flat{own}")
        elif number % 4 == 1:
            names = (f"x{own}", f"y{own}")
            init_device_mesh("cpu", (4, 8), mesh_dim_names=names, universe=universe)
        elif number % 4 == 2:
            universe.part([0, 1 + step % 31]).explain()
            universe.group([0, 1 + step % 31], name=own)
        else:
            universe.explain().to_json()
            universe.memory_stats()
            meshverse.load_mesh(meshverse.save_mesh(root))
            list(universe.meshes), universe.draw(), repr(universe)
            for ref in universe.groups:
                assert ref.group is not None
                ref.group.in_words()  # as errors do


def test_threads_read_what_other_threads_are_adding_to() -> None:
    with fake_world(32), switching_often():
        mesh = init_device_mesh("cpu", (2, 4, 4), mesh_dim_names=_NAMES)
        _at_once(
            lambda number: _change_and_read(mesh.universe, number, 20 if number % 4 == 3 else 150)
        )


def test_a_part_waits_for_a_group_that_another_thread_is_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would make the same group again, and only on ranks whose threads ran in this order."""
    begun, go, create = threading.Event(), threading.Event(), universe_groups.create_by_members

    def slow(group: Group, *arguments: Any) -> Any:
        if group.request.axis_name == "slow":
            begun.set()
            assert go.wait(30)
        return create(group, *arguments)

    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_NAMES)
        monkeypatch.setattr(universe_groups, "create_by_members", slow)
        of_threads: dict[str, Any] = {}

        def flatten() -> None:
            of_threads["whole"] = mesh["dp", "tp"].flatten("slow")

        def take_part() -> None:
            of_threads["part"] = init_device_mesh(
                "cpu", (4,), ranks=[0, 1, 2, 3], universe=mesh.universe
            )

        first, second = threading.Thread(target=flatten), threading.Thread(target=take_part)
        with groups_created(1):
            first.start()
            assert begun.wait(30)
            second.start()
            second.join(0.3)  # short-timeout: if it waits later, the result is the same
            go.set()
            first.join(30)
            second.join(30)
        assert of_threads["part"].get_group() is of_threads["whole"].get_group()


def test_a_mesh_that_is_being_made_notices_that_its_group_is_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then it is not equal to a mesh on the new group, as torch's caches are keyed by meshes."""
    intern = UniverseMeshes.intern
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))

        def late(meshes: UniverseMeshes, made: DeviceMesh, key: Any) -> DeviceMesh:
            monkeypatch.setattr(UniverseMeshes, "intern", intern)
            dist.destroy_process_group(mesh.get_group("tp"))
            return intern(meshes, made, key)

        monkeypatch.setattr(UniverseMeshes, "intern", late)
        stale = mesh["tp"]
        again = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"), universe=mesh.universe)
        assert stale != again["tp"]
        with pytest.raises(RuntimeError, match="was destroyed"):
            stale.get_group()


def test_a_mesh_that_is_being_made_notices_that_its_world_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the next world, this process may be another rank."""
    intern = UniverseMeshes.intern
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))

        def late(meshes: UniverseMeshes, made: DeviceMesh, key: Any) -> DeviceMesh:
            dist.destroy_process_group()
            return intern(meshes, made, key)

        monkeypatch.setattr(UniverseMeshes, "intern", late)
        stale = mesh["tp"]
        monkeypatch.undo()
    with fake_world(8, 2), pytest.raises(RuntimeError, match="rank"):
        stale.get_coordinate()


def test_fsdp2s_default_mesh_connects_to_the_store_without_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread other than the main one has a connection of its own; forks wait for the lock."""
    is_owned, clone = list[bool](), world_module.clone_store

    def clone_store(store: Any) -> Any:
        is_owned.append(state_lock.of_python._is_owned())  # type: ignore[attr-defined]
        return clone(store)

    monkeypatch.setattr(world_module, "clone_store", clone_store)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with installed():
            thread = threading.Thread(target=lambda: fully_shard(torch.nn.Linear(2, 2)))
            thread.start()
            thread.join()
    finally:
        dist.destroy_process_group()
    assert is_owned
    assert not any(is_owned)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_universe_that_is_destroyed_while_a_thread_makes_a_mesh_keeps_no_group(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's call raises, and frees what it has created, of whichever axis."""
    begun, go, create = threading.Event(), threading.Event(), universe_groups.create_by_members

    def slow(group: Group, *arguments: Any) -> Any:
        made = create(group, *arguments) if when == "after" else None
        begun.set()
        assert go.wait(30)
        return made or create(group, *arguments)

    with fake_world(8):
        before = live_groups()
        universe = Universe(8)
        init_device_mesh("cpu", (8,), mesh_dim_names=("world",), universe=universe)
        monkeypatch.setattr(universe_groups, "create_by_members", slow)
        errors: list[BaseException] = []

        def build() -> None:
            try:
                init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_NAMES, universe=universe)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=build)
        thread.start()
        assert begun.wait(30)
        universe.destroy()
        go.set()
        thread.join(30)
        assert "was destroyed" in str(errors[0])
        assert universe.groups.is_freed
        assert live_groups() == before


def test_a_universe_that_is_destroyed_between_two_groups_of_a_mesh_creates_no_further_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create, universes = universe_groups.create_by_members, list[Universe]()

    def ends_it(group: Group, *arguments: Any) -> Any:
        if group.request.axis_name == "dp":
            universes[0].destroy()
        return create(group, *arguments)

    with fake_world(8):
        before = live_groups()
        universes.append(Universe(8))
        monkeypatch.setattr(universe_groups, "create_by_members", ends_it)
        with pytest.raises(RuntimeError, match="was destroyed"):
            init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_NAMES, universe=universes[0])
        assert universes[0].groups.is_freed
        assert live_groups() == before


def test_a_thread_shares_no_group_of_a_call_that_fails_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has found the group before the call fails, and requests it afterwards."""
    found, has_failed = threading.Event(), threading.Event()
    create, count = universe_groups.create_by_members, GroupRef.count_request
    meshes: list[DeviceMesh] = []

    def fails_once_it_is_found(group: Group, *arguments: Any) -> Any:
        if group.request.axis_name == "b":
            second.start()
            assert found.wait(30)
            raise RuntimeError("no more memory")
        return create(group, *arguments)

    def count_late(ref: GroupRef, axis_name: str) -> Any:
        if axis_name == "c" and not found.is_set():
            found.set()
            assert has_failed.wait(30)
        return count(ref, axis_name)

    def build(*names: str) -> None:
        meshes.append(init_device_mesh("cpu", (4, 2), mesh_dim_names=names, universe=universe))

    second = threading.Thread(target=build, args=("c", "d"))
    with fake_world(8):
        universe = Universe(8)
        monkeypatch.setattr(universe_groups, "create_by_members", fails_once_it_is_found)
        monkeypatch.setattr(GroupRef, "count_request", count_late)
        with pytest.raises(RuntimeError, match="no more memory"):
            build("a", "b")
        has_failed.set()
        second.join(30)
        assert [meshes[0].get_group(name).size() for name in "cd"] == [4, 2]
        assert [set(group.requests) for group in universe.explain().groups] == [{"c"}, {"d"}]
        monkeypatch.undo()
        build("a", "b")
        assert meshes[1].get_all_groups() == meshes[0].get_all_groups()
        universe.destroy()
        assert len(group_names()) == 1


def test_a_call_that_failed_counts_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    create = universe_groups.create_by_members

    def fails(group: Group, *arguments: Any) -> Any:
        if group.request.axis_name == "b":
            raise RuntimeError("no more memory")
        return create(group, *arguments)

    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        monkeypatch.setattr(universe_groups, "create_by_members", fails)
        for names in (("dp", "b", "a"), ("other", "b", "a")):
            with pytest.raises(RuntimeError, match="no more memory"):
                init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names, universe=mesh.universe)
        requests = [group.requests for group in mesh.universe.explain().groups]
        assert requests == [{"dp": 1}, {"tp": 1}]


def test_a_part_may_be_made_in_the_middle_of_making_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a signal handler does: the thread does not wait for itself."""
    create, parts = universe_groups.create_by_members, list[DeviceMesh]()
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_NAMES)

        def interrupted(group: Group, *arguments: Any) -> Any:
            if group.request.axis_name == "slow":
                part = init_device_mesh("cpu", (3,), ranks=[0, 1, 2], universe=mesh.universe)
                parts.append(part)
            return create(group, *arguments)

        monkeypatch.setattr(universe_groups, "create_by_members", interrupted)
        flat = mesh["dp", "tp"].flatten("slow")
        assert [flat.get_group().size(), parts[0].get_group().size()] == [4, 3]


def test_threads_wait_in_the_order_of_the_documentation(uninstalled_afterwards: None) -> None:
    with fake_world(32, 21), switching_often(), recorded() as seen:
        mesh = init_device_mesh("cpu", (2, 4, 4), mesh_dim_names=_NAMES)
        _at_once(lambda number: _change_and_read(mesh.universe, number, 5))
        _at_once(lambda number: _derive(mesh, number))
        lazy = init_device_mesh("cpu", (2, 4, 4), mesh_dim_names=_NAMES, lazy=True, isolate="lazy")
        _at_once(lambda number: lazy.get_group("tp"))
        _at_once(lambda number: lazy.universe.destroy())
        meshverse.install(share="world")

        def make_and_end(number: int) -> None:
            for _ in range(3):
                init_device_mesh("cpu", (4, 8), mesh_dim_names=("dp", "tp")).universe.destroy()

        _at_once(make_and_end)
        mesh.abort()
    assert set(seen) == {
        (None, CREATES_ENTRY),
        (None, MAKES_GROUP),
        (None, STATE_LOCK),
        (CREATES_ENTRY, MAKES_GROUP),
        (CREATES_ENTRY, STATE_LOCK),
        (MAKES_GROUP, STATE_LOCK),
    }


@pytest.mark.skipif(not hasattr(sys, "_is_gil_enabled"), reason="Python before 3.13")
@pytest.mark.skipif(
    getattr(sys, "_is_gil_enabled", lambda: True)(), reason="this Python runs with its global lock"
)
def test_the_package_leaves_the_interpreter_without_its_lock() -> None:
    with fake_world(8, 5):
        assert init_device_mesh("cpu", (8,)).size() == 8
    assert not sys._is_gil_enabled()
