"""Worlds of one process, and what c10d itself knows of their process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from worlds import fake_world as _fake_world


class FakeWorld(NamedTuple):
    """A world of `size` ranks of which this process plays `rank`; collectives do nothing."""

    size: int
    rank: int


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[FakeWorld]:
    """A fake world, taken down with all its groups, unless that was done before."""
    with _fake_world(size, rank):
        yield FakeWorld(size, rank)


def in_worlds(*worlds: tuple[int, int]) -> pytest.MarkDecorator:
    """Run a test in each of these (size, rank) worlds, through its fixture `world`."""
    names = [f"rank {rank} of {size}" for size, rank in worlds]
    return pytest.mark.parametrize("world", worlds, indirect=True, ids=names)


def live_groups() -> dict[str, tuple[int, ...]]:
    """c10d's own list of this rank's groups: name -> global ranks in group-rank order."""
    return {
        name: tuple(dist.get_process_group_ranks(group))
        for group, name in c10d._world.pg_names.items()
    }


def group_names() -> set[str]:
    """Names of this rank's groups, from c10d."""
    return set(c10d._world.pg_names.values())


@contextlib.contextmanager
def groups_created(expected: int) -> Iterator[None]:
    """Check how many process groups c10d has more after the block than before."""
    before = group_names()
    yield
    new = group_names() - before
    assert len(new) == expected, f"expected {expected} new groups, c10d has {new}"
