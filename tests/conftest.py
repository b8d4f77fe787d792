"""What every tier of tests shares: fake worlds, real processes, Hypothesis's settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import meshverse
from helpers import via_store
from helpers.crew import Crew
from helpers.worlds import FakeWorld, fake_world

# Real work of uneven cost, so no deadline; the same examples each time where nobody can look.
_COMMON = {"deadline": None, "print_blob": True, "derandomize": "CI" in os.environ}
settings.register_profile("meshverse", max_examples=150, **_COMMON)
settings.register_profile("thorough", max_examples=2000, **_COMMON)
settings.load_profile("meshverse")

_DEFAULT_WORLD = FakeWorld(size=8, rank=5)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[FakeWorld]:
    """A fake world of 8 ranks seen by rank 5, or as `helpers.worlds.in_worlds` says."""
    size, rank = getattr(request, "param", _DEFAULT_WORLD)
    with fake_world(size, rank) as started:
        yield started


_CREWS = {"four": 4, "eight": 8, "crew": 16}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _CREWS.keys().isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.processes)


def _processes(name: str) -> Iterator[Crew]:
    crew = Crew(_CREWS[name])
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    """Four processes, which form a world for each program they are given."""
    yield from _processes("four")


@pytest.fixture(scope="session")
def eight() -> Iterator[Crew]:
    """Eight processes, of which a program uses as many as it wants."""
    yield from _processes("eight")


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Sixteen processes, of which a program uses as many as it wants."""
    yield from _processes("crew")


@pytest.fixture
def uninstalled_afterwards() -> Iterator[None]:
    """torch's names are torch's again afterwards."""
    yield
    meshverse.uninstall()


@pytest.fixture
def shared(uninstalled_afterwards: None) -> None:
    """Meshes that are made apart share the universe of the world."""
    meshverse.install(share="world")


@pytest.fixture(scope="session")
def via_store_library(request: pytest.FixtureRequest) -> Path:
    """The compiled backend of `helpers.via_store`, from this checkout's cache if it is there."""
    if via_store.compiler() is None:
        pytest.skip("a backend in C++ needs a compiler: there is no c++, and CXX names none")
    return via_store.build(request.config.cache.mkdir("backends"))
