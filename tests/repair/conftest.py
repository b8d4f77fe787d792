"""Fixture of the tests of repair."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.jobs import Jobs


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """A store, and processes that join jobs in it."""
    started = Jobs()
    yield started
    started.close()
