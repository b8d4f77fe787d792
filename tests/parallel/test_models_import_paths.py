"""Classes by their import paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from meshverse.parallel import import_class_from_path, import_classes_from_paths


def test_import_by_path() -> None:
    assert import_class_from_path("torch.nn.Linear") is nn.Linear
    with pytest.raises(ImportError, match=r"'torch\.nn' has no attribute 'Linea'"):
        import_class_from_path("torch.nn.Linea")
    with pytest.raises(ImportError, match="no_such_package"):
        import_class_from_path("no_such_package.Class")
    with pytest.raises(ImportError, match="No module named 'Linear'"):
        import_class_from_path("Linear")


def test_imports_that_fail_are_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "module_that_fails.py").write_text("raise RuntimeError('no such luck')")
    monkeypatch.syspath_prepend(tmp_path)
    wrong = ["no_such_package.Class", "torch.nn.Linea", "Linear", "module_that_fails.Class"]
    paths = ["torch.nn.Linear", *wrong, "torch.nn.Embedding"]
    assert import_classes_from_paths(paths) == [nn.Linear, nn.Embedding]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(wrong)
    assert all(repr(path) in caplog.text for path in wrong)
    assert "no such luck" in caplog.text
