"""This tier runs at several places: on NCCL where there is a GPU, and on the CPU anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.crew import Crew
from helpers.places import PLACES, World

_HERE = Path(__file__).parent
_SECONDS = 60  # of one program on the CPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def gpu_crew() -> Iterator[Crew]:
    """Eight processes that share one GPU."""
    crew = Crew(8)
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def splitting_crew() -> Iterator[Crew]:
    """Four processes with the tests' own device type, which they keep."""
    crew = Crew(4)
    yield crew
    crew.stop()


_CREWS = {"gloo": "eight", "splitting": "splitting_crew", "nccl": "gpu_crew"}


@pytest.fixture
def world(way: str, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """The default group of this test, in this way; see `helpers.at_places`."""
    place, *more = way.split()
    library = request.getfixturevalue("via_store_library") if place == "splitting" else ""
    return World(place, str(tmp_path), str(library), "bound" in more, "mixed" in more)


@pytest.fixture
def run(world: World, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Runs a program on so many ranks of this place; gives what it returned, by rank."""
    crew: Crew = request.getfixturevalue(_CREWS[world.place])
    seconds = _SECONDS * PLACES[world.place].slowness
    return lambda program, size, *given: crew.run(program, size, *given, timeout=seconds)
