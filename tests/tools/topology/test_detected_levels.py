"""Real processes give several tiers of switches; they stay in the order given."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.crew import Crew
from meshverse import Topology

_ABOVE = {"leaf": "leaf0", "pod": "pod0", "big": "big0"}  # not in the order of the alphabet


def _on_tiers_of_switches(turned: bool) -> list[tuple[str, list[str]]]:
    rank = dist.get_rank()
    switches = {**_ABOVE, "leaf": f"leaf{rank // 2}"}
    if turned and rank == 3:  # the same as rank 2 says, in another order
        switches = dict(reversed(switches.items()))
    found = Topology.detect(node=f"n{rank // 2}", domain="d", switches=switches).to_dict()
    return [(level, list(parts.values())) for level, parts in found.items()]


_LEVELS = [
    ("node", ["0-1", "2-3"]),
    ("leaf", ["0-1", "2-3"]),
    ("pod", ["0-3"]),
    ("big", ["0-3"]),
    ("domain", ["0-3"]),
]


def test_tiers_of_switches_stay_in_the_order_given(crew: Crew) -> None:
    assert crew.run(_on_tiers_of_switches, 4, False) == [_LEVELS] * 4


def test_the_first_rank_that_tells_a_tier_orders_it(crew: Crew) -> None:
    assert crew.run(_on_tiers_of_switches, 4, True) == [_LEVELS] * 4


def _on_a_leaf_and_a_spine() -> list[str]:
    rank = dist.get_rank()
    topology = Topology.detect(
        node=f"n{rank}", switches={"switch": f"leaf{rank // 2}", "spine": "top"}
    )
    return [f"{level.name} {len(level.parts)}" for level in topology.levels]


def test_a_leaf_is_inside_its_spine(crew: Crew) -> None:
    assert crew.run(_on_a_leaf_and_a_spine, 4) == [["node 4", "switch 2", "spine 1"]] * 4


def _one_gives_no_names(bad_rank: int, given: dict[str, Any]) -> str:
    asked = given if dist.get_rank() == bad_rank else {"node": "a"}
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        Topology.detect(**asked, timeout=timedelta(minutes=5))
    return f"{caught.typename}: {caught.value}"


@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"node": 5}, "is not a location of this rank: give strings"),
        ({"node": " "}, "is not a location of this rank: give strings"),
        ({"switches": {3: "leaf"}}, "is not a location of this rank: give strings"),
        ({"switches": "leaf"}, "give the switches of this rank by level"),
        ({"switches": {"node": "n", "switch": "s"}}, "names a node: pass it as node="),
        ({"switches": {"domain": "d"}}, "names a domain: pass it as domain="),
    ],
    ids=str,
)
def test_a_rank_that_gives_no_names_is_named(crew: Crew, bad_rank: int, given, said: str) -> None:
    answers = crew.run(_one_gives_no_names, 4, bad_rank, given)
    assert said in answers[bad_rank]
    assert answers[bad_rank].startswith("ValueError" if "pass it" in said else "TypeError")
    for text in answers[:bad_rank] + answers[bad_rank + 1 :]:
        assert text.startswith(f"RuntimeError: Topology.detect() failed on rank {bad_rank}: ")
