"""Groups that `shrink_group` shrinks under a mesh: no rank gets a coordinate of another."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from helpers import splitting
from helpers.all_reduce import reached_by
from helpers.crew import Crew
from meshverse import init_device_mesh

_LEFT = [0, 1, 2]


def _outcome_of(call: Callable[[], object]) -> str:
    try:
        return f"gave {call()}"
    except RuntimeError as error:
        return str(error)


def _shrink_an_axis(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder, is_bound=False)
    mesh = init_device_mesh(
        "cpu", (4,), mesh_dim_names=("dp",), isolate="mine", timeout=timedelta(seconds=40)
    )
    view = mesh.unflatten("dp", (4, 1), ("fsdp", "one"))  # several axes have the group
    if dist.get_rank() not in _LEFT:
        return {}
    shrunk = dist.distributed_c10d.shrink_group([3], mesh.get_group())
    seen: dict[str, Any] = {
        "use": _outcome_of(mesh.get_group),
        "of a view": _outcome_of(lambda: view.get_group("fsdp")),
        "place": _outcome_of(lambda: mesh.get_local_rank("dp")),
    }
    left = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",), ranks=_LEFT)
    return {
        **seen,
        "left": (left.get_local_rank(), reached_by(left.get_group())),
        "shrunk": (shrunk.rank(), shrunk.size()),
        "printed": (str(mesh), mesh.get_coordinate()),
    }


def test_a_shrunk_axis_says_so_and_is_not_made_again(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    answers = bound_crew.run(_shrink_an_axis, 4, str(via_store_library), str(tmp_path))
    for rank, seen in enumerate(answers[:3]):
        for use in ("use", "of a view", "place"):
            assert (
                "The process group of axis 'dp' or 'fsdp' with ranks [0, 1, 2, 3] was shrunk by "
                "shrink_group() to ranks [0, 1, 2]" in seen[use]
            ), use
        assert seen["left"] == (rank, [1, 1, 1, 0])
        assert seen["shrunk"] == (rank, 3)


def _shrink_the_world(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder, is_bound=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        dist.init_process_group(  # for the crew, which ends it
            "gloo", rank=0, world_size=1, store=dist.HashStore()
        )
        return {}
    dist.distributed_c10d.shrink_group([0])
    seen = {
        "use": _outcome_of(lambda: mesh.get_group("tp")),
        "derive": _outcome_of(lambda: mesh.unflatten("tp", (2, 1), ("a", "b"))),
        "place": _outcome_of(lambda: mesh.get_local_rank("tp")),
        "coordinate": _outcome_of(mesh.get_coordinate),
        "coordinate of a slice": _outcome_of(tp.get_coordinate),
        "coordinate of a new slice": _outcome_of(mesh["dp"].get_coordinate),
        "coordinate for torch": _outcome_of(lambda: mesh._sym_get_coordinate(0)),
    }
    again = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",), isolate="new")
    assert again.get_coordinate() == (dist.get_rank(),)
    return {**seen, "rank": again.get_local_rank(), "reached": reached_by(again.get_group())}


def test_a_shrunk_default_group_says_so_and_new_meshes_have_its_new_ranks(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    answers = bound_crew.run(_shrink_the_world, 4, str(via_store_library), str(tmp_path))
    for rank, seen in enumerate(answers[1:]):
        for use, message in seen.items():
            if use not in ("rank", "reached"):
                assert "shrink_group() has left 3 of them" in message, (use, message)
        assert (seen["rank"], seen["reached"]) == (rank, [1, 1, 1])
