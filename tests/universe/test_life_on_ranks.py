"""The end of universes, worlds and processes: all is given back, and nothing stale is used."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.all_reduce import reached_by
from helpers.allocated import Allocated, allocated
from helpers.crew import Crew
from helpers.forked import SECONDS
from helpers.held import grown, held, held_after
from helpers.ports import held_port
from helpers.turns import (
    say_when_compared,
    wait_for_comparison,
    wait_until,
    wait_until_they_wait,
)
from meshverse import DeviceMesh, init_device_mesh
from meshverse.parallel import Reshard

_AXES = ("dp", "tp")


def _mesh(**extra: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, **extra)


def _use(mesh: DeviceMesh) -> list[int]:
    assert sum(reached_by(mesh.get_group("dp"))) == 2
    assert sum(reached_by(mesh.flatten("all").get_group())) == 4
    return reached_by(mesh.get_group("tp"))


def _destroy(way: str) -> dict[str, Any]:
    others = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    own = dist.new_group([0, 1, 2, 3])
    given = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("given",))
    assert sum(_use(others)) == 2
    assert sum(reached_by(own)) == 4  # all connections are there, now that they were used
    before = held()
    mesh = _mesh(timeout=timedelta(seconds=30))  # so that no axis is on the default group
    _use(mesh)
    during = held()
    getattr(mesh.universe, way)()
    getattr(mesh.universe, way)()  # again: nothing happens
    dist.barrier()
    after = held_after(before) if way == "destroy" else held()
    assert sum(_use(others)) == 2
    given.universe.destroy()
    assert sum(reached_by(own)) == 4
    return {"before": before, "during": during, "after": after, "printed": repr(mesh["tp"])}


@pytest.mark.parametrize("way", ["destroy", pytest.param("abort", marks=pytest.mark.long)])
def test_what_was_made_is_given_back_and_nothing_else(fresh_crew: Crew, way: str) -> None:
    for seen in fresh_crew.run(_destroy, 4, way):
        assert seen["after"]["groups"] == seen["before"]["groups"]
        assert seen["during"]["groups"] == seen["before"]["groups"] + 3
        for what in ("threads", "descriptors"):
            assert seen["during"][what] > seen["before"][what]
            if way == "destroy":  # after an abort, gloo's are left behind for their timeout
                assert seen["after"][what] <= seen["before"][what]
        ended = {"destroy": "destroyed", "abort": "aborted"}[way]
        assert seen["printed"] == f"DeviceMesh((tp=2), 'cpu', stride=(1,), universe={ended!r})"


_CYCLES = 30  # what is left behind in each shows in the counts after one


def _many_cycles(cycles: int) -> dict[str, Any]:
    def cycle() -> None:
        mesh = _mesh()
        mesh.flatten("all")
        dist.barrier()  # as with c10d's groups, nobody leaves while others still connect
        mesh.universe.destroy()

    for _ in range(10):
        cycle()
    before, first = held(), allocated()
    for _ in range(cycles):
        cycle()
    dist.barrier()
    return {"grown": grown(before, held_after(before)), "each": _growth(first, cycles)}


def _growth(first: Allocated, cycles: int) -> tuple[float, float]:
    """Bytes and blocks of Python, for each cycle."""
    now = allocated()
    return (
        (now.native_bytes - first.native_bytes) / cycles,
        (now.python_blocks - first.python_blocks) / cycles,
    )


@pytest.mark.long
def test_cycles_of_making_and_destroying_leave_nothing_behind(fresh_crew: Crew) -> None:
    for seen in fresh_crew.run(_many_cycles, 4, _CYCLES):
        assert seen["grown"] == {}
        of_bytes, blocks = seen["each"]  # the store's keys, and what c10d keeps of a name
        assert of_bytes < 12_000
        assert blocks < 5


def _cycles_alone(backend: str, cycles: int) -> dict[str, Any]:
    def cycle() -> None:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=_AXES, isolate="x")
        mesh.flatten("all")
        mesh.universe.destroy()

    dist.destroy_process_group()
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    for _ in range(cycles // 5):
        cycle()
    before, first = held(), allocated()
    for _ in range(cycles):
        cycle()
    return {"grown": grown(before, held_after(before)), "each": _growth(first, cycles)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "cycles", "kept"),
    [
        ("fake", 10_000, 100),
        ("gloo", 250, 2_000),  # a group of gloo that is left behind has more than that
    ],
)
def test_hundreds_of_cycles_leave_nothing_behind(
    fresh_crew: Crew, backend: str, cycles: int, kept: int
) -> None:
    [seen] = fresh_crew.run(_cycles_alone, 1, backend, cycles)
    assert seen["grown"] == {}
    # A free-threaded Python frees some of its memory later.
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        kept *= 5
    of_bytes, blocks = seen["each"]
    assert of_bytes < kept
    assert blocks < kept / 1_000


def _worlds_one_after_another(folder: str) -> list[dict[str, int]]:
    rank, seen, meshes = dist.get_rank(), [], []
    dist.barrier()  # before it is destroyed, all have connected
    dist.destroy_process_group()
    for number in range(3):
        store = dist.FileStore(f"{folder}/{number}", 4)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        mesh = _mesh()
        _use(mesh)
        meshes.append(mesh)  # held, as a trainer may, beyond its world
        dist.barrier()
        dist.destroy_process_group()
        seen.append(held_after(seen[0]) if seen else held())
    for mesh in meshes:
        with pytest.raises(RuntimeError, match=r"is gone \(there is none now\)"):
            mesh.get_group("tp")
        mesh.universe.destroy()  # nothing is left to free
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/x", 4), rank=rank, world_size=4)
    return seen


@pytest.mark.long
def test_meshes_of_ended_worlds_keep_nothing_alive(fresh_crew: Crew) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seen in fresh_crew.run(_worlds_one_after_another, 4, folder):
            assert grown(seen[0], seen[1]) == grown(seen[0], seen[2]) == {}


def _fork() -> list[str]:
    mesh = _mesh()
    lazy = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, lazy=True, isolate="lazy")
    reached_by(mesh.get_group("tp"))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = ["nothing"]
        try:
            uses = (lambda: mesh.get_group("tp"), lambda: mesh.flatten("all"))
            places = [mesh.get_local_rank("tp"), mesh["dp"].get_local_rank(), mesh.get_rank()]
            places.append(lazy.get_local_rank("dp"))
            said = [repr(mesh["dp"]), str(mesh == copy.deepcopy(mesh)), str(places)]
            said += map(_error_of, uses)
        finally:
            os.write(write, "\n".join(said).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read().splitlines()
    os.waitpid(child, 0)
    assert sum(reached_by(mesh.get_group("tp"))) == 2
    return said


def _fork_after_destroying_a_group() -> int:
    """The exit code of a child, which must not end what is its parent's."""
    gc.collect()  # earlier programs' groups, which c10d cannot end in the child
    mesh = _mesh()
    dist.barrier()
    dist.destroy_process_group(mesh.get_group("tp"))
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_ends_no_group_of_its_parent(crew: Crew) -> None:
    assert crew.run(_fork_after_destroying_a_group, 4) == [7] * 4


