"""Fixtures of every tier of tests: fake worlds, real processes, Hypothesis's settings.

A test that failed says how to run it again, and leaves no process behind.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import meshverse
from helpers import jitter, processes, via_store
from helpers.crew import Crew
from helpers.worlds import FakeWorld, fake_world

# Real work of uneven cost, so no deadline; the same examples each time where nobody can look.
_COMMON = {"deadline": None, "print_blob": True, "derandomize": "CI" in os.environ}
settings.register_profile("meshverse", max_examples=150, **_COMMON)
settings.register_profile("thorough", max_examples=2000, **_COMMON)
settings.load_profile("meshverse")

_DEFAULT_WORLD = FakeWorld(size=8, rank=5)


# Inductor compiles plain loops, in the process that asks: seconds instead of half a minute. All
# processes of a run do, or one would compile what another that has vectors left in torch's cache.
_INDUCTOR = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # pays from some five kernels on
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="run a part of the files: 2/3 is the second of three")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers and ranks inherit this
        os.environ.update(_INDUCTOR, TORCHINDUCTOR_CACHE_DIR=tempfile.mkdtemp(prefix="inductor-"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[FakeWorld]:
    """A fake world of 8 ranks seen by rank 5, or as `helpers.worlds.in_worlds` says."""
    size, rank = getattr(request, "param", _DEFAULT_WORLD)
    with fake_world(size, rank) as started:
        yield started


_CREWS = {"crew", "bound_crew"}
_THREADS = {"threading", "Thread", "ThreadPoolExecutor"}


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    for item in items:
        if not _CREWS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.processes)
        if isinstance(item, pytest.Function) and not _THREADS.isdisjoint(vars(item.module)):
            item.add_marker(pytest.mark.threads)
    yield
    if part := config.getoption("part"):
        number, count = map(int, part.split("/"))
        files = {*sorted({item.path for item in items})[number - 1 :: count]}
        config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
        items[:] = [item for item in items if item.path in files]
    is_random = config.getoption("random_order_bucket", None) is not None
    if hasattr(config, "workerinput") and not is_random:  # a worker has one file at a time
        # Long files first, so that no worker runs one at the end, alone. Real processes take long.
        lengths = Counter(item.path for item in items if item.get_closest_marker("processes"))
        items.sort(key=lambda item: -lengths[item.path])


# Workers of xdist get 80, whatever the terminal; tables would be wrapped.
os.environ.pop("COLUMNS", None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    jitter.begin(item.nodeid)


_began = pytest.StashKey[float]()
_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    item.stash[_began] = processes.now()
    yield
    if item.stash.get(_failed, False):
        processes.end_those_since(item.stash[_began])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
        switch = f"{jitter.SWITCH}={jitter.seed()} " if jitter.seed() else ""
        again = f"{switch}{sys.executable} -m pytest -m '' '{item.nodeid}'"
        report.sections.append(("run this test again", again))
    return report


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Processes that form a world for each program they are given."""
    started = Crew()
    yield started
    started.stop()


@pytest.fixture
def fresh_crew() -> Iterator[Crew]:
    """Processes that ran no other test, whose threads and sockets may still be on their way out."""
    started = Crew()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def bound_crew() -> Iterator[Crew]:
    """Processes with an accelerator of the tests' own, which they keep: `helpers.splitting`."""
    started = Crew()
    yield started
    started.stop()


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
    """The compiled backend of `helpers.via_store`, one for all workers and for later runs."""
    if via_store.compiler() is None:
        pytest.skip("a backend in C++ needs a compiler: there is no c++, and CXX names none")
    return via_store.build(request.config.rootpath / "build" / "backends")
