"""Groups of dumps by axis: from what `explain()` saved on one rank, those of all ranks."""

from __future__ import annotations

import json

import pytest

from helpers.worlds import FakeWorld, fake_world, in_worlds
from meshverse import DeviceMesh, find_group, init_device_mesh
from meshverse.hang.live import _name_groups, live_coordinates
from meshverse.hang.named_groups import MeshNames
from meshverse.hang.records import GroupSeen, RankRecord


def _cube() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    mesh["dp", "tp"].flatten("ep")
    mesh.flatten("world", isolate="again")
    init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "same"), universe=mesh.universe)
    return mesh


def _permuted() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), ranks=[6, 1, 3, 4])


@pytest.mark.parametrize("writer", [4, 6])
@pytest.mark.parametrize("make", [_cube, _permuted])
def test_one_ranks_file_names_the_groups_of_all(make, writer: int) -> None:
    with fake_world(8, writer):
        names = MeshNames(json.loads(make().universe.explain().to_json()))
    for rank in range(8):
        with fake_world(8, rank):
            mesh = make()
            uses = [use for use in mesh.universe.groups if use.name is not None]
            if mesh.get_coordinate() is None:
                assert names.coordinates(rank) == {}
                continue
            seen = {use.name: GroupSeen("group ''", None) for use in uses}
            record = RankRecord(rank, 0.0, groups=seen)
            names.name({rank: record})
            coordinate = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
            assert names.coordinates(rank) == coordinate
            for use in uses:
                label, ranks, *_ = record.groups[use.name]
                first, *others = use.requests
                shared = f" (shared with {', '.join(others)})" if others else ""
                assert (label, list(ranks)) == (f"axis {first}{shared}", use.request.my_ranks())


@in_worlds(FakeWorld(8, 0))
def test_a_group_that_is_not_of_the_universe_keeps_what_its_dump_says(world) -> None:
    names = MeshNames(json.loads(_cube().universe.explain().to_json()))
    seen = {"7": GroupSeen("group 'mine'", [0, 3]), "0": GroupSeen("the default group", None)}
    record = RankRecord(0, 0.0, groups=dict(seen))
    names.name({0: record})
    assert record.groups["7"] == seen["7"]
    assert list(record.groups["0"].ranks) == list(range(8))


def test_a_rank_is_named_by_the_mesh_with_the_most_axes() -> None:
    with fake_world(4, 0):
        world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        data = world.unflatten("world", (2, 2), ("batch", "model"))
        mesh = world.unflatten("world", (2, 1, 2), ("fsdp", "cp", "tp"))
        again = world.unflatten("world", (2, 2, 1), ("a", "b", "c"))
        assert live_coordinates(3) == {"fsdp": 1, "cp": 0, "tp": 1}
        assert find_group(mesh.get_group("tp").group_name).coordinate == {
            "fsdp": 0,
            "cp": 0,
            "tp": 0,
        }
        names = MeshNames(json.loads(world.universe.explain().to_json()))
        assert names.coordinates(3) == {"fsdp": 1, "cp": 0, "tp": 1}
        assert live_coordinates(4) == names.coordinates(4) == {}
        del data, mesh, again


def test_a_rank_is_named_by_a_mesh_on_the_default_group() -> None:
    with fake_world(4, 0):
        assert live_coordinates(3) == {}
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        assert live_coordinates(3) == {"dp": 3}
        # Ranks compare labels, but may have collected other universes that created no groups.
        record = RankRecord(0, 0.0, groups={"0": GroupSeen("the default group", range(4))})
        _name_groups(record)
        assert record.groups["0"].label == "the default group"
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        assert live_coordinates(3) == {"pp": 1, "tp": 1}
        grid.flatten("all")
        _name_groups(record)
        assert record.groups["0"].label == "axis all"
        del mesh
