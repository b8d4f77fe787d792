"""Replacement of transformers' checks for packed sequences.

With FlashAttention, transformers checks in every layer whether the position ids belong to packed
sequences. The result is on the GPU, so every layer waits for it, even if nothing is packed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import nn

from meshverse.locks import state_lock

_CHECK = "_is_packed_sequence"
_MASKS = "find_packed_sequence_indices"
_MODULES = {_CHECK: "modeling_flash_attention_utils", _MASKS: "masking_utils"}

# transformers' own functions, while they are replaced: the check, and what finds sequences to mask.
_own: list[Any] = []
_own_masks: list[Any] = []
_open_blocks: set[object] = set()  # in any thread: the last one restores it


# Models that are trained on packed sequences.
_packed: WeakSet[nn.Module] = WeakSet()


def note_packed(model: nn.Module) -> None:
    """Note that a model is trained on packed sequences, as long as it lives."""
    _packed.add(model)


def check_none_is_packed() -> None:
    """Raise ValueError if a model is trained on packed sequences: the check is for all models."""
    for model in _packed:
        raise ValueError(
            "patch_is_packed_sequence=True would replace transformers' check for all models of "
            f"this process, and a {type(model).__name__} is trained with packed_sequences=True: "
            "its sequences would attend to one another. Leave patch_is_packed_sequence out."
        )


def _never_packed(position_ids: Any, batch_size: int) -> bool:
    return False


def _no_indices(position_ids: Any) -> None:
    """Replace transformers' function that finds packed sequences: find none."""


def patch_is_packed_sequence() -> bool:
    """Make transformers' check for packed sequences return False. Do not use it with them.

    Returns:
        Whether this call replaced the check. False if it was replaced before, or if transformers
        has no such check.

    Raises:
        ValueError: an `FSDP2Manager` has parallelized a model for packed sequences.
    """
    check_none_is_packed()
    module = _module_with(_CHECK)
    if module is None or module._is_packed_sequence is _never_packed:
        return False
    _own.append(module._is_packed_sequence)
    module._is_packed_sequence = _never_packed
    return True


def restore_is_packed_sequence() -> None:
    """Restore transformers' own check, if it was replaced."""
    module = _module_with(_CHECK)
    if module is not None and module._is_packed_sequence is _never_packed:
        module._is_packed_sequence = _own.pop()


@contextlib.contextmanager
def without_masks_for_packed_sequences() -> Iterator[None]:
    """Keep transformers from masking tokens by their positions, within the context.

    If positions do not increase by one, transformers assumes packed sequences, and masks each
    sequence from the others.
    """
    if (module := _module_with(_MASKS)) is None:
        yield
        return
    block = object()
    try:
        with state_lock.held:
            _open_blocks.add(block)
            if module.find_packed_sequence_indices is not _no_indices:
                _own_masks.append(module.find_packed_sequence_indices)
                module.find_packed_sequence_indices = _no_indices
        yield
    finally:
        with state_lock.held:
            _open_blocks.discard(block)
            if _own_masks and not _open_blocks:
                module.find_packed_sequence_indices = _own_masks.pop()


def _module_with(name: str) -> Any:
    """Return transformers' module that has a function of this name, or None."""
    try:
        module = importlib.import_module(f"transformers.{_MODULES[name]}")
    except ImportError:
        return None
    return module if hasattr(module, name) else None
