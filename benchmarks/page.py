from __future__ import annotations

from pathlib import Path


def write(root: Path, results: Path) -> None:
    """Filled in below."""
