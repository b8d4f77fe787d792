"""Pictures of plans whose nodes a topology tells."""

from __future__ import annotations

import json

import pytest
import torch

from meshverse import Topology
from meshverse.tools.planner import Places, plan

_VIEWS = ["dp=4,tp=4"]


def test_the_page_names_several_parts_of_each_level() -> None:
    topology = Topology.uniform(16, node_size=4, switch_size=8)
    page = plan(_VIEWS, topology=topology).to_html()
    assert "switches per group" in page
    assert "nodes per group" in page
    assert "switchs" not in page


_EQUAL = [
    Topology.uniform(16, node_size=4, switch_size=8),
    Topology({"node": [f"tux{9 - rank // 4}" for rank in range(16)]}),
]


@pytest.mark.parametrize("topology", _EQUAL, ids=["uniform", "by name"])
def test_equal_nodes_in_order_are_drawn_as_with_their_size(topology: Topology) -> None:
    planned, with_size = plan(_VIEWS, topology=topology), plan(_VIEWS, node_size=4)
    assert planned.node_size == planned.to_dict()["node_size"] == 4
    assert planned.to_svg() == with_size.to_svg()
    assert str(planned.picture) == str(with_size.picture)
    assert "node 3" in str(planned.picture)
    assert "node 3" in planned.to_html()


@pytest.mark.parametrize(
    ("of_rank", "size"),
    [
        ([0, 0, 0, 0], 4),
        ([0, 1, 2, 3], 1),
        ([5, 5, 2, 2], 2),
        ([0, 0, 0, 1], 3),  # the last node may have fewer, as where its size is given
        ([0, 1, 1, 1], None),
        ([0, 0, 1, 2], None),
        ([0, 1, 0, 1], None),
        ([0, 1, 1, 0], None),
        ([0, 0, 1, 1, 0, 0], None),
    ],
    ids=str,
)
def test_nodes_are_drawn_where_they_are_equal_blocks(of_rank: list[int], size: int | None) -> None:
    world = len(of_rank)
    planned = plan([f"dp={world}"], places=[Places("node", torch.tensor(of_rank))])
    assert planned.picture.node_size == size
    assert json.loads(planned.to_json())["node_size"] == size
    if size is None:
        assert "node 0" not in str(planned.picture)


def test_other_levels_are_no_nodes() -> None:
    planned = plan(["dp=8"], topology=Topology({"switch": list("aaaabbbb")}))
    assert planned.node_size is None


def test_a_size_that_is_given_stays() -> None:
    assert plan(["dp=4"], node_size=64).node_size == 64
