"""Topologies read from the environment, from files, and from NVIDIA's driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from helpers import via_store
from meshverse import Topology
from meshverse.tools.topology.detection import nvlink_domain
from meshverse.tools.topology.slurm import (
    expand_hosts,
    expand_tasks,
    read_network,
    switches_of_address,
)

# --- Slurm's lists -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("tux[0-2,7]", "tux0 tux1 tux2 tux7"),
        ("tux[08-11]", "tux08 tux09 tux10 tux11"),
        ("a[1-2]b[3,5],c", "a1b3 a1b5 a2b3 a2b5 c"),
        ("gpu-a[1-2].rack-x,gpu-b7", "gpu-a1.rack-x gpu-a2.rack-x gpu-b7"),
    ],
)
def test_hosts_are_listed_as_slurm_does(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize(
    "text", ["tux[0-2", "tux0-2]", "tux[2-0]", "tux[a]", "tux[]", "", "a,,b", "a[1[2]]"]
)
def test_what_is_no_list_of_hosts_raises(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"host list {text!r}")):
        expand_hosts(text)


def test_lists_that_are_too_long_are_refused() -> None:
    for text in ("n[1-99999999]", "n[1-9999]m[1-9999]"):
        with pytest.raises(ValueError, match="has more than 1048576 hosts"):
            expand_hosts(text)
    with pytest.raises(ValueError, match="is not as in"):
        expand_tasks("8(x99999999)")


def test_tasks_per_node() -> None:
    assert expand_tasks("8(x3),4, 2(x2)") == [8, 8, 8, 4, 2, 2]
    with pytest.raises(ValueError, match=r"'8\(3\)' in the tasks per node"):
        expand_tasks("8(3)")


def test_switches_in_an_address() -> None:
    assert switches_of_address("core.leaf3.tux7", "switch.switch.node") == {
        "switch": "leaf3",
        "spine": "core",
    }
    assert switches_of_address("b1.tux7", "block.node") == {"domain": "b1"}
    assert switches_of_address("tux7", "node") == {}
    assert switches_of_address("s1.tux7.example.org", "switch.node") == {"switch": "s1"}
    with pytest.raises(ValueError, match=r"does not fit its pattern 'switch\.node'"):
        switches_of_address("tux7", "switch.node")


# --- the environment -----------------------------------------------------------------------------

_CLEARED = ("SLURM_", "WORLD_SIZE", "LOCAL_", "GROUP_", "RANK")
_TORCHRUN = {
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "6",
    "LOCAL_RANK": "2",
}
_SLURM = {"SLURM_JOB_NODELIST": "tux[0-1,5]", "SLURM_TASKS_PER_NODE": "2(x2),1"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith(_CLEARED):
            monkeypatch.delenv(name)

    def set_all(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_of_torchrun(environment) -> None:
    environment({**_TORCHRUN, **_SLURM})  # torchrun says where the ranks are
    assert Topology.from_environment().to_dict() == {"node": {"node0": "0-3", "node1": "4-7"}}


def test_of_slurm(environment, tmp_path: Path) -> None:
    environment(_SLURM)
    nodes = {"tux0": "0-1", "tux1": "2-3", "tux5": "4"}
    assert Topology.from_environment().to_dict() == {"node": nodes}
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=s0 Nodes=tux[0,5-6]\nSwitchName=s1 Nodes=tux[1-4]\n")
    switches = {"s0": "0-1,4", "s1": "2-3"}
    assert Topology.from_environment(file).to_dict() == {"node": nodes, "switch": switches}
    environment({"SLURM_DISTRIBUTION": "cyclic:block"})
    nodes = {"tux0": "0,3", "tux1": "1,4", "tux5": "2"}
    assert Topology.from_environment().to_dict() == {"node": nodes}


def test_a_step_goes_before_its_job(environment) -> None:
    step = {"SLURM_STEP_NODELIST": "tux1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    environment({**_SLURM, **step, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "5"})
    assert Topology.from_environment().to_dict() == {"node": {"tux1": "0-1"}}


def test_slurms_address_tells_the_switches_of_a_job_on_one_node(environment) -> None:
    address = {
        "SLURM_TOPOLOGY_ADDR": "top.leaf2.tux1",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    environment({"SLURM_JOB_NODELIST": "tux1", "SLURM_TASKS_PER_NODE": "2", **address})
    data = Topology.from_environment().to_dict()
    assert data == {"node": {"tux1": "0-1"}, "switch": {"leaf2": "0-1"}, "spine": {"top": "0-1"}}
    environment(_SLURM)  # of other nodes it says nothing
    assert list(Topology.from_environment().to_dict()) == ["node"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "neither torchrun's LOCAL_WORLD_SIZE and GROUP_RANK nor Slurm's"),
        ({**_TORCHRUN, "WORLD_SIZE": "7"}, "WORLD_SIZE=7, LOCAL_WORLD_SIZE=4 on node 1 of 2"),
        ({**_TORCHRUN, "RANK": "2"}, "RANK=2, LOCAL_RANK=2: the nodes have different numbers"),
        (
            {**_TORCHRUN, "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2", "RANK": "10"},
            "on node 2 of 2, RANK=10",
        ),
        ({**_TORCHRUN, "WORLD_SIZE": "9" * 5000}, "99' in the environment is not a number"),
        ({**_TORCHRUN, "WORLD_SIZE": "\u0668"}, "in the environment is not a number"),
        ({**_TORCHRUN, "WORLD_SIZE": "x"}, "WORLD_SIZE='x' in the environment is not a number"),
        ({"SLURM_NODELIST": "a,b"}, "names 2 nodes, but SLURM_TASKS_PER_NODE is not set"),
        ({**_SLURM, "SLURM_JOB_NODELIST": "a,b"}, "names 2 nodes, but tasks for 3"),
        ({**_SLURM, "SLURM_JOB_NODELIST": "a,b,a"}, "Slurm names a node twice: a,b,a"),
        ({**_SLURM, "SLURM_NTASKS": "4"}, "Slurm runs 5 tasks (SLURM_TASKS_PER_NODE=2(x2),1)"),
        ({**_SLURM, "WORLD_SIZE": "40"}, "but WORLD_SIZE=40: the ranks of the job are not"),
        ({**_SLURM, "SLURM_DISTRIBUTION": "plane=2"}, "SLURM_DISTRIBUTION=plane=2 is not"),
    ],
)
def test_an_environment_that_tells_too_little_is_refused(environment, variables, said) -> None:
    environment(variables)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        Topology.from_environment()
    assert "Topology.detect()" in str(caught.value)


def test_numbers_of_nodes_are_not_looked_up_in_a_file(environment, tmp_path: Path) -> None:
    environment(_TORCHRUN)
    with pytest.raises(ValueError, match=re.escape("Use Topology.detect(network_file=...)")):
        Topology.from_environment(tmp_path / "topology.conf")


# --- files ---------------------------------------------------------------------------------------

_TREE = """
# the network
switchname=s0 Nodes=tux[0-1]   # a leaf
SwitchName=s1 Nodes=tux2 LinkSpeed=100
SwitchName=s2 Switches=s[0-1]
SwitchName=s3 Nodes=tux3
SwitchName=top \\
    Switches=s[2-3]