def _error_of(use: Callable[[], object]) -> str:
    try:
        use()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_forked_process_may_hold_a_mesh_but_not_use_its_groups(crew: Crew) -> None:
    for rank, (printed, equal, places, *errors) in enumerate(crew.run(_fork, 4)):
        assert places == str([rank % 2, rank // 2, rank, rank // 2])
        assert printed == "DeviceMesh((dp=2), 'cpu', stride=(2,))"
        assert equal == "True"
        assert len(errors) == 2
        assert all("do not survive a fork" in error and "spawn" in error for error in errors)


def _on_a_port(port_file: str) -> bool:
    """A world on a store of its own, whose port must be free once the world is destroyed."""
    rank = dist.get_rank()
    ports: list[Any] = [held_port() if rank == 0 else None]
    dist.broadcast_object_list(ports, 0)
    dist.barrier()
    dist.destroy_process_group()
    for _ in range(2):
        store = dist.TCPStore("127.0.0.1", ports[0], 2, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        del store
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), isolate="mine")
        reached_by(mesh.get_group())
        source = {"w": torch.ones(4)} if rank == 0 else None
        move = Reshard(source, {"w": torch.zeros(4)} if rank else None)
        move()
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
    store = dist.FileStore(port_file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return mesh.shape == (2,) and "1 runs" in repr(move)  # both were held all the while


@pytest.mark.long
def test_meshes_and_moves_that_are_held_keep_no_store(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_on_a_port, 2, str(tmp_path / "after")) == [True, True]


# --- a rank that is killed while groups are being made -------------------------------------------


def _survive(rank: int, folder: str, when: str, answers: Any) -> None:
    timeout = timedelta(seconds=3)  # short-timeout: it must elapse
    store = _start_world(f"{folder}/first", rank, 3, timedelta(seconds=60))
    store.set(f"process of {rank}", str(os.getpid()))
    store.set(f"{rank} has started", "")
    if rank == 2:
        store.wait(["0 has started", "1 has started"])  # they still connect to this rank
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        timeout = _A_MINUTE  # it is killed while it waits
    elif when == "meanwhile" and rank == 0:
        wait_until_they_wait(2)
        os.kill(int(store.get("process of 2")), signal.SIGKILL)
        store.set("2 is dead", "")
    elif when == "meanwhile":
        store.wait(["2 is dead"])
    message = "no error"
    try:
        init_device_mesh(
            "cpu",
            (3, 1),
            mesh_dim_names=_AXES,
            isolate="own",
            timeout=timeout,
            check_consistency=when == "before",  # else timeouts differ
        )
    except RuntimeError as error:
        message = str(error)
    dist.destroy_process_group()
    _start_world(f"{folder}/second", rank, 2, timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=_AXES, timeout=_A_MINUTE)
    answers.put((rank, message, reached_by(mesh.get_group("dp"))))
    dist.barrier()
    dist.destroy_process_group()


def _start_world(file: str, rank: int, size: int, timeout: timedelta) -> dist.Store:
    store = dist.FileStore(file, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return store


@pytest.mark.parametrize("when", ["before", pytest.param("meanwhile", marks=pytest.mark.long)])
def test_ranks_that_are_left_get_an_error_in_time_and_can_begin_anew(when: str) -> None:
    context = get_context("forkserver")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_survive, args=(r, folder, when, answers)) for r in range(3)
        ]
        for process in ranks:
            process.start()
        seen = sorted(answers.get(timeout=SECONDS) for _ in range(2))
        for process in ranks:
            process.join(SECONDS)
    assert ranks[2].exitcode == -signal.SIGKILL
    for rank, (result, message, reached) in enumerate(seen):
        assert result == rank
        assert message.startswith(f"Rank {rank} could not create the process group of axis 'dp'")
        assert reached == [1, 1]


# --- the store's host is gone --------------------------------------------------------------------


_A_MINUTE = timedelta(seconds=60)


def _outlive_the_store(rank: int, port: int, end: str, answers: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_A_MINUTE)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=_AXES)
    with pytest.MonkeyPatch.context() as patch:
        say_when_compared(patch)
        if rank == 0:  # who compares first writes a key, and would take it back at the end
            wait_for_comparison(1)
        mesh.unflatten("dp", (2, 1), ("a", "b"), isolate="mine")
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: not _is_answering(store))
    getattr(mesh.universe, end)()
    if dist.is_initialized():  # an abort ends the default group too, as an axis is on it
        dist.destroy_process_group()
    answers.put(f"after {end}")


