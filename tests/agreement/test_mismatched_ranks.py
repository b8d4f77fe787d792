"""Errors where ranks disagree about which ranks a mesh has, or in whom they wait for."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.differing import AXES, error_of
from helpers.tiers import in_tiers
from helpers.turns import looks_for_missing_after, wait_until_they_wait
from meshverse import (
    DeviceMesh,
    init_device_mesh,
)
from meshverse.agreement import rendezvous

_OVER_OTHER_RANKS = {
    "overlapping": [[0, 1, 2], [0, 1, 2], [1, 2, 3], [1, 2, 3]],
    "one left out": [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]],
    "a neighbor each": [[0, 1], [1, 2], [2, 3], [0, 3]],
    "another third": [[0, 1, 2], [0, 1, 3], [0, 1, 2], [0, 1, 3]],
}
# The rank without which nobody is in a deadlock. It comes last: a deadlock is found soon after, and
# who joins after the others got their error joins their next attempt.
_COMES_LAST = {"overlapping": 2, "one left out": 3, "a neighbor each": 0, "another third": 1}


def _over_other_ranks(way: str) -> tuple[str, list[int]]:
    rank = dist.get_rank()
    ranks = _OVER_OTHER_RANKS[way][rank]
    build = partial(DeviceMesh, "cpu", ranks, mesh_dim_names=("dp",), isolate="not the world")
    if rank == _COMES_LAST[way]:
        wait_until_they_wait(*({0, 1, 2, 3} - {rank}))
    error = error_of(build)
    dist.barrier()
    # The same ranks can make the right mesh after that, and views of it.
    mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("all",), isolate="not the world")
    return error, reached_by(mesh.unflatten("all", (2, 2), AXES).get_group("tp"))


@pytest.mark.long
@pytest.mark.parametrize("way", in_tiers(_OVER_OTHER_RANKS, short=list(_OVER_OTHER_RANKS)[:1]))
def test_ranks_that_build_over_other_ranks_get_an_error_soon(crew: Crew, way: str) -> None:
    for rank, (error, reached) in enumerate(crew.run(_over_other_ranks, 4, way)):
        mine = _OVER_OTHER_RANKS[way][rank]
        assert error.startswith(
            f"Rank {rank} could not create the process group of axis 'dp' with ranks {mine}: "
            "deadlock: "
        )
        # Descriptions, and whose they are.
        named = re.findall(r"rank (\d) waits to create .*? with ranks (\[.*?\])", error)
        assert len({ranks for _, ranks in named}) >= 2
        assert all(str(_OVER_OTHER_RANKS[way][int(who)]) == ranks for who, ranks in named)
        assert reached == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _one_is_not_in_a_hurry() -> tuple[list[str], str]:
    """Return the log records and the error where one rank of a group never creates it."""
    seen: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = seen.append  # type: ignore[method-assign]
    logging.getLogger("meshverse").addHandler(handler)
    message = "no error"
    dist.barrier()
    if dist.get_rank() < 2:
        with pytest.MonkeyPatch.context() as patch, looks_for_missing_after(0, 1):
            patch.setattr(rendezvous, "_WARNING_SECONDS", 15.0)
            timeout = timedelta(seconds=30)  # it elapses
            build = partial(init_device_mesh, "cpu", (3,), ranks=[0, 1, 2], timeout=timeout)
            message = error_of(partial(build, mesh_dim_names=("dp",)))
    return [record.getMessage() for record in seen], message


@pytest.mark.long
def test_ranks_that_wait_long_say_so_and_for_whom(crew: Crew) -> None:
    answers = crew.run(_one_is_not_in_a_hurry, 4)
    missing = "2 of 3 members joined; missing: ranks [2]. Those that joined may have made"
    [warning] = [warning for warnings, _ in answers for warning in warnings]  # not one a rank
    assert (
        "has waited 15 s to create the process group of axis 'dp' with ranks [0, 1, 2]" in warning
    )
    assert missing in warning
    assert re.search(r"This rank waits at .*differing\.py:\d+; ", warning)
    for rank, (_, message) in enumerate(answers):
        if rank > 1:
            assert message == "no error"
            continue
        assert f"Rank {rank} could not create the process group of axis 'dp'" in message
        assert f"waited 0:00:30: {missing}" in message
