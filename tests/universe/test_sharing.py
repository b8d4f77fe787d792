"""The same ranks and options are one process group, and the same mesh is one object."""

from __future__ import annotations

import pytest

from helpers.observation import OURS, STOCK, assert_same
from helpers.worlds import fake_world, groups_created, in_worlds, live_groups
from meshverse import DeviceMesh, init_device_mesh
from trainer_views import Degrees, five_views

_TRAINER = Degrees()  # 10,240 ranks
_WITH_REPLICAS = Degrees(pp=2, dp_replicate=2, dp_shard=2, tp=2, ep=4)  # 16 ranks


@pytest.fixture
def mesh(world) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))


# --- process groups, counted by c10d -------------------------------------------------------------


def test_a_mesh_makes_one_group_an_axis(world) -> None:
    with groups_created(3):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    with groups_created(0):
        mesh["dp", "tp"].get_all_groups()
        init_device_mesh("cpu", (8,))  # the default group


@pytest.mark.parametrize(
    ("degrees", "rank", "stock_groups", "our_groups"),
    [
        pytest.param(_TRAINER, 0, 19, 7, marks=pytest.mark.long),
        (_TRAINER, 7_321, 19, 7),
        # Here the replicas differ from the shards: one group more.
        pytest.param(_WITH_REPLICAS, 11, 19, 8, marks=pytest.mark.long),
    ],
)
def test_five_views_of_one_world(degrees, rank, stock_groups, our_groups) -> None:
    with fake_world(degrees.world_size, rank):
        stock = five_views(STOCK.init_device_mesh, degrees)
        assert len(live_groups()) == stock_groups
    with fake_world(degrees.world_size, rank):
        ours = five_views(OURS.init_device_mesh, degrees)
        groups = live_groups()
        assert len(groups) == our_groups
        assert len(set(groups.values())) == our_groups
    assert ours["full"].shape == stock["full"].shape


@in_worlds((16, 0), (16, 11))
def test_the_groups_of_five_views_are_stocks(world) -> None:
    stock, ours = (
        five_views(STOCK.init_device_mesh, _WITH_REPLICAS),
        five_views(OURS.init_device_mesh, _WITH_REPLICAS),
    )
    for name in stock:
        assert_same(stock[name], ours[name])


def test_flattening_and_unflattening_reuse_known_groups(mesh) -> None:
    with groups_created(1):
        flat = mesh["dp", "cp"].flatten("dp_cp")
    with groups_created(0):
        view = flat.unflatten(0, (2, 2), ("replicate", "shard"))
        again = view.flatten("batch")
        assert mesh["dp", "cp"].flatten("loss").get_group() is flat.get_group()
    assert view.get_group("replicate") is mesh.get_group("dp")
    assert view.get_group("shard") is mesh.get_group("cp")
    assert again.get_group() is flat.get_group()


def test_flattening_the_whole_mesh_is_the_default_group(mesh) -> None:
    with groups_created(0):
        flat = mesh.flatten("world")
    assert flat.get_group() is init_device_mesh("cpu", (8,)).get_group()


def test_axes_of_size_one_share_a_group(world) -> None:
    with groups_created(3):
        mesh = init_device_mesh("cpu", (1, 2, 1, 4), mesh_dim_names=("pp", "dp", "cp", "tp"))
        view = mesh.unflatten("tp", (4, 1, 1), ("fsdp", "ep", "etp"))
        flat = mesh["pp", "cp"].flatten("none")
    alone = mesh.get_group("pp")
    others = [mesh.get_group("cp"), view.get_group("ep"), view.get_group("etp"), flat.get_group()]
    assert all(group is alone for group in others)
    assert alone.size() == 1
    assert view.get_group("fsdp") is mesh.get_group("tp")


def test_an_axis_and_the_same_backwards_share_a_group(mesh) -> None:
    # A group's ranks ascend, in stock too, whatever the order of the axis.
    backwards = DeviceMesh.concatenate([mesh["tp"], mesh["dp"]])
    with groups_created(1):
        flat, flat_backwards = mesh["dp", "tp"].flatten(), backwards.flatten()
    assert flat.mesh.tolist() == [0, 1, 4, 5]
    assert flat_backwards.mesh.tolist() == [0, 4, 1, 5]
    assert flat_backwards.get_group() is flat.get_group()


def test_two_universes_share_nothing_but_the_default_group(world) -> None:
    with groups_created(2):
        one, two = (DeviceMesh("cpu", [4, 5], mesh_dim_names=("tp",)) for _ in range(2))
    assert one.get_group() is not two.get_group()


# --- meshes --------------------------------------------------------------------------------------


def test_slices_are_one_object(mesh) -> None:
    assert mesh["tp"] is mesh["tp"]
    assert mesh["dp", "tp"]["tp"] is mesh["tp"]


def test_concatenations_are_one_object(mesh) -> None:
    joined = DeviceMesh.concatenate([mesh["dp"], mesh["tp"]])
    assert joined is DeviceMesh.concatenate([mesh["dp"], mesh["tp"]])
    assert joined is mesh["dp", "tp"]
    backwards = DeviceMesh.concatenate([mesh["tp"], mesh["dp"]])
    assert backwards is not joined
    assert backwards.mesh_dim_names == ("tp", "dp")


def test_unflattened_views_are_one_object(mesh) -> None:
    flat = mesh["dp", "cp"].flatten("dp_cp")
    view = flat.unflatten(0, (2, 2), ("a", "b"))
    assert view is flat.unflatten("dp_cp", [2, 2], ["a", "b"])
    assert flat.unflatten(0, (2, 2), ("dp", "cp")) is mesh["dp", "cp"]
    assert flat.unflatten(0, (2, 2), ("b", "a")) is not view


def test_unflattening_back_to_the_same_axes_gives_the_mesh_itself(world) -> None:
    names = ("dp", "tp")
    flat = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    view = flat.unflatten(0, (2, 4), names)
    same = init_device_mesh("cpu", (2, 4), mesh_dim_names=names, universe=flat.universe)
    assert same == view
    assert same["tp"] is view["tp"]


def test_two_meshes_made_separately_are_equal_and_not_one(world) -> None:
    one, two = (init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one is not two
    assert one.universe is not two.universe
    assert one["tp"] == two["tp"]
    assert one["tp"] is not two["tp"]
    assert one["tp"].get_group() is not two["tp"].get_group()


def test_a_given_universe_shares_groups(world) -> None:
    first = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    with groups_created(0):
        second = init_device_mesh(
            "cpu", (2, 4), mesh_dim_names=("pp", "fsdp"), universe=first.universe
        )
    assert second.universe is first.universe
    assert second.get_all_groups() == first.get_all_groups()
    with groups_created(2):
        third = init_device_mesh("cpu", (4, 2), universe=first.universe)
    assert third.universe is first.universe


def test_a_given_universe_serves_explicit_ranks_in_its_order(world) -> None:
    first = DeviceMesh("cpu", [[4, 5], [7, 6]], mesh_dim_names=("dp", "tp"))
    with groups_created(0):
        second = DeviceMesh(
            "cpu", [[4, 5], [7, 6]], mesh_dim_names=("a", "b"), universe=first.universe
        )
    assert second.get_all_groups() == first.get_all_groups()
