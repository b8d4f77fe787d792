"""Rows of tensors that change ranks, with their gradients on the way back.

Example:
    >>> received = exchange_rows(rows, [3, 0], [1, 2], group)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["exchange_rows", "pair_features", "scale_gradient"]


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send consecutive rows to each rank of a group, and get theirs; gradients go the other way.

    Args:
        rows: shape (sum of sent, ...).
        sent: number of rows for each rank of the group.
        received: number of rows from each rank of the group.
        group: all of its ranks call this.

    Returns:
        Rows by the rank they come from, shape (sum of received, ...).
    """
    apply: Any = _Exchange.apply
    exchanged: Tensor = apply(rows, list(sent), list(received), group)
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = (received, sent, group)
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, *ctx.back), None, None, None


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group)
    return result


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """The tensor itself; its gradient is multiplied by a factor."""
    apply: Any = _Scale.apply
    scaled: Tensor = apply(tensor, factor)
    return scaled


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def pair_features(features: Tensor, mesh: DeviceMesh) -> Tensor:
    """From consecutive features of two halves, each rank's share of the first and of the second.

    A weight that gives gates and features, one half after the other, is split as it lies: of n
    ranks the first have gates only, the last features only. An expert needs both for the same
    places. In units of a half's n-th part, rank r has the parts 2r and 2r+1, and needs r and n+r.

    Args:
        features: shape (rows, features of a rank), the same rows on all ranks.
        mesh: 1-D.

    Returns:
        The same shape: this rank's gates, then its features.
    """
    size, rank, count = mesh.size(), mesh.get_local_rank(), features.size(0)
    if size == 1:
        return features
    first, second = features.chunk(2, dim=-1)
    to_first, to_second = 2 * rank % size, (2 * rank + 1) % size
    if to_first > to_second:
        first, second = second, first
    sent, received = [0] * size, [0] * size
    for target in (to_first, to_second):
        sent[target] = count
    for source in (rank // 2, (size + rank) // 2):
        received[source] = count
    halves = exchange_rows(torch.cat([first, second]), sent, received, mesh.get_group())
    return torch.cat(halves.chunk(2), dim=-1) if count else halves.new_empty(features.shape)
