"""Meshes made again after a group of an equal one was destroyed, or after its world ended.

DTensor and torch.compile remember results by equal meshes, also results that refer to destroyed
groups. What they remember of one test is found by the next ones in the same process, too.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.device_mesh import init_device_mesh as stock_init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from helpers.compiling import COMPILES
from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.versions import needs_opaque_meshes
from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh

pytestmark = COMPILES

_AXES = ("dp", "tp")
_WHOLE = torch.arange(24.0).reshape(6, 4)
# So that no axis uses the default group, which ends the world when it is destroyed.
_TIMEOUT = timedelta(seconds=100)


def _ours(**extra: Any) -> DeviceMesh:
    size = dist.get_world_size()
    return init_device_mesh(
        "cpu", (2, size // 2), mesh_dim_names=_AXES, **({"timeout": _TIMEOUT} | extra)
    )


def _stock() -> StockDeviceMesh:
    size = dist.get_world_size()
    return stock_init_device_mesh("cpu", (2, size // 2), mesh_dim_names=_AXES)


def _destroyed(mesh: StockDeviceMesh, *axes: str) -> None:
    for axis in axes:
        dist.destroy_process_group(mesh.get_group(axis))


def _is_right(mesh: StockDeviceMesh) -> bool:
    """Return whether a tensor's products and copies are right, and on this mesh.

    A slice whose groups are live may equal that of an earlier mesh, and its result be there.
    """
    tensor = distribute_tensor(_WHOLE, mesh, [Shard(0), Shard(1)])
    product = tensor @ tensor.t()
    doubled = (tensor + tensor).redistribute(placements=[Replicate(), Shard(0)])
    over_slice = distribute_tensor(_WHOLE, mesh["tp"], [Shard(0)]).sum(0)
    return (
        product.full_tensor().equal(_WHOLE @ _WHOLE.t())
        and doubled.full_tensor().equal(2 * _WHOLE)
        and over_slice.full_tensor().equal(_WHOLE.sum(0))
        and product.device_mesh is doubled.device_mesh is mesh
    )


# Each returns an equal mesh, made after groups of the first one were destroyed.
def _one_axis(first: DeviceMesh) -> DeviceMesh:
    _destroyed(first, "tp")
    return _ours()


def _both_axes(first: DeviceMesh) -> DeviceMesh:
    _destroyed(first, "dp", "tp")
    return _ours()


def _same_universe(first: DeviceMesh) -> DeviceMesh:
    _destroyed(first, "tp")
    return _ours(universe=first.universe, timeout=None)


def _lazy(first: DeviceMesh) -> DeviceMesh:
    _destroyed(first, "tp")
    return _ours(lazy=True)


def _twice(first: DeviceMesh) -> DeviceMesh:
    _destroyed(first, "tp")
    second = _ours()
    _is_right(second)  # DTensor remembers its results
    _destroyed(second, "dp")
    return _ours()


def _beside_a_live_one(first: DeviceMesh) -> DeviceMesh:
    second = _ours()
    _destroyed(first, "tp")
    return second


_AGAIN: dict[str, Callable[[DeviceMesh], DeviceMesh]] = {
    "one axis": _one_axis,
    "both axes": _both_axes,
    "same universe": _same_universe,
    "lazy": _lazy,
    "twice": _twice,
    "beside a live one": _beside_a_live_one,
}


def _made_again(how: str) -> tuple[bool, bool]:
    first = _ours()
    return _is_right(first), _is_right(_AGAIN[how](first))


@pytest.mark.parametrize("how", in_tiers(_AGAIN, ["one axis", "same universe"]))
def test_results_are_on_the_mesh_that_was_made_again(crew: Crew, how: str) -> None:
    assert crew.run(_made_again, 4, how) == [(True, True)] * 4


def _after_a_stock_mesh() -> tuple[bool, bool]:
    _clear_sharding_prop_cache()  # torch's meshes of earlier worlds are equal to this one
    first = _stock()
    is_right = _is_right(first)
    _destroyed(first, "tp")
    return is_right, _is_right(_ours())


def test_results_are_not_on_a_mesh_of_torch_with_a_destroyed_group(crew: Crew) -> None:
    assert crew.run(_after_a_stock_mesh, 4) == [(True, True)] * 4


@pytest.mark.parametrize("make", [_stock, _ours], ids=["stock", "ours"])
def test_results_are_not_on_a_mesh_of_an_ended_world(make: Callable[[], StockDeviceMesh]) -> None:
    def product(mesh: StockDeviceMesh) -> DTensor:
        tensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Shard(1)], run_check=False)
        return (tensor @ tensor.t()).redistribute(placements=[Shard(0), Replicate()])

    with fake_world(8, 5):
        old = make()
        product(old)
    with fake_world(8, 5):
        dist.new_group([4, 5])  # so that torch's names refer to other groups
        mesh = _ours()
        assert mesh != old
        assert old != mesh
        assert product(mesh).device_mesh is mesh


@pytest.mark.parametrize("how", _AGAIN)
def test_equality(how: str) -> None:
    with fake_world(8, 5):
        first = _ours()
        slices = first["dp"], first["tp"]
        again = _AGAIN[how](first)
        stock = _stock()
        assert again != first
        assert first != again
        assert stock != first != stock
        assert again == stock == again
        assert hash(first) == hash(again) == hash(stock)
        assert first == first
        assert slices[1] == first["tp"] != again["tp"]
        if how != "both axes":  # the group of this axis is live
            assert slices[0] == again["dp"]
        assert "destroyed=" in repr(first)
        assert repr(again) == repr(stock)
        _destroyed(stock, "dp")
        assert again != stock
        assert stock != again
        assert again["tp"] == stock["tp"]


def test_the_error_about_two_meshes_tells_the_destroyed_one_apart() -> None:
    with fake_world(8, 5):
        first = _ours()
        weight = distribute_tensor(torch.ones(8, 4), first, [Shard(0), Replicate()])
        _destroyed(first, "tp")
        again = _ours()
        batch = distribute_tensor(torch.ones(8, 4), again, [Shard(0), Replicate()])
        with pytest.raises(
            RuntimeError, match=r"different mesh(es: got|: Found) .*, destroyed='tp'\)"
        ):
            batch + weight
        moved = DTensor.from_local(weight.to_local(), again, weight.placements)
        assert (batch + moved).device_mesh is again


# --- compiled functions --------------------------------------------------------------------------


def _reduce(x: Tensor, mesh: Any) -> Tensor:
    return funcol.all_reduce(x, "sum", mesh["tp"]) + 1


def _reduce_flattened(x: Tensor, mesh: Any) -> Tensor:
    return funcol.all_reduce(x, "sum", mesh._flatten("all")) + 1


def _gather(x: Tensor, mesh: Any) -> Tensor:
    tensor = DTensor.from_local(x, mesh, [Replicate(), Shard(0)], run_check=False)
    return (tensor * 2).redistribute(placements=[Replicate(), Replicate()]).to_local()


_COMPILED = {"slice": _reduce, "flattened": _reduce_flattened, "DTensor": _gather}


def _compiled(form: str, how: str) -> bool:
    torch._dynamo.reset()
    function = _COMPILED[form]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    first, x = _ours(), torch.ones(2, 3) * dist.get_rank()
    first.flatten("all")
    is_right = torch.equal(compiled(x, first), function(x, first))
    if form == "flattened":
        _destroyed(first, "all")
    again = _AGAIN[how](first)
    again.flatten("all")
    again.universe.warm_up()
    return is_right and torch.equal(compiled(x, again), function(x, again))


_AGAIN_COMPILED = [(form, how) for form in _COMPILED for how in _AGAIN]


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "how"),
    in_tiers(_AGAIN_COMPILED, [("slice", "one axis")], _AGAIN_COMPILED[::3]),
)
def test_compiled_functions_use_the_groups_of_the_mesh_that_was_made_again(
    crew: Crew, form: str, how: str
) -> None:
    assert crew.run(_compiled, 4, form, how) == [True] * 4


@needs_opaque_meshes
def test_a_compiled_function_with_a_destroyed_group_says_so() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_reduce, backend="aot_eager", fullgraph=True)
    with fake_world(8, 5):
        mesh = _ours()
        compiled(torch.ones(2, 3), mesh)
        _destroyed(mesh, "tp")
        with pytest.raises(RuntimeError, match=r"'tp' with ranks \[4, 5, 6, 7\] was destroyed"):
            compiled(torch.ones(2, 3), mesh)
