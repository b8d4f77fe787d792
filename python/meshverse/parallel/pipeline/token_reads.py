"""Operators that read the values of token ids, seen while a model runs.

Example:
    >>> tokens = torch.ones(2, 3, dtype=torch.int64)
    >>> with TokenReads(tokens) as reads:
    ...     _ = tokens.view(-1).shape, tokens != 0
    >>> reads.operators
    ['aten.ne.Scalar']
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshverse._torch_compat.dispatch import DispatchMode, tensors_in

_LIKE: tuple[str, ...] = ("empty_like", "full_like", "ones_like", "zeros_like")
_LIKE += ("new_empty", "new_full", "new_ones", "new_zeros")
# Operators that embed tokens, or use only their shape, dtype and device.
_HARMLESS = {getattr(torch.ops.aten, name).default for name in ("embedding", *_LIKE)}


class TokenReads(DispatchMode):  # type: ignore[misc]
    """Mode that records the operators that read the values of tokens, but for their embedding.

    Args:
        tokens: token ids, not on the meta device. A view of them counts as the tokens.

    Attributes:
        operators: names of those that ran, each once.
    """

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.operators: list[str] = []
        self._tokens = tokens  # keeps the memory

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        is_harmless = operator in _HARMLESS or getattr(operator, "is_view", False)
        if not is_harmless and str(operator) not in self.operators:
            given = (*tensors_in(arguments), *tensors_in(keywords))
            if any(map(self._is_tokens, given)):
                self.operators.append(str(operator))
        return operator(*arguments, **keywords)

    def said(self) -> str:
        """Return the operators in words, or "" if there are none."""
        names = ", ".join(self.operators)
        return (
            names and f"reads its tokens besides embedding them ({names}); later stages lack them"
        )

    def _is_tokens(self, tensor: Tensor) -> bool:
        pointer = self._tokens.untyped_storage().data_ptr()
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() == pointer
