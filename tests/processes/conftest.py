"""This tier is of real processes, also where a test starts some of its own."""

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
def bound_crew() -> Iterator[Crew]:
    """Four processes with an accelerator, which they keep."""
    crew = Crew(4)
    yield crew
    crew.stop()
