"""The version is written down once; between releases it is a development version."""

from __future__ import annotations

import re
from pathlib import Path

import meshverse

_TOP = Path(__file__).parents[2]


def _text(file: str) -> str:
    return (_TOP / file).read_text(encoding="utf-8")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.removesuffix(".dev0").split(".")))


def test_the_package_has_the_version_of_the_project() -> None:
    match = re.search(r'^version = "(.*)"$', _text("pyproject.toml"), flags=re.MULTILINE)
    assert match is not None
    assert meshverse.__version__ == match[1]
    assert re.search(r"^project\(.*VERSION", _text("CMakeLists.txt"), re.MULTILINE) is None


def test_with_unreleased_changes_it_is_a_development_version() -> None:
    """So a bug report does not name a release for what came after it."""
    unreleased, *releases = re.split(r"^## \[", _text("CHANGELOG.md"), flags=re.MULTILINE)[1:]
    assert unreleased.startswith("Unreleased]")
    has_changes = bool(unreleased.removeprefix("Unreleased]").strip())
    newest = releases[0].partition("]")[0]
    assert re.match(re.escape(newest) + r"\] - \d{4}-\d\d-\d\d$", releases[0].splitlines()[0])
    assert meshverse.__version__.endswith(".dev0") == has_changes
    if has_changes:
        assert _numbers(meshverse.__version__) > _numbers(newest)
    else:
        assert meshverse.__version__ == newest
