"""Checks of `make dist` on what it has built."""

from __future__ import annotations

import importlib.util
import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

_TOOL = Path(__file__).parents[2] / "tools" / "make_dist.py"

_GIT = {"pyproject.toml", "csrc/layout.cpp", "docs/when.md", "docs/plan.svg", "tests/gpu/test_x.py"}
_HELD = {"pyproject.toml", "csrc/layout.cpp", "docs/when.md", "PKG-INFO"}


@pytest.fixture(scope="module")
def make_dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_dist", _TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sdist_has_what_it_needs(make_dist: ModuleType) -> None:
    make_dist.check_sdist(_HELD, _GIT)


def test_a_file_that_is_missing_or_not_needed_is_named(make_dist: ModuleType) -> None:
    with pytest.raises(make_dist.DistError, match=r"lacks csrc/layout\.cpp"):
        make_dist.check_sdist(_HELD - {"csrc/layout.cpp"}, _GIT)
    for extra in ("docs/plan.svg", "tests/gpu/test_x.py", "python/meshverse/_core.so"):
        with pytest.raises(make_dist.DistError, match=f"no use for {extra}"):
            make_dist.check_sdist(_HELD | {extra}, _GIT)


@pytest.mark.parametrize("tag", ["manylinux_2_28_x86_64", "manylinux_2_17_aarch64"])
def test_old_platforms_will_do(make_dist: ModuleType, tag: str) -> None:
    verdict = f'x.whl is consistent with the following\nplatform tag: "{tag}".\n'
    assert make_dist.check_verdict(verdict) == tag


@pytest.mark.parametrize("tag", ["manylinux_2_31_x86_64", "linux_x86_64", "manylinux_3_0_x86_64"])
def test_newer_platforms_will_not(make_dist: ModuleType, tag: str) -> None:
    with pytest.raises(make_dist.DistError, match=f"auditwheel says {tag}"):
        make_dist.check_verdict(f'x.whl is consistent with the following platform tag: "{tag}".')
    with pytest.raises(make_dist.DistError, match="no platform tag"):
        make_dist.check_verdict("x.whl is no wheel")


def test_wheels_are_compared_byte_by_byte(make_dist: ModuleType, tmp_path: Path) -> None:
    def wheel(name: str, year: int = 2026, **files: str) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for file, text in files.items():
                archive.writestr(zipfile.ZipInfo(file, (year, 1, 1, 0, 0, 0)), text)
        return tmp_path / name

    one = wheel("one", core="x", init="y")
    make_dist.check_same(one, wheel("same", core="x", init="y"))
    with pytest.raises(make_dist.DistError, match="differ in core, more"):
        make_dist.check_same(one, wheel("other", core="z", init="y", more=""))
    with pytest.raises(make_dist.DistError, match="of other times"):
        make_dist.check_same(one, wheel("later", 2027, core="x", init="y"))


def test_links_of_readme_lead_into_the_repository(make_dist: ModuleType) -> None:
    readme = (
        "[a](docs/when.md#x) ![p](docs/sharing.svg) [b](https://x.org/y) [c](#here) [`d`](e.py)"
    )
    assert make_dist.with_links(readme, "https://host/me/it", "v1.0") == (
        "[a](https://host/me/it/blob/v1.0/docs/when.md#x) "
        "![p](https://host/me/it/raw/v1.0/docs/sharing.svg) [b](https://x.org/y) [c](#here) "
        "[`d`](https://host/me/it/blob/v1.0/e.py)"
    )
    cloned = make_dist.with_links(
        "git clone <address of this repository> meshverse", "https://host/me/it", "v1.0"
    )
    assert cloned == "git clone https://host/me/it meshverse"


def test_no_link_of_our_readme_is_left_relative(make_dist: ModuleType) -> None:
    text = (_TOOL.parents[1] / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", make_dist.with_links(text, "https://host/me/it", "v1.0"))
    assert len(links) > 20
    assert "git clone <address of this repository>" in text
    assert [link for link in links if not link.startswith("https://")] == []
    files = [re.sub(r"#.*", "", link) for link in re.findall(r"\]\(([^)]+)\)", text)]
    missing = [file for file in files if not (_TOOL.parents[1] / file).exists()]
    assert missing == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the standard library reads no TOML")
def test_the_urls_are_part_of_the_project(make_dist: ModuleType) -> None:
    import tomllib

    text = (_TOOL.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    urls = make_dist.project_urls("https://host/me/it", "v1.0")
    assert tomllib.loads(text + urls)["project"]["urls"] == {
        "Repository": "https://host/me/it",
        "Documentation": "https://host/me/it/blob/v1.0/docs/index.md",
        "Changelog": "https://host/me/it/blob/v1.0/CHANGELOG.md",
        "Issues": "https://host/me/it/issues",
    }


def test_an_address_that_is_none_is_refused(make_dist: ModuleType) -> None:
    for given in ("me/it", "http://host/me", "https://host", "https://host/me?x"):
        with pytest.raises(make_dist.DistError, match="give an address"):
            make_dist._source(given)
