"""`get_local_rank`: stock's answers and errors, also of groups that are still to be made."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.asking import AXES, DIMS, PERMUTED, lazy_cube
from helpers.meshes import MeshSpec, mesh_specs
from helpers.observation import OURS, STOCK, Family, attempt
from helpers.operations import operations
from helpers.versions import needs_canonical_layouts
from helpers.worlds import fake_world, groups_created, in_worlds
from meshverse import DeviceMesh, Universe, init_device_mesh


def _lazy(spec: MeshSpec, **extra: Any) -> StockDeviceMesh:
    if spec.ranks is None:
        return spec.build(OURS, lazy=True, **extra)
    return spec.build(OURS, universe=Universe(spec.ranks, lazy=True), **extra)


def _local_ranks(mesh: StockDeviceMesh) -> list[Any]:
    dims = (*DIMS, *range(-mesh.ndim, mesh.ndim), *(mesh.mesh_dim_names or ()), "a", "flat", "loss")
    return [attempt(lambda dim=dim: mesh.get_local_rank(dim)) for dim in dims]


@given(mesh_specs(seen_by="an outsider"))
def test_outside_of_a_lazy_mesh_it_raises_as_stock_does(spec: MeshSpec) -> None:
    with fake_world(spec.world_size, spec.rank):
        result = _local_ranks(_lazy(spec))
        assert result == _local_ranks(spec.build(STOCK))
    assert all(outcome.error for outcome in result)


@needs_canonical_layouts
@given(mesh_specs(seen_by="a member"), st.data())
def test_of_lazy_meshes_are_stocks(spec: MeshSpec, data: st.DataObject) -> None:
    with fake_world(spec.world_size, spec.rank):
        stock = [spec.build(STOCK)]
        operation = data.draw(operations(stock))
        derived = attempt(lambda: operation.apply(STOCK, stock)).value
        stock += [] if derived is None else [derived]
        with groups_created(0):
            ours = [_lazy(spec)]
            derived = attempt(lambda: operation.apply(OURS, ours)).value
            ours += [] if derived is None else [derived]
            seen = [_local_ranks(mesh) for mesh in ours]
        assert seen == [_local_ranks(mesh) for mesh in stock]


@given(mesh_specs(always_named=True, explicit=True), st.booleans())
def test_before_and_after_a_group_is_made(spec: MeshSpec, preserve_rank_order: bool) -> None:
    with fake_world(spec.world_size, spec.rank):
        mesh = _lazy(spec, preserve_rank_order=preserve_rank_order)
        flat = mesh.flatten("flat")
        before = [_local_ranks(mesh), _local_ranks(flat)]
        if mesh.get_coordinate() is not None:
            groups = [*mesh.get_all_groups(), flat.get_group()]
            made = [dist.get_rank(group) for group in groups]
            dims = [*range(mesh.ndim), "flat"]
            assert [mesh.get_local_rank(dim) for dim in dims] == made
        assert [_local_ranks(mesh), _local_ranks(flat)] == before


@in_worlds((8, 3))
def test_it_is_the_place_in_the_group_and_not_the_coordinate(world) -> None:
    seen = {}
    for preserve_rank_order in (False, True):
        mesh = DeviceMesh(
            "cpu",
            PERMUTED,
            mesh_dim_names=AXES,
            preserve_rank_order=preserve_rank_order,
            universe=Universe(torch.tensor(PERMUTED), lazy=True),
        )
        with groups_created(0):
            seen[preserve_rank_order] = [mesh.get_local_rank(axis) for axis in AXES]
        assert mesh.get_coordinate() == (0, 1, 1)
    assert seen == {False: [0, 1, 0], True: [0, 1, 1]}  # of ranks 3 7, 1 3 and 4 3


@in_worlds((8, 5))
@pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])
def test_of_groups_in_the_users_order(world, family: Family) -> None:
    groups = [dist.new_group([1, 5]), dist.new_group([7, 6, 5, 4])]
    mesh = family.DeviceMesh.from_group(
        groups, "cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("dp", "tp")
    )
    assert [mesh.get_local_rank("dp"), mesh.get_local_rank(1)] == [dist.get_rank(g) for g in groups]


@in_worlds((8, 5), (8, 1))
@pytest.mark.parametrize("method", ["get_local_rank", "get_group"])
def test_without_groups_it_raises_as_stock_does(world, method: str) -> None:
    stock, ours = (
        family.DeviceMesh("cpu", [4, 5, 6], mesh_dim_names=("tp",), _init_backend=False)
        for family in (STOCK, OURS)
    )
    lazy_cube()  # something else is still to be made
    for mesh, dim in itertools.product((stock, ours), DIMS):
        with pytest.raises(RuntimeError, match="DeviceMesh process groups not initialized!"):
            getattr(mesh, method)(dim)


@in_worlds((8, 5))
def test_after_the_end_it_says_so(world) -> None:
    destroyed, over = lazy_cube(), lazy_cube()
    destroyed.universe.destroy()
    with pytest.raises(RuntimeError, match="was destroyed"):
        destroyed.get_local_rank("tp")
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"gone \(there is none now\)"):
        over.get_local_rank("tp")


@in_worlds((1_048_576, 777_777))
def test_in_a_large_world_it_is_a_few_divisions(world) -> None:
    mesh = init_device_mesh("cpu", (1024, 512, 2), mesh_dim_names=AXES, lazy=True)
    flat = mesh["dp_replicate", "tp"].flatten("flat")
    with groups_created(0):
        assert [mesh.get_local_rank(axis) for axis in (*AXES, "flat")] == [759, 280, 1, 1519]
        assert flat.get_local_rank() == 1519
