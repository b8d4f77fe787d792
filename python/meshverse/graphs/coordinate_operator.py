"""`torch.ops.meshverse.coordinate`: where the rank that runs a graph stands along an axis.

A graph that one rank compiles for all ranks contains the arithmetic of a mesh, but no rank. The
rank that runs it asks for its coordinate by this operator. Importing Meshverse registers it, so a
process that only runs such a graph must import Meshverse too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshverse import _torch_compat as compat

__all__ = ["coordinate", "coordinate_of"]

# Kept in a global: when the library object goes, the operator goes too.
_library: Any = torch.library.Library("meshverse", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "coordinate(int[] axis, int[] ranks, int first) -> SymInt", tags=torch.Tag.pt2_compliant_tag
)


def coordinate_of(rank: int, axis: Sequence[int], ranks: Sequence[int], first: int) -> int:
    """The coordinate of a global rank along an axis. O(digits).

    Args:
        rank: the global rank.
        axis: how the axis steps through positions: size and stride of each digit in turn, the
            rightmost fastest.
        ranks: the global ranks at the positions 0, 1, ..., less `first`, as digits like those of
            `axis`. Sorted by stride, each stride is a multiple of the one before times its size.
        first: the global rank at position 0.

    Raises:
        AssertionError: the rank is not among these, as stock's.

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
            f"Rank {rank} runs a graph that asks for its place along an axis of a mesh, and it is "
            f"not in that mesh. Its ranks are {first} and (size, stride) "
            f"{', '.join(map(str, _pairs(ranks)))} from there. Run the graph on ranks of the mesh."
        )
    index = 0
    for size, stride in _pairs(axis):
        index = index * size + position // stride % size
    return index


def _pairs(digits: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(digits[::2], digits[1::2], strict=True)


def _run(axis: Sequence[int], ranks: Sequence[int], first: int) -> int | torch.SymInt:
    simulated = compat.on_simulated_ranks(lambda rank: coordinate_of(rank, axis, ranks, first))
    return coordinate_of(dist.get_rank(), axis, ranks, first) if simulated is None else simulated


def _fake(axis: Sequence[int], ranks: Sequence[int], first: int) -> int | torch.SymInt:
    compat.let_inductor_call(coordinate)
    size = 1
    for digit_size, _ in _pairs(axis):
        size *= digit_size
    symbol = compat.coordinate_symbol(size)
    return _run(axis, ranks, first) if symbol is None else symbol


_library.impl("coordinate", _run, "CompositeExplicitAutograd")
torch.library.register_fake("meshverse::coordinate", _fake, lib=_library)

coordinate = torch.ops.meshverse.coordinate.default
