"""Signs of life of a job's processes, as one of them sees them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from meshverse.repair.membership import JobStore, Membership


@pytest.fixture
def no_more_files() -> Iterator[None]:
    """This process cannot open another file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:
        free = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_nobody_is_lost_because_this_process_has_too_many_open_files(no_more_files: None) -> None:
    store = JobStore(dist.HashStore(), "job")
    here = Membership(
        store,
        [1],
        None,
        "127.0.0.1",
        whole_replica=set,
        lost_after=10.0,
        slow_after=60.0,
        replaced_within=0.0,
        started_within=60.0,
    )
    with pytest.raises(OSError, match="Too many open files"):
        open(os.devnull)  # noqa: SIM115
    assert here.signs.why_lost(here.own.number) == ""
