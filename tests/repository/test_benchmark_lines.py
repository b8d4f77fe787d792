"""`make bench` into a file or pipe: a line for each suite when it is done, and no bars."""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path

import pytest
import torch

from helpers.pages import ROOT

rich_console = pytest.importorskip("rich.console", reason="benchmarks print with rich")


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures NCCL where there is a GPU")
def test_a_file_gets_a_line_for_each_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    cli = importlib.import_module("cli")
    file = io.StringIO()
    # This suite measures nothing here, and says why.
    reports = cli.run_suites(["gpu", "gpu"], True, tmp_path, rich_console.Console(file=file))
    assert [report.name for report in reports] == ["gpu", "gpu"]
    lines = file.getvalue().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(r"gpu: .*(needs|NCCL|CUDA).*, \d+ s", line)


_SUITES = sorted(path.stem for path in (ROOT / "benchmarks" / "suites").glob("*.py"))


@pytest.mark.parametrize("suite", [name for name in _SUITES if name != "__init__"])
def test_what_a_suite_imports_is_there(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    importlib.import_module(f"suites.{suite}")
