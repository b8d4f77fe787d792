"""Default groups whose backend keeps no options: every mesh works on them as on any other."""

from __future__ import annotations

import os
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from helpers import via_store
from helpers.all_reduce import reached_by
from helpers.crew import Crew
from meshverse import DeviceMesh, init_device_mesh

_AXES = ("dp", "tp")
_SECONDS = 33.0  # of the default group's operations; unlike c10d's default

_WORLDS = {
    "alone": "via_store",
    "beside gloo": "cpu:via_store,cuda:gloo",
    "behind gloo": "cpu:gloo,cuda:via_store",
}


def _restart(backend: str | None, library: str, folder: str) -> None:
    """Have another default group than the crew's."""
    via_store.register(Path(library))
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=dist.FileStore(os.path.join(folder, "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_SECONDS),
    )


def _reached(mesh: DeviceMesh) -> list[int]:
    return reached_by(mesh.get_group())


def _life_of_a_mesh(*world: Any) -> dict[str, Any]:
    _restart(*world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    flat = mesh.flatten("all")
    view = mesh.unflatten("tp", (2, 1), ("ep", "etp"))
    lazy = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, lazy=True)
    stock_like = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=_AXES)
    given = DeviceMesh.from_group(mesh.get_group("tp"), "cpu", mesh_dim_names=("given",))
    seen = {
        "dp": [_reached(m["dp"]) for m in (mesh, view, lazy, stock_like)],
        "tp": [_reached(m) for m in (mesh["tp"], view["ep"], lazy["tp"], given)],
        "all": _reached(flat),
        "default": flat.get_group() is dist.group.WORLD,
        "loaded": pickle.loads(pickle.dumps(mesh)) is mesh,
        "warm": [group.size for group in mesh.universe.warm_up()],
        "report": str(mesh.universe.explain()),
    }
    whole = torch.arange(16.0).view(4, 4)
    mine = distribute_tensor(whole, mesh, (Shard(0), Shard(1)))
    product = mine @ distribute_tensor(whole, mesh, (Replicate(), Replicate()))
    seen["product"] = torch.equal(product.full_tensor(), whole @ whole)
    seen["sum"] = mine.sum().full_tensor().item()
    dist.barrier()
    mesh.universe.destroy()
    seen["after"] = _reached(stock_like["tp"])
    return seen


@pytest.mark.parametrize("backend", _WORLDS.values(), ids=_WORLDS)
def test_every_mesh_works(crew: Crew, via_store_library: Path, tmp_path: Path, backend) -> None:
    for rank, seen in enumerate(
        crew.run(_life_of_a_mesh, 4, backend, str(via_store_library), str(tmp_path))
    ):
        along_tp = [1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]
        assert seen["dp"] == [[1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1]] * 4
        assert seen["tp"] == [along_tp] * 4
        assert seen["after"] == along_tp
        assert seen["all"] == [1, 1, 1, 1]
        assert sorted(seen["warm"]) == [1, 2, 2, 4]
        assert seen["default"]
        assert seen["loaded"]
        assert backend in seen["report"]
        assert (seen["product"], seen["sum"]) == (True, 120.0)


def _timeouts(*world: Any) -> dict[str, Any]:
    _restart(*world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, backend_override={"tp": "gloo"})
    gloo = mesh.get_group("tp")._get_backend(torch.device("cpu"))
    return {
        "gloo": gloo.options._timeout.total_seconds(),
        "keys": {group.request.options.timeout.total_seconds() for group in mesh.universe.groups},
    }


@pytest.mark.parametrize("backend", _WORLDS.values(), ids=_WORLDS)
def test_the_timeout_is_that_of_any_backend_that_tells_it(
    crew: Crew, via_store_library: Path, tmp_path: Path, backend: str
) -> None:
    # c10d itself keeps it nowhere else: where no backend tells, it is c10d's default.
    seconds = 1800.0 if backend == "via_store" else _SECONDS
    for seen in crew.run(_timeouts, 4, backend, str(via_store_library), str(tmp_path)):
        assert seen == {"gloo": seconds, "keys": {seconds}}


def _wrapped(*world: Any) -> list[list[int]]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        _restart(*world)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
        reached = [reached_by(mesh.get_group(axis)) for axis in _AXES]
        mesh.universe.destroy()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    return reached


def test_c10ds_debug_wrapper_does_not_hide_that_there_are_none(
    crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    arguments = "via_store", str(via_store_library), str(tmp_path)
    for rank, (along_dp, along_tp) in enumerate(crew.run(_wrapped, 4, *arguments)):
        assert along_dp == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])
        assert along_tp == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _without_a_name(*world: Any) -> dict[str, Any]:
    _restart(None, *world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, backend_override={"dp": "gloo"})
    return {
        "reached": [reached_by(mesh.get_group(axis)) for axis in _AXES],
        "seconds": [
            mesh.get_group(axis)._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for axis in _AXES
        ],
        "default": mesh.flatten("all").get_group() is dist.group.WORLD,
        "report": str(mesh.universe.explain()),
    }


def test_a_default_group_that_was_given_no_backend(
    crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    answers = crew.run(_without_a_name, 4, str(via_store_library), str(tmp_path))
    for rank, seen in enumerate(answers):
        assert seen["reached"][0] == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])
        assert seen["reached"][1] == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])
        assert seen["seconds"] == [_SECONDS, _SECONDS]
        assert seen["default"]
        assert re.search(r"\n  tp .* cpu:gloo", seen["report"])
        assert re.search(r"\nAll groups: .*timeout=33s", seen["report"])
