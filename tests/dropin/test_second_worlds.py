"""Caches of torch by mesh, when the world ends and begins anew, or a mesh is made twice.

DTensor and torch.compile keep meshes by value. A mesh of an earlier world has dead groups, so it
equals none of this world; stock's does, and is used, unless DTensor's caches are cleared.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from helpers.crew import WORLD_TIMEOUT_SECONDS, Crew
from helpers.observation import OURS, STOCK, Family
from helpers.sides import SIDES, side
from helpers.tiers import in_tiers
from helpers.training import TOLERANCE, make_model, tensor_parallel, train, train_alone
from helpers.worlds import fake_world, live_groups

_WHOLE = torch.arange(30.0).reshape(5, 6)
_AXES = ("dp", "tp")
of_ours = pytest.mark.parametrize("which", ["ours", "installed"])


def _mesh(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)


def _meshes_of_results(mesh: StockDeviceMesh) -> list[StockDeviceMesh]:
    """Meshes of what DTensor makes of a tensor on this one, without communication."""
    local = torch.ones(2, 3)
    tensor = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False)
    product = tensor @ tensor.t()
    gathered = product.redistribute(placements=[Replicate(), Replicate()])
    over_slice = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False)
    return [value.device_mesh for value in (tensor + tensor, product, gathered, over_slice * 2)]


# --- one world after another ---------------------------------------------------------------------


@of_ours
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "let go"])
def test_results_are_on_the_mesh_of_their_world(which: str, keep: bool) -> None:
    kept = []
    with side(which) as family:  # clears DTensor's caches here, not between the worlds
        for extra_groups in range(3):
            with fake_world(4, 1):
                for _ in range(extra_groups):
                    dist.new_group([0, 1])
                mesh = _mesh(family)
                results = _meshes_of_results(mesh)
                assert all(result is mesh for result in results[:3])
                assert results[3] is mesh["tp"]
                groups = [group for result in results for group in result.get_all_groups()]
                assert {group.group_name for group in groups} <= live_groups().keys()
                assert results[1]._flatten("world").get_group() is dist.group.WORLD
            kept.extend([mesh] if keep else [])


@pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])
def test_a_mesh_of_an_earlier_world(family: Family) -> None:
    with fake_world(4, 1):
        old = _mesh(family)
    with fake_world(4, 1):
        new, stock = _mesh(family), _mesh(STOCK)
        assert hash(new) == hash(old)
        assert new == _mesh(family) == stock
        assert (new == old) is (old == new) is (family is STOCK)
        assert (stock == old) is (old == stock) is (family is STOCK)


class _OfStock(StockDeviceMesh):
    """A program's own class, with which torch's own method compares other meshes."""


@pytest.mark.parametrize("lazy", [False, True])
def test_a_subclass_of_stocks_gets_no_mesh_of_an_earlier_world(lazy: bool) -> None:
    with side("ours"):  # clears DTensor's caches here, not between the worlds
        with fake_world(4, 1):
            old = OURS.init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, lazy=lazy)
            _meshes_of_results(old)
            before = hash(old)
        with fake_world(4, 1):
            mesh = _OfStock("cpu", torch.arange(4).view(2, 2), mesh_dim_names=_AXES)
            assert all(result is mesh for result in _meshes_of_results(mesh)[:3])
            assert mesh != old
            assert old != mesh
            assert hash(old) == before == hash(mesh)


def test_a_subclass_of_stocks_equals_no_slice_that_is_made_after_its_world() -> None:
    with fake_world(4, 1):
        old = OURS.init_device_mesh("cpu", (1, 4), mesh_dim_names=_AXES)
    late = old["tp"]
    with fake_world(4, 1):
        mesh = _OfStock("cpu", torch.arange(4), mesh_dim_names=("tp",))
        assert mesh != late
        assert late != mesh
        assert {mesh: 1}.get(late) is None
        assert hash(mesh) == hash(late)


def test_a_mesh_loaded_without_a_world_equals_as_in_stock() -> None:
    with fake_world(4, 1):
        old = _mesh(OURS)
        saved = pickle.dumps(old)
    loaded = pickle.loads(saved)
    assert loaded == old
    with fake_world(4, 1):
        new, stock = _mesh(OURS), _mesh(STOCK)
        assert loaded == new
        assert loaded == stock
        loaded.bind(new.universe)
        assert loaded == new
        assert loaded != old


def _double(x: Tensor, mesh: StockDeviceMesh) -> Tensor:
    shard = DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False)
    return (shard * 2).redistribute(placements=[Replicate()]).to_local()


@of_ours
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_code_serves_the_next_world(which: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(_double, backend="aot_eager", fullgraph=True)
    with side(which) as family:
        for meshes_before in (1, 0):  # so that the groups have other names
            with fake_world(4, 1):
                *_, mesh = (_mesh(family) for _ in range(meshes_before + 1))
                assert compiled(_WHOLE, mesh).shape == (10, 6)


def _begin_again(folder: str) -> None:
    dist.barrier()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    timeout = timedelta(seconds=WORLD_TIMEOUT_SECONDS)
    store = dist.FileStore(f"{folder}/second", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _calculate(mesh: StockDeviceMesh) -> bool:
    tensor = distribute_tensor(_WHOLE, mesh, [Shard(0), Shard(1)])
    product = (tensor @ tensor.t()).redistribute(placements=[Shard(0), Replicate()])
    over_slice = distribute_tensor(_WHOLE, mesh["dp"], [Shard(1)])
    return (
        product.full_tensor().equal(_WHOLE @ _WHOLE.t())
        and over_slice.full_tensor().equal(_WHOLE)
        and (tensor + tensor).device_mesh is mesh
    )


def _train(mesh: StockDeviceMesh) -> list[float]:
    model = make_model()
    for block in model:
        tensor_parallel(block, mesh["tp"])
        fully_shard(block, mesh=mesh["dp"])
    return train(fully_shard(model, mesh=mesh["dp"]), mesh["dp"])


def _two_worlds(side_name: str, folder: str) -> dict[str, Any]:
    with side(side_name) as family:
        first = _mesh(family)
        seen = {"first": _calculate(first), "first losses": _train(first)}
        if dist.get_rank() == 0:  # ranks whose processes have other histories
            family.DeviceMesh("cpu", [0])
        _begin_again(folder)
        second = _mesh(family)
        seen |= {"second": _calculate(second), "second losses": _train(second)}
        seen["flattened"] = distribute_tensor(_WHOLE, second._flatten("world"), [Shard(0)])
        seen["flattened"] = seen["flattened"].full_tensor().equal(_WHOLE)
        with pytest.raises(RuntimeError, match="gone"):
            first.get_group("tp")
    return seen


@pytest.mark.long
@pytest.mark.parametrize("which", in_tiers(["ours", "installed"], ["installed"]))
def test_training_goes_on_in_a_second_world(crew: Crew, which: str, tmp_path: Path) -> None:
    losses, _ = train_alone()
    for answer in crew.run(_two_worlds, 4, which, str(tmp_path)):
        assert (answer["first"], answer["second"], answer["flattened"]) == (True, True, True)
        assert answer["first losses"] == pytest.approx(losses, rel=TOLERANCE)
        assert answer["second losses"] == pytest.approx(losses, rel=TOLERANCE)


# --- a mesh made twice in one world --------------------------------------------------------------


def _made_twice(side_name: str) -> dict[str, Any]:
    with side(side_name) as family:
        first, second = _mesh(family), _mesh(family)
        one, two = (
            distribute_tensor(_WHOLE, mesh, [Shard(0), Shard(1)]) for mesh in (first, second)
        )
        product, again = one @ one.t(), two @ two.t()
        return {
            "equal": first == second and hash(first) == hash(second),
            "other groups": first.get_group("tp") is not second.get_group("tp"),
            "own meshes": one.device_mesh is first and two.device_mesh is second,
            "right": again.full_tensor().equal(product.full_tensor()),
            "together": (one + two).full_tensor().equal(2 * _WHOLE),
            "moved": two.redistribute(first, [Replicate()] * 2).to_local().equal(_WHOLE),
            "on the first": again.device_mesh is first,
        }


def test_results_are_on_the_equal_mesh_that_was_made_first(crew: Crew) -> None:
    """As in stock: DTensor keeps operations by value, and answers with the first mesh it saw."""
    for which in SIDES:
        for answer in crew.run(_made_twice, 4, which):
            assert all(answer.values()), (which, answer)


def _made_again() -> dict[str, Any]:
    """Return results on a mesh, and on an equal one made after its universe was destroyed."""
    with side("ours") as family:
        compiled = torch.compile(_double, backend="aot_eager", fullgraph=True)
        seen = {}
        for turn in ("first", "second"):
            mesh = _mesh(family)
            seen[turn] = _calculate(mesh), tuple(compiled(_WHOLE, mesh).shape)
            dist.barrier()
            mesh.universe.destroy()
        return seen


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.long
def test_a_mesh_may_be_made_again_when_its_universe_is_destroyed(crew: Crew) -> None:
    for answer in crew.run(_made_again, 4):
        assert answer == {"first": (True, (10, 6)), "second": (True, (10, 6))}
