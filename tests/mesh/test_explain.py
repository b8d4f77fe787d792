"""`universe.explain()` tells what c10d would tell, as text and as data."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from helpers.observation import OURS
from helpers.recipe import Degrees, five_views
from helpers.worlds import fake_world, live_groups
from meshverse import DeviceMesh, init_device_mesh


@pytest.fixture
def mesh(world) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2, 4), mesh_dim_names=("pp", "dp", "tp"))


def test_data_says_what_c10d_has(mesh) -> None:
    mesh.flatten("world")
    told = mesh.universe.explain().to_dict()
    groups = {group["name"]: tuple(group["ranks"]) for group in told["groups"]}
    assert groups == live_groups()
    assert told["rank"] == dist.get_rank()
    assert (told["requested"], told["created"], told["shared"]) == (4, 3, 1)
    assert [group["layout"] for group in told["groups"]] == ["1:0", "2:4", "4:1", "8:1"]
    assert [group["created"] for group in told["groups"]] == [True, True, True, False]
    assert [group["how"] for group in told["groups"]] == [
        "made by its members",
        "made by its members",
        "made by its members",
        "the default group",
    ]


def test_data_is_plain(mesh) -> None:
    told = mesh.universe.explain().to_dict()
    assert json.loads(json.dumps(told))["groups"][1]["ranks"] == [1, 5]


def test_requests_are_counted_by_axis(mesh) -> None:
    mesh["dp", "tp"].flatten("world").unflatten(0, (2, 4), ("replicate", "tp"))
    requests = [group.requests for group in mesh.universe.explain().groups]
    assert requests == [{"pp": 1}, {"dp": 1, "replicate": 1}, {"tp": 2}, {"world": 1}]


def test_slicing_asks_for_no_group(mesh) -> None:
    before = mesh.universe.explain()
    mesh["dp"].get_group()
    DeviceMesh.concatenate([mesh["pp"], mesh["tp"]]).get_all_groups()
    assert mesh.universe.explain() == before


def test_text_names_axes_layouts_ranks_and_origin(mesh) -> None:
    mesh.flatten("world")
    head, titles, *rows = str(mesh.universe.explain()).splitlines()
    assert "identity of 8" in head
    assert "seen by rank 5" in head
    assert "4 groups asked for, 3 created, 1 shared" in head
    assert titles.split() == ["axes", "layout", "my", "ranks", "options", "how"]
    assert len(rows) == 4
    assert rows[1].split()[:4] == ["dp", "x1", "2:4", "1,"]
    assert rows[3].startswith("  world x1  8:1     0, 1, 2, 3, 4, 5, 6, 7")
    assert rows[3].endswith("the default group")


def test_text_stays_short_for_large_groups() -> None:
    with fake_world(4096, 17):
        mesh = init_device_mesh("cpu", (4, 1024), mesh_dim_names=("dp", "tp"))
        row = str(mesh.universe.explain()).splitlines()[-1]
    assert "0, 1, 2, 3, 4, 5, ... 1023 (1024)" in row
    assert len(row) < 200


def test_a_rank_outside_the_mesh_is_told_so(world) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    told = mesh.universe.explain()
    assert (told.requested, told.created) == (2, 0)
    assert [(group.name, group.ranks) for group in told.groups] == [(None, ()), (None, ())]
    assert "none" in str(told)


def test_a_trainers_universe() -> None:
    degrees = Degrees()
    with fake_world(degrees.world, 7_321):
        told = five_views(OURS, degrees)["world"].universe.explain()
        groups = {group.name: group.ranks for group in told.groups}
        assert groups == live_groups()
    assert (told.requested, told.created, told.shared) == (19, 6, 13)
    assert told.groups[0].how == "the default group"
