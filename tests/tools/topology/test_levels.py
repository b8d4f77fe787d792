"""The order of levels, and what they are called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from meshverse import Topology

_NODE = list("aabbccdd")
_SWITCH = list("ssssuuuu")
_WHOLE = ["all"] * 8


@pytest.mark.parametrize(
    ("parts", "levels"),
    [
        # Larger than a switch, or as large: the order given is nested, so it stays.
        ({"node": _NODE, "switch": _SWITCH, "domain": _WHOLE}, "node switch domain"),
        ({"node": _NODE, "switch": _SWITCH, "domain": _SWITCH}, "node switch domain"),
        ({"node": _NODE, "domain": _SWITCH, "switch": _SWITCH}, "node domain switch"),
        ({"domain": _NODE, "node": _NODE, "switch": _SWITCH}, "domain node switch"),
        # It is not, so the domain is moved to where it fits.
        ({"domain": _WHOLE, "node": _NODE, "switch": _SWITCH}, "node switch domain"),
        ({"node": _NODE, "domain": _WHOLE, "switch": _SWITCH}, "node switch domain"),
        ({"node": _NODE, "switch": _SWITCH, "domain": list("12345678")}, "domain node switch"),
        ({"node": _NODE, "switch": _WHOLE, "domain": _SWITCH}, "node domain switch"),
        ({"switch": _SWITCH, "spine": _WHOLE, "domain": _NODE}, "domain switch spine"),
    ],
)
def test_a_domain_is_where_it_fits(parts: Mapping[str, list[str]], levels: str) -> None:
    assert [level.name for level in Topology(parts).levels] == levels.split()


def test_blocks_have_a_domain_larger_than_a_switch() -> None:
    topology = Topology.uniform(32, node_size=4, domain_size=16, switch_size=8)
    assert [level.name for level in topology.levels] == ["node", "switch", "domain"]


def test_a_domain_that_fits_nowhere_raises() -> None:
    with pytest.raises(ValueError, match="Domain '3' is on two switch parts: rank 3 is on switch"):
        Topology({"node": list("abcdef"), "switch": list("ssssuu"), "domain": list("112332")})


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("", ValueError, "The name of a level is empty"),
        (" ", ValueError, "The name of a level is empty"),
        (
            3,
            TypeError,
            "The name of a level must be a string, such as 'node', but got 3 of type int",
        ),
        (None, TypeError, "but got None of type NoneType"),
        (("node",), TypeError, "but got ('node',) of type tuple"),
    ],
)
def test_a_level_has_a_name(name: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        Topology({name: ["a", "b"]})


def test_the_first_rank_that_tears_a_part_is_named_whatever_the_number_of_threads() -> None:
    n, torn = 1 << 16, 1 << 15
    switches = ["s0", "s1"] * (n // 2)
    switches[torn] = "s1"
    topology = {"node": ["n0", "n1"] * (n // 2), "switch": switches}
    n_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(20):
            with pytest.raises(ValueError, match=f"rank 0 is on switch 's0', rank {torn} on 's1'"):
                Topology(topology)
    finally:
        torch.set_num_threads(n_threads)
