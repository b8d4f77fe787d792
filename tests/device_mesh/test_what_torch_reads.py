"""Private attributes that torch's own code reads of a mesh: the same as stock's, or of its form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.meshes import MeshSpec, mesh_specs
from helpers.observation import OURS, STOCK, Family
from helpers.one_graph import compiled_on_one_rank
from helpers.versions import needs_canonical_layouts
from helpers.worlds import fake_world, in_worlds
from meshverse import init_device_mesh
from trainer_views import Degrees, five_views

_WITH_REPLICAS = Degrees(pp=2, dp_replicate=2, dp_shard=2, tp=2, ep=4)  # 16 ranks


def _read(mesh: StockDeviceMesh) -> dict[str, object]:
    return {
        "_device_type": mesh._device_type,
        "_mesh_dim_names": mesh._mesh_dim_names,
        "_flatten_rank_map": mesh._flatten_rank_map,
        "_rank_map": (mesh._rank_map.dtype, mesh._rank_map.tolist()),
        "_coordinate_on_dim": mesh._coordinate_on_dim,
        "_thread_id": mesh._thread_id,
        "_rank": mesh._rank,
        "is root": mesh._root_mesh is None,
        "groups": len(mesh._dim_group_names),
    }


@given(mesh_specs())
def test_of_new_meshes(spec: MeshSpec) -> None:
    with fake_world(spec.world_size, spec.rank):
        stock, ours = spec.build(STOCK), spec.build(OURS)
        assert _read(ours) == _read(stock)
        assert ours._layout == stock._layout
        assert isinstance(ours._flatten_rank_map, tuple)


@needs_canonical_layouts
@in_worlds((16, 11))
def test_of_derived_meshes(world) -> None:
    stock, ours = (
        five_views(STOCK.init_device_mesh, _WITH_REPLICAS),
        five_views(OURS.init_device_mesh, _WITH_REPLICAS),
    )
    for name in stock:
        assert _read(ours[name]) == _read(stock[name])
        assert ours[name]._layout == stock[name]._layout
        assert ours[name]._get_root_mesh() is ours["world"]
    assert list(ours["world"]._flatten_mapping) == list(stock["world"]._flatten_mapping) == ["loss"]
    assert ours["world"]._flatten_mapping["loss"] is ours["loss"]


@pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])
@in_worlds((16, 11))
def test_the_root_registers_every_group_by_name(family: Family, world) -> None:
    views = five_views(family.init_device_mesh, _WITH_REPLICAS)
    registry = views["world"]._pg_registry
    for view in views.values():
        for name, group in zip(view._dim_group_names, view.get_all_groups(), strict=True):
            assert registry[name] is group is c10d._resolve_process_group(name)


def test_a_rank_in_the_mesh_knows_its_place(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert [mesh._sym_get_coordinate(axis) for axis in range(2)] == [1, 1]
    assert [mesh["tp"]._get_mesh_dim_by_name("tp"), mesh["tp"]._get_root_mesh_dim()] == [0, 1]
    ranks = mesh._layout.remap_to_tensor(mesh._rank_map)
    assert torch.equal(mesh._get_mesh_tensor_from_full_mesh(ranks), mesh.mesh)


def test_the_name_of_a_flattened_axis_is_no_axis(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh.flatten("dt")
    with pytest.raises(KeyError, match=r"It is a flattened axis: mesh\['dt'\] returns its mesh"):
        mesh._get_mesh_dim_by_name("dt")
    with pytest.raises(KeyError, match="Did you mean 'dt'"):
        mesh._get_mesh_dim_by_name("dtt")


def test_stable_hashes_tell_meshes_apart_that_have_other_graphs(world) -> None:
    one = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    two = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), universe=one.universe)
    other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "tp"), universe=one.universe)
    assert one._stable_hash() == two._stable_hash()
    assert one["tp"]._stable_hash() == two["tp"]._stable_hash() == other["tp"]._stable_hash()
    assert len({mesh._stable_hash() for mesh in (one, other, one["tp"], one["dp"])}) == 4


def _stable_hashes() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    apart = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert apart == mesh
    return [mesh["tp"]._stable_hash(), apart["tp"]._stable_hash()]


def test_stable_hashes_are_of_what_a_graph_of_one_rank_knows() -> None:
    seen: dict[int, list[list[str]]] = {4: [], 5: []}
    for rank in (4, 5, 4):
        with fake_world(8, rank):
            seen[rank].append(_stable_hashes())
    assert seen[4][0] == seen[4][1]  # so the next run of a job finds its graphs
    # Another rank has another place, and meshes made apart have other groups.
    assert len({*seen[4][0], *seen[5][0]}) == 4


def test_stable_hashes_are_of_no_rank_where_a_graph_is_for_all() -> None:
    seen = set()
    for rank in (4, 5, 4):
        with fake_world(8, rank), compiled_on_one_rank():
            seen.update(_stable_hashes())
    assert len(seen) == 1
