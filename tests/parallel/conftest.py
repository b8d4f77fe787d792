"""The processes of this tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.crew import Crew

_CREWS = ("four", "eight")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if set(_CREWS) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    """Four processes, which form a world for each program they are given."""
    crew = Crew(4)
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def eight() -> Iterator[Crew]:
    """Eight processes, which form a world for each program they are given."""
    crew = Crew(8)
    yield crew
    crew.stop()
