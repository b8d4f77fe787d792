"""Threads that use groups while others destroy them."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from helpers.forked import SECONDS
from helpers.worlds import fake_world
from meshverse import Universe, init_device_mesh
from meshverse.universe.universe_groups import UniverseGroups


def _derive(mesh: Any) -> Any:
    view = mesh.unflatten("dp", (2, 2), ("a", "b"))
    return view.get_group("b")


class _SlowerRemoves:
    """A group cache in which the first thread that removes waits until it may go on."""

    def __init__(self, cache: Any) -> None:
        self._cache, self._first = cache, threading.Lock()
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def remove(self, *arguments: Any) -> Any:
        if self._first.acquire(blocking=False):
            self.is_there.set()
            assert self.may_go.wait(SECONDS)
        return self._cache.remove(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def test_of_two_threads_that_replace_a_destroyed_group_the_slower_uses_the_new_one() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        old = _derive(mesh)
        dist.destroy_process_group(old)
        cache = mesh.universe.groups._by_axis = _SlowerRemoves(mesh.universe.groups._by_axis)
        with ThreadPoolExecutor() as threads:
            slow = threads.submit(_derive, mesh)
            assert cache.is_there.wait(SECONDS)
            try:
                fast = threads.submit(_derive, mesh).result(SECONDS)
            finally:
                cache.may_go.set()
            assert slow.result(SECONDS) is fast is not old
        assert _derive(mesh) is fast
        names = [use.name for use in mesh.universe.groups]
        assert len(names) == len(set(names))
        mesh.universe.destroy()


def test_a_group_that_ends_while_it_is_requested_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before_use = UniverseGroups.before_use

    def destroyed(groups: UniverseGroups, name: str) -> None:
        before_use(groups, name)
        dist.destroy_process_group(groups.process_groups[name])

    with fake_world(8):
        universe = Universe(8)
        with monkeypatch.context() as patch:
            patch.setattr(UniverseGroups, "before_use", destroyed)
            with pytest.raises(RuntimeError, match=r"ranks .0, 1, 2. was destroyed"):
                universe.group([0, 1, 2])
        assert dist.get_process_group_ranks(universe.group([0, 1, 2])) == [0, 1, 2]


@pytest.mark.long
def test_threads_that_derive_and_destroy_get_a_group_or_an_error_that_says_so() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        universe, destroying = mesh.universe, threading.Lock()

        def step(number: int, *, destroys: bool) -> None:
            group = universe.group([0, 1, 2]) if number % 2 else _derive(mesh)
            if destroys:
                with destroying:  # torch's function is for one thread at a time
                    dist.destroy_process_group(group)

        def work(number: int) -> list[str]:
            errors = []
            for time in range(100):
                try:
                    step(number, destroys=time % 3 == number % 3)
                except (RuntimeError, ValueError) as error:  # noqa: PERF203
                    errors.append(str(error))
            return errors

        known = re.compile("was destroyed|changed size|Invalid process group")
        with ThreadPoolExecutor(6) as threads:
            for done in [threads.submit(work, number) for number in range(6)]:
                assert all(map(known.search, done.result(SECONDS)))
        universe.destroy()
