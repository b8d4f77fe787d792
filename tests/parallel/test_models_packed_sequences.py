"""Transformers' function that masks packed sequences, while blocks replace it."""

from __future__ import annotations

import contextlib

import pytest

from meshverse.parallel.models.packed_sequences import without_masks_for_packed_sequences


def test_blocks_that_overlap_restore_the_function() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    own = masking.find_packed_sequence_indices
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(without_masks_for_packed_sequences())
    second.enter_context(without_masks_for_packed_sequences())
    replaced = masking.find_packed_sequence_indices
    assert replaced is not own
    first.close()  # as one of two threads may be done first
    assert masking.find_packed_sequence_indices is replaced
    second.close()
    assert masking.find_packed_sequence_indices is own
