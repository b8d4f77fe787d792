"""Two models on equal meshes: where DTensor takes one mesh for the other, ranks wait for ever.

DTensor remembers the mesh of a result by the meshes of its inputs. Of two equal meshes on different
process groups, it so knows the one that was used first, which may be another one on each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.device_mesh import init_device_mesh as stock_init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import meshverse
from helpers.crew import Crew
from helpers.groups_used import collectives
from helpers.tiers import in_tiers
from helpers.turns import wait_until
from meshverse import init_device_mesh

_WIDTH = 4
_TIMED_OUT = "timed out"
_NAMES = ("first", "second")


def _options() -> Any:
    # Options of its own, so that the axis is on a group of its own though it is the whole world.
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(minutes=4)
    return options


def _stock() -> list[StockDeviceMesh]:
    return [
        stock_init_device_mesh(
            "cpu", (2,), mesh_dim_names=("tp",), backend_override={"tp": _options()}
        )
        for _ in _NAMES
    ]


def _ours(**of_second: Any) -> list[StockDeviceMesh]:
    return [
        init_device_mesh(
            "cpu", (2,), mesh_dim_names=("tp",), backend_override={"tp": _options()}, **extra
        )
        for extra in ({}, of_second)
    ]


def _in_one_universe() -> list[StockDeviceMesh]:
    mesh = _ours()[0]
    return [
        init_device_mesh(
            "cpu",
            (2,),
            mesh_dim_names=("tp",),
            backend_override={"tp": _options()},
            universe=mesh.universe,
        )
        for _ in _NAMES
    ]


def _sharing_the_world() -> list[StockDeviceMesh]:
    meshverse.install(share="world")
    try:
        return _stock()  # by torch's names
    finally:
        meshverse.uninstall()


_MESHES: dict[str, Callable[[], list[StockDeviceMesh]]] = {
    "stock": _stock,
    "ours": _ours,
    "one universe": _in_one_universe,
    "share='world'": _sharing_the_world,
    "isolate=": lambda: _ours(isolate="second"),
}


def _outcome(compute: Callable[[], torch.Tensor]) -> Any:
    try:
        return compute().tolist()
    except RuntimeError:
        return _TIMED_OUT


def _in_order(order: tuple[str, ...]) -> Iterator[str]:
    return iter(order if dist.get_rank() == 0 else reversed(order))


# --- used one after the other, but first in another order on each rank ---------------------------


def _totals(how: str, waits_for_ever: bool) -> dict[str, Any]:
    """Sums of tensors on two equal meshes, computed in another order by each rank."""
    _clear_sharding_prop_cache()
    meshes = dict(zip(_NAMES, _MESHES[how](), strict=True))
    if waits_for_ever:
        for mesh in meshes.values():
            # short-timeout: of a deadlock, in which it must elapse
            _set_pg_timeout(timedelta(seconds=2), mesh.get_group())
    tensors = {
        name: DTensor.from_local(torch.full((2, 3), index + 1.0), mesh, [Shard(0)], run_check=False)
        for index, (name, mesh) in enumerate(meshes.items())
    }
    partial = {name: tensors[name].sum(0) for name in _in_order(_NAMES)}  # without communication
    seen: dict[str, Any] = {"equal": meshes["first"] == meshes["second"]}
    seen["is on its mesh"] = all(partial[name].device_mesh is meshes[name] for name in _NAMES)
    seen.update({name: _outcome(partial[name].full_tensor) for name in _NAMES})
    _clear_sharding_prop_cache()
    return seen


@pytest.mark.parametrize("how", in_tiers(["stock", "ours"], ["ours"]))
def test_ranks_that_use_equal_meshes_in_another_order_wait_for_ever(crew: Crew, how: str) -> None:
    for answer in crew.run(_totals, 2, how, True):
        assert answer["equal"]
        assert answer["first"] == _TIMED_OUT


@pytest.mark.parametrize("how", ["one universe", "share='world'", "isolate="])
def test_either_cure_helps(crew: Crew, how: str) -> None:
    for answer in crew.run(_totals, 2, how, False):
        assert answer["equal"] is (how != "isolate=")
        assert answer["is on its mesh"] is (how == "isolate=")  # or else on an equal one
        assert (answer["first"], answer["second"]) == ([4.0] * 3, [8.0] * 3)


# --- used at the same time -----------------------------------------------------------------------


def _model(mesh: StockDeviceMesh, scale: float) -> nn.Module:
    layers = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.ReLU(), nn.Linear(2 * _WIDTH, _WIDTH))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, scale)
            nn.init.zeros_(layer.bias)
    return parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _two_models(how: str) -> dict[str, Any]:
    """Two tensor-parallel models, each used by a thread of its own; one begins, then the other."""
    _clear_sharding_prop_cache()
    models = {
        name: _model(mesh, index + 1.0)
        for index, (name, mesh) in enumerate(zip(_NAMES, _MESHES[how](), strict=True))
    }
    seen: dict[str, Any] = {}
    follower = list(_in_order(_NAMES))[1]
    before = collectives()

    def use(name: str) -> None:
        # Until the leader waits for the other rank.
        wait_until(lambda: name != follower or collectives() != before)
        with torch.no_grad():
            seen[name] = _outcome(lambda: models[name](torch.ones(1, _WIDTH)))

    threads = [threading.Thread(target=use, args=(name,)) for name in _NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _clear_sharding_prop_cache()
    return seen


_RIGHT = {"first": [[32.0] * _WIDTH], "second": [[128.0] * _WIDTH]}


def test_two_models_on_equal_meshes_of_torch_mix_their_numbers(crew: Crew) -> None:
    # Or deadlock, if they communicate in other shapes.
    for answer in crew.run(_two_models, 2, "stock"):
        assert answer["first"] != _RIGHT["first"]
        assert answer["second"] != _RIGHT["second"]


def test_two_models_of_which_one_is_isolated_do_not(crew: Crew) -> None:
    assert crew.run(_two_models, 2, "isolate=") == [_RIGHT] * 2
