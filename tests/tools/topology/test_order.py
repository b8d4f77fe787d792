"""The order of ranks for a mesh: the cheapest of all on small worlds, never a dearer one."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
from collections.abc import Sequence

import pytest
import torch

from helpers.tiers import in_tiers
from meshverse import Topology
from meshverse.tools.topology import orders


def _slow_cost(
    topology: Topology, order: Sequence[int], shape: Sequence[int], weights: Sequence[float]
) -> float:
    """Return the cost of a mesh, counted group by group."""
    grid = torch.tensor(order).view(*shape)
    total = 0.0
    for axis, weight in enumerate(weights):
        for group in grid.movedim(axis, -1).reshape(-1, shape[axis]).tolist():
            for level in topology.levels:
                parts = {int(level.of_rank[rank]) for rank in group}
                total += weight * (len(parts) if len(parts) > 1 else 0)
    return total


def _least_of_all(topology: Topology, shape: Sequence[int], weights: Sequence[float]) -> float:
    """The least that any order of the ranks costs; orders that are alike are counted once."""
    places = list(zip(*(level.of_rank.tolist() for level in topology.levels), strict=True))
    seen = {}
    for order in itertools.permutations(range(topology.world_size)):
        seen.setdefault(tuple(places[rank] for rank in order), order)
    return min(_slow_cost(topology, order, shape, weights) for order in seen.values())


def _shapes(world_size: int, ndim: int) -> list[tuple[int, ...]]:
    sizes = itertools.product(range(2, world_size + 1), repeat=ndim)
    return [shape for shape in sizes if math.prod(shape) == world_size]


def _random_cluster(random: random.Random, node_of_rank: list[int]) -> Topology:
    """Nodes on switches and domains at random, with the ranks in any order."""
    domains = {node: random.randint(0, 2) for node in node_of_rank}
    switches = {domain: random.randint(0, 1) for domain in domains.values()}
    random.shuffle(node_of_rank)
    return Topology(
        {
            "node": [f"n{node}" for node in node_of_rank],
            "domain": [f"d{domains[node]}" for node in node_of_rank],
            "switch": [f"s{switches[domains[node]]}" for node in node_of_rank],
        }
    )


_SMALL = [
    [0, 0, 1, 1],
    [0, 0, 0, 1],
    [0, 0, 0, 1, 1, 1],
    [0, 0, 1, 1, 2, 2],
    [0, 0, 0, 0, 1, 1],
    [0, 0, 0, 1, 1, 2],
    [0, 0, 0, 0, 1, 1, 1, 1],
    [0, 0, 0, 0, 0, 0, 1, 1],
    [0, 0, 0, 0, 0, 1, 1, 1],
    [0, 0, 0, 1, 1, 1, 2, 2],
    [0, 0, 1, 1, 2, 2, 3, 3],
]


@pytest.mark.parametrize("searched_in_full", [True, False], ids=["in full", "by rule"])
@pytest.mark.parametrize("nodes", in_tiers(_SMALL, _SMALL[::3]), ids=str)
def test_no_order_of_a_small_world_is_cheaper(nodes, searched_in_full, monkeypatch) -> None:
    if not searched_in_full:  # then it is found as on larger worlds
        monkeypatch.setattr(orders, "_SEARCHED_IN_FULL", 0)
    generator = random.Random(str(nodes))
    shapes = [shape for ndim in (2, 3) for shape in _shapes(len(nodes), ndim)]
    for shape in generator.sample(shapes, min(2, len(shapes))):
        topology = _random_cluster(generator, list(nodes))
        weights = [generator.choice([1.0, 2.0, 10.0, 100.0]) for _ in shape]
        names = [f"a{axis}" for axis in range(len(shape))]
        traffic = dict(zip(names, weights, strict=True))
        order = topology.order(shape, names, traffic)
        assert sorted(order.tolist()) == list(range(len(nodes)))
        cost = topology.cost(order, shape, names, traffic)
        assert cost == _slow_cost(topology, order.tolist(), shape, weights)
        assert cost == _least_of_all(topology, shape, weights), (shape, weights, topology.to_dict())


@pytest.mark.parametrize("node_sizes", [[8], [8, 8, 8, 7, 4]], ids=["even", "uneven"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_never_dearer_than_the_ranks_in_order(node_sizes, seed, shuffled) -> None:
    generator = random.Random(seed)
    nodes: list[int] = []
    while len(nodes) < 10_240:
        nodes += [nodes[-1] + 1 if nodes else 0] * generator.choice(node_sizes)
    nodes = nodes[:10_240]
    domains = sorted(node // generator.randint(3, 20) for node in range(nodes[-1] + 1))
    switches = {domain: domain // 5 for domain in domains}
    if shuffled:
        generator.shuffle(nodes)
    topology = Topology(
        {
            "node": [f"n{node}" for node in nodes],
            "domain": [f"d{domains[node]}" for node in nodes],
            "switch": [f"s{switches[domains[node]]}" for node in nodes],
        }
    )
    shape = generator.choice([(8, 160, 8), (2, 4, 160, 8), (5, 2048)])
    order = topology.order(shape)
    assert torch.equal(order.sort().values, torch.arange(10_240))
    identity = topology.cost(None, shape)
    assert topology.cost(order, shape) <= identity
    if shuffled:
        assert topology.cost(order, shape) < identity / 2


def test_ranks_that_are_handed_out_in_turn_cost_what_ranks_in_blocks_do() -> None:
    blocks = Topology.uniform(64, node_size=8, switch_size=32)
    nodes = [f"n{rank % 8}" for rank in range(64)]
    in_turn = Topology({"node": nodes, "switch": [f"s{rank % 8 // 4}" for rank in range(64)]})
    shape, names = (2, 4, 8), ("pp", "dp", "tp")
    assert torch.equal(blocks.order(shape, names), torch.arange(64))
    order = in_turn.order(shape, names)
    assert in_turn.cost(order, shape, names) == blocks.cost(None, shape, names)
    of_tp = order.view(shape)[0, 0].tolist()
    assert in_turn.spans("node", of_tp) == 1


def test_the_axis_with_the_most_traffic_stays_inside() -> None:
    topology = Topology.uniform(64, node_size=8)
    shape, names = (8, 8), ("a", "b")
    first = topology.order(shape, names, {"a": 100, "b": 1}).view(shape)
    last = topology.order(shape, names, {"b": 100}).view(shape)
    assert [topology.spans("node", first[:, 3].tolist()), first[3].unique().numel()] == [1, 8]
    assert torch.equal(last, torch.arange(64).view(shape))
    assert torch.equal(topology.order(shape, names), last.flatten())  # the last one, by default
    assert torch.equal(topology.order(shape, names, {"a": 0, "b": 0}), torch.arange(64))


def test_a_mesh_is_cut_into_boxes_where_that_costs_least() -> None:
    topology = Topology.uniform(64, node_size=4)
    shape, names = (8, 8), ("a", "b")
    alike = {"a": 1, "b": 1}
    order = topology.order(shape, names, alike).view(shape)
    spans = [topology.spans("node", line.tolist()) for line in (*order, *order.T)]
    assert spans == [4] * 16  # nodes have 2 x 2; in order, groups of a would be on 8
    assert topology.cost(order, shape, names, alike) < topology.cost(None, shape, names, alike)


def test_whole_groups_stay_on_nodes_that_have_room_for_some_and_a_rest() -> None:
    topology = Topology({"node": [f"n{rank // 5}" for rank in range(60)]})
    shape, names, traffic = (15, 4), ("dp", "tp"), {"tp": 100}
    order = topology.order(shape, names, traffic).view(shape)
    spans = [topology.spans("node", group.tolist()) for group in order]
    assert sorted(spans) == [1] * 12 + [4] * 3  # of ranks in order, 6 would be on one node
    assert topology.cost(order, shape, names, traffic) < topology.cost(None, shape, names, traffic)


def test_a_factor_makes_a_level_count_more() -> None:
    topology = Topology({"node": list("aabb"), "switch": list("ssss")})
    once = topology.cost([0, 2, 1, 3], (2, 2))
    assert topology.cost([0, 2, 1, 3], (2, 2), factors={"node": 7}) == 7 * once


def test_axes_without_names_count_the_same_where_traffic_is_given() -> None:
    named = _FOUR.cost([0, 2, 1, 3], (2, 2), ("a", "b"), {"a": 1, "b": 1})
    assert _FOUR.cost([0, 2, 1, 3], (2, 2), None, {}) == named


_FOUR = Topology({"node": list("aabb")})


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: _FOUR.order((2, 4)), "mesh_shape (2, 4) has 8 ranks, but the topology has 4"),
        (
            lambda: _FOUR.order((2, 2), ("dp", "tp"), {"pp": 2}),
            "names ['pp'], but the axes are ['dp', 'tp']",
        ),
        (lambda: _FOUR.order((2, 2), None, {"tp": 2}), "the axes are []"),
        (lambda: _FOUR.order((2, 2), ("dp", "tp"), {"tp": -1}), "traffic['tp']=-1: give a finite"),
        (lambda: _FOUR.order((2, 2), ("dp", "tp"), {"tp": math.nan}), "traffic['tp']=nan"),
        (lambda: _FOUR.order((2, 2), ("dp", "tp"), {"tp": 10**400}), "traffic['tp']=1000"),
        (lambda: Topology.uniform(10**12, node_size=8), "world_size=1000000000000: give an int"),
        (lambda: _FOUR.order((2, 2), ("dp", "tp"), {"tp": True}), "traffic['tp']=True"),
        (lambda: _FOUR.order((2, 2), factors={"rack": 2}), "the levels are ['node']"),
        (
            lambda: _FOUR.cost([0, 1, 2, 2], (2, 2)),
            "each of the ranks 0 to 3 once, but got [0, 1, 2, 2]",
        ),
        (lambda: _FOUR.cost([0, 1], (2, 2)), "but got [0, 1]"),
        (
            lambda: _FOUR.cost(None, (2, 2), ("dp", "tp"), {"tp": 1e200}, factors={"node": 1e200}),
            "gives a cost that is not a finite number",
        ),
        (lambda: _FOUR.order((4,), ("dp",), {"dp": 1.7e308}), "that is not a finite number"),
        (lambda: _FOUR.order((2, 2), ("dp", "tp"), [1, 2]), "traffic=[1, 2]: give a mapping"),
        (lambda: _FOUR.order((2, 2), factors=3), "factors=3: give a mapping from levels"),
    ],
)
def test_what_cannot_be_ordered_raises(ask, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        ask()


_TORCH_THREADS = 3


def _threads_of_a_search(node_sizes: list[int], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return numbers of threads: before a search, after it, and after an operation of torch."""
    torch.set_num_threads(_TORCH_THREADS)
    nodes: list[int] = []
    for node in itertools.count():
        nodes += [node] * node_sizes[node % len(node_sizes)]
        if len(nodes) >= math.prod(shape):
            break
    random.Random(0).shuffle(nodes)
    topology = Topology({"node": [f"n{node}" for node in nodes[: math.prod(shape)]]})
    before = len(os.listdir("/proc/self/task"))
    topology.order(shape)
    after = len(os.listdir("/proc/self/task"))
    torch.arange(10_000_000).add_(1)
    return before, after, len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
