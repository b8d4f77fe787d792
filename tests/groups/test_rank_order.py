"""`preserve_rank_order`: a group's ranks in the mesh's order instead of ascending."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.meshes import MeshSpec, mesh_specs
from helpers.observation import OURS, STOCK, assert_same, assert_same_outcome, attempt
from helpers.operations import operations
from helpers.versions import needs_stock_rank_order
from helpers.worlds import fake_world, groups_created, in_worlds
from meshverse import DeviceMesh

_RANKS = [[6, 5], [4, 7], [1, 0]]


def _mesh(*, preserve_rank_order: bool) -> DeviceMesh:
    return DeviceMesh(
        "cpu", _RANKS, mesh_dim_names=("dp", "tp"), preserve_rank_order=preserve_rank_order
    )


def _group_ranks(mesh: DeviceMesh) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]


@in_worlds((8, 5))
@pytest.mark.parametrize(
    ("preserve_rank_order", "ranks", "local_ranks"),
    [(False, [[0, 5, 7], [5, 6]], [1, 0]), (True, [[5, 7, 0], [6, 5]], [0, 1])],
    ids=["ascending", "preserved"],
)
def test_order_of_group_ranks(world, preserve_rank_order, ranks, local_ranks) -> None:
    mesh = _mesh(preserve_rank_order=preserve_rank_order)
    assert _group_ranks(mesh) == ranks
    assert [mesh.get_local_rank(axis) for axis in (0, 1)] == local_ranks
    assert mesh.get_coordinate() == (0, 1)


def test_derived_meshes_carry_it_along(world) -> None:
    mesh = _mesh(preserve_rank_order=True)
    flat = mesh.flatten("all")
    assert _group_ranks(flat) == [[6, 5, 4, 7, 1, 0]]
    assert _group_ranks(mesh["tp"]) == [[6, 5]]
    view = flat.unflatten(0, (2, 3), ("a", "b"))
    assert _group_ranks(view) == [[5, 1], [6, 5, 4]]


@pytest.mark.parametrize("ranks", [[[0, 1], [4, 5]], [[1, 3], [5, 6]]])
def test_ranks_that_ascend_are_in_order_already(world, ranks) -> None:
    mesh = DeviceMesh("cpu", ranks, preserve_rank_order=True)
    with groups_created(0):
        ascending = DeviceMesh("cpu", ranks, universe=mesh.universe)
    assert ascending.get_all_groups() == mesh.get_all_groups()


def test_both_orders_in_one_universe_are_two_groups(world) -> None:
    mesh = _mesh(preserve_rank_order=True)
    with groups_created(2):
        ascending = DeviceMesh("cpu", _RANKS, universe=mesh.universe)
    with groups_created(0):
        again = DeviceMesh("cpu", _RANKS, universe=mesh.universe, preserve_rank_order=True)
    assert _group_ranks(ascending) == [[0, 5, 7], [5, 6]]
    assert again.get_all_groups() == mesh.get_all_groups()


@needs_stock_rank_order
@given(mesh_specs(always_named=True, seen_by="a member", explicit=True), st.data())
def test_equals_stock(spec: MeshSpec, data: st.DataObject) -> None:
    with fake_world(spec.world_size, spec.rank):
        stock, ours = (spec.build(family, preserve_rank_order=True) for family in (STOCK, OURS))
        assert_same(stock, ours)
        operation = data.draw(operations([stock]))
        assert_same_outcome(
            attempt(lambda: operation.apply(STOCK, [stock])),
            attempt(lambda: operation.apply(OURS, [ours])),
        )
