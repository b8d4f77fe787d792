"""A default group that is aborted while groups that were split off it are in use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from helpers import splitting
from helpers.all_reduce import reached_ranks
from helpers.crew import Crew
from helpers.versions import needs_one_split
from meshverse import init_device_mesh

_AXES = ("dp", "tp")


def _outcome_of(call: Callable[[], object]) -> str:
    try:
        return f"gave {call()}"
    except RuntimeError as error:
        return str(error)


def _uses(mesh: Any, tp: Any) -> dict[str, str]:
    return {
        "a group": _outcome_of(lambda: mesh.get_group("dp")),
        "a slice that was there": _outcome_of(tp.get_group),
        "a rank in a group": _outcome_of(lambda: tp.get_local_rank()),
        "a new view": _outcome_of(lambda: mesh.unflatten("tp", (1, 2), ("a", "b"))),
        "coordinate": _outcome_of(mesh.get_coordinate),
        "coordinate of a slice": _outcome_of(tp.get_coordinate),
    }


def _aborted_by_c10d(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    tp, before = mesh["tp"], reached_ranks(mesh)
    dist.distributed_c10d._abort_process_group()
    seen = {"before": before, "without a world": _uses(mesh, tp)}
    # The ranks that are left have other places in the next world.
    splitting.start(library, os.path.join(folder, "next"), size - 1 - rank, size)
    seen["in the next world"] = _uses(mesh, tp)
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    return {**seen, "again": reached_ranks(again), "coordinate": again.get_coordinate()}


@needs_one_split
def test_splits_of_an_aborted_default_group_say_so(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    (tmp_path / "next").mkdir()
    answers = bound_crew.run(_aborted_by_c10d, 4, str(via_store_library), str(tmp_path))
    for rank, seen in enumerate(answers):
        for now in ("without a world", "in the next world"):
            state = "there is none" if now == "without a world" else "there is another one"
            for use, message in seen[now].items():
                if now == "without a world" and use.startswith("coordinate"):
                    assert message.startswith("gave ("), "what it was, as nobody has another"
                    continue
                assert (
                    f"of 4 ranks that this mesh was created with is gone ({state} now" in message
                ), use
        assert seen["coordinate"] == divmod(3 - rank, 2)
        assert sum(map(sum, seen["again"].values())) == 4


def _aborted_below_c10d(library: str, folder: str) -> dict[str, Any]:
    """As libraries for fault tolerance do it: c10d goes on to list the group."""
    splitting.restart(library, folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    before = reached_ranks(mesh)
    dist.group.WORLD.abort()
    seen = {
        "known": reached_ranks(mesh) == before,
        "errors": [
            _outcome_of(lambda: mesh.unflatten("tp", (2,), ("new",), isolate="new"))
            for _ in range(2)
        ],
        "known again": reached_ranks(mesh) == before,
        "listed": len(mesh.universe.explain().to_dict()["groups"]),
    }
    dist.distributed_c10d._abort_process_group()
    splitting.start(library, os.path.join(folder, "next"), rank, size)
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    return {**seen, "again": reached_ranks(again) == before}


@needs_one_split
def test_no_group_is_split_off_an_aborted_backend(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    (tmp_path / "next").mkdir()
    answers = bound_crew.run(_aborted_below_c10d, 4, str(via_store_library), str(tmp_path))
    for seen in answers:
        assert seen["known"], "what was split off before works on"
        for message in seen["errors"]:
            assert "was aborted" in message
        assert seen["known again"]
        assert seen["listed"] == 2
        assert seen["again"]
