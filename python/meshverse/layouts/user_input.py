"""Ranks, shapes and names of a mesh as users pass them: read and checked.

Users pass global ranks in any kind of tensor, array or list.
"""

from __future__ import annotations

import ctypes
import math
import numbers
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist

from meshverse._core import Layout, RankMap
from meshverse._torch_compat.c10d_groups import current_default_group
from meshverse._torch_compat.private_names import ProcessGroup
from meshverse._torch_compat.tracing import (
    has_no_values,
    lacks_memory,
    lies_in_memory,
    outside_torch_modes,
)
from meshverse.wording import did_you_mean

AxisNames: TypeAlias = "tuple[str, ...]"

ArrayLike: TypeAlias = Any
"""Anything that `torch.tensor` accepts: nested sequences of integers, a numpy array."""

LARGEST_RANK = 2**31 - 1  # torch stores the ranks of a mesh as int32


# Errors that tensors raise if they do not stand for one array of values.
_REFUSALS = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)


@runtime_checkable
class TopologyLike(Protocol):
    """The node, and perhaps more, of each rank of a world; see `meshverse.Topology`."""

    def check_has(self, rank_map: RankMap) -> None:
        """Raise ValueError if one of these ranks is not in the topology."""

    def spans(self, name: str, ranks: Sequence[int]) -> int | None:
        """Count the parts of a level, such as "node", that ranks are on; None without the level."""

    def order(
        self,
        mesh_shape: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        traffic: Mapping[str, float] | None = None,
    ) -> torch.Tensor:
        """Return the rank at each position of a mesh, shape (world size,)."""


def as_rank_tensor(given: torch.Tensor | ArrayLike, of: str = "A mesh") -> torch.Tensor:
    """Return the ranks as a dense int64 CPU tensor of the same shape. O(number of ranks).

    Args:
        given: the ranks.
        of: what has these ranks, for messages.

    Raises:
        ValueError: there are no ranks, or a value is not an integer from 0 to `LARGEST_RANK`.
        RuntimeError: a tensor has no values (fake, meta), or torch does not list its values
            (sparse, quantized, DTensor, most wrapper subclasses).
        TypeError: `torch.tensor` does not accept the argument.
    """
    values = _values_of(given, of) if isinstance(given, torch.Tensor) else _tensor_of(given)
    with outside_torch_modes():
        ranks = values.to(torch.int64).contiguous()
        if ranks.numel() == 0:
            raise ValueError(f"{of} needs at least one rank, but got shape {tuple(ranks.shape)}.")
        # int64 can hold all integer types except uint64, whose large values become negative.
        may_have_fractions = values.is_floating_point() or values.is_complex()
        are_whole = not may_have_fractions or torch.equal(ranks.to(values.dtype), values)
        smallest, largest = torch.aminmax(ranks)
        if not are_whole or int(smallest) < 0 or int(largest) > LARGEST_RANK:
            raise ValueError(_what_is_no_rank(values, ranks, of))
        return ranks


def _values_of(given: torch.Tensor, of: str) -> torch.Tensor:
    if given.is_meta or has_no_values(given):
        kind, error = ("meta", NotImplementedError) if given.is_meta else ("fake", RuntimeError)
        raise error(  # torch's types
            f"{of} needs global ranks, but a {kind} tensor of shape {tuple(given.shape)} has no "
            "values. Give the ranks as a list, or make the tensor on the CPU, outside of modes."
        )
    with outside_torch_modes():
        if lies_in_memory(given):
            return given.detach()
    try:
        if lacks_memory(given):
            raise RuntimeError("its memory was taken away")
        # Copy first: that waits for asynchronous results, computes lazy ones, and may give a tensor
        # in memory. All others are converted to a list, which tensors refuse that do not stand for
        # one array of values.
        copied = given.detach().clone()
        with outside_torch_modes():
            if lies_in_memory(copied):
                return copied
        return _tensor_of(copied.tolist())
    except _REFUSALS as refusal:
        raise RuntimeError(
            f"{of} needs global ranks, but those in a {type(given).__name__} of layout "
            f"{given.layout} and type {given.dtype} cannot be read ({refusal}). Give the ranks as "
            "a list or as a dense tensor."
        ) from refusal


def _tensor_of(values: ArrayLike) -> torch.Tensor:
    with outside_torch_modes():
        try:
            read = torch.tensor(values, device="cpu")
        except (IndexError, RuntimeError):
            # torch could not infer the type of the values. torch's DeviceMesh says that they are
            # integers, which gives a better error.
            return torch.tensor(values, device="cpu", dtype=torch.int64)
        if not read.is_floating_point():
            return read
        return torch.tensor(values, device="cpu", dtype=torch.float64)  # float32 rounds