"""


def test_a_tree_of_switches() -> None:
    network = read_network(_TREE, "topology.conf")
    assert network.nodes == ("tux0", "tux1", "tux2", "tux3")
    assert {level: list(of.values()) for level, of in network.levels.items()} == {
        "switch": ["s0", "s0", "s1", "s3"],
        "spine": ["s2", "s2", "s2", "s3"],  # s3 is below no spine: it stands for its own
        "core": ["top", "top", "top", "top"],
    }


def test_blocks_are_domains(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text("BlockName=b0 Nodes=n[0-1]\nBlockName=b1 Nodes=n[2-3]\nBlockSizes=2,4\n")
    data = Topology.from_file(file, node_size=2, nodes="n[3,0-1]").to_dict()
    assert data == {
        "node": {"n3": "0-1", "n0": "2-3", "n1": "4-5"},
        "domain": {"b1": "0-1", "b0": "2-5"},
    }


def test_a_topology_is_saved_and_read(tmp_path: Path) -> None:
    topology = Topology(
        {"node": list("abacb"), "switch": list("xyxyy"), "domain": ["1", "2", "1", "4", "2"]}
    )
    assert [level.name for level in topology.levels] == ["node", "domain", "switch"]
    topology.save(tmp_path / "t.json")
    assert Topology.from_file(tmp_path / "t.json") == topology
    data = json.loads((tmp_path / "t.json").read_text())
    assert data["node"] == {"a": "0,2", "b": "1,4", "c": "3"}
    (tmp_path / "lists.json").write_text(json.dumps({"node": {"a": [0, 2], "b": "1"}}))
    assert Topology.from_file(tmp_path / "lists.json") == Topology({"node": list("aba")})
    assert topology != Topology({"node": list("aba")})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no levels"),
        ('{"node": ["a"]}', "has no levels"),
        ('{"node": {"a": "0-1", "b": "1-2"}}', "rank 1 is on two node parts, 'a' and 'b'"),
        ('{"node": {"a": "0-1", "b": "4"}}', "ranks 2-3 are on no node. List each of the ranks"),
        ('{"node": {"a": "0-1"}, "switch": {"s": "0"}}', "ranks 1 are on no switch"),
        ('{"node": {"a": "1-0"}}', "'1-0' is not a list of ranks, for node 'a'"),
        ('{"node": {"a": [0, -1]}}', "is not a list of ranks, for node 'a'"),
        ('{"node": {"a": 3}}', "3 is not a list of ranks, for node 'a'"),
        ('{"node": {"a": "0-99999999999"}}', "is not a list of ranks, for node 'a'"),
        ('{"node": {"a": "0-1"}, "switch": {"s": "0", "t": "1"}}', "Node 'a' is on two switch"),
        ("SwitchName=s0 Nodes=a\nHello=1", "'Hello=1' begins with neither SwitchName="),
        ("SwitchName=s0 Nodes", "is not of the form Name=value"),
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=a", "a is below s0 and below s1"),
        ("BlockName=s0 Nodes=a\nBlockName=s1 Nodes=a", "a is in s0 and in s1"),
        (
            "SwitchName=s0 Nodes=a\nSwitchName=s1 Switches=s[0,2]\nSwitchName=s2 Switches=s1",
            "is above itself",
        ),
        (
            "SwitchName=t Switches=leaff0\nSwitchName=leaf0 Nodes=a",
            "no line has SwitchName=leaff0.",
        ),
        ("SwitchName=s0 Nodes=a nodes=b", "has Nodes= twice. Write it once"),
        ("SwitchName=s0 Node=a", "has Node=, but the fields of a line with SwitchName= are"),
        ("SwitchName=s0 Nodes=a Switch=s1", "has Switch=, but the fields"),
        ("BlockName=b0 Nodes=a Switches=s1", "has Switches=, but the fields"),
        ("BlockSizes=2 Nodes=a", "begins with neither SwitchName="),
        ("SwitchName=s0 BlockName=b0 Nodes=a", "has SwitchName= and BlockName=. Write a line"),
        (
            "SwitchName=s0 Nodes=a\nSwitchName=s1 Switches=s2\nSwitchName=s2 Switches=s1",
            "is above itself",
        ),
        ("SwitchName=s0 Nodes=a,b\nBlockName=b0 Nodes=a", "the node b is on no block, but"),
        ("SwitchName=s0 Nodes=a\nBlockName=b0 Nodes=a,b", "the node b is on no switch, but"),
        ("SwitchName=s0 Switches=s1", "has no nodes: no line of it has Nodes="),
        ("SwitchName=s0 Nodes=b", "does not name a, on which ranks run"),
    ],
)
def test_a_file_that_cannot_be_read_raises(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "some.file"
    file.write_text(text)
    asked = {} if text.startswith("{") else {"nodes": "a", "node_size": 2}
    with pytest.raises(ValueError, match=re.escape(said)):
        Topology.from_file(file, **asked)


def test_what_a_file_tells_is_not_given_beside_it(tmp_path: Path) -> None:
    Topology.uniform(4, node_size=2).save(tmp_path / "t.json")
    with pytest.raises(ValueError, match="leave nodes= and node_size= out"):
        Topology.from_file(tmp_path / "t.json", node_size=2)
    (tmp_path / "topology.conf").write_text(_TREE)
    with pytest.raises(ValueError, match=re.escape("Give node_size=, an int above 0; got None")):
        Topology.from_file(tmp_path / "topology.conf")
    (tmp_path / "notes.txt").write_text("root:x:0:0\n")
    with pytest.raises(ValueError, match=r"'root:x:0:0' is not of the form Name=value"):
        Topology.from_file(tmp_path / "notes.txt")


# --- made by hand --------------------------------------------------------------------------------


def test_a_domain_is_inside_a_node_or_outside() -> None:
    inside = Topology.uniform(16, node_size=8, domain_size=4, switch_size=16)
    outside = Topology.uniform(16, node_size=4, domain_size=8)
    assert [level.name for level in inside.levels] == ["domain", "node", "switch"]
    assert [level.name for level in outside.levels] == ["node", "domain"]
    assert repr(outside) == "Topology(16 ranks; node: 4, domain: 2)"


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Topology({}), ValueError, "A topology needs a level"),
        (lambda: Topology({"node": []}), ValueError, "The level 'node' has no ranks"),
        (
            lambda: Topology({"node": "ab"}),
            TypeError,
            "one string per rank, the name of its node; got 'ab'",
        ),
        (lambda: Topology("node"), TypeError, "'node' is no topology: give, by level, the part"),
        (lambda: Topology({"node": {"a", "b"}}), TypeError, "one string per rank"),
        (lambda: Topology({"node": {"a": "0-3"}}), TypeError, "one string per rank"),
        (lambda: Topology({"node": iter("ab")}), TypeError, "one string per rank"),
        (lambda: Topology({"node": None}), TypeError, "one string per rank"),
        (lambda: Topology({"node": ["a"]}).spans("node", [1]), ValueError, "ranks 0 to 0, but got"),
        (lambda: Topology({"node": ["a"]}).spans("node", [-1]), ValueError, "but got -1"),
        (
            lambda: Topology({"node": [0, 1]}),
            TypeError,
            "one string per rank, the name of its node; got [0, 1]",
        ),
        (
            lambda: Topology({"node": ["a", ""]}),
            ValueError,
            "Rank 1 has no node: its name is empty",
        ),
        (
            lambda: Topology({"node": ["a"], "switch": ["s", "s"]}),
            ValueError,
            "the node of 1 rank, the switch of 2 ranks",
        ),
        (lambda: Topology.uniform(8, node_size=0), ValueError, "node_size=0"),
        (lambda: Topology.uniform(0, node_size=1), ValueError, "world_size=0"),
        (lambda: Topology.uniform(8, node_size=True), ValueError, "node_size=True"),
        (lambda: Topology.uniform(12, node_size=4, switch_size=6), ValueError, "is on two switch"),
    ],
)
def test_what_is_no_topology_raises(make, error, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        make()


# --- NVIDIA's driver -----------------------------------------------------------------------------

_NVML = """
#include <string.h>
typedef struct { unsigned char uuid[16]; int status; unsigned clique; unsigned char state; } Info;
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetGpuFabricInfo(void *device, Info *info) {
  memset(info->uuid, UUID, 16);
  info->status = 0;
  info->clique = (long)device == 4 ? LAST : 7;
  info->state = STATE;
  return 0;
}
"""


@pytest.mark.skipif(via_store.compiler() is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("init", "byte", "last", "state", "domain"),
    [
        (0, 0xAB, 7, 3, "abababab-abab-abab-abab-abababababab-7"),
        (0, 0xAB, 8, 3, ""),  # the GPUs of a node are in two cliques
        (0, 0xAB, 7, 2, ""),  # not registered yet
        (0, 0, 7, 3, ""),  # a fabric of one machine
        (9, 0xAB, 7, 3, ""),  # the driver is not loaded
    ],
)
def test_the_clique_that_the_driver_tells(tmp_path: Path, init, byte, last, state, domain) -> None:
    source, library = tmp_path / "nvml.cpp", tmp_path / "libnvml.so"
    source.write_text('extern "C" {' + _NVML + "}")
    flags = [f"-D{n}={v}" for n, v in (("INIT", init), ("UUID", byte), ("LAST", last))]
    command = [str(via_store.compiler()), *flags, f"-DSTATE={state}", "-shared", "-fPIC"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    assert nvlink_domain(str(library)) == domain


def test_without_a_driver_there_is_no_domain(tmp_path: Path) -> None:
    assert nvlink_domain(str(tmp_path / "libnvml.so")) == ""
