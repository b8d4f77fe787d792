"""Comparing calls: operations on the store, and stores that lack them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.crew import Crew
from helpers.differing import AXES, TIMEOUT
from helpers.replaced import replace_everywhere
from meshverse import (
    init_device_mesh,
)
from meshverse._torch_compat.backends import creation_blocks
from meshverse.world import World


def _count_store_operations() -> list[int]:
    world = World.current()
    counting = _Counting(world.store)
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "store", counting)
        replace_everywhere(patch, creation_blocks, lambda backend: False)  # no rendezvous
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        counts.append(counting.operations)
        mesh["dp"], mesh["tp"].flatten("alias"), mesh.unflatten("tp", (2, 1), ("a", "b"))
        counts.append(counting.operations)
        mesh.unflatten("tp", (2, 1), ("a", "b"))
        counts.append(counting.operations)
        dist.barrier()
        mesh.universe.destroy()
    return counts


class _Counting:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self._store, self.operations = store, 0

    def __getattr__(self, name: str) -> Any:
        self.operations += 1
        return getattr(self._store, name)


def test_one_store_operation_a_rank_and_call(crew: Crew) -> None:
    # Before the first call, ranks agree on the number of the run, by two operations each. Then two
    # calls derive meshes, for which torch would make groups; the slice needs none.
    assert crew.run(_count_store_operations, 4) == [[3, 5, 5]] * 4


class _SmallStore(dist.Store):
    """A store written in Python that lacks `compare_set`, as torchelastic's for etcd does."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or TIMEOUT)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


@pytest.mark.parametrize(
    ("store", "can"), [(_SmallStore(dist.HashStore()), False), (dist.HashStore(), True)]
)
def test_a_store_that_cannot_compare_is_not_asked_to(store: dist.Store, can: bool) -> None:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        init_device_mesh("cpu", (1, 1), mesh_dim_names=AXES)
        assert (World.current().store is not None) == can
    finally:
        dist.destroy_process_group()


def test_a_new_life_on_the_store_of_the_old_one_begins_anew() -> None:
    store = dist.HashStore()  # which keeps its keys, as a launcher's does
    for names in (("a", "b"), ("c", "d")):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
        dist.destroy_process_group()
