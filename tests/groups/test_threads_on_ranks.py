"""Meshes built by several threads of every rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.lock_order import MAKES_GROUP, STATE_LOCK, recorded
from helpers.turns import wait_until
from helpers.worlds import group_names
from meshverse import DeviceMesh, Universe, init_device_mesh, isolate
from meshverse.world import World

_AXES = ("dp", "tp")


def _in_threads(*programs: Callable[[], Any]) -> list[Any]:
    answers: dict[int, Any] = {}
    start = threading.Barrier(len(programs))

    def run(number: int) -> None:
        start.wait(30)
        try:
            answers[number] = programs[number]()
        except RuntimeError as error:
            answers[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    return [answers[number] for number in range(len(programs))]


def _views_of_one_universe() -> tuple[int, list[list[int]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    before = group_names()

    def flat() -> DeviceMesh:
        return mesh.flatten("all", isolate="all")

    def view() -> DeviceMesh:
        return mesh.unflatten("tp", (2, 1), ("a", "b"), isolate="view")["a"]

    def same() -> DeviceMesh:
        return mesh.unflatten("tp", (2,), ("a",), isolate="view")["a"]

    made = _in_threads(*[flat, view, same, view, same, flat])
    new = len(group_names() - before)
    assert made[1].get_group() is made[2].get_group()
    return new, [reached_by(made[number].get_group()) for number in (0, 1)]


def test_threads_share_what_they_make_in_one_universe(crew: Crew) -> None:
    for rank, (new, (flat, view)) in enumerate(crew.run(_views_of_one_universe, 4)):
        assert new == 3  # of all ranks, of two, and of one
        assert flat == [1, 1, 1, 1]
        assert view == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _roots_under_tags() -> list[float]:
    """Two threads of every rank train on meshes of their own, at the same time."""

    def program(tag: str, value: float) -> Callable[[], float]:
        def run() -> float:
            with isolate(tag):
                mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
            total = torch.tensor(value)
            for _ in range(20):
                dist.all_reduce(total, op=dist.ReduceOp.SUM, group=mesh.get_group())
                total /= 4
            return total.item()

        return run

    return _in_threads(program("one", 1.0), program("two", 2.0))


def test_threads_under_tags_of_their_own_do_not_mix(crew: Crew) -> None:
    assert crew.run(_roots_under_tags, 4) == [[1.0, 2.0]] * 4


def _main_goes_on_after_threads() -> list[int]:
    """A thread takes a call on some ranks that the main thread makes on others: no false alarm."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)

    def flat() -> DeviceMesh:
        return mesh.flatten("all", isolate="mine")

    if dist.get_rank() % 2:
        _in_threads(flat)
    else:
        flat()
    view = mesh.unflatten("tp", (2, 1), ("a", "b"), isolate="view")
    return reached_by(view.get_group("a"))


def test_calls_of_threads_raise_no_false_alarm(crew: Crew) -> None:
    for rank, reached in enumerate(crew.run(_main_goes_on_after_threads, 4)):
        assert reached == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _many_groups_in_two_threads() -> int:
    """Each thread makes 30 gloo groups, which wait for the other rank's thread in the store."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def program(tag: str) -> Callable[[], int]:
        def run() -> int:
            for number in range(30):
                flat = mesh.flatten(f"{tag} {number}", isolate=f"{tag} {number}")
                assert flat.get_group().size() == 2
            return 30

        return run

    programs = [program("one"), program("two")]
    return sum(_in_threads(*programs[:: 1 if dist.get_rank() else -1]))


def test_threads_that_make_gloo_groups_do_not_keep_the_store_from_each_other(crew: Crew) -> None:
    assert crew.run(_many_groups_in_two_threads, 2) == [60, 60]


def _in_order(program: Callable[[], object]) -> int:
    with recorded() as seen:
        program()
    return seen[MAKES_GROUP, STATE_LOCK]


@pytest.mark.parametrize(
    "program",
    [_roots_under_tags, pytest.param(_many_groups_in_two_threads, marks=pytest.mark.long)],
)
def test_threads_on_ranks_wait_in_the_order_of_the_documentation(
    crew: Crew, program: Callable[[], object]
) -> None:
    assert min(crew.run(_in_order, 2 if program is _many_groups_in_two_threads else 4, program)) > 0


def _world_ends_while_a_thread_waits(folder: str) -> list[str]:
    """A thread of rank 0 waits for the others to make a lazy group; then the world ends."""
    mesh = init_device_mesh("cpu", (2,), isolate="a", lazy=True, timeout=timedelta(seconds=60))
    errors: list[str] = []

    def use() -> None:
        try:
            mesh.get_group()
        except RuntimeError as error:
            errors.append(str(error))

    thread, rank = threading.Thread(target=use), dist.get_rank()
    if rank == 0:
        store, name = World.current().store, mesh.group_names[0]
        thread.start()
        wait_until(lambda: store.check([f"meshverse/2/1/rendezvous/{name}/0/joined"]))
    dist.barrier()
    dist.destroy_process_group()
    if thread.ident is not None:
        thread.join()
    store = dist.FileStore(f"{folder}/second", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return errors


def test_a_thread_that_waits_is_freed_when_the_world_ends(crew: Crew, tmp_path: Path) -> None:
    errors, others = crew.run(_world_ends_while_a_thread_waits, 2, str(tmp_path))
    assert others == []
    assert "is gone" in errors[0]


def _two_threads_and_a_latecomer() -> list[list[float]]:
    """Ranks 0 and 1 wait in both groups, in threads; ranks 2 and 3 come late to one each."""
    rank = dist.get_rank()
    first = DeviceMesh("cpu", [0, 1, 2], universe=Universe([0, 1, 2], lazy=True))
    second = DeviceMesh("cpu", [0, 1, 3], universe=Universe([0, 1, 3], lazy=True))

    def use(mesh: DeviceMesh, delay: float) -> Callable[[], list[float]]:
        def run() -> list[float]:
            time.sleep(delay)  # sleep: others look for a deadlock meanwhile; it may be longer
            return reached_by(mesh.get_group())

        return run

    if rank > 1:  # the others have looked for a cycle twice
        return _in_threads(use((first, second)[rank - 2], 4))
    return _in_threads(use(first, 0.3 * rank), use(second, 0.3 * (1 - rank)))


@pytest.mark.long
def test_threads_that_wait_in_several_groups_are_in_no_circle(crew: Crew) -> None:
    # What a rank waits for last would show ranks 0 and 1 waiting for each other.
    one, two = [1, 1, 1, 0], [1, 1, 0, 1]
    assert crew.run(_two_threads_and_a_latecomer, 4) == [[one, two], [one, two], [one], [two]]
