"""Stock's meshes and ours in one program: equal by value in both directions, and used together."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import meshverse
from helpers.crew import Crew
from helpers.meshes import MeshSpec, mesh_specs
from helpers.observation import OURS, STOCK, Family, attempt
from helpers.operations import operations
from helpers.sides import side
from helpers.versions import HAS_CANONICAL_LAYOUTS
from helpers.worlds import fake_world, in_worlds

_AXES = ("dp", "tp")
_DIRECTIONS = {"stock first": (STOCK, OURS), "ours first": (OURS, STOCK)}
both_directions = pytest.mark.parametrize("families", _DIRECTIONS.values(), ids=_DIRECTIONS)

_Build = Callable[[Family], StockDeviceMesh]


def _world_mesh(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)


def _cube(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))


_MESHES: dict[str, _Build] = {
    "world": _world_mesh,
    "nameless": lambda family: family.init_device_mesh("cpu", (2, 4)),
    "slice": lambda family: _world_mesh(family)["tp"],
    "outer slice": lambda family: _world_mesh(family)["dp"],
    "flattened": lambda family: _world_mesh(family)._flatten("all"),
    "unflattened": lambda family: _world_mesh(family)._unflatten(1, (2, 2), ("cp", "ep")),
    "part": lambda family: family.DeviceMesh("cpu", [[4, 7], [5, 2]], mesh_dim_names=_AXES),
    "without me": lambda family: family.DeviceMesh("cpu", [1, 2], mesh_dim_names=("tp",)),
    "one axis of size 1": lambda family: family.init_device_mesh("cpu", (8, 1)),
    "of a group": lambda family: family.DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu"),
    "other names": lambda family: family.init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b")),
    "other device": lambda family: family.init_device_mesh("meta", (2, 4), mesh_dim_names=_AXES),
    "concatenated": lambda family: _concatenated(family),
}


def _concatenated(family: Family) -> StockDeviceMesh:
    cube = _cube(family)
    return family.DeviceMesh._concatenate([cube["dp"], cube["tp"]])


# --- equality and hashing ------------------------------------------------------------------------


@in_worlds((8, 5))
@both_directions
def test_each_mesh_equals_the_same_of_the_other_family_and_no_other(
    world: object, families: tuple[Family, Family]
) -> None:
    left, right = ({name: build(family) for name, build in _MESHES.items()} for family in families)
    for left_name, mesh in left.items():
        for right_name, other in right.items():
            same = left_name == right_name
            assert (mesh == other) is same, (left_name, right_name)
            assert (mesh != other) is not same, (left_name, right_name)
            assert not same or hash(mesh) == hash(other)


@in_worlds((8, 5))
@both_directions
def test_one_finds_what_the_other_stored(world: object, families: tuple[Family, Family]) -> None:
    kept, asked = ({name: build(family) for name, build in _MESHES.items()} for family in families)
    table = {mesh: name for name, mesh in kept.items()}
    assert len(table) == len(_MESHES)
    assert {name: table[mesh] for name, mesh in asked.items()} == {name: name for name in _MESHES}
    assert len({*kept.values(), *asked.values()}) == len(_MESHES)
    assert all(mesh in list(kept.values()) for mesh in asked.values())
    table |= dict.fromkeys(asked.values(), "seen")
    assert set(table.values()) == {"seen"}
    assert len(table) == len(_MESHES)


@in_worlds((8, 5))
@pytest.mark.parametrize(
    "other",
    [None, 8, "cpu", (2, 4), pytest.param(object(), id="an object"), torch.ones(2)],
    ids=repr,
)
def test_other_things_are_unequal(world: object, other: object) -> None:
    for family in (STOCK, OURS):
        mesh = _world_mesh(family)
        assert mesh != other
        assert other != mesh


@in_worlds((8, 5))
@both_directions
def test_specs_and_tensors_compare(world: object, families: tuple[Family, Family]) -> None:
    left, right = (_spec(_world_mesh(family)) for family in families)
    assert left == right
    assert hash(left) == hash(right)
    assert {left: "here"}[right] == "here"
    assert left != _spec(_MESHES["other names"](families[1]))


def _spec(mesh: StockDeviceMesh) -> DTensorSpec:
    meta = TensorMeta(torch.Size([8, 8]), (8, 1), torch.float32)
    return DTensorSpec(mesh, (Shard(0), Replicate()), tensor_meta=meta)


@in_worlds((8, 5))
def test_copies_stay_equal_across_families(world: object) -> None:
    stock, ours = _world_mesh(STOCK), _world_mesh(OURS)
    for mesh, other in ((stock, ours), (ours, stock)):
        assert copy.deepcopy(mesh) == other
        assert hash(copy.deepcopy(mesh)) == hash(other)


@pytest.mark.long
@given(mesh_specs(always_named=True), st.data())
def test_equality_is_one_relation_over_both_families(spec: MeshSpec, data: st.DataObject) -> None:
    """Symmetric, transitive, with equal hashes; and a mesh equals its twin in the other family."""
    with fake_world(spec.world_size, spec.rank):
        pairs = _pairs(spec, data)
        meshes = [mesh for pair in pairs for mesh in pair]
        for one, two in itertools.product(meshes, repeat=2):
            assert (one == two) is (two == one) is not (one != two)
            if one == two:
                assert hash(one) == hash(two)
                assert all((one == third) is (two == third) for third in meshes)
        for stock, ours in pairs:
            assert stock == ours or (not HAS_CANONICAL_LAYOUTS and _is_written_in_two_ways(ours))


def _is_written_in_two_ways(mesh: StockDeviceMesh) -> bool:
    """Whether stock before 2.13 has two unequal meshes for it: flattened, or with a size of 1."""
    flattened = mesh._get_root_mesh()._flatten_mapping
    return 1 in mesh.shape or not flattened.keys().isdisjoint(mesh.mesh_dim_names)


def _pairs(spec: MeshSpec, data: st.DataObject) -> list[tuple[StockDeviceMesh, StockDeviceMesh]]:
    """Twins: one mesh of each family, and what the same operations make of them."""
    pairs = [(spec.build(STOCK), spec.build(OURS))]
    for _ in range(data.draw(st.integers(1, 5))):
        stock, ours = zip(*pairs, strict=True)
        operation = data.draw(operations(stock))
        outcomes = [
            attempt(lambda family=family, meshes=meshes: operation.apply(family, meshes))  # noqa: B023
            for family, meshes in ((STOCK, stock), (OURS, ours))
        ]
        if all(outcome.error is None for outcome in outcomes):
            pairs.append((outcomes[0].value, outcomes[1].value))
    return pairs


@pytest.mark.skipif(HAS_CANONICAL_LAYOUTS, reason="from 2.13 on, such axes have no stride")
@in_worlds((8, 5))
def test_before_2_13_axes_of_size_1_may_distinguish_stock(world: object) -> None:
    """Stock tells a mesh from another by the stride of an axis of size 1. Ours do not have it."""
    stock, ours = (
        family.init_device_mesh("cpu", (2, 1, 4), mesh_dim_names=("dp", "cp", "tp"))
        for family in (STOCK, OURS)
    )
    assert ours == stock
    assert ours["dp", "tp"] == stock["dp", "tp"]
    alone = STOCK.init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp", "cp"))["cp"]
    assert stock["cp"] != alone  # the same single rank, named alike
    assert ours["cp"] != stock["cp"]
    assert ours["cp"] == alone
    assert hash(ours["cp"]) == hash(alone)


# --- used together -------------------------------------------------------------------------------

_MATRIX = torch.arange(64.0).reshape(8, 8) / 8  # of which float32 has all sums and products


# In `side("stock")`, so that nothing is remembered of the stock meshes of other programs.


def _together(stock_first: bool) -> dict[str, Any]:
    with side("stock"):
        return _computed_together(stock_first)


def _computed_together(stock_first: bool) -> dict[str, Any]:
    families = (STOCK, OURS) if stock_first else (OURS, STOCK)
    left, right = (
        family.init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES) for family in families
    )
    a = distribute_tensor(_MATRIX, left, [Shard(0), Replicate()])
    b = distribute_tensor(_MATRIX.T.contiguous(), right, [Replicate(), Shard(1)])
    results = {
        "a @ b": (a @ b, _MATRIX @ _MATRIX.T),
        "b + a": (b + a, _MATRIX.T + _MATRIX),
        "stack": (torch.stack([a, b, a]), torch.stack([_MATRIX, _MATRIX.T, _MATRIX])),
        "moved": (a.redistribute(right, [Shard(1), Shard(1)]), _MATRIX),
        "moved back": (b.redistribute(left, [Shard(1), Shard(0)]), _MATRIX.T),
        "partial": (
            DTensor.from_local(_MATRIX, left, [Partial(), Replicate()]) * b,
            2 * _MATRIX * _MATRIX.T,
        ),
        "on slices": (
            distribute_tensor(_MATRIX, left["tp"], [Shard(0)])
            @ distribute_tensor(_MATRIX, right["tp"], [Replicate()]),
            _MATRIX @ _MATRIX,
        ),
    }
    for name, (result, expected) in results.items():
        torch.testing.assert_close(result.full_tensor(), expected, msg=lambda text: name + text)  # noqa: B023
    a.copy_(b)
    a.requires_grad_()
    (a @ b).sum().backward()
    return {
        "copied": torch.equal(a.detach().full_tensor(), _MATRIX.T),
        "gradient": torch.allclose(a.grad.full_tensor(), _MATRIX.sum(0).expand(8, 8)),
        "gradient's mesh": a.grad.device_mesh == left,
    }


@pytest.mark.parametrize("stock_first", [True, False], ids=["stock first", "ours first"])
def test_tensors_on_equal_meshes_work_together(crew: Crew, stock_first: bool) -> None:
    for answer in crew.run(_together, 4, stock_first):
        assert answer == {"copied": True, "gradient": True, "gradient's mesh": True}


def _refusal(action: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, NotImplementedError)) as raised:
        action()
    return str(raised.value)


def _unequal() -> list[str]:
    with side("stock"):
        return _refusals()


def _refusals() -> list[str]:
    stock = STOCK.init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    ours = OURS.init_device_mesh("cpu", (4, 1), mesh_dim_names=_AXES)
    a, b = (DTensor.from_local(_MATRIX, mesh, [Replicate()] * 2) for mesh in (stock, ours))
    return [
        _refusal(lambda: a + b),
        _refusal(lambda: b + a),
        _refusal(lambda: a.redistribute(ours, [Shard(0)] * 2)),
        _refusal(lambda: b.redistribute(stock, [Shard(0)] * 2)),
    ]


def test_tensors_on_unequal_meshes_are_refused(crew: Crew) -> None:
    for answer in crew.run(_unequal, 4):
        assert len(answer) == 4
        assert all("mesh" in text for text in answer)


def _stock_then_installed() -> list[bool]:
    with side("stock"):
        return _seen_around_install()


def _seen_around_install() -> list[bool]:
    before = STOCK.init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    kept = distribute_tensor(_MATRIX, before, [Shard(0), Shard(1)])
    with meshverse.installed():
        inside = STOCK.init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
        made = distribute_tensor(_MATRIX, inside, [Shard(0), Shard(1)])
        first = torch.equal((kept + made).full_tensor(), 2 * _MATRIX)
        moved = kept.redistribute(inside, [Replicate()] * 2)
    after = (made - kept).full_tensor().any().item()
    return [
        type(inside) is OURS.DeviceMesh,
        type(kept.device_mesh) is STOCK.DeviceMesh,
        first,
        torch.equal(moved.to_local(), _MATRIX),
        not after,
    ]


def test_tensors_from_before_during_and_after_install(crew: Crew) -> None:
    assert crew.run(_stock_then_installed, 4) == [[True] * 5] * 4
