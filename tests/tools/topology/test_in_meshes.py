"""Meshes, explanations and plans that know where their ranks are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from helpers.worlds import fake_world, groups_created
from meshverse import Topology, Universe, init_device_mesh, init_mesh_partition
from meshverse.tools.commands.main import main
from meshverse.tools.planner import plan

_NAMES = ("dp", "tp")
_IN_TURN = Topology({"node": ["a", "b"] * 4, "switch": ["s"] * 8})


def test_a_mesh_is_placed_in_the_order_of_the_topology(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES, topology=_IN_TURN)
    order = _IN_TURN.order((2, 4), _NAMES)
    assert torch.equal(mesh.mesh.flatten().long(), order)
    assert mesh.mesh.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh["tp"].mesh.tolist() == [1, 3, 5, 7]
    assert mesh.universe.topology is _IN_TURN


def test_traffic_says_which_axis_stays_inside(world) -> None:
    mesh = init_device_mesh(
        "cpu", (4, 2), mesh_dim_names=_NAMES, topology=_IN_TURN, traffic={"dp": 10}
    )
    assert mesh["dp"].mesh.tolist() == [1, 3, 5, 7]


def test_ranks_that_are_in_a_good_order_stay_in_it(world) -> None:
    mesh = init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=_NAMES, topology=Topology.uniform(8, node_size=4)
    )
    assert mesh.universe.rank_map.is_identity
    assert mesh == init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)


def test_explain_tells_how_many_nodes_a_group_is_on(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES, topology=_IN_TURN)
    mesh.unflatten("tp", (2, 2), ("a", "b"))
    report = mesh.universe.explain()
    nodes = {name: group.nodes for group in report.groups for name in group.requests}
    assert nodes == {"dp": 2, "tp": 1, "a": 1, "b": 1}
    assert json.loads(report.to_json())["groups"][0]["nodes"] == 2
    _, _, titles, first, *_ = str(report).splitlines()
    assert re.split("  +", titles.strip())[3:6] == ["size", "nodes", "ranks"]
    assert re.split("  +", first.strip())[3:6] == ["2", "2", "4, 5"]


def test_explain_tells_no_nodes_where_none_are_known(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)
    report = mesh.universe.explain()
    assert [group.nodes for group in report.groups] == [None, None]
    assert "nodes" not in str(report)
    other = init_device_mesh(
        "cpu", (8,), universe=Universe(8, topology=Topology({"rack": list("xxxxyyyy")}))
    )
    assert "nodes" not in str(other.universe.explain())


def test_a_universe_with_a_topology_keeps_the_order_of_its_ranks(world) -> None:
    universe = Universe([4, 5, 6, 7], topology=_IN_TURN)
    mesh = init_device_mesh("cpu", (4,), universe=universe)
    assert mesh.mesh.tolist() == [4, 5, 6, 7]
    assert [group.nodes for group in universe.explain().groups] == [2]


def test_a_rank_outside_a_mesh_is_on_no_node_of_it() -> None:
    with fake_world(8, 0):
        universe = Universe([4, 5, 6, 7], topology=_IN_TURN)
        init_device_mesh("cpu", (4,), universe=universe)
        assert [group.nodes for group in universe.explain().groups] == [0]
        assert "nodes" in str(universe.explain())


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        ({"topology": _IN_TURN, "ranks": range(8)}, ValueError, "ranks=..., topology=...): both"),
        ({"traffic": {"tp": 2}}, ValueError, "Give topology= too"),
        ({"topology": [0] * 8}, TypeError, "of type list: give a meshverse.Topology"),
        ({"topology": _IN_TURN, "traffic": {"pp": 1}}, ValueError, "names ['pp'], but the axes"),
        (
            {"topology": Topology({"node": ["a"] * 4})},
            ValueError,
            "mesh_shape (2, 4) has 8 ranks, but the topology has 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(world, ask, error, said) -> None:
    with groups_created(0), pytest.raises(error, match=re.escape(said)):
        init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES, **ask)


def test_a_topology_belongs_to_the_universe(world) -> None:
    universe = Universe(8)
    with pytest.raises(ValueError, match=re.escape("together with topology=")):
        init_device_mesh("cpu", (2, 4), topology=_IN_TURN, universe=universe)
    with pytest.raises(ValueError, match="includes rank 8, but the topology has ranks 0 to 7"):
        Universe([1, 8], topology=_IN_TURN)


def test_a_partition_takes_no_topology(world) -> None:
    parts = {"actor": {"mesh_shape": (4,)}, "judge": {"mesh_shape": (4,), "topology": _IN_TURN}}
    with groups_created(0), pytest.raises(ValueError, match="takes no topology="):
        init_mesh_partition("cpu", parts)


# --- plans ---------------------------------------------------------------------------------------


def test_a_plan_tells_what_crosses_every_level() -> None:
    topology = Topology.uniform(64, node_size=8, domain_size=16, switch_size=32)
    planned = plan(["dp=8,tp=8"], topology=topology)
    data = json.loads(planned.to_json())
    spans = [(g["nodes"]["max"], g["domains"]["max"], g["switches"]["max"]) for g in data["groups"]]
    assert spans == [(8, 4, 2), (1, 1, 1)]
    assert "switches per group" in str(planned)
    uneven = Topology({"node": list("aab"), "switch": list("sst")})
    notes = plan(["dp=3"], topology=uneven).warnings
    assert any("The switches have different sizes" in note for note in notes)


def test_a_plan_and_explain_tell_the_same_nodes() -> None:
    planned = plan(["dp=2,tp=4"], topology=_IN_TURN)
    with fake_world(8, 3):
        universe = Universe(8, topology=_IN_TURN)
        init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES, universe=universe)
        report = universe.explain()
    spans = [next(c.max for c in g.crossings if c.level == "node") for g in planned.groups]
    assert spans == [group.nodes for group in report.groups] == [1, 2]


def test_a_level_is_given_once() -> None:
    with pytest.raises(ValueError, match="The level node is given twice: leave node_size="):
        plan(["dp=8"], topology=_IN_TURN, node_size=4)
    with pytest.raises(ValueError, match="nodes of 8 ranks are given, but the world has 4"):
        plan(["dp=4"], topology=_IN_TURN)


def test_the_command_reads_a_file(tmp_path: Path, capsys) -> None:
    _IN_TURN.save(tmp_path / "t.json")
    assert main(["plan", "dp=2,tp=4", "--topology", str(tmp_path / "t.json"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [group["nodes"]["max"] for group in data["groups"]] == [1, 2]
    (tmp_path / "net").write_text("SwitchName=s0 Nodes=n[0-1]\nSwitchName=s1 Nodes=n[2-3]\n")
    arguments = ["plan", "dp=2,tp=4", "--topology", str(tmp_path / "net"), "--json"]
    assert main([*arguments, "--node-size", "4", "--nodes", "n[1,2]"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [group["switches"]["max"] for group in data["groups"]] == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology", "nowhere.json"], "nowhere.json"),
        (["--nodes", "n[0-1]"], "--nodes n[0-1] needs a --topology FILE"),
    ],
)
def test_what_the_command_cannot_read_is_an_error(arguments, said: str, capsys) -> None:
    assert main(["plan", "dp=2", *arguments]) == 2
    assert said in capsys.readouterr().err
