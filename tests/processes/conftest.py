"""The processes of this tier: one crew of 16, used by every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.crew import Crew

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Sixteen processes, of which a test uses as many as it wants."""
    crew = Crew(16)
    yield crew
    crew.stop()
