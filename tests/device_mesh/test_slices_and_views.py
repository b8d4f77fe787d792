"""Slicing rules, flattened axes, all submeshes and the current mesh, by example."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh as stock_module

from helpers.observation import OURS, STOCK, Family, assert_same, observe
from helpers.worlds import FakeWorld, groups_created, in_worlds
from meshverse import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.usefixtures("world")

_SHAPE, _NAMES = (2, 2, 2), ("dp", "cp", "tp")


def _mesh(family: Family = OURS) -> DeviceMesh:
    return family.init_device_mesh("cpu", _SHAPE, mesh_dim_names=_NAMES)


@pytest.mark.parametrize("names", ["cp", ("cp",), ["cp"], ("dp", "tp"), ["dp", "tp"], list(_NAMES)])
@in_worlds((8, 0), (8, 5), (8, 7))
def test_a_slice_has_stocks_ranks(names: str | tuple[str, ...] | list[str]) -> None:
    assert_same(_mesh(STOCK)[names], _mesh()[names])


def test_a_slice_is_one_object_however_its_axes_are_given() -> None:
    mesh = _mesh()
    assert mesh["cp"] is mesh["cp"] is mesh[("cp",)] is mesh[["cp"]]
    assert mesh["dp", "tp"] is mesh[["dp", "tp"]]
    assert mesh["dp", "cp"]["cp"] is mesh["cp"]
    assert mesh[_NAMES] is mesh[list(_NAMES)] is mesh


def test_a_list_that_changes_later_changes_no_slice() -> None:
    names = ["dp", "cp"]
    mesh = _mesh()
    sliced = mesh[names]
    names.pop()
    assert mesh[names].mesh_dim_names == ("dp",)
    assert sliced.mesh_dim_names == ("dp", "cp")


@pytest.mark.parametrize("names", [("tp", "dp"), ["cp", "dp"], ("dp", "tp", "cp")])
def test_another_order_than_the_meshs_is_refused(names: tuple[str, ...] | list[str]) -> None:
    with pytest.raises(KeyError, match=r"should be in ascending order.*'dp', 'cp', 'tp'"):
        _mesh()[names]


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(KeyError, match=r"'pp'.*Valid mesh_dim_names are \['dp', 'cp', 'tp'\]"):
        _mesh()["dp", "pp"]
    with pytest.raises(KeyError, match="pp"):
        _mesh()["dp", "cp"]["pp"]


def test_an_axis_outside_the_slice_is_refused() -> None:
    with pytest.raises(KeyError, match=r"Valid mesh_dim_names are \['dp', 'cp'\]"):
        _mesh()["dp", "cp"]["tp"]


def test_an_axis_twice_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"overlapping dim_names \('dp', 'dp'\)"):
        _mesh()["dp", "dp"]


def test_a_mesh_without_names_is_not_sliced() -> None:
    with pytest.raises(RuntimeError, match="without mesh_dim_names"):
        init_device_mesh("cpu", _SHAPE)["dp"]


def test_a_flattened_axis_is_sliced_from_the_root_with_stocks_warning() -> None:
    stock, ours = _mesh(STOCK), _mesh()
    for mesh in (stock, ours):
        mesh["dp", "cp"]._flatten("dp_cp")
    with pytest.warns(UserWarning, match="Slicing a flattened dim from root mesh"):
        stock_slice = stock["dp_cp", "tp"]
    with pytest.warns(UserWarning, match="Slicing a flattened dim from root mesh"):
        our_slice = ours["dp_cp", "tp"]
    assert_same(stock_slice, our_slice)
    with pytest.raises(KeyError, match="dp_cp"):  # from the root only
        ours["dp", "cp"]["dp_cp"]


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
def test_a_flattened_axis_that_overlaps_is_refused() -> None:
    mesh = _mesh()
    mesh["dp", "cp"]._flatten("dp_cp")
    with pytest.raises(RuntimeError, match=r"overlapping dim_names \('dp', 'dp_cp'\)"):
        mesh["dp", "dp_cp"]


def test_a_flattened_group_is_found_by_name() -> None:
    mesh = _mesh()
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    assert mesh.get_group("dp_cp") is flat.get_group()
    assert dist.get_process_group_ranks(flat.get_group()) == [1, 3, 5, 7]


def test_flattening_again_gives_the_same_mesh_and_another_layout_is_refused() -> None:
    mesh = _mesh()
    flat = mesh["dp", "cp"].flatten()
    assert flat.mesh_dim_names == ("dp_cp",)
    assert mesh["dp", "cp"].flatten() is flat is mesh["dp", "cp"]._flatten("dp_cp")
    assert mesh["dp"].flatten() is mesh["dp"]
    with pytest.raises(ValueError, match="dp_cp has been created before"):
        mesh["cp", "tp"].flatten("dp_cp")
    with pytest.raises(ValueError, match="tp already exists"):
        mesh["dp", "cp"].flatten("tp")


@pytest.mark.parametrize(
    ("spelling", "private"),
    [
        (lambda m: m["dp", "cp"].flatten("x"), lambda m: m["dp", "cp"]._flatten("x")),
        (
            lambda m: m.unflatten("tp", (1, 2), ("a", "b")),
            lambda m: m._unflatten("tp", (1, 2), ("a", "b")),
        ),
        (
            lambda m: DeviceMesh.concatenate([m["dp"], m["tp"]]),
            lambda m: DeviceMesh._concatenate([m["dp"], m["tp"]]),
        ),
    ],
    ids=["flatten", "unflatten", "concatenate"],
)
def test_public_spellings_do_what_the_private_ones_do(spelling, private) -> None:
    mesh = _mesh()
    assert spelling(mesh) is private(mesh)


@in_worlds((8, 0), (8, 6))
@pytest.mark.parametrize("name", _NAMES)
def test_all_submeshes_are_stocks(name: str) -> None:
    stock, ours = _mesh(STOCK), _mesh()
    with groups_created(0):
        submeshes = ours._get_all_submeshes(name)
    for stock_submesh, submesh in zip(stock._get_all_submeshes(name), submeshes, strict=True):
        assert_same(stock_submesh, submesh)


def test_all_submeshes_of_an_unknown_axis() -> None:
    with pytest.raises(KeyError, match="pp"):
        _mesh()._get_all_submeshes("pp")


def test_the_current_mesh_is_the_innermost() -> None:
    mesh = _mesh()
    current = stock_module._mesh_resources.get_current_mesh
    with mesh as outer:
        assert current() is outer is mesh
        with mesh["tp"]:
            assert current() is mesh["tp"]
        assert current() is mesh
    with pytest.raises(RuntimeError, match="No device mesh is currently active"):
        current()


def test_the_layout_and_the_universe_of_derived_meshes() -> None:
    mesh = _mesh()
    derived = [mesh["dp"], mesh["dp", "tp"], mesh["dp", "cp"].flatten(), mesh["tp"]]
    assert all(view.universe is mesh.universe for view in derived)
    assert [str(axis) for axis in mesh.layout] == ["2:4", "2:2", "2:1"]
    assert [str(axis) for axis in mesh["dp", "tp"].layout] == ["2:4", "2:1"]
    assert [str(axis) for axis in derived[2].layout] == ["4:2"]
    assert mesh.universe.size == 8
    assert mesh.universe.rank_map.is_identity
    assert mesh.universe.rank == mesh.universe.position == 5


def test_the_tensor_is_made_once_for_each_mesh() -> None:
    mesh = _mesh()
    tensors = [mesh.mesh, mesh["dp"].mesh, mesh["cp", "tp"].mesh, mesh["dp", "cp"].flatten().mesh]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert mesh.mesh is tensors[0]
    assert mesh["dp"].mesh.dtype is torch.int32


@in_worlds((8, 1), (8, 4))
def test_a_mesh_of_part_of_the_world_in_another_order(world: FakeWorld) -> None:
    ranks = [[[6], [1]], [[0], [7]]]
    stock, ours = (
        family.DeviceMesh("cpu", ranks, mesh_dim_names=_NAMES) for family in (STOCK, OURS)
    )
    assert_same(stock, ours)
    assert ours.universe.position == (1 if world.rank == 1 else None)
    assert observe(ours)["groups"][0].value == ([1, 7] if world.rank == 1 else None)


def test_the_nearest_name_is_named(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_shard", "tp"))
    with pytest.raises(KeyError, match=r"Valid mesh_dim_names are .* Did you mean 'dp_shard'\?"):
        mesh["dp_shrad"]
    with pytest.raises(KeyError) as caught:
        mesh["qqq"]
    assert "Did you mean" not in str(caught.value)


def test_to_write_into_the_ranks_of_a_mesh_changes_no_other(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    view = mesh.unflatten("tp", (2, 2), ("a", "b"))
    before = [view.mesh.clone(), mesh["tp"].mesh.clone(), mesh["dp"].mesh.clone()]
    mesh.mesh.fill_(0)
    mesh["tp"].mesh.fill_(0)
    after = [view.mesh, mesh["dp", "tp"].unflatten("dp", (2, 1), ("x", "y")).mesh]
    assert torch.equal(after[0], before[0])
    assert after[1].flatten().tolist() == list(range(8))
    assert torch.equal(mesh["dp"].mesh, before[2])
    assert mesh.get_coordinate() == view.get_coordinate()[:1] + mesh["tp"].get_coordinate()
