"""This tier runs on several platforms: on NCCL where there is a GPU, and on the CPU anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.crew import Crew
from helpers.forked import SECONDS
from helpers.platforms import PLATFORMS, World

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def crews(crew: Crew, bound_crew: Crew) -> Iterator[dict[str, Crew]]:
    """Crews by platform: a process keeps what it has set up for a device."""
    on_gpu = Crew()
    yield {"gloo": crew, "splitting": bound_crew, "nccl": on_gpu}
    on_gpu.stop()


@pytest.fixture
def world(way: str, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """The default group of this test, in this way; see `helpers.at_platforms`."""
    platform, *more = way.split()
    library = request.getfixturevalue("via_store_library") if platform == "splitting" else ""
    return World(platform, str(tmp_path), str(library), "bound" in more, "mixed" in more)


@pytest.fixture
def run(world: World, crews: dict[str, Crew]) -> Callable[..., list[Any]]:
    """Runs a program on so many ranks of this platform; gives what it returned, by rank."""
    crew = crews[world.platform]
    # Less than the 1,800 s of a test, so that a hang says where each rank is.
    seconds = min(SECONDS * PLATFORMS[world.platform].slowness, 1500)
    return lambda program, size, *given: crew.run(program, size, *given, timeout=seconds)
