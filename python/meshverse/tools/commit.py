"""Version and commit of this package. Without torch, so that `meshverse --version` is quick."""

from __future__ import annotations

import subprocess
from pathlib import Path

from meshverse import _core


def version_and_commit() -> str:
    """Return the version and commit of this package, such as "0.3.0 (commit 8f29b36f1c02)".

    The commit is that of the git checkout which the package is imported from, or else that which
    its core was built from; "unknown" for a core built outside of a checkout. Runs git.
    """
    commit = commit_of_checkout(Path(__file__).parents[1]) or _core.__commit__
    return f"{_core.__version__} (commit {commit})"


def commit_of_checkout(package: Path) -> str:
    """Return the commit of a package's source tree; "" if it is installed, or there is no git."""
    # A virtual environment can lie in a checkout too, of which its files are no part.
    if not _git(package, "ls-files", "__init__.py"):
        return ""
    return _git(package, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *command: str) -> str:
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
