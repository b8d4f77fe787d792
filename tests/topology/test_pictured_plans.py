"""Pictures of plans whose nodes a topology tells."""

from __future__ import annotations

import json

import pytest
import torch

from meshverse import Topology
from meshverse.planner import plan
from meshverse.planner.places import Places

_VIEWS = ["dp=4,tp=4"]


def test_the_page_names_several_parts_of_each_level() -> None:
    topology = Topology.uniform(16, node_size=4, switch_size=8)
    page = plan(_VIEWS, topology=topology).to_html()
    assert "switches a group" in page
    assert "nodes a group" in page
    assert "switchs" not in page
