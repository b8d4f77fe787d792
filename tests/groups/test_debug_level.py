"""c10d's debug wrapper, which makes groups of any backend wait for their members."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend "fake"

from helpers.crew import Crew
from helpers.versions import AT_LEAST_2_15
from meshverse import init_device_mesh
from meshverse._torch_compat.backends import creation_blocks

_NCCL = "nccl-legacy" if AT_LEAST_2_15 else "nccl"  # the one that connects at first use
_MADE_AT_ONCE = (_NCCL, "fake", f"cpu:fake,cuda:{_NCCL}")


def _alone(level: str) -> tuple[str, float]:
    """Make a mesh on rank 0 alone; return rank 0's outcome, and after how long."""
    outcome = "made"
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    start = time.monotonic()
    try:
        if dist.get_rank() == 0:
            init_device_mesh(
                "cpu",
                (2,),
                mesh_dim_names=("dp",),
                backend_override={"dp": "fake"},
                timeout=timedelta(seconds=1),  # short-timeout: it must elapse
            )
    except RuntimeError as error:
        outcome = str(error)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    seconds = time.monotonic() - start
    dist.barrier()
    return outcome, seconds


def test_under_detail_a_member_that_does_not_come_is_named(crew: Crew) -> None:
    (result, seconds), _ = crew.run(_alone, 2, "DETAIL")
    assert "Rank 0 could not create the process group of axis 'dp' with ranks [0, 1]" in result
    assert "missing: ranks [1]" in result
    assert seconds >= 1


def test_otherwise_such_a_group_waits_for_nobody(crew: Crew) -> None:
    (result, _), _ = crew.run(_alone, 2, "INFO")
    assert result == "made"


@pytest.mark.parametrize("backend", _MADE_AT_ONCE)
def test_which_backends_wait(backend: str) -> None:
    assert not creation_blocks(backend)
    assert creation_blocks("gloo")
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        assert creation_blocks(backend)
        assert not creation_blocks("threaded")  # is a process group itself: not wrapped
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
