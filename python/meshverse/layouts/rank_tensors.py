"""The global ranks in what a user gives for them: any kind of tensor, an array, nested lists."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import torch

from meshverse import _torch_compat as compat
from meshverse._core import RankMap

__all__ = ["LARGEST_RANK", "ArrayLike", "plain_ranks", "rank_map_of"]

ArrayLike: TypeAlias = Any
"""Whatever `torch.tensor` takes: nested sequences of integers, a numpy array."""

LARGEST_RANK = 2**31 - 1  # torch holds the ranks of a mesh as int32


def plain_ranks(given: torch.Tensor | ArrayLike) -> torch.Tensor:
    """The ranks as a dense int64 CPU tensor of the same shape, whatever they come in. O(world).

    Raises:
        ValueError: no ranks, or values that are no integers from 0 to `LARGEST_RANK`.
        RuntimeError: a tensor without values (fake, meta), or one whose values torch does not list
            (sparse, quantized, DTensor, most wrapper subclasses).
        TypeError: `torch.tensor` does not take it.
    """
    if isinstance(given, torch.Tensor):
        if given.is_meta or compat.has_no_values(given):
            raise _without_values(given)
        with compat.untraced():
            if compat.lies_in_memory(given):
                return _checked(given.detach())
        values = _told_by(given)
    else:
        values = _tensor_of(given)
    with compat.untraced():
        return _checked(values)


def _checked(values: torch.Tensor) -> torch.Tensor:
    ranks = values.to(torch.int64).contiguous()
    if ranks.numel() == 0:
        raise ValueError(f"A mesh needs at least one rank, but got shape {tuple(ranks.shape)}.")
    if not _are_whole(values, ranks) or not _in_range(ranks):
        raise ValueError(_what_is_no_rank(values, ranks))
    return ranks


def rank_map_of(plain: torch.Tensor) -> RankMap:
    """The rank map of what `plain_ranks` gave, in row-major order.

    Raises:
        ValueError: a rank that repeats.
    """
    # Its memory as a buffer, without numpy. ctypes spells the format "<q", the cast makes it "q".
    memory = (ctypes.c_int64 * plain.numel()).from_address(plain.data_ptr())
    return RankMap.from_ranks(memoryview(memory).cast("B").cast("q"))


def _without_values(given: torch.Tensor) -> RuntimeError:
    kind, error = ("meta", NotImplementedError) if given.is_meta else ("fake", RuntimeError)
    return error(  # as stock
        f"A mesh needs global ranks, but a {kind} tensor of shape {tuple(given.shape)} has no "
        "values. Give the ranks as a list, or make the tensor on the CPU, outside of modes."
    )


def _told_by(given: torch.Tensor) -> torch.Tensor:
    """The values of a tensor whose memory cannot be read directly, as the tensor gives them."""
    if compat.lacks_memory(given):
        raise RuntimeError(_what_cannot_be_read(given, "its memory was taken away"))
    try:
        return _as_told(given)
    except _REFUSALS as refusal:
        raise RuntimeError(_what_cannot_be_read(given, str(refusal))) from refusal


# What tensors raise that have no one array of values to give.
_REFUSALS = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)


def _as_told(given: torch.Tensor) -> torch.Tensor:
    # First a copy: that waits for asynchronous results and computes lazy ones, and may then lie in
    # memory. Every other tensor is asked for a list. Tensors that stand for something else than one
    # array of values refuse that.
    copied = given.detach().clone()
    with compat.untraced():
        if compat.lies_in_memory(copied):
            return copied
    return _tensor_of(copied.tolist())


def _what_cannot_be_read(given: torch.Tensor, why: str) -> str:
    return (
        f"A mesh needs global ranks, but those in a {type(given).__name__} of layout "
        f"{given.layout} and type {given.dtype} cannot be read ({why}). Give the ranks as a list "
        "or as a dense tensor."
    )


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


def _are_whole(values: torch.Tensor, ranks: torch.Tensor) -> bool:
    # All integer types fit int64 but uint64. Its large values come out negative, which `_in_range`
    # refuses.
    if not values.is_floating_point() and not values.is_complex():
        return True
    return torch.equal(ranks.to(values.dtype), values)


def _in_range(ranks: torch.Tensor) -> bool:
    smallest, largest = torch.aminmax(ranks)
    return int(smallest) >= 0 and int(largest) <= LARGEST_RANK


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
