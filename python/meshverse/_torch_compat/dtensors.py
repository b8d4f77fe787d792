"""Private parts of DTensor, which is imported only when there is one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .groups import find_group


def is_strided_shard(placement: object) -> bool:
    """Whether a placement is torch's `_StridedShard`: FSDP2's of a dimension that is split."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return type(placement) is _StridedShard


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or the result of a collective that it still waits for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def group_ranks_of(mesh: Any) -> list[list[int]]:
    """Return the ranks of this rank's groups along the axes of a mesh, in group-rank order.

    Those of lazy groups, which are not created yet, are left out; a mesh without groups has none.
    """
    names = list.__iter__(getattr(mesh, "_dim_group_names", None) or [])
    found = [find_group(name) for name in names if name is not None]
    return [dist.get_process_group_ranks(group) for group in found if group is not None]


def held_by(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
    """Return the local tensor of a DTensor and its layout, or a plain tensor; the same objects.

    `to_local` makes another object each time, in some 10 us.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor._local_tensor, tensor._spec
    return tensor, None


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that a tensor was made from by slicing or viewing; None if it was not."""
    return tensor._base
