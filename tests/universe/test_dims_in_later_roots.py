"""Where an axis stands in the root that it was sliced from: several roots in a universe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.observation import STOCK, attempt
from meshverse import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8


def _dims(build: Callable[..., Any]) -> list[Any]:
    """Of four root meshes, their slices, and slices of an unflattened mesh."""
    first, later, line, nameless = (
        build((2, 4), ("dp", "tp")),
        build((4, 2), ("tp", "x")),
        build((8,), ("w",)),
        build((8,), None),
    )
    split = first._unflatten(1, (2, 2), ("cp", "tp"))
    meshes = [first, first["dp"], first["tp"], later, later["tp"], later["x"], line, nameless]
    meshes += [split["dp"], split["cp"], split["tp"]]
    return [attempt(mesh._get_root_mesh_dim) for mesh in meshes]


def test_as_in_stock() -> None:
    universe = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")).universe
    ours = _dims(
        lambda shape, names: init_device_mesh("cpu", shape, mesh_dim_names=names, universe=universe)
    )
    assert ours == _dims(
        lambda shape, names: STOCK.init_device_mesh("cpu", shape, mesh_dim_names=names)
    )
    ranks = torch.arange(8).view(8, 1)
    by_ranks = DeviceMesh("cpu", ranks, mesh_dim_names=("y", "z"), universe=universe)
    assert [by_ranks[name]._get_root_mesh_dim() for name in "yz"] == [0, 1]
