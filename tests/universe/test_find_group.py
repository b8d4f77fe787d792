"""Groups found by c10d's name, and the descriptions that others' tools show."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import meshverse
from helpers.worlds import FakeWorld, in_worlds
from meshverse import DeviceMesh, init_device_mesh
from meshverse.groups.creation import group_desc
from meshverse.universe.universe_groups import share_world_wide


@in_worlds(FakeWorld(8, 5))
def test_a_shared_group_has_the_axes_of_all_that_use_it(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"), universe=mesh.universe)
    name = mesh["tp"].get_group().group_name
    found = meshverse.find_group(name)
    assert (found.name, found.axes, found.ranks) == (name, ("tp", "ep"), (4, 5, 6, 7))
    assert found.coordinate == {"dp": 1, "tp": 1}
    assert found.universe is mesh.universe
    assert meshverse.find_group(mesh["tp"].get_group()) == found


@in_worlds(FakeWorld(8, 5))
def test_a_group_that_the_mesh_did_not_create_is_found(world) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))  # on the default group
    found = meshverse.find_group(mesh.get_group())
    assert (found.axes, found.ranks) == (("dp",), tuple(range(8)))
    assert found.coordinate == {"dp": 5}
    assert found.universe is mesh.universe
    given = DeviceMesh.from_group(dist.new_group([1, 5]), "cpu", mesh_dim_names=("tp",))
    found = meshverse.find_group(given.get_group())
    assert (found.axes, found.ranks, found.coordinate) == (("tp",), (1, 5), {"tp": 1})
    assert found.universe is given.universe


@in_worlds(FakeWorld(8, 5))
def test_of_the_universes_of_a_group_those_that_created_groups_come_first(world) -> None:
    plain = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    later = init_device_mesh("cpu", (8,), mesh_dim_names=("later",))
    name = plain.get_group().group_name
    assert meshverse.find_group(name).universe is plain.universe
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert meshverse.find_group(name).universe is plain.universe
    mesh.flatten("world")
    assert meshverse.find_group(name).axes == ("world",)
    mesh.universe.destroy()
    plain.universe.destroy()
    assert meshverse.find_group(name).axes == ("later",)
    later.universe.destroy()
    with pytest.raises(KeyError, match="No mesh of this rank uses a group named"):
        meshverse.find_group(name)


@in_worlds(FakeWorld(8, 5))
def test_a_group_that_universes_share_has_the_axes_of_all(world) -> None:
    share_world_wide(True)
    try:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "model"))
    finally:
        share_world_wide(False)
    found = meshverse.find_group(other.get_group("data"))
    assert found.axes == ("dp", "data")
    assert found.universe is mesh.universe
    mesh.universe.destroy()
    assert meshverse.find_group(other.get_group("data")).axes == ("data",)


@in_worlds(FakeWorld(8, 5))
def test_an_unknown_name_is_refused(world) -> None:
    init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    with pytest.raises(KeyError, match="No mesh of this rank uses a group named 'other'"):
        meshverse.find_group("other")
    dist.new_group([5])
    with pytest.raises(KeyError, match="No mesh of this rank"):
        meshverse.find_group(next(n for n in dist.distributed_c10d._world.pg_names.values()))


@in_worlds(FakeWorld(8, 5))
def test_a_lazy_group_is_described_by_all_axes_and_its_ranks(world) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"), lazy=True)
    init_device_mesh("cpu", (4, 2), mesh_dim_names=("batch", "tp"), universe=mesh.universe)
    assert mesh.get_group("fsdp").group_desc == "mesh_fsdp+batch[1-7:2]"
    assert mesh.get_group("tp").group_desc == "mesh_tp[4-5]"


@pytest.mark.parametrize(
    ("axes", "ranks", "text"),
    [
        (["tp"], [3], "mesh_tp[3]"),
        (["tp"], [0, 1, 5], "mesh_tp[0-5, 3 ranks]"),
        (["tp"], [3, 2, 1], "mesh_tp[1-3, 3 ranks]"),
        (["tp"], [], "mesh_tp"),
        ([f"axis_{i}" for i in range(20)], range(0, 10_240, 8), None),
        (["x" * 100, "y"], range(10_240), None),
        (["x" * 100], range(10_240), None),
    ],
)
def test_a_description_has_at_most_60_characters(axes, ranks, text) -> None:
    found = group_desc(axes, ranks)
    assert len(found) <= 60
    assert text is None or found == text
    assert text is not None or found.endswith("]")
    assert ("more" in found) == (len(axes) > 1)
