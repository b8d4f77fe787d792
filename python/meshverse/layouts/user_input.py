"""Reading what a user gives for a mesh: ranks, shapes, names. All checks, no side effects."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse._core import Layout, RankMap

from .rank_tensors import LARGEST_RANK, ArrayLike, plain_ranks, rank_map_of

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

AxisNames: TypeAlias = "tuple[str, ...]"


def read_mesh(mesh: torch.Tensor | ArrayLike) -> tuple[Layout, RankMap]:
    """The layout and rank map of a tensor or array of global ranks. O(world): it reads them all.

    Raises:
        ValueError: no ranks, repeated or negative ranks, or values that are no integers.
        RuntimeError: a tensor whose values cannot be read.
    """
    ranks = plain_ranks(mesh)
    return Layout.from_shape(tuple(ranks.shape)), rank_map_of(ranks)


def read_rank_map(ranks: int | torch.Tensor | ArrayLike) -> RankMap:
    """The rank map of n ranks 0, 1, ..., or of what lists global ranks, in its order.

    Raises:
        ValueError: no ranks, repeated or negative ranks, or values that are no integers.
        RuntimeError: a tensor whose values cannot be read.
        TypeError: a bool, a number that is no integer, or nothing that lists integers.
    """
    is_bool = isinstance(ranks, bool)
    if is_bool or not isinstance(ranks, numbers.Integral):
        if not _is_list(ranks):
            raise TypeError(
                "Ranks are a number of ranks, or a list, tensor or array of global ranks, but got "
                f"{ranks!r} of type {type(ranks).__name__}."
            )
        return rank_map_of(plain_ranks(ranks))
    size = int(ranks)
    if size > LARGEST_RANK + 1:
        raise ValueError(f"A mesh of {size} ranks: ranks run from 0 to {LARGEST_RANK} at most.")
    return RankMap.identity(size)


def _is_list(ranks: torch.Tensor | ArrayLike) -> bool:
    if isinstance(ranks, (str, bytes, Mapping)) or getattr(ranks, "ndim", None) == 0:
        return False
    return hasattr(ranks, "__getitem__") or hasattr(ranks, "__array__")


def read_ranks(ranks: torch.Tensor) -> RankMap:
    """The rank map of a 1-D tensor of global ranks.

    Raises:
        ValueError: repeated or negative ranks, or a tensor of another dimension.
        RuntimeError: a tensor whose values cannot be read.
    """
    if ranks.ndim != 1:
        raise ValueError(f"The rank map must be 1-dimensional, but got shape {tuple(ranks.shape)}.")
    if compat.has_no_values(ranks):  # torch's init_device_mesh made it: always 0, 1, 2, ...
        return RankMap.identity(ranks.numel())
    return rank_map_of(plain_ranks(ranks))


def read_groups(
    group: compat.ProcessGroup | Sequence[compat.ProcessGroup],
    mesh: torch.Tensor | ArrayLike | None,
    names: Sequence[str] | None,
) -> tuple[list[compat.ProcessGroup], torch.Tensor | ArrayLike]:
    """The groups of a mesh's axes and its global ranks, from what `from_group` is given.

    Raises:
        ValueError: `mesh` is not the ranks of the one group; or with several groups, `mesh` or
            `names` is missing, or `mesh` has another number of axes than groups; or its values
            are no ranks.
        RuntimeError: `mesh` is a tensor whose values cannot be read.
    """
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        if mesh is not None and not _lists(mesh, ranks):
            raise ValueError(f"Invalid mesh {mesh} for ProcessGroup with ranks {ranks}")
        return [group], ranks
    groups = list(group)
    if not groups:
        raise ValueError("Expects at least one ProcessGroup to be passed")
    if mesh is None:
        raise ValueError("Must pass mesh if passing multiple ProcessGroups")
    if names is None:
        raise ValueError("Must pass mesh_dim_names if passing multiple ProcessGroups")
    ranks_of_mesh = plain_ranks(mesh)
    if ranks_of_mesh.ndim != len(groups):
        raise ValueError(
            "Expects mesh with ndim equal to number of ProcessGroups but got mesh "
            f"{ranks_of_mesh.tolist()} and {len(groups)} ProcessGroups"
        )
    return groups, ranks_of_mesh


def _lists(mesh: torch.Tensor | ArrayLike, ranks: list[int]) -> bool:
    try:
        return bool(plain_ranks(mesh).tolist() == ranks)
    except ValueError:
        return False
    except (RuntimeError, TypeError):
        if isinstance(mesh, torch.Tensor):
            raise  # it cannot be read: who knows what ranks it has
        return False


def check_device_type(device_type: str) -> None:
    """Raise RuntimeError for a device type with an index, such as "cuda:0"."""
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. If you maintained a "
            "'torch.device' object, it's recommended to pass in 'device.type'."
        )


def check_axis_names(names: Sequence[str] | None, ndim: int) -> AxisNames | None:
    """The names of a mesh's axes, or None if it has none. One string names an axis a letter.

    Raises:
        TypeError: names that are no strings.
        RuntimeError: a repeated name, or another number of names than axes.
    """
    if names is None:
        return None
    names = tuple(names)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"mesh_dim_names must be a tuple of strings, one an axis; got {names!r}.")
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
    return names or None


def check_layout(layout: Layout, rank_map: RankMap) -> None:
    """Check that a layout is a mesh over a rank map.

    Raises:
        AssertionError: axes that overlap, or a layout larger than the rank map (as stock).
        ValueError: a layout whose copies do not cover the ranks.
    """
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
