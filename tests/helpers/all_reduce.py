"""Ranks that an axis's process group reaches, found by an all-reduce, and those it should reach."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

Reached = dict[str, list[int]]
"""Axis name -> for every global rank, how often an all-reduce along the axis counted it."""


def reached_ranks(mesh: StockDeviceMesh, device: str = "cpu") -> Reached:
    """Along every axis of a mesh that I am in, who an all-reduce of such tensors reaches."""
    names = mesh.mesh_dim_names or tuple(f"dim_{index}" for index in range(mesh.ndim))
    return {name: reached_by(mesh.get_group(index), device) for index, name in enumerate(names)}


def reached_by(group: dist.ProcessGroup, device: str = "cpu") -> list[int]:
    """Count, for every global rank, how often an all-reduce of this group reached it."""
    counts = torch.zeros(dist.get_world_size(), device=device)
    counts[dist.get_rank()] = 1
    dist.all_reduce(counts, group=group)
    return counts.int().tolist()


def expected_ranks(
    ranks: np.ndarray, names: tuple[str, ...], rank: int, world_size: int
) -> Reached:
    """Return the same from the array of the whole mesh, in numpy; nothing for a rank outside it."""
    place = np.argwhere(ranks == rank)
    if len(place) == 0:
        return {}
    reached = {}
    for axis, name in enumerate(names):
        line = list(place[0])
        line[axis] = slice(None)
        members = ranks[tuple(line)]
        reached[name] = [int(other in members) for other in range(world_size)]
    return reached
