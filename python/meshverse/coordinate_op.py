"""Coordinates of ranks in a graph that one rank compiles for all ranks.

Such a graph contains the arithmetic of a mesh, but no rank. The operator
`torch.ops.meshverse.coordinate` computes the coordinate of the rank that runs the graph. Importing
Meshverse registers the operator, so a process that only runs such a graph must import Meshverse
too.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshverse._core import AxisLayout, RankMap
from meshverse._torch_compat.one_graph import (
    coordinate_symbol,
    on_simulated_ranks,
    register_with_inductor,
)

# A global, because torch removes the operator when the library object is freed.
_library: Any = torch.library.Library("meshverse", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "coordinate(int[] axis, int[] ranks, int first) -> SymInt", tags=torch.Tag.pt2_compliant_tag
)


def coordinate_of(rank: int, axis: Sequence[int], ranks: Sequence[int], first: int) -> int:
    """Compute the coordinate of a global rank along an axis. O(number of digits).

    Args:
        rank: global rank.
        axis: positions of the axis, as pairs (size, stride), flat: [size, stride, size, ...]. Each
            pair is one digit of the coordinate, the last one varying fastest.
        ranks: the global ranks at positions 0, 1, ..., minus `first`, as pairs like those of
            `axis`. Sorted by stride, each stride is a multiple of the previous stride times the
            previous size.
        first: global rank at position 0.

    Raises:
        AssertionError: the rank is not one of these ranks. (torch raises this type too.)

    Example:
        >>> coordinate_of(13, axis=[4, 2], ranks=[8, 1], first=8)  # 8..15 as (4, 2): 13 is (2, 1)
        2
    """
    position, rest = 0, rank - first
    offset = rest
    for size, stride in _pairs(ranks):
        digit = offset // stride % size
        position = position * size + digit
        rest -= digit * stride
    if rest:
        raise AssertionError(
            f"Rank {rank} runs a graph that needs its coordinate along an axis of a mesh, but is "
            f"not in that mesh. The ranks of the mesh begin at {first} and have (size, stride) "
            f"{', '.join(map(str, _pairs(ranks)))}. Run the graph only on ranks of the mesh."
        )
    index = 0
    for size, stride in _pairs(axis):
        index = index * size + position // stride % size
    return index


def _pairs(digits: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(digits[::2], digits[1::2], strict=True)


def _run(axis: Sequence[int], ranks: Sequence[int], first: int) -> int | torch.SymInt:
    simulated = on_simulated_ranks(lambda rank: coordinate_of(rank, axis, ranks, first))
    return coordinate_of(dist.get_rank(), axis, ranks, first) if simulated is None else simulated


def _fake(axis: Sequence[int], ranks: Sequence[int], first: int) -> int | torch.SymInt:
    register_with_inductor(coordinate)
    symbol = coordinate_symbol(math.prod(axis[::2]))
    return _run(axis, ranks, first) if symbol is None else symbol


_library.impl("coordinate", _run, "CompositeExplicitAutograd")
torch.library.register_fake("meshverse::coordinate", _fake, lib=_library)

coordinate = torch.ops.meshverse.coordinate.default


# --- the operator's arguments for an axis --------------------------------------------------------


class RankDigits(NamedTuple):
    """Arithmetic of a rank map: the global rank at a position is `first + layout(position)`."""

    first: int
    layout: AxisLayout


class CoordinateArguments(NamedTuple):
    """Arguments of `torch.ops.meshverse.coordinate`; see `coordinate_of`."""

    axis: list[int]
    ranks: list[int]
    first: int


def traced_coordinate(axis: AxisLayout, rank_map: RankMap) -> int | torch.SymInt | None:
    """Return this rank's coordinate along an axis, as a number that the running graph computes.

    Args:
        axis: layout of the axis, over positions of the rank map.
        rank_map: rank map of the axis's universe.

    Returns:
        The coordinate; None if the rank map has no arithmetic (see `rank_digits`), so that a graph
        would need a table of the ranks.
    """
    arguments = coordinate_arguments(axis, rank_map)
    if arguments is None:
        return None
    return coordinate(*arguments)  # type: ignore[no-any-return]


def coordinate_arguments(axis: AxisLayout, rank_map: RankMap) -> CoordinateArguments | None:
    """Return the operator's arguments for an axis, a few numbers; None without arithmetic."""
    digits = rank_digits(rank_map)
    if digits is None:
        return None
    return CoordinateArguments(_flat(axis), _flat(digits.layout), digits.first)


def _flat(axis: AxisLayout) -> list[int]:
    return [number for pair in zip(axis.sizes, axis.strides, strict=True) for number in pair]


_known: weakref.WeakKeyDictionary[RankMap, RankDigits | None] = weakref.WeakKeyDictionary()


def rank_digits(rank_map: RankMap) -> RankDigits | None:
    """Return the arithmetic of a rank map; None if its ranks cannot be computed from positions.

    They can if the ranks are an `arange(...)` that was sliced, reshaped and permuted: then each
    digit of a position is a digit of the rank. O(number of ranks), once; O(1) for 0, 1, 2, ...

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