def _what_is_no_rank(values: torch.Tensor, ranks: torch.Tensor, of: str) -> str:
    pairs = enumerate(zip(values.flatten().tolist(), ranks.flatten().tolist(), strict=True))
    position, value = next(
        (position, value)
        for position, (value, rank) in pairs
        if value != rank or not 0 <= rank <= LARGEST_RANK
    )
    return (
        f"{of} holds global ranks, which are integers from 0 to {LARGEST_RANK}, but got {value} "
        f"at position {position} in row-major order."
    )


def rank_map_of(plain: torch.Tensor) -> RankMap:
    """Return the rank map of a tensor that `as_rank_tensor` returned, in row-major order.

    Raises:
        ValueError: a rank repeats.
    """
    # The tensor's memory as a buffer, without numpy. ctypes writes the format as "<q"; the casts
    # change that to "q", which the core reads.
    memory = (ctypes.c_int64 * plain.numel()).from_address(plain.data_ptr())
    return RankMap.from_ranks(memoryview(memory).cast("B").cast("q"))


# --- arguments of meshes and universes ----------------------------------------------------------


def read_mesh(mesh: torch.Tensor | ArrayLike) -> tuple[Layout, RankMap]:
    """Return the layout and rank map of a tensor or array of global ranks. O(number of ranks).

    Raises:
        ValueError: there are no ranks, a rank repeats or is negative, or a value is not an integer.
        RuntimeError: the values of a tensor cannot be read.
    """
    ranks = as_rank_tensor(mesh)
    return Layout.from_shape(tuple(ranks.shape)), rank_map_of(ranks)


def read_rank_map(ranks: int | torch.Tensor | ArrayLike, of: str = "A mesh") -> RankMap:
    """Return the rank map of a number n (ranks 0 to n-1), or of a list of global ranks in order.

    Args:
        ranks: the ranks.
        of: what has these ranks, for messages.

    Raises:
        ValueError: there are no ranks, a rank repeats or is negative, or a value is not an integer.
        RuntimeError: the values of a tensor cannot be read.
        TypeError: the argument is neither an integer nor a list, tensor or array; or it is a bool.
    """
    is_bool = isinstance(ranks, bool)
    if isinstance(ranks, numbers.Integral) and not is_bool:
        size = int(ranks)
        if size > LARGEST_RANK + 1:
            raise ValueError(f"{of} of {size} ranks: ranks run from 0 to {LARGEST_RANK} at most.")
        if size < 1:
            raise ValueError(f"{of} of {size} ranks: it needs at least one.")
        return RankMap.identity(size)
    is_list = hasattr(ranks, "__getitem__") or hasattr(ranks, "__array__")
    if not is_list or isinstance(ranks, (str, bytes, Mapping)) or getattr(ranks, "ndim", 1) == 0:
        raise TypeError(
            "Ranks are a number of ranks, or a list, tensor or array of global ranks, but got "
            f"{ranks!r} of type {type(ranks).__name__}."
        )
    return rank_map_of(as_rank_tensor(ranks, of))


def read_ranks(ranks: torch.Tensor) -> RankMap:
    """Return the rank map of a 1-D tensor of global ranks.

    Raises:
        ValueError: a rank repeats or is negative, or the tensor is not 1-D.
        RuntimeError: the values of the tensor cannot be read.
    """
    if ranks.ndim != 1:
        raise ValueError(f"The rank map must be 1-dimensional, but got shape {tuple(ranks.shape)}.")
    if has_no_values(ranks):  # from torch's init_device_mesh, so it stands for 0, 1, 2, ...
        return RankMap.identity(ranks.numel())
    return rank_map_of(as_rank_tensor(ranks))


