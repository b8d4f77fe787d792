"""The figures in README and the documentation are those of the results that are kept."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from helpers.pages import ROOT


def test_results_stay_small_enough_to_commit() -> None:
    size = sum(path.stat().st_size for path in (ROOT / "benchmarks" / "results").iterdir())
    assert size <= 1_500_000


def test_figures_are_those_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("page")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    page.write(tmp_path, ROOT / "benchmarks" / "results")
    for path in ["README.md", "docs/benchmarks.md", "docs/when.md"]:
        written = (tmp_path / path).read_text(encoding="utf-8")
        again = "write them again: benchmarks/page.py has write(root, results)"
        assert written == (ROOT / path).read_text(encoding="utf-8"), again
        assert "<!-- figures: " in written
