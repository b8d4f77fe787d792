"""A default group whose ranks are given anew under a mesh (torch 2.15, gloo)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from meshverse import init_device_mesh

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"),
    reason="torch reconfigures process groups from 2.14 on",
)


def _outcome_of(call: Callable[[], object]) -> str:
    try:
        return f"gave {call()}"
    except RuntimeError as error:
        return str(error)


def _give_ranks(store: dist.Store, number: int, order: list[int]) -> None:
    store.set(f"{number}/{dist.get_rank()}", c10d._get_reconfigure_handle())
    handles = [store.get(f"{number}/{rank}").decode() for rank in order]
    c10d._reconfigure(uuid=number, handles=handles).wait()


def _swap_ranks(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, enable_reconfigure=True)
    _give_ranks(store, 1, [0, 1])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
    own = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), isolate="its own")
    before = reached_by(mesh.get_group()), reached_by(own.get_group())
    assert mesh.get_coordinate() == own.get_coordinate() == (rank,)
    _give_ranks(store, 2, [1, 0])
    return {
        "before": before,
        "rank": dist.get_rank(),
        "errors": [
            _outcome_of(mesh.get_group),
            _outcome_of(own.get_group),
            _outcome_of(lambda: mesh.get_local_rank("all")),
            _outcome_of(mesh.get_coordinate),
            _outcome_of(lambda: own._sym_get_coordinate(0)),
            _outcome_of(own["dp"].get_coordinate),
            _outcome_of(lambda: funcol.all_reduce(torch.ones(1), "sum", (own, 0))),
            _outcome_of(lambda: own.flatten("flat", isolate="another")),
        ],
    }


def test_use_after_the_ranks_have_changed_says_so(crew: Crew, tmp_path: Path) -> None:
    for rank, seen in enumerate(crew.run(_swap_ranks, 2, str(tmp_path))):
        assert seen["before"] == ([1, 1], [1, 1])
        assert seen["rank"] == 1 - rank
        for message in seen["errors"]:
            assert f"was created by rank {rank} of 2, which is rank {1 - rank} of 2 now" in message