def read_groups(
    group: ProcessGroup | Sequence[ProcessGroup],
    mesh: torch.Tensor | ArrayLike | None,
    names: Sequence[str] | None,
) -> tuple[list[ProcessGroup], torch.Tensor | ArrayLike]:
    """Return the groups of a mesh's axes and its global ranks, from the arguments of `from_group`.

    Raises:
        TypeError: `group` is neither a process group nor an iterable of process groups.
        ValueError: with one group, `mesh` is not the list of its ranks. Or with several groups,
            `mesh` or `names` is missing, `mesh` has not as many axes as there are groups, its
            values are not ranks, or a group has other ranks than its axis.
        RuntimeError: `mesh` is a tensor whose values cannot be read.
    """
    if isinstance(group, dist.ProcessGroup):
        ranks = _ranks_of_live(group)
        if mesh is not None and not _lists(mesh, ranks):
            raise ValueError(f"Invalid mesh {mesh} for ProcessGroup with ranks {ranks}")
        return [group], ranks
    given: Any = group
    groups = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not groups:
        raise ValueError("Expects at least one ProcessGroup to be passed")
    for each in groups:
        if not isinstance(each, dist.ProcessGroup):
            raise TypeError(
                f"from_group() got {each!r} of type {type(each).__name__}: pass a process group, "
                "or a list with one per axis. On ranks outside a group, new_group() returns "
                f"{dist.GroupMember.NON_GROUP_MEMBER}: call from_group() on its members only."
            )
        _ranks_of_live(each)
    if mesh is None:
        raise ValueError("Must pass mesh if passing multiple ProcessGroups")
    if names is None:
        raise ValueError("Must pass mesh_dim_names if passing multiple ProcessGroups")
    ranks_of_mesh = as_rank_tensor(mesh)
    if ranks_of_mesh.ndim != len(groups):
        raise ValueError(
            "Expects mesh with ndim equal to number of ProcessGroups but got mesh "
            f"{ranks_of_mesh.tolist()} and {len(groups)} ProcessGroups"
        )
    _check_ranks_of_groups(groups, ranks_of_mesh)
    return groups, ranks_of_mesh


@outside_torch_modes()
def _check_ranks_of_groups(groups: Sequence[ProcessGroup], ranks_of_mesh: torch.Tensor) -> None:
    """Raise ValueError if a group has other ranks than this rank's axis of the mesh."""
    default_group = current_default_group()
    if default_group is None:
        return
    # Not `dist.get_rank()`, which LocalTensor mode replaces by one that simulates all ranks.
    found = (ranks_of_mesh == default_group.rank()).nonzero()
    if len(found) != 1:  # this rank is outside the mesh, or the mesh is refused as a rank repeats
        return
    coordinate = found[0].tolist()
    for axis, group in enumerate(groups):
        along = ranks_of_mesh[(*coordinate[:axis], slice(None), *coordinate[axis + 1 :])].tolist()
        ranks = dist.get_process_group_ranks(group)
        if sorted(ranks) != sorted(along):
            raise ValueError(
                f"from_group() got for axis {axis} the process group of ranks {ranks}, but this "
                f"rank's ranks along this axis of the mesh are {along}. Pass the groups in the "
                "order of the axes, and the ranks of the same groups as mesh=."
            )


