"""Files of topologies that are refused, and why; and how text is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshverse import Topology
from meshverse.tools.commands.main import main

_NETWORK = "SwitchName=s0 Nodes=a,b\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"node": {"a": [0, 1000000000]}}', "is not a list of ranks, for node 'a'"),
        ('{"node": {"a": [0, 1000000000]}}', "with ranks below 16777216"),
        ('{"node": {"a": "0,16777216"}}', "with ranks below 16777216"),
        ('{"node": {"a": "' + "9" * 5000 + '"}}', "with ranks below 16777216"),
        ('{"node": {"a": [' + "9" * 5000 + "]}}", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"node": {"a": "0,0,1"}}', "rank 0 is twice on node 'a'. List it once."),
        ('{"node": {"a": "0-3,2"}}', "rank 2 is twice on node 'a'. List it once."),
        ('{"node": {"a": [0, 1, 1]}}', "rank 1 is twice on node 'a'. List it once."),
        ('{"node": {"a": "0-16777215' + ",0-16777215" * 9 + '"}}', "rank 0 is twice on node 'a'"),
        ('{"node": {"a": [], "b": [0]}}', "[] is not a list of ranks, for node 'a'"),
        ('{"node": {"a": []}}', "[] is not a list of ranks, for node 'a'"),
        ('{"node": {"a": "0"}, "node": {"a": "0-1"}}', "has 'node' twice in one object"),
        ('{"node": {"a": "0", "a": "1"}}', "has 'a' twice in one object"),
        ('{"": {"a": "0"}}', "has no levels"),
        ("[1, 2]", "has no levels"),
        (' [{"node": {"a": "0"}}]', "has no levels"),
    ],
    ids=lambda value: value[:40],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "mark"])
def test_json_that_is_no_topology_is_refused(tmp_path: Path, text, said, mark) -> None:
    file = tmp_path / "t.json"
    file.write_text(mark + text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        Topology.from_file(file)
    assert str(file) in str(caught.value)


def test_only_some_missing_ranks_are_listed(tmp_path: Path) -> None:
    ranks = ",".join(map(str, [*range(0, 100_000, 2), 16_000_000]))
    (tmp_path / "t.json").write_text(json.dumps({"node": {"a": ranks}}))
    with pytest.raises(ValueError, match=re.escape("ranks 1,3,5,7,")) as caught:
        Topology.from_file(tmp_path / "t.json")
    assert ",... are on no node. List each of the ranks 0 to 16000000" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_mark_at_the_beginning_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b'\xef\xbb\xbf{"node": {"a": "0-1"}}')
    assert Topology.from_file(tmp_path / "t.json").to_dict() == {"node": {"a": "0-1"}}
    (tmp_path / "net").write_bytes(b"\xef\xbb\xbf" + _NETWORK.encode())
    data = Topology.from_file(tmp_path / "net", node_size=1).to_dict()
    assert data == {"node": {"a": "0", "b": "1"}, "switch": {"s0": "0-1"}}


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_another_encoding_raises(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "t.json").write_text('{"n\xf6de": {"a": "0"}}', encoding=encoding)
    with pytest.raises(ValueError, match=re.escape("t.json is not text in UTF-8")):
        Topology.from_file(tmp_path / "t.json")


@pytest.mark.parametrize("nodes", ["a,a", "b,a,b", ["a", "b", "a", "a"]], ids=str)
def test_a_node_is_taken_once(tmp_path: Path, nodes) -> None:
    (tmp_path / "net").write_text(_NETWORK)
    with pytest.raises(ValueError, match=re.escape("is in nodes= twice. Name each node once")):
        Topology.from_file(tmp_path / "net", nodes=nodes, node_size=2)


def test_the_command_refuses_a_node_that_is_named_twice(tmp_path: Path, capsys) -> None:
    (tmp_path / "net").write_text(_NETWORK)
    asked = ["--topology", str(tmp_path / "net"), "--nodes", "a,a", "--node-size", "2"]
    assert main(["plan", "dp=2,tp=2", *asked]) == 2
    assert "'a' is in nodes= twice" in capsys.readouterr().err


def test_nodes_of_too_many_ranks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "net").write_text(_NETWORK)
    with pytest.raises(ValueError, match="2 nodes of 10000000000 ranks"):
        Topology.from_file(tmp_path / "net", node_size=10**10)
