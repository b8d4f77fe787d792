"""Ranks, shapes and names of a mesh as users give them: read and checked, without side effects.

The global ranks come in any kind of tensor, array or list.
"""

from __future__ import annotations

import ctypes
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse._core import Layout, RankMap

AxisNames: TypeAlias = "tuple[str, ...]"

ArrayLike: TypeAlias = Any
"""Whatever `torch.tensor` takes: nested sequences of integers, a numpy array."""

LARGEST_RANK = 2**31 - 1  # torch holds the ranks of a mesh as int32


# Errors of tensors that have no one array of values to give.
_REFUSALS = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)


def plain_ranks(given: torch.Tensor | ArrayLike) -> torch.Tensor:
    """Return the ranks as a dense int64 CPU tensor of the same shape. O(world).

    Raises:
        ValueError: no ranks, or values that are no integers from 0 to `LARGEST_RANK`.
        RuntimeError: a tensor without values (fake, meta), or one whose values torch does not list
            (sparse, quantized, DTensor, most wrapper subclasses).
        TypeError: `torch.tensor` does not take it.
    """
    values = _values_of(given) if isinstance(given, torch.Tensor) else _tensor_of(given)
    with compat.untraced():
        ranks = values.to(torch.int64).contiguous()
        if ranks.numel() == 0:
            raise ValueError(f"A mesh needs at least one rank, but got shape {tuple(ranks.shape)}.")
        # All integer types fit int64 but uint64, whose large values come out negative.
        may_have_fractions = values.is_floating_point() or values.is_complex()
        are_whole = not may_have_fractions or torch.equal(ranks.to(values.dtype), values)
        smallest, largest = torch.aminmax(ranks)
        if not are_whole or int(smallest) < 0 or int(largest) > LARGEST_RANK:
            raise ValueError(_what_is_no_rank(values, ranks))
        return ranks


def _values_of(given: torch.Tensor) -> torch.Tensor:
    if given.is_meta or compat.has_no_values(given):
        kind, error = ("meta", NotImplementedError) if given.is_meta else ("fake", RuntimeError)
        raise error(  # as stock
            f"A mesh needs global ranks, but a {kind} tensor of shape {tuple(given.shape)} has no "
            "values. Give the ranks as a list, or make the tensor on the CPU, outside of modes."
        )
    with compat.untraced():
        if compat.lies_in_memory(given):
            return given.detach()
    try:
        if compat.lacks_memory(given):
            raise RuntimeError("its memory was taken away")
        # First a copy: that waits for asynchronous results and computes lazy ones, and may then lie
        # in memory. Every other tensor gives a list. Tensors that stand for something else
        # than one array of values refuse that.
        copied = given.detach().clone()
        with compat.untraced():
            if compat.lies_in_memory(copied):
                return copied
        return _tensor_of(copied.tolist())
    except _REFUSALS as refusal:
        raise RuntimeError(
            f"A mesh needs global ranks, but those in a {type(given).__name__} of layout "
            f"{given.layout} and type {given.dtype} cannot be read ({refusal}). Give the ranks as "
            "a list or as a dense tensor."
        ) from refusal


def _tensor_of(values: ArrayLike) -> torch.Tensor:
    with compat.untraced():
        try:
            read = torch.tensor(values, device="cpu")
        except (IndexError, RuntimeError):
            # It could not tell the type of the values. Stock says that they are integers, and
            # gives the better error.
            return torch.tensor(values, device="cpu", dtype=torch.int64)
        if not read.is_floating_point():
            return read
        return torch.tensor(values, device="cpu", dtype=torch.float64)  # float32 rounds


def _what_is_no_rank(values: torch.Tensor, ranks: torch.Tensor) -> str:
    pairs = enumerate(zip(values.flatten().tolist(), ranks.flatten().tolist(), strict=True))
    position, value = next(
        (position, value)
        for position, (value, rank) in pairs
        if value != rank or not 0 <= rank <= LARGEST_RANK
    )
    return (
        f"A mesh holds global ranks, which are integers from 0 to {LARGEST_RANK}, but got {value} "
        f"at position {position} in row-major order."
    )


def rank_map_of(plain: torch.Tensor) -> RankMap:
    """Return the rank map of what `plain_ranks` gave, in row-major order.

    Raises:
        ValueError: a rank that repeats.
    """
    # Its memory as a buffer, without numpy. ctypes spells the format "<q", the cast makes it "q".
    memory = (ctypes.c_int64 * plain.numel()).from_address(plain.data_ptr())
    return RankMap.from_ranks(memoryview(memory).cast("B").cast("q"))


# --- what a mesh is made of ---------------------------------------------------------------------


def read_mesh(mesh: torch.Tensor | ArrayLike) -> tuple[Layout, RankMap]:
    """Return the layout and rank map of a tensor or array of global ranks. O(world).

    Raises:
        ValueError: no ranks, repeated or negative ranks, or values that are no integers.
        RuntimeError: a tensor whose values cannot be read.
    """
    ranks = plain_ranks(mesh)
    return Layout.from_shape(tuple(ranks.shape)), rank_map_of(ranks)


def read_rank_map(ranks: int | torch.Tensor | ArrayLike) -> RankMap:
    """Return the rank map of n ranks 0, 1, ..., or of a list of global ranks, in its order.

    Raises:
        ValueError: no ranks, repeated or negative ranks, or values that are no integers.
        RuntimeError: a tensor whose values cannot be read.
        TypeError: a bool, a number that is no integer, or nothing that lists integers.
    """
    is_bool = isinstance(ranks, bool)
    if isinstance(ranks, numbers.Integral) and not is_bool:
        size = int(ranks)
        if size > LARGEST_RANK + 1:
            raise ValueError(f"A mesh of {size} ranks: ranks run from 0 to {LARGEST_RANK} at most.")
        return RankMap.identity(size)
    is_list = hasattr(ranks, "__getitem__") or hasattr(ranks, "__array__")
    if not is_list or isinstance(ranks, (str, bytes, Mapping)) or getattr(ranks, "ndim", 1) == 0:
        raise TypeError(
            "Ranks are a number of ranks, or a list, tensor or array of global ranks, but got "
            f"{ranks!r} of type {type(ranks).__name__}."
        )
    return rank_map_of(plain_ranks(ranks))


def read_ranks(ranks: torch.Tensor) -> RankMap:
    """Return the rank map of a 1-D tensor of global ranks.

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
    """Return the groups of a mesh's axes and its global ranks, from the arguments of `from_group`.

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
    """Return the names of a mesh's axes, or None if it has none. One string names an axis a letter.

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
