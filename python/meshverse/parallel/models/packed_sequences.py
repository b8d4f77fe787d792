"""transformers' checks for packed sequences, and how to do without them.

With FlashAttention, transformers asks in every layer whether the position ids belong to packed
sequences. The answer is on the GPU, so every layer waits for it. Where nothing is packed, the
answer is known.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

__all__ = [
    "patch_is_packed_sequence",
    "restore_is_packed_sequence",
    "without_masks_for_packed_sequences",
]

_MASKS, _FIND = "transformers.masking_utils", "find_packed_sequence_indices"

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


@contextlib.contextmanager
def without_masks_for_packed_sequences() -> Iterator[None]:
    """Within the context, transformers makes no mask where positions do not go up by one.

    It takes such positions for several sequences in a row, and masks them from each other.
    """
    module = _imported(_MASKS)
    find = getattr(module, _FIND, None)
    if find is None:
        yield
        return
    setattr(module, _FIND, _never_found)
    try:
        yield
    finally:
        setattr(module, _FIND, find)


def _never_found(position_ids: Any) -> None:
    """In place of transformers' own: no indices of packed sequences."""


def _flash_attention_utils() -> Any:
    return _imported(_MODULE)


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
