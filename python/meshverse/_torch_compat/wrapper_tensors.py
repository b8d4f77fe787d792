"""Tensors without memory, of a class that decides what operations on them do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def tensor_without_memory(cls: type[_Tensor], shape: Sequence[int], dtype: torch.dtype) -> _Tensor:
    """Return a tensor of a subclass, said to be contiguous and on the CPU, that has no memory."""
    maker: Any = torch.Tensor._make_wrapper_subclass
    made: _Tensor = maker(cls, shape, dtype=dtype, device=torch.device("cpu"))
    return made


def changes_its_inputs(operator: Any) -> bool:
    """Return whether an operator of torch writes to one of its arguments."""
    return bool(operator._schema.is_mutable)
