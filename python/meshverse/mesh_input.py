"""Reading what a user gives for a mesh: ranks, shapes, names. All checks, no side effects."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from . import _torch_compat as compat
from ._core import Layout, RankMap

if TYPE_CHECKING:
    from .universe import Universe

__all__ = [
    "ArrayLike",
    "AxisNames",
    "check_axis_names",
    "check_device_type",
    "check_layout",
    "read_groups",
    "read_mesh",
    "read_rank_map",
    "read_ranks",
]

ArrayLike: TypeAlias = Any
"""Whatever `torch.tensor` takes: nested sequences of integers, a numpy array."""

AxisNames: TypeAlias = "tuple[str, ...]"


def read_mesh(mesh: torch.Tensor | ArrayLike) -> tuple[Layout, RankMap]:
    """The layout and rank map of a tensor or array of global ranks. O(world): it reads them all.

    Raises:
        ValueError: no ranks, repeated or negative ranks, or values that are no integers.
    """
    with compat.untraced():
        given = mesh.detach().cpu() if isinstance(mesh, torch.Tensor) else torch.tensor(mesh)
        ranks = given.to(torch.int64).contiguous()
        if not torch.equal(ranks.to(given.dtype), given):
            raise ValueError(f"A mesh holds global ranks, which are integers, but got {given}.")
    if ranks.numel() == 0:
        raise ValueError(f"A mesh needs at least one rank, but got shape {tuple(ranks.shape)}.")
    return Layout.from_shape(tuple(ranks.shape)), _rank_map_at(ranks)


def read_rank_map(ranks: int | torch.Tensor | ArrayLike) -> RankMap:
    """The rank map of n ranks 0, 1, ..., or of what lists global ranks, in its order.

    Raises:
        ValueError: no ranks, repeated or negative ranks, or values that are no integers.
    """
    return RankMap.identity(ranks) if isinstance(ranks, int) else read_mesh(ranks)[1]


def read_ranks(ranks: torch.Tensor) -> RankMap:
    """The rank map of a 1-D tensor of global ranks.

    Raises:
        ValueError: repeated or negative ranks, or a tensor of another dimension.
    """
    if ranks.ndim != 1:
        raise ValueError(f"The rank map must be 1-dimensional, but got shape {tuple(ranks.shape)}.")
    if compat.has_no_values(ranks):  # torch's init_device_mesh made it: always 0, 1, 2, ...
        return RankMap.identity(ranks.numel())
    if type(ranks) is not torch.Tensor:  # one per simulated rank, all alike, in LocalTensor mode
        return RankMap.from_ranks(ranks.tolist())
    with compat.untraced():
        return _rank_map_at(ranks.detach().to("cpu", torch.int64).contiguous())


def _rank_map_at(ranks: torch.Tensor) -> RankMap:
    # The memory of a contiguous int64 tensor as a buffer, without numpy; the tensor outlives it.
    # ctypes spells the format "<q", the cast makes that "q".
    memory = (ctypes.c_int64 * ranks.numel()).from_address(ranks.data_ptr())
    return RankMap.from_ranks(memoryview(memory).cast("B").cast("q"))


def read_groups(
    group: compat.ProcessGroup | Sequence[compat.ProcessGroup],
    mesh: torch.Tensor | ArrayLike | None,
    names: Sequence[str] | None,
) -> tuple[list[compat.ProcessGroup], torch.Tensor | ArrayLike]:
    """The groups of a mesh's axes and its global ranks, from what `from_group` is given.

    Raises:
        ValueError: `mesh` is not the ranks of the one group; or with several groups, `mesh` or
            `names` is missing, or `mesh` has another number of axes than groups.
    """
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        if mesh is not None and torch.as_tensor(mesh).tolist() != ranks:
            raise ValueError(f"Invalid mesh {mesh} for ProcessGroup with ranks {ranks}")
        return [group], ranks
    groups = list(group)
    if not groups:
        raise ValueError("Expects at least one ProcessGroup to be passed")
    if mesh is None:
        raise ValueError("Must pass mesh if passing multiple ProcessGroups")
    if names is None:
        raise ValueError("Must pass mesh_dim_names if passing multiple ProcessGroups")
    given = torch.as_tensor(mesh)
    if given.ndim != len(groups):
        raise ValueError(
            "Expects mesh with ndim equal to number of ProcessGroups but got mesh "
            f"{given.tolist()} and {len(groups)} ProcessGroups"
        )
    return groups, mesh


def check_device_type(device_type: str) -> None:
    """Raise RuntimeError for a device type with an index, such as "cuda:0"."""
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. If you maintained a "
            "'torch.device' object, it's recommended to pass in 'device.type'."
        )


def check_axis_names(names: Sequence[str] | None, ndim: int) -> AxisNames | None:
    """The names of a mesh's axes, or None if it has none.

    Raises:
        TypeError: a single string, or names that are no strings.
        RuntimeError: a repeated name, or another number of names than axes.
    """
    if not names:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"mesh_dim_names must be a tuple of strings, one an axis; got {names!r}.")
    names = tuple(names)
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise RuntimeError(
            "Each mesh_dim_name must be unique. Found repeated mesh_dim_name in mesh_dim_names "
            f"{names}: {repeated}. Give every axis a name of its own."
        )
    if len(names) != ndim:
        raise RuntimeError(
            "mesh_shape and mesh_dim_names should have same length! Found "
            f"len(mesh_dim_names): {len(names)} and len(mesh_shape):{ndim}, with names {names}."
        )
    return names


def check_layout(layout: Layout, rank_map: RankMap, universe: Universe | None) -> None:
    """Check that a layout is a mesh over a rank map, and that the rank map is the universe's.

    Raises:
        AssertionError: axes that overlap, or a layout larger than the rank map (as stock).
        ValueError: other ranks than the universe's, or a layout whose copies do not cover them.
    """
    if universe is not None and rank_map != universe.rank_map:
        raise ValueError(
            f"A mesh over {rank_map} cannot join a universe of {universe.rank_map}: every mesh of "
            "a universe has the same ranks in the same order. Make a universe of its own for it."
        )
    if not layout.is_orthogonal():
        raise AssertionError(
            f"Please use a non-overlapping layout when creating a DeviceMesh: {layout} maps "
            "several coordinates to one position."
        )
    if layout.cosize > rank_map.size:
        raise AssertionError(
            f"The rank map contains {rank_map.size} element, which isn't large enough for layout "
            f"{layout}, whose largest position is {layout.cosize - 1}."
        )
    if layout.size != rank_map.size:
        layout.collapse().complement(rank_map.size)  # raises unless copies of it cover all ranks
