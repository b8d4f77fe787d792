"""Ranks as messages show them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["shortened"]


def shortened(ranks: Sequence[int]) -> str:
    """The ranks, or of many the first eight and how many more.

    >>> shortened([3, 4]), shortened(range(10))
    ('[3, 4]', '[0, 1, 2, 3, 4, 5, 6, 7] and 2 more')
    """
    shown = list(ranks[:8])
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else f"{shown}"
