"""Private parts of DTensor. Its module is imported only when one of these functions needs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .groups import find_group


def is_strided_shard(placement: object) -> bool:
    """Whether a placement is `_StridedShard`, which FSDP2 uses for a dimension already split."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return type(placement) is _StridedShard


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, after waiting for the collective that fills it, if there is one."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def group_ranks_of(mesh: Any) -> list[list[int]]:
    """Return the global ranks of this rank's groups along the axes of a mesh, in group-rank order.

    Lazy groups that are not created yet are left out. For a mesh without groups, the list is empty.
    """
    names = list.__iter__(getattr(mesh, "_dim_group_names", None) or [])
    found = [find_group(name) for name in names if name is not None]
    return [dist.get_process_group_ranks(group) for group in found if group is not None]


def lacks_a_group(stock: Any, ranks: list[list[int]]) -> bool:
    """Return whether a stock mesh was made with process groups, and one of them has ended.

    A later world may have another group of the same name.

    Args:
        stock: mesh of torch's class.
        ranks: ascending global ranks of this rank's group along each axis.
    """
    names = getattr(stock, "_dim_group_names", None) or []
    if len(names) != len(ranks) or None in names:
        return False
    return [sorted(found) for found in group_ranks_of(stock)] != ranks


def held_by(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
    """Return a DTensor's own local tensor and spec, or a plain tensor and None.

    `to_local` creates a new object each time, in some 10 us.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor._local_tensor, tensor._spec
    return tensor, None


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this one is a view of; None if it is not a view."""
    return tensor._base
