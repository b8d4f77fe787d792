"""`suspend`, `resume` and `memory_stats` of a universe, on a backend that is strict about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from helpers import splitting
from helpers.all_reduce import reached_by, reached_ranks
from helpers.crew import Crew
from meshverse import init_device_mesh, init_mesh_partition
from meshverse.device_mesh.group_names import check_in_graph

_AXES = ("dp", "tp")

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Backend, "suspend"),
    reason="torch can suspend a backend from 2.12 on",
)


def _outcome_of(call: Callable[[], object]) -> str:
    try:
        return f"gave {call()}"
    except (RuntimeError, KeyError) as error:
        return str(error)


def _stats(universe: Any, *axes: str) -> dict[str, tuple[bool, int]]:
    stats = universe.memory_stats(axes or None)
    return {" ".join(one.axes): (one.suspended, one.stats["total"]) for one in stats}


def _one_axis_is_suspended(library: str, folder: str, is_bound: bool) -> dict[str, Any]:
    splitting.restart(library, folder, is_bound=is_bound)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("all",), universe=mesh.universe)
    universe, tp, before = mesh.universe, mesh.get_group("tp"), reached_ranks(mesh)
    universe.suspend(["tp"])
    universe.suspend(["tp"])  # is suspended already
    view = mesh.unflatten("tp", (2, 1), ("ep", "one"))
    suspended = {
        "use": _outcome_of(lambda: mesh.get_group("tp")),
        "functional": _outcome_of(lambda: funcol.all_reduce(torch.ones(1), "sum", (mesh, 1))),
        "of a view": _outcome_of(lambda: view.get_group("ep")),
        "warm up": _outcome_of(lambda: universe.warm_up(["tp"])),
        "in a graph": _outcome_of(lambda: check_in_graph(tp.group_name)),
        # torch.compile reads a mesh that a graph slices only if its names are in a plain list.
        "plain": [
            type(each._dim_group_names) is list for each in (mesh, mesh["dp"], mesh["tp"], view)
        ],
        "others": reached_by(mesh.get_group("dp")),
        "world": reached_by(other.get_group()),
        "coordinate": mesh.get_coordinate(),
        "stats": _stats(universe),
        "how": [(g["suspended"], g["requests"]) for g in universe.explain().to_dict()["groups"]],
        "report": str(universe.explain()),
        "itself": _outcome_of(lambda: reached_by(tp)),
    }
    universe.resume()
    return {
        **suspended,
        "before": before,
        "after": reached_ranks(mesh),
        "same": mesh.get_group("tp") is tp is view.get_group("ep"),
        "known to compile": tp.group_name in mesh._pg_registry,
        "stats after": _stats(universe, "tp"),
        "report after": str(universe.explain()),
    }


@pytest.mark.parametrize("is_bound", [False, True])
def test_one_axis_is_suspended_and_resumed(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path, is_bound: bool
) -> None:
    library, folder = str(via_store_library), str(tmp_path)
    for rank, seen in enumerate(
        bound_crew.run(_one_axis_is_suspended, 4, library, folder, is_bound)
    ):
        line = [0, 1] if rank < 2 else [2, 3]
        assert seen["plain"] == [False, True, False, False]
        for use in ("use", "functional", "of a view", "warm up", "in a graph"):
            assert f"The process group of axis 'tp' or 'ep' with ranks {line} is sus" in seen[use]
            assert "All its ranks must call mesh.universe.resume()" in seen[use]
        assert seen["others"] == seen["before"]["dp"]
        assert seen["world"] == [1, 1, 1, 1]
        assert list(seen["coordinate"]) == [rank // 2, rank % 2]
        assert seen["stats"]["tp ep"] == (True, 64)
        assert seen["stats"]["dp"] == (False, 1088)
        assert [requests for suspended, requests in seen["how"] if suspended] == [
            {"tp": 1, "ep": 1}
        ]
        assert seen["report"].split().count("suspended") == 1
        assert "was used while it is suspended" in seen["itself"]
        assert seen["after"] == seen["before"]
        assert seen["same"]
        assert seen["known to compile"]
        assert seen["stats after"] == {"tp ep": (False, 1088)}
        assert "suspended" not in seen["report after"].split()


def _all_are_suspended(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder, is_bound=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    names = _AXES if dist.get_rank() % 2 else _AXES[::-1]  # whatever the order
    mesh.universe.suspend(names)
    mesh.universe.resume(names)
    mesh.universe.suspend()
    seen = {"stats": {all_of for all_of, _ in _stats(mesh.universe).values()}}
    seen["world"] = reached_by(dist.group.WORLD)
    mesh.universe.resume()
    seen["reached"] = reached_ranks(mesh)
    mesh.universe.suspend()
    seen["destroyed"] = _outcome_of(mesh.universe.destroy)
    seen["use"] = _outcome_of(lambda: mesh.get_group("tp"))
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    seen["again"] = reached_ranks(again)
    return seen


def test_all_are_suspended_and_may_be_destroyed_so(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    for seen in bound_crew.run(_all_are_suspended, 4, str(via_store_library), str(tmp_path)):
        assert seen["stats"] == {True}
        assert seen["world"] == [1, 1, 1, 1], "the default group is not the universe's"
        assert "was destroyed" in seen["use"]
        assert seen["again"] == seen["reached"]


def _a_backend_refuses(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder, is_bound=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    tp, before = mesh.get_group("tp"), reached_ranks(mesh)
    backend = tp._get_backend(torch.device("cpu"))
    backend.suspend()  # behind our back, so that it refuses
    seen = {"suspend": _outcome_of(lambda: mesh.universe.suspend(["tp"]))}
    seen["use"] = _outcome_of(lambda: reached_by(mesh.get_group("tp")))
    mesh.universe.resume()  # there is nothing to do
    backend.resume()
    seen["after"] = reached_ranks(mesh) == before and mesh.get_group("tp") is tp
    seen["known to compile"] = tp.group_name in mesh._pg_registry
    mesh.universe.suspend(["tp"])
    seen["suspended"] = _outcome_of(lambda: mesh.get_group("tp"))
    mesh.universe.resume()
    return {**seen, "resumed": reached_ranks(mesh) == before}


def test_a_group_that_could_not_be_suspended_is_as_it_was(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    for seen in bound_crew.run(_a_backend_refuses, 4, str(via_store_library), str(tmp_path)):
        assert "is suspended already" in seen["suspend"]
        assert "was used while it is suspended" in seen["use"]
        assert seen["after"]
        assert seen["known to compile"]
        assert "is suspended, by universe.suspend()" in seen["suspended"]
        assert seen["resumed"]


def _of_gloo() -> tuple[Any, Any, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), isolate="of its own")
    universe = mesh.universe
    return (
        _outcome_of(universe.suspend),
        _outcome_of(lambda: universe.suspend(["nowhere"])),
        (universe.memory_stats(), reached_by(mesh.get_group())),
    )


def test_what_cannot_be_suspended_says_so(bound_crew: Crew) -> None:
    for answer, unknown, left in bound_crew.run(_of_gloo, 2):
        assert "suspend(): none of these groups of gloo can be suspended" in answer
        assert "nowhere" in unknown
        assert left == ([], [1, 1])


def _a_suspended_part(library: str, folder: str, is_bound: bool) -> dict[str, Any]:
    splitting.restart(library, folder, is_bound=is_bound)
    job = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    parts = init_mesh_partition(
        "cpu", {name: {"mesh_shape": (2,)} for name in ("a", "b")}, universe=job.universe
    )
    mine = parts["a" if dist.get_rank() < 2 else "b"]
    seen: dict[str, Any] = {"reached": reached_by(mine.get_group())}
    seen["shared"] = mine.get_group() is job.get_group("tp")
    mine.universe.suspend()
    seen["of the part"] = _outcome_of(mine.get_group)
    seen["of the job"] = _outcome_of(lambda: reached_by(job.get_group("tp")))
    job.universe.resume()
    seen["after"] = [reached_by(mesh.get_group(0)) for mesh in (mine, job["tp"])]
    job.universe.suspend()
    seen["all suspended"] = _outcome_of(mine.get_group)
    mine.universe.resume()
    seen["part resumed"] = reached_by(mine.get_group())
    job.universe.resume()
    job.universe.destroy()
    return seen


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_part_is_suspended_and_resumed(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path, is_bound: bool
) -> None:
    library, folder = str(via_store_library), str(tmp_path)
    for rank, seen in enumerate(bound_crew.run(_a_suspended_part, 4, library, folder, is_bound)):
        mine = [1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]
        assert seen["reached"] == seen["part resumed"] == mine
        assert seen["after"] == [mine, mine]
        # A bound default group is split by all ranks: a rank that finds a group must not stay away.
        assert seen["shared"] == (not is_bound)
        assert "is suspended" in seen["of the part"]
        assert "is suspended" in seen["all suspended"]
        assert seen["of the job"] == f"gave {mine}" if is_bound else "sus" in seen["of the job"]
