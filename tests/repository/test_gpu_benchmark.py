"""The benchmark of communicators on one GPU: what it does there, done with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.forked import SECONDS

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.long
@pytest.mark.processes
def test_what_is_measured_on_a_gpu_works_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_BENCHMARKS)
    from crews import in_crew
    from harness import OURS, STOCK
    from suites.gpu import set_up

    held = {
        side: in_crew(4, set_up, side, 4, "cpu", False, limit_s=SECONDS)[0]
        for side in (STOCK, OURS)
    }
    assert held[OURS]["set up"] > 0
    assert 0 < held[OURS]["process groups"] < held[STOCK]["process groups"]
