"""transformers' per-layer check for packed sequences, and how to do without it.

With FlashAttention, transformers asks in every layer whether the position ids belong to packed
sequences. The answer is on the GPU, so every layer waits for it. Where nothing is packed, the
answer is known.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["patch_is_packed_sequence", "restore_is_packed_sequence"]

_MODULE = "transformers.modeling_flash_attention_utils"
_NAME = "_is_packed_sequence"


def _never_packed(position_ids: Any, batch_size: int) -> bool:
    """In place of transformers' own: nothing is packed."""
    return False


_replaced: dict[str, Any] = {}  # transformers' own function by name, while it is replaced


def patch_is_packed_sequence() -> bool:
    """Replace transformers' check for packed sequences by False. Not where any are trained.

    Returns:
        Whether it was replaced now: not where it was before, or transformers has no such check.
    """
    module = _flash_attention_utils()
    current = getattr(module, _NAME, None)
    if current is None or current is _never_packed:
        return False
    _replaced[_NAME] = current
    setattr(module, _NAME, _never_packed)
    return True


def restore_is_packed_sequence() -> None:
    """Put transformers' own check back, if it was replaced."""
    module = _flash_attention_utils()
    if getattr(module, _NAME, None) is _never_packed:
        setattr(module, _NAME, _replaced.pop(_NAME))


def _flash_attention_utils() -> Any:
    try:
        return importlib.import_module(_MODULE)
    except ImportError:
        return None
