"""Tensors without memory, of a class that decides what operations on them do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def tensor_without_memory(cls: type, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return a tensor of a subclass, said to be contiguous and on the CPU, that has no memory."""
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(cls, shape, dtype=dtype, device=torch.device("cpu"))


def changes_its_inputs(operator: Any) -> bool:
    """Return whether an operator of torch writes to one of its arguments."""
    return bool(operator._schema.is_mutable)
