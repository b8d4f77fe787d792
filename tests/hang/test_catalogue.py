"""Verdicts on catalogued hangs, from dumps in each format that torch writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.hang_catalogue import CATALOGUE, CataloguedHang, Verdict
from helpers.recorded_job import Format
from meshverse.tools.commands.main import main

_FORMATS = [Format("nccl"), Format("nccl", is_timed=True), Format("nccl2"), Format("gloo")]


def _expected(hang: CataloguedHang, of: Format) -> Verdict | None:
    if of.is_gloo:
        return hang.gloo
    return hang.timed or hang.nccl if of.is_timed else hang.nccl


_CASES = [
    pytest.param(hang, of, expected, id=f"{hang.what}-{of.backend}{'-timed' * of.is_timed}")
    for hang in CATALOGUE
    for of in _FORMATS
    if (expected := _expected(hang, of)) is not None
]


@pytest.mark.parametrize(("hang", "of", "expected"), _CASES)
def test_the_root_cause_comes_first(hang, of, expected, tmp_path: Path, capsys) -> None:
    hang.job.write(tmp_path, of)
    command = ["hang", str(tmp_path), *(["--mesh", hang.mesh] if hang.mesh else [])]
    assert main(command) == (1 if expected.cause else 0)
    text = capsys.readouterr().out
    for part in expected.parts:
        assert part in text
    for part in expected.never:
        assert part not in text
    if expected.cause:
        assert main([*command, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)[0]["cause"] == expected.cause


def test_the_catalogue_has_each_kind() -> None:
    assert len(CATALOGUE) >= 24
    assert len({hang.what for hang in CATALOGUE}) == len(CATALOGUE)
