"""Bounds for two results that differ only in the order in which sums were taken.

A split over ranks, another processor and another number of threads each take sums in an order of
their own. So a bound may not come from what one machine shows: it comes from the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def rounding(dtype: torch.dtype, *, terms: int, steps: int) -> float:
    """Bound the relative error between two orders of `steps` sums, each of the one before.

    A sum of n numbers, in any order, is off by at most n * eps / 2 of the sum of their sizes
    (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), hence two orders by n * eps from
    each other; and the errors of steps add up. Real errors are about the square root of that,
    which leaves room for sums that cancel. Defects are far above: without an all-reduce over two
    ranks, a gradient is off by about a half.

    Args:
        dtype: the narrowest in which anything is computed.
        terms: of the longest sum, such as the tokens that a weight's gradient sums over.
        steps: operations in a row that each sum or round.
    """
    return steps * terms * torch.finfo(dtype).eps


def relative_errors(
    seen: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], floor: float
) -> dict[str, float]:
    """Return the relative difference of each tensor, by Euclidean norm.

    Args:
        seen: tensors by name; None where there is no gradient.
        expected: likewise.
        floor: part of the largest tensor that a difference is at least relative to, because sums
            that cancel leave nothing but rounding: the gradient of a key's bias. "logits" are not
            among those that are compared with it.
    """
    assert seen.keys() == expected.keys()
    size = {name: 0.0 if each is None else each.norm().item() for name, each in expected.items()}
    least = floor * max(length for name, length in size.items() if name != "logits")
    errors = {}
    for name, tensor in expected.items():
        other = seen[name]
        if tensor is None or other is None:
            assert tensor is other, f"{name}: a gradient on one side only"
            continue
        errors[name] = (other - tensor).norm().item() / max(size[name], least)
    return errors


def largest_error(
    seen: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], floor: float
) -> tuple[float, str]:
    """Return the largest of the relative errors, and the tensor that has it; arguments as there."""
    errors = relative_errors(seen, expected, floor)
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[worst], worst


def training_error(
    trained: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Return the largest error of trained weights, and of which: relative to how far they moved.

    An error of a weight itself would say little: in a few steps, some move by 1e-4 in all.
    """
    seen, wanted = (
        {name: each - before[name] for name, each in weights.items()}
        for weights in (trained, expected)
    )
    return largest_error(seen, wanted, floor=1e-3)