def _is_answering(store: dist.Store) -> bool:
    try:
        store.check(["anything"])
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("end", ["abort", "destroy"])
def test_a_universe_ends_where_the_stores_host_is_gone(end: str) -> None:
    context = get_context("forkserver")
    answers = context.Queue()
    port = held_port()
    ranks = [
        context.Process(target=_outlive_the_store, args=(rank, port, end, answers))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    assert answers.get(timeout=SECONDS) == f"after {end}"
    for process in ranks:
        process.join(SECONDS)
    assert [process.exitcode for process in ranks] == [-signal.SIGKILL, 0]


def test_use_after_destroy(crew: Crew) -> None:
    for errors in crew.run(_use_after_destroy, 4):
        assert len(errors) == 6
        assert all("was destroyed, and its process groups with it" in error for error in errors)
        assert all("Create the mesh again" in error for error in errors)


def _use_after_destroy() -> list[str]:
    mesh = _mesh()
    tensor = distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)])
    dist.barrier()
    mesh.universe.destroy()
    uses = (
        lambda: mesh.get_group("tp"),
        lambda: mesh["tp"].get_group(),
        lambda: mesh.flatten("all"),
        lambda: mesh.unflatten("tp", (2, 1), ("a", "b")),
        lambda: init_device_mesh("cpu", (4,), universe=mesh.universe),
        tensor.full_tensor,
    )
    errors = [_error_of(use) for use in uses]
    again = _mesh()
    assert again != mesh  # so that nothing remembered of the old one is found for the new one
    assert sum(_use(again)) == 2
    return errors
