"""The processes of this tier, and a torch that is left as it was found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import meshverse
from helpers.crew import Crew


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "four" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    """Four processes, which form a world for each program they are given."""
    crew = Crew(4)
    yield crew
    crew.stop()


@pytest.fixture(autouse=True)
def uninstalled_afterwards() -> Iterator[None]:
    yield
    meshverse.uninstall()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """What is compiled is forgotten afterwards."""
    yield
    torch.compiler.reset()
