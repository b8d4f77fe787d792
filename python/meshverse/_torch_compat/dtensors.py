"""Private parts of DTensor. Its module is imported only when one of these functions needs it."""

from __future__ import annotations

import torch


def is_strided_shard(placement: object) -> bool:
    """Whether a placement is `_StridedShard`, which FSDP2 uses for a dimension already split."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return type(placement) is _StridedShard


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, after waiting for the collective that fills it, if there is one."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def held_by(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
    """Return a DTensor's own local tensor and spec, or a plain tensor and None.

    `to_local` creates a new object each time, in some 10 us.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor._local_tensor, tensor._spec
    return tensor, None
