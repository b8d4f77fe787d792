"""A default group that is bound to a device: groups are split off it, by all ranks together.

The backend of these worlds is as strict as NCCL: see `backends/splitting_backend.hpp`.
"""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from helpers import splitting
from helpers.all_reduce import reached_by, reached_ranks
from helpers.crew import Crew
from helpers.splitting import NAME, backend_of
from helpers.versions import AT_LEAST_2_14, AT_LEAST_2_15, needs_one_split
from meshverse import DeviceMesh, connect, init_device_mesh

_AXES = ("dp", "tp")
_MIXED = f"cpu:gloo,{splitting.DEVICE}:{NAME}"
_LINES = {"dp": [[1, 0, 1, 0], [0, 1, 0, 1]], "tp": [[1, 1, 0, 0], [0, 0, 1, 1]]}


def _expected(rank: int) -> dict[str, list[int]]:
    return {"dp": _LINES["dp"][rank % 2], "tp": _LINES["tp"][rank // 2]}


def _counts() -> tuple[int, int]:
    backend = backend_of(dist.group.WORLD)
    return backend.splits, backend.memberless_splits


def _hows(mesh: DeviceMesh) -> dict[str, str]:
    groups = mesh.universe.explain().to_dict()["groups"]
    return {" ".join(group["requests"]): group["how"] for group in groups}


def _life_of_a_mesh(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    made = _counts()
    view = mesh.unflatten("tp", (2, 1), ("ep", "one"))
    flat = mesh.flatten("all")
    lazy = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, lazy=True)
    known = _counts()
    sums = funcol.all_reduce(torch.ones(2), "sum", (mesh, 1)).tolist()
    groups = {name: mesh.get_group(name) for name in _AXES}
    parts = {name: backend_of(group) for name, group in groups.items()}
    seen = {
        "counts": (made, known),
        "reached": reached_ranks(mesh),
        "others": [reached_by(m.get_group(axis)) for m, axis in ((view, "ep"), (lazy, "tp"))],
        "whole": flat.get_group() is dist.group.WORLD,
        "sums": sums,
        "hows": _hows(mesh),
        "is one for both devices": [
            backend_of(group, "cpu") is parts[name] for name, group in groups.items()
        ],
        "connected": [part.is_connected for part in parts.values()],
        "device": [str(group.bound_device_id) for group in groups.values()],
        "ranks": {name: dist.get_process_group_ranks(group) for name, group in groups.items()},
        "seconds": {part.options._timeout.total_seconds() for part in parts.values()},
        "of the parent": (
            backend_of(dist.group.WORLD).options.group_name,
            backend_of(dist.group.WORLD).options.split_from,
        ),
    }
    mesh.universe.destroy()
    lazy.universe.destroy()
    seen["left"] = sorted(dist.distributed_c10d._world.pg_names.values())
    return seen


@needs_one_split
def test_every_axis_is_one_split_that_all_ranks_take_part_in(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    answers = bound_crew.run(_life_of_a_mesh, 4, str(via_store_library), str(tmp_path))
    for rank, seen in enumerate(answers):
        assert seen["reached"] == _expected(rank)
        assert seen["others"] == [_expected(rank)["tp"]] * 2
        assert seen["sums"] == [2, 2]
        # dp and tp; then the axis of size 1; then dp and tp of another universe.
        assert seen["counts"] == ((2, 0), (5, 0))
        assert seen["whole"]
        assert seen["hows"]["dp"] == seen["hows"]["tp ep"] == "split off the default group"
        assert seen["is one for both devices"] == [True, True]
        assert seen["connected"] == [True, True]
        assert seen["device"] == [f"{splitting.DEVICE}:0"] * 2
        assert seen["ranks"] == {
            name: [other for other, there in enumerate(line) if there]
            for name, line in _expected(rank).items()
        }
        assert seen["seconds"] == {splitting.SECONDS}
        assert seen["of the parent"] == ("", ""), "a split wrote to the default group's options"
        assert seen["left"] == ["0"]


def _after_other_histories(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder)
    rank = dist.get_rank()
    # As if each rank had made another number of groups: from 2.15 on, c10d splits the default group
    # for each, which takes all ranks.
    dist.distributed_c10d._world.group_count += rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    return {
        "reached": reached_ranks(mesh),
        "names": {name: mesh.get_group(name).group_name for name in _AXES},
    }


def test_members_agree_on_a_split_whatever_each_made_before(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    library, folder = str(via_store_library), str(tmp_path)
    answers = bound_crew.run(_after_other_histories, 4, library, folder)
    assert [seen["reached"] for seen in answers] == [_expected(rank) for rank in range(4)]
    names = [seen["names"] for seen in answers]
    assert names[0]["tp"] == names[1]["tp"] != names[2]["tp"] == names[3]["tp"]


def _over_a_part(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder)
    part = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), ranks=[1, 2])
    is_in = part.get_coordinate() is not None
    return {"counts": _counts(), "reached": reached_by(part.get_group()) if is_in else None}


@needs_one_split
def test_ranks_outside_a_mesh_take_part_too(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    answers = bound_crew.run(_over_a_part, 4, str(via_store_library), str(tmp_path))
    assert [seen["counts"] for seen in answers] == [(0, 1), (1, 0), (1, 0), (0, 1)]
    assert [seen["reached"] for seen in answers] == [None, [0, 1, 1, 0], [0, 1, 1, 0], None]


def _by_options(library: str, folder: str, backend: str) -> dict[str, Any]:
    module = splitting.restart(library, folder, backend)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)

    def group(seconds: float | None = None, **fields: int) -> Any:
        options = module.SplittingOptions()
        for name, value in fields.items():
            setattr(options, name, value)
        if seconds is not None:
            options._timeout = timedelta(seconds=seconds)
        view = mesh.unflatten("tp", (2,), ("view",), backend_override={"view": options})
        return view.get_group("view")

    usual, narrow, hurried = mesh.get_group("tp"), group(channels=3), group(70)
    parts = [(backend_of(g), backend_of(g, "cpu")) for g in (usual, narrow, hurried)]
    return {
        "shared": group() is usual and group(channels=3) is narrow and group(70) is hurried,
        "channels": [part.options.channels for part, _ in parts],
        "seconds": [[p.options._timeout.total_seconds() for p in pair] for pair in parts],
        "kinds": [type(cpu).__name__ for _, cpu in parts],
        "reached": [reached_by(g) for g in (usual, narrow, hurried)],
        "of the parent": backend_of(dist.group.WORLD).options.channels,
        "report": str(mesh.universe.explain()),
        "hows": set(_hows(mesh).values()),
    }


@pytest.mark.parametrize("backend", [pytest.param(NAME, marks=needs_one_split), _MIXED])
def test_options_are_those_of_the_bound_device_and_reach_its_backend(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path, backend: str
) -> None:
    answers = bound_crew.run(_by_options, 4, str(via_store_library), str(tmp_path), backend)
    for rank, seen in enumerate(answers):
        assert seen["shared"]
        assert seen["channels"] == [16, 3, 16]
        assert seen["seconds"] == [[splitting.SECONDS] * 2, [splitting.SECONDS] * 2, [70.0] * 2]
        kind = "SplittingBackend" if backend == NAME else "ProcessGroupGloo"
        assert seen["kinds"] == [kind] * 3
        assert seen["reached"] == [_expected(rank)["tp"]] * 3
        assert seen["of the parent"] == 16
        assert "channels=3" in seen["report"]
        assert seen["hows"] == {"split off the default group"}


def _of_one_device(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder, _MIXED)
    override = {"dp": "gloo", "tp": f"{splitting.DEVICE}:{NAME}"}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, backend_override=override)
    group = mesh.get_group("tp")
    return {
        "counts": _counts(),
        "hows": _hows(mesh),
        "reached": reached_by(mesh.get_group("dp")),
        "devices": [str(device) for device in group._device_types],
        "splits": backend_of(group).splits,
        "report": str(mesh.universe.explain()),
    }


@needs_one_split
def test_an_axis_may_have_the_backend_of_one_device(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    """The split is of what the options key says, and of nothing else."""
    answers = bound_crew.run(_of_one_device, 4, str(via_store_library), str(tmp_path))
    for rank, seen in enumerate(answers):
        assert seen["reached"] == _expected(rank)["dp"]
        assert seen["hows"] == {"dp": "created by its members", "tp": "split off the default group"}
        assert seen["counts"] == (1, 0)
        assert seen["devices"] == [splitting.DEVICE]
        assert re.search(rf"\n  tp .* {splitting.DEVICE}:{NAME} ", seen["report"])


def _in_mesh_order(library: str, folder: str) -> dict[str, Any]:
    splitting.restart(library, folder)
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=_AXES, preserve_rank_order=True)
    group = mesh.get_group("tp")
    return {
        "ranks": dist.get_process_group_ranks(group),
        "place": group.rank(),
        "reached": reached_by(group),
        "how": _hows(mesh)["tp"],
    }


def test_an_order_of_ranks_to_keep_is_kept(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    answers = bound_crew.run(_in_mesh_order, 4, str(via_store_library), str(tmp_path))
    for rank, seen in enumerate(answers):
        line = [3, 1] if rank in (1, 3) else [2, 0]
        assert seen["ranks"] == line
        assert seen["place"] == line.index(rank)
        assert seen["reached"] == [int(other in line) for other in range(4)]
        # From 2.15 on, c10d asks any backend to make a group by a split.
        assert seen["how"].startswith("created by all ranks" if AT_LEAST_2_15 else "created by its")


# As DeepSpeed 0.19 looks for it in the error of a mesh, to make other groups (utils/groups.py).
_CANNOT_SPLIT = "No backend for the parent process group or its backend does not support splitting"


def _where_nothing_splits(library: str, folder: str) -> tuple[str, list[int]]:
    """Split as torch's mesh does where it has an accelerator, and make a mesh of ours."""
    splitting.restart(library, folder, f"cpu:gloo,{splitting.DEVICE}:fake")
    error = ""
    try:
        dist.split_group(split_ranks=[[0, 1], [2, 3]])
    except RuntimeError as raised:
        error = str(raised)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    return error, reached_by(mesh.get_group("tp"))


def test_where_torch_cannot_split_the_groups_are_made_otherwise(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    answers = bound_crew.run(_where_nothing_splits, 4, str(via_store_library), str(tmp_path))
    for rank, (error, reached) in enumerate(answers):
        if not AT_LEAST_2_14:  # where c10d makes a split of backends that have none
            assert _CANNOT_SPLIT in error or "No backend type associated" in error  # in torch 2.11
        assert reached == _expected(rank)["tp"]


def _connected(library: str, folder: str) -> dict[str, Any]:
    """Connect two worlds of two ranks each, whose default groups are bound."""
    rank = dist.get_rank()
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    world = Path(folder) / str(rank // 2)
    world.mkdir(exist_ok=True)
    splitting.start(library, str(world), rank % 2, 2)
    store = dist.FileStore(str(Path(folder) / "between"), 4)
    connection = connect("weights", store, rank=rank, size=4, backend="gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones, group=connection.group)
    with connection:
        default = dist.group.WORLD
        assert default is not None
        return {"sum": ones.item(), "splits": _counts(), "bound": str(default.bound_device_id)}


def test_a_connection_splits_no_default_group(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    for seen in bound_crew.run(_connected, 4, str(via_store_library), str(tmp_path)):
        assert seen == {"sum": 4, "splits": (0, 0), "bound": f"{splitting.DEVICE}:0"}


def _seen_while_connecting(library: str, folder: str) -> dict[str, Any]:
    """Return facts that another thread sees while a connection's backend is created."""
    splitting.restart(library, folder)
    world, seen = dist.group.WORLD, dict[str, Any]()

    def create(common: Any, given: Any) -> Any:
        def look() -> None:
            seen["device"] = str(world.bound_device_id)
            seen["hows"] = _hows(init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES))

        other = threading.Thread(target=look)
        other.start()
        other.join()
        seen["split from"] = getattr(common, "split_from", None)
        return dist.ProcessGroupGloo(common.store, common.group_rank, common.group_size)

    if "looking" not in dist.Backend.backend_list:
        dist.Backend.register_backend("looking", create, extended_api=True, devices=["cpu"])
    store = dist.FileStore(str(Path(folder) / "connection"), 4)
    with connect("w", store, rank=dist.get_rank(), size=4, backend="looking") as connection:
        seen["reached"] = reached_by(connection.group)
    seen["device afterwards"] = str(world.bound_device_id)
    return seen


@needs_one_split
def test_other_threads_see_the_default_group_as_it_is_while_one_connects(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    device = f"{splitting.DEVICE}:0"
    for seen in bound_crew.run(_seen_while_connecting, 4, str(via_store_library), str(tmp_path)):
        assert seen["device"] == seen["device afterwards"] == device
        assert set(seen["hows"].values()) == {"split off the default group"}
        assert seen["split from"] is None
        assert seen["reached"] == [1, 1, 1, 1]