def _ranks_of_live(group: ProcessGroup) -> list[int]:
    """Return the global ranks of a group; ValueError if the group was destroyed."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:  # c10d's error shows the object's address, and nothing else
        raise ValueError(
            f"from_group() got a destroyed process group, {group.group_name!r} of {group.size()} "
            "ranks: destroy_process_group() was called for it, or its world has ended. Pass a live "
            "group, such as one from torch.distributed.new_group()."
        ) from None


def _lists(mesh: torch.Tensor | ArrayLike, ranks: list[int]) -> bool:
    try:
        return bool(as_rank_tensor(mesh).tolist() == ranks)
    except ValueError:
        return False
    except (RuntimeError, TypeError):
        if isinstance(mesh, torch.Tensor):
            raise  # its values cannot be read, so they cannot be compared
        return False


def check_device_type(device_type: Any) -> None:
    """Check that a device type is one, such as "cuda".

    Raises:
        RuntimeError: it has an index, as "cuda:0" has.
        TypeError: it is no string, but for example a `torch.device`.
    """
    if device_type and not isinstance(device_type, str):
        kind = getattr(device_type, "type", "cuda")
        raise TypeError(
            f"device_type={device_type!r} of type {type(device_type).__name__}: pass the name of a "
            f"device type without an index, such as {kind!r}. Of a torch.device, that is its type."
        )
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. If you maintained a "
            "'torch.device' object, it's recommended to pass in 'device.type'."
        )


def warn_of_suspicious_input(
    device_type: Any, names: Sequence[str] | None, ndim: int, *, stacklevel: int
) -> None:
    """Warn of arguments that torch accepts, but that hardly mean what they say.

    Args:
        device_type: device type of a mesh.
        names: names of its axes, as the user passed them.
        ndim: number of its axes.
        stacklevel: as if the caller of this function called `warnings.warn`.
    """
    if ndim > 1 and isinstance(names, str):
        warnings.warn(
            f"mesh_dim_names={names!r} is one string, so its {len(names)} letters name the "
            f"{ndim} axes: {', '.join(map(repr, names))}. Pass a tuple with one name per axis; "
            f"write {tuple(names)} if you want these.",
            stacklevel=stacklevel + 1,
        )
    if isinstance(device_type, str) and not _is_device_type(device_type):
        known = ("cuda", "cpu", "xpu", "mps", "hpu", "mtia", "xla", "meta")
        hint = {"gpu": " Did you mean 'cuda'?"}.get(device_type.lower())
        warnings.warn(
            f"device_type={device_type!r} is no device type of this torch, which chooses no device "
            "for such a mesh and cannot put tensors on it. Pass the name of a torch.device, such "
            "as 'cuda' or 'cpu', or import the package that registers the type first."
            f"{hint or did_you_mean(device_type.lower(), known)}",
            stacklevel=stacklevel + 1,
        )


def _is_device_type(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


_REST = -1  # size of the axis that gets the ranks which the other axes leave


def read_sizes(shape: Any, argument: str) -> tuple[int, ...]:
    """Return sizes of axes as a tuple of ints.

    Args:
        shape: the sizes.
        argument: name of the user's argument, for messages.

    Raises:
        TypeError: `shape` is not a sequence, or a size is no integer.
    """
    try:
        given = tuple(shape)
    except TypeError:
        raise TypeError(
            f"{argument}={shape!r} of type {type(shape).__name__}: pass a sequence with the size "
            f"of each axis, such as {(shape if isinstance(shape, int) else 8,)} for one axis."
        ) from None
    sizes: tuple[int, ...] = ()
    try:
        for size in given:
            sizes += (operator.index(size),)  # products of NumPy's integers could overflow
    except TypeError:
        wrong = given[len(sizes)]
        raise TypeError(
            f"{argument}={given}: sizes must be integers, got {wrong!r} of type "
            f"{type(wrong).__name__}. Pass the size of each axis as an int."
        ) from None
    return sizes


def read_shape(shape: Any, argument: str = "mesh_shape") -> tuple[int, ...]:
    """Return sizes of axes as a tuple; one of them may be -1, "the rest".

    Args:
        shape: the sizes.
        argument: name of the user's argument, for messages.

    Raises:
        TypeError: `shape` is not a sequence, or a size is no integer.
        ValueError: a size is 0 or below -1, or several are -1.
    """
    sizes = read_sizes(shape, argument)
    low = [size for size in sizes if size < 1]
    if low and (len(low) > 1 or low[0] != _REST):
        raise ValueError(
            f"{argument}={sizes} has the {'sizes' if len(low) > 1 else 'size'} "
            f"{', '.join(map(str, low))}: the size of an axis must be at least 1. One axis may "
            "have size -1, and gets the ranks that the others leave."
        )
    return sizes


def has_rest(sizes: Sequence[int]) -> bool:
    """Return whether one of the sizes that `read_shape` returned is -1."""
    return _REST in sizes


def fill_rest(
    sizes: tuple[int, ...], n_ranks: int, argument: str = "mesh_shape", of: str = "of the mesh"
) -> tuple[int, ...]:
    """Return sizes of axes with a size of -1 replaced by the ranks that the others leave.

    Args:
        sizes: sizes that `read_shape` returned.
        n_ranks: product of the sizes.
        argument: name of the user's argument, for messages.
        of: what has these ranks, for messages.

    Raises:
        ValueError: the other sizes do not divide the number of ranks.
    """
    if not has_rest(sizes):
        return sizes
    others = -math.prod(sizes)
    if n_ranks < others or n_ranks % others:
        raise ValueError(
            f"{argument}={sizes} cannot have {n_ranks} ranks, the number {of}: the product of the "
            f"sizes other than -1 is {others}, and must divide it."
        )
    return tuple(n_ranks // others if size == _REST else size for size in sizes)


def check_axis_names(names: Sequence[str] | None, ndim: int) -> AxisNames | None:
    """Return the names of a mesh's axes as a tuple, or None if it has none.

    As in torch, one string gives one name per character.

    Raises:
        TypeError: a name is not a string.
        RuntimeError: a name repeats, or there are not as many names as axes.
    """
    if names is None:
        return None
    names = tuple(names)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"mesh_dim_names must be a tuple of strings, one per axis; got {names!r}.")
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
    """Check that a layout describes a mesh over a rank map.

    Raises:
        AssertionError: axes overlap, or the layout has positions outside the rank map (torch's
            type).
        ValueError: shifted copies of the layout cannot cover all ranks.
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
