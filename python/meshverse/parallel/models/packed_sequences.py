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

_CHECK = "_is_packed_sequence"  # in the first of these modules, _MASKS in the second
_MASKS = "find_packed_sequence_indices"
_MODULES = {_CHECK: "modeling_flash_attention_utils", _MASKS: "masking_utils"}

_own: list[Any] = []  # transformers' own check, while it is replaced


def _never_packed(position_ids: Any, batch_size: int) -> bool:
    return False


def _no_indices(position_ids: Any) -> None:
    """Replace transformers' own, which would find sequences."""


def patch_is_packed_sequence() -> bool:
    """Replace transformers' check for packed sequences by False. Not where any are trained.

    Returns:
        Whether it was replaced now: not where it was before, or transformers has no such check.
    """
    module = _module_with(_CHECK)
    if module is None or module._is_packed_sequence is _never_packed:
        return False
    _own.append(module._is_packed_sequence)
    module._is_packed_sequence = _never_packed
    return True


def restore_is_packed_sequence() -> None:
    """Put transformers' own check back, if it was replaced."""
    module = _module_with(_CHECK)
    if module is not None and module._is_packed_sequence is _never_packed:
        module._is_packed_sequence = _own.pop()


@contextlib.contextmanager
def without_masks_for_packed_sequences() -> Iterator[None]:
    """Keep transformers from making a mask where positions do not go up by one.

    It takes such positions for several sequences in a row, and masks them from each other.
    """
    if (module := _module_with(_MASKS)) is None:
        yield
        return
    own = module.find_packed_sequence_indices
    module.find_packed_sequence_indices = _no_indices
    try:
        yield
    finally:
        module.find_packed_sequence_indices = own


def _module_with(name: str) -> Any:
    """Return transformers' module that has a name; None if it is not there."""
    try:
        module = importlib.import_module(f"transformers.{_MODULES[name]}")
    except ImportError:
        return None
    return module if hasattr(module, name) else None
