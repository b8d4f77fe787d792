"""The coordinate of a rank as a graph asks for it that one rank compiles for all."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from meshverse._core import AxisLayout, RankMap

from .coordinate_operator import coordinate

__all__ = [
    "CoordinateArguments",
    "RankDigits",
    "coordinate_arguments",
    "rank_digits",
    "traced_coordinate",
]


class RankDigits(NamedTuple):
    """A rank map as arithmetic: the global rank at a position is `first + layout(position)`."""

    first: int
    layout: AxisLayout


class CoordinateArguments(NamedTuple):
    """What `torch.ops.meshverse.coordinate` is called with; see `coordinate_of`."""

    axis: list[int]
    ranks: list[int]
    first: int


def traced_coordinate(axis: AxisLayout, rank_map: RankMap) -> int | torch.SymInt | None:
    """My coordinate along an axis, as a number that is computed when the graph runs.

    Args:
        axis: over positions of the rank map.
        rank_map: of the axis's universe.

    Returns:
        None if the ranks follow no arithmetic, so that a graph needs a table of them.
    """
    arguments = coordinate_arguments(axis, rank_map)
    if arguments is None:
        return None
    return coordinate(*arguments)  # type: ignore[no-any-return]


def coordinate_arguments(axis: AxisLayout, rank_map: RankMap) -> CoordinateArguments | None:
    """The operator's arguments for an axis: a few numbers, however many ranks there are."""
    digits = rank_digits(rank_map)
    if digits is None:
        return None
    return CoordinateArguments(_pairs(axis), _pairs(digits.layout), digits.first)


def _pairs(axis: AxisLayout) -> list[int]:
    return [number for pair in zip(axis.sizes, axis.strides, strict=True) for number in pair]


_known: weakref.WeakKeyDictionary[RankMap, RankDigits | None] = weakref.WeakKeyDictionary()


def rank_digits(rank_map: RankMap) -> RankDigits | None:
    """The arithmetic of a rank map, if it has one. O(ranks), once; O(1) for ranks 0, 1, 2, ...

    It has one if the ranks are an `arange(...)` that was sliced, reshaped and permuted. Each digit
    of the position is a digit of the rank then.

    Example: of ranks 4, 6, 5, 7, the one at position `2 * i + j` is `4 + i + 2 * j`. So `first` is
    4, and the layout has sizes (2, 2) and strides (1, 2).
    """
    if rank_map.is_identity:
        return RankDigits(0, AxisLayout(rank_map.size))
    if rank_map not in _known:
        _known[rank_map] = _find_digits(rank_map.ranks().tolist())
    return _known[rank_map]


def _find_digits(ranks: list[int]) -> RankDigits | None:
    first, sizes, strides = ranks[0], list[int](), list[int]()
    rest = ranks  # every rank whose digits found so far are 0
    while len(rest) > 1:
        stride = rest[1] - rest[0]
        size = next((i for i, rank in enumerate(rest) if rank != first + i * stride), len(rest))
        if stride < 1 or len(rest) % size:
            return None
        sizes.insert(0, size)
        strides.insert(0, stride)
        rest = rest[::size]
    layout = AxisLayout(sizes, strides)
    if not layout.is_orthogonal():
        return None
    is_all = all(first + layout(position) == rank for position, rank in enumerate(ranks))
    return RankDigits(first, layout) if is_all else None
