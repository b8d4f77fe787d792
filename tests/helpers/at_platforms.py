"""The mark for a test that runs on several platforms, with several kinds of default group."""

from __future__ import annotations

import pytest

from helpers.versions import needs_one_split
from one_gpu import why_no_gpu

__all__ = ["ON_GPU", "at"]

_NO_GPU = why_no_gpu()
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(_NO_GPU is not None, reason=_NO_GPU or ""),
)


def at(*ways: str, gloo_is_long: bool = False) -> pytest.MarkDecorator:
    """Run a test in each of these ways, given to it as `way`.

    Args:
        ways: a platform, then "bound" or "mixed" or both; see `helpers.platforms.World`.
        gloo_is_long: whether the long tier has the case of gloo.
    """
    cases = [pytest.param(way, marks=_marks(way, gloo_is_long)) for way in ways]
    return pytest.mark.parametrize("way", cases)


def _marks(way: str, gloo_is_long: bool) -> tuple[pytest.MarkDecorator, ...]:
    if way.startswith("nccl"):
        return ON_GPU
    if way == "gloo" and gloo_is_long:
        return (pytest.mark.long,)
    return (needs_one_split,) if way == "splitting bound" else ()
