"""The version is written down in three places, and they agree."""

from __future__ import annotations

import re
from pathlib import Path

import meshverse

_TOP = Path(__file__).parents[2]


def _found(file: str, pattern: str) -> str:
    match = re.search(pattern, (_TOP / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert match is not None, f"{file} has no {pattern}"
    return match[1]


def test_the_version_is_the_same_everywhere() -> None:
    version = _found("pyproject.toml", r'^version = "(.*)"$')
    assert _found("CMakeLists.txt", r"^project\(meshverse VERSION (\S+) ") == version
    assert _found("CHANGELOG.md", r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$") == version
    assert meshverse.__version__ == version
