"""Cases of a test by tier: each runs in one of `make test`, `make test-all` and `make families`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["in_tiers"]


def in_tiers(
    cases: Iterable[Any], short: Collection[Any], long: Collection[Any] | None = None
) -> list[Any]:
    """Return the cases as parameters of a test, each with the mark of its tier.

    Args:
        cases: all of them: names, or tuples where the test has several parameters.
        short: those of `make test`; at least one.
        long: those that `make test-all` adds; the others are for `make families`. By default all
            others are long.
    """
    all_cases = list(cases)
    assert short, "no case of this test would run in `make test`"
    assert all(case in all_cases for case in (*short, *(long or ()))), "a tier has unknown cases"

    def marks(case: Any) -> list[pytest.MarkDecorator]:
        if case in short:
            return []
        return [pytest.mark.long if long is None or case in long else pytest.mark.sweep]

    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case))
        for case in all_cases
    ]
