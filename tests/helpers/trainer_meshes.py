"""The axes of the meshes that a trainer builds, and what asking for them may make."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from meshverse import DeviceMesh

from .worlds import group_names

__all__ = ["AXES", "FLATTENED", "nothing_created", "ranks_by_axes"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


def ranks_by_axes(shape: tuple[int, ...], kept: tuple[str, ...], rank: int) -> list[int]:
    """Return the ranks that differ from one in some axes only: cut out of a tensor of all ranks."""
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    place = torch.nonzero(ranks == rank)[0].tolist()
    index = tuple(slice(None) if a in kept else i for a, i in zip(AXES, place, strict=True))
    return ranks[index].flatten().tolist()


@contextlib.contextmanager
def nothing_created(mesh: DeviceMesh | None = None) -> Iterator[None]:
    """Check that the block makes no process group, and asks the mesh's universe for none."""
    groups = group_names()
    explained = None if mesh is None else mesh.universe.explain().to_dict()
    yield
    assert group_names() == groups
    assert explained == (None if mesh is None else mesh.universe.explain().to_dict())
