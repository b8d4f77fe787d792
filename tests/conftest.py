"""What every tier of tests shares: fake worlds and Hypothesis's settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from helpers import via_store
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


@pytest.fixture(scope="session")
def via_store_library(request: pytest.FixtureRequest) -> Path:
    """The compiled backend of `helpers.via_store`, from this checkout's cache if it is there."""
    if via_store.compiler() is None:
        pytest.skip("a backend in C++ needs a compiler: there is no c++, and CXX names none")
    return via_store.build(request.config.cache.mkdir("backends"))
