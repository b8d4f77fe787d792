"""What DTensor has that torch calls private. Importing it is left until a DTensor is at hand."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_strided_shard", "root_of", "waited"]


def is_strided_shard(placement: object) -> bool:
    """Whether a placement is torch's `_StridedShard`: FSDP2's of a dimension that is split."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return type(placement) is _StridedShard


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the result of a collective that it still waits for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def root_of(mesh: Any) -> Any:
    """The mesh that a mesh was derived from; itself if from none."""
    return mesh._get_root_mesh()
