"""The layouts of this rank's tensors when a move was built, and whether they are the same now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .sides import has_memory, local_tensor

__all__ = ["KnownLayouts"]


class _Layout(NamedTuple):
    """All of a tensor that a plan depends on. Compared in each run, so no text."""

    local_shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    has_memory: bool
    shape: torch.Size | None = None
    placements: tuple[Any, ...] = ()
    mesh: Any = None

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        local = local_tensor(tensor)
        own = (local.shape, local.dtype, local.device, has_memory(local))
        if not isinstance(tensor, DTensor):
            return cls(*own)
        return cls(*own, tensor.shape, tensor.placements, tensor.device_mesh)

    def __str__(self) -> str:
        placed = ""
        if self.shape is not None:
            placed = f" of {tuple(self.shape)} {self.placements} on {self.mesh}"
        state = "" if self.has_memory else " without memory"
        return f"{tuple(self.local_shape)} {self.dtype} on {self.device}{placed}{state}"


class KnownLayouts:
    """The layouts that tensors have now, to be compared with those they have later.

    Args:
        tensors: each with what to call it.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = [(name, tensor, _Layout.of(tensor)) for name, tensor in tensors]

    def what_changed(self) -> str:
        """Which tensor has another layout than then, in words; empty if none has."""
        for name, tensor, then in self._tensors:
            if (now := _Layout.of(tensor)) != then:
                return (
                    f"Reshard: {name} has changed since the move was built: it was {then}, and is "
                    f"{now} now. Build the move again."
                )
        return ""