@pytest.mark.parametrize(
    ("node_sizes", "shape"),
    [([4, 3], (6, 6)), ([8, 7, 4], (16, 80, 8)), ([8], (8, 1024, 8))],
    ids=str,
)
def test_a_search_starts_no_threads_of_torch(fresh_crew, node_sizes, shape) -> None:
    ((before, after, at_work),) = fresh_crew.run(_threads_of_a_search, 1, node_sizes, shape)
    assert after == before
    assert at_work >= before + _TORCH_THREADS - 1  # torch starts them at its first large operation


def test_many_ranks_that_are_interchangeable_keep_their_order() -> None:
    order = Topology({"switch": ["s"] * 2048}).order((2048,), ("x",))
    assert order.tolist() == list(range(2048))


@pytest.mark.long
def test_many_ranks_with_few_placements() -> None:
    uneven = Topology({"switch": ["a", *["b"] * 1199]})
    shape = (600, 2)
    order = uneven.order(shape, ("x", "y"))
    assert sorted(order.tolist()) == list(range(1200))
    assert uneven.cost(order, shape, ("x", "y")) <= uneven.cost(None, shape, ("x", "y"))


def test_all_arrangements_are_listed_in_order() -> None:
    listed = list(orders._arrangements([2, 1, 2]))
    assert listed == sorted(set(itertools.permutations((0, 0, 1, 2, 2))))
