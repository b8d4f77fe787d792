"""Links to pages of the documentation lead to a page, and to a heading on it.

Sphinx checks the links between pages; here are those in other Markdown files, and the pages that
source code, examples and tests name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from helpers.pages import ROOT

_LINK = re.compile(r"\]\((docs/[\w/.]+\.md)(?:#([\w-]+))?\)")
_NAMED = re.compile(r"docs/[\w/]+\.md")
_SOURCES = ("python", "csrc", "examples", "benchmarks", "tools")


def _anchors(page: Path) -> set[str]:
    """The anchors of a page, by the names that GitHub gives to headings."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^ *```.*?^ *```$", "", text), re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
    return named | set(re.findall(r'<a id="([\w-]+)">', text))


def _broken(text: str) -> Iterator[str]:
    for page, anchor in _LINK.findall(text):
        if not (ROOT / page).exists() or (anchor and anchor not in _anchors(ROOT / page)):
            yield f"{page}#{anchor}"


def test_links_lead_to_a_heading_of_a_page() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.md"))}
    assert sum(len(_LINK.findall(text)) for text in texts.values()) > 30
    broken = {name: list(_broken(text)) for name, text in texts.items()}
    assert not any(broken.values()), broken


def test_a_link_to_a_page_or_heading_that_is_not_there_is_found() -> None:
    text = "[a](docs/index.md), [b](docs/limits.md#limits), [c](docs/limits.md#no), [d](docs/no.md)"
    assert list(_broken(text)) == ["docs/limits.md#no", "docs/no.md#"]


def test_pages_that_source_code_names_exist() -> None:
    paths = [path for folder in _SOURCES for path in (ROOT / folder).rglob("*.[pch]*")]
    texts = [
        (path, path.read_text(encoding="utf-8"))
        for path in paths
        if path.suffix in (".py", ".pyi", ".cpp", ".hpp")
    ]
    named = {(path.name, page) for path, text in texts for page in _NAMED.findall(text)}
    assert len(named) > 3
    assert not [one for one in named if not (ROOT / one[1]).exists()]
