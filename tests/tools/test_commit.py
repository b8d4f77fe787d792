"""The commit of a package: of its own source tree, and of no other repository around it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from meshverse.tools.commit import commit_of_checkout


def _git(folder: Path, *command: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, *command], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "python" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "commit", "--quiet", "--allow-empty", "--message=first")
    return folder


def test_of_a_source_tree_it_is_the_commit_and_whether_files_have_changed(package: Path) -> None:
    _git(package, "add", ".")
    _git(package, "commit", "--quiet", "--message=package")
    commit = commit_of_checkout(package)
    assert re.fullmatch("[0-9a-f]{12}", commit)
    assert _git(package, "rev-parse", "HEAD").startswith(commit)
    (package / "__init__.py").write_text("changed = True\n")
    assert commit_of_checkout(package) == f"{commit}-dirty"


def test_a_package_installed_inside_a_checkout_has_none(package: Path) -> None:
    assert commit_of_checkout(package) == ""  # such as one in .venv/


def test_without_git_there_is_none(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _git(package, "add", ".")
    monkeypatch.setenv("PATH", "")
    assert commit_of_checkout(package) == ""
