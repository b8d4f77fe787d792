"""Descriptions of meshes that either implementation can build, and strategies that draw them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.observation import Family
from helpers.versions import HAS_CANONICAL_LAYOUTS

_MAX_AXES = 5
_MAX_AXIS_SIZE = 4
_MAX_RANKS = 24  # stock makes a process group per group of every axis
_NAMES = ("pp", "dp", "ep", "cp", "tp")

_FORMS = {
    "list": lambda ranks, shape: np.reshape(ranks, shape).tolist(),
    "numpy": lambda ranks, shape: np.reshape(ranks, shape),
    "int32 tensor": lambda ranks, shape: torch.tensor(ranks, dtype=torch.int32).reshape(shape),
    "int64 tensor": lambda ranks, shape: torch.tensor(ranks, dtype=torch.int64).reshape(shape),
}


# Before 2.13, an axis of size 1 keeps whatever stride it has in the tensor.
if HAS_CANONICAL_LAYOUTS:
    _FORMS["transposed tensor"] = lambda ranks, shape: torch.tensor(
        np.reshape(ranks, shape).T.copy(), dtype=torch.int64
    ).permute(*reversed(range(len(shape))))


@dataclass(frozen=True)
class MeshSpec:
    """A mesh, and the world it is built in.

    Attributes:
        world_size: ranks of the world, at least those of the mesh.
        rank: the rank that looks.
        shape: size of each axis.
        names: one an axis, or None.
        ranks: global ranks in row-major order; None for 0, 1, 2, ... by `init_device_mesh`.
        form: what the ranks are handed over as.
    """

    world_size: int
    rank: int
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    ranks: tuple[int, ...] | None = None
    form: str = "list"

    def build(self, family: Family, **extra: Any) -> StockDeviceMesh:
        """Return the mesh in one of the implementations."""
        if self.ranks is None:
            return family.init_device_mesh("cpu", self.shape, mesh_dim_names=self.names, **extra)
        array = _FORMS[self.form](self.ranks, self.shape)
        return family.DeviceMesh("cpu", array, mesh_dim_names=self.names, **extra)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """One to five axes, some of size 1, of few ranks altogether."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, _MAX_AXES))):
        room = _MAX_RANKS // math.prod(shape)
        shape.append(draw(st.integers(1, min(room, _MAX_AXIS_SIZE))))
    return tuple(shape)


def mesh_specs(
    *,
    always_named: bool = False,
    explicit: bool = False,
    seen_by: Literal["a member", "anyone", "an outsider"] = "anyone",
) -> st.SearchStrategy[MeshSpec]:
    """Meshes over the whole world or a part of it, in order or (`explicit`) permuted."""
    return _mesh_specs(always_named, explicit, seen_by)


@st.composite
def _mesh_specs(draw: st.DrawFn, always_named: bool, explicit: bool, seen_by: str) -> MeshSpec:
    shape = draw(shapes())
    size = math.prod(shape)
    world_size = size + draw(st.sampled_from([1, 3] if seen_by == "an outsider" else [0, 0, 1, 3]))
    permuted = explicit or draw(st.booleans())
    ranks = draw(st.permutations(range(world_size)))[:size] if permuted else None
    members = range(size) if ranks is None else ranks
    lookers = {
        "a member": sorted(members),
        "anyone": range(world_size),
        "an outsider": sorted(set(range(world_size)) - set(members)),
    }[seen_by]
    return MeshSpec(
        world_size=world_size,
        rank=draw(st.sampled_from(lookers)),
        shape=shape,
        names=_NAMES[: len(shape)] if always_named or draw(st.booleans()) else None,
        ranks=None if ranks is None else tuple(ranks),
        form=draw(st.sampled_from(sorted(_FORMS))),
    )
