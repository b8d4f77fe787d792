"""A plan says what the job would: the same groups as `explain()`, and what they cross."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshverse
from helpers.observation import STOCK
from helpers.worlds import fake_world, live_groups
from meshverse import init_device_mesh
from meshverse.explain.communicator_memory import COMMUNICATOR_BYTES
from meshverse.parallel import ParallelismSizes, create_fsdp2_device_mesh, get_flat_mesh
from meshverse.tools.planner import Places, View, plan, saves, trainer_views

VIEWS = ("pp=8,dp=160,tp=8,loss=pp*dp", "pp=8,replicate=4,shard=40,tp=8", "world=10240")


def _make(view: View, universe: meshverse.Universe | None) -> meshverse.DeviceMesh:
    mesh = meshverse.init_device_mesh(
        "cpu", tuple(view.sizes.values()), mesh_dim_names=tuple(view.sizes), universe=universe
    )
    for name, parts in view.flattened.items():
        mesh[parts].flatten(name)
    return mesh


@pytest.mark.parametrize("rank", [0, 777, 5_121, 10_239])
def test_the_counts_are_those_of_explain(rank: int) -> None:
    planned = plan(VIEWS, backend="fake", rank=rank)
    with fake_world(10_240, rank):
        universe = None
        for view in planned.views:
            universe = _make(view, universe).universe
        assert universe is not None
        report = universe.explain()
    mine = planned.mine
    assert (mine.requested, mine.created) == (report.requested, report.created)
    assert mine.stock_created == report.created + report.saved
    assert mine.groups == tuple(group.ranks for group in report.groups)
    assert [group.layout for group in planned.groups] == [group.layout for group in report.groups]
    assert [group.asked for group in planned.groups] == [group.requests for group in report.groups]
    assert [group.created for group in planned.groups] == [group.created for group in report.groups]


def test_a_trainers_counts_are_those_of_explain() -> None:
    sizes = ParallelismSizes(
        dp_size=8, dp_replicate_size=2, tp_size=2, cp_size=2, pp_size=2, ep_size=4
    )
    planned = plan(trainer_views(sizes, 64), backend="fake", rank=37)
    with fake_world(64, 37):
        mesh, _ = create_fsdp2_device_mesh(sizes, world_size=64)
        for name in planned.views[0].flattened:
            get_flat_mesh(mesh, name)
        report = mesh.universe.explain()
    assert planned.mine.groups == tuple(group.ranks for group in report.groups)
    assert (planned.mine.requested, planned.mine.created) == (report.requested, report.created)


def test_stock_makes_as_many_as_planned(world) -> None:
    planned = plan(["dp=2,tp=4,all=dp*tp", "a=2,b=2,c=2,bc=b*c"], backend="fake", rank=5)
    before = len(live_groups())
    dp_tp = STOCK.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dp_tp._flatten("all")
    abc = STOCK.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    abc["b", "c"]._flatten("bc")
    assert len(live_groups()) - before == planned.mine.stock_created == 6


def test_isolated_axes_have_groups_of_their_own(world) -> None:
    views = ["dp=2,tp=4,all=dp*tp", "replicate=2,ep=4"]
    planned = plan(views, backend="fake", rank=5, isolate=["all", "ep"])
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh.flatten("all", isolate="mine")
    names, universe = ("replicate", "ep"), mesh.universe
    init_device_mesh("cpu", (2, 4), mesh_dim_names=names, universe=universe, isolate={"ep": "own"})
    report = universe.explain()
    assert planned.mine.groups == tuple(group.ranks for group in report.groups)
    assert [group.asked for group in planned.groups] == [group.requests for group in report.groups]
    assert planned.mine.created == report.created == 4
    assert planned.to_dict()["isolate"] == ["all", "ep"]
    assert "all (isolated)" in str(planned)
    assert "Isolated, each with groups of its own: all, ep\n" in str(saves(planned))
    assert len(planned.picture.groups) == 4


def test_an_unknown_axis_to_isolate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"isolate='tq' names no axis of .* dp, tp"):
        plan(["dp=2,tp=4"], isolate="tq")


def test_memory_is_that_of_the_communicators_made() -> None:
    planned = plan(["pp=2,one=1,tp=4", "a=2,b=4"], rank=3)
    each = COMMUNICATOR_BYTES["nccl"]
    assert (planned.mine.bytes, planned.mine.stock_bytes) == (2 * each, 4 * each)
    assert (planned.bytes, planned.stock_bytes) == (8 * 2 * each, 8 * 4 * each)
    assert plan(["a=2,b=4"], communicator_bytes={"nccl": 7}).mine.bytes == 14
    assert "is unknown" in str(plan(["a=2,b=4"], backend="ring"))


def _slow_crossing(ranks: list[list[int]], part_of: list[int]) -> tuple[int, int, int, float]:
    spans = [len({part_of[rank] for rank in group}) for group in ranks]
    steps = dict.fromkeys(part_of, 0)
    for group in ranks:
        for here, there in zip(group, group[1:] + group[:1], strict=True):
            steps[part_of[here]] += part_of[here] != part_of[there]
    return min(spans), max(spans), max(steps.values()), sum(steps.values()) / len(steps)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 9), st.randoms())
def test_what_groups_cross_equals_counting(shape: list[int], node_size: int, random) -> None:
    sizes = {f"a{index}": size for index, size in enumerate(shape)}
    world = math.prod(shape)
    parts = [rank // node_size for rank in range(world)]
    random.shuffle(parts)
    planned = plan([sizes], node_size=node_size, places=[Places("switch", torch.tensor(parts))])
    grid = torch.arange(world).view(shape)
    for name, group in zip(sizes, plan([sizes]).groups, strict=False):
        assert name in sizes
        assert group.crossings == ()
    seen = {}
    for index, name in enumerate(sizes):
        ranks = grid.movedim(index, -1).reshape(-1, shape[index]).tolist()
        seen[name] = (ranks, shape[index])
    for group in planned.groups:
        ranks, _ = seen[group.axes[0]]
        switch, node = group.crossings
        for crossing, of in ((switch, parts), (node, [rank // node_size for rank in range(world)])):
            found = (crossing.min, crossing.max, crossing.busiest, crossing.mean)
            assert found == pytest.approx(_slow_crossing(ranks, of))


def test_data_is_plain_and_has_the_documented_keys() -> None:
    data = json.loads(plan(VIEWS, node_size=8, domain_size=64, rank=777).to_json())
    assert data["world"] == 10_240
    dp = next(group for group in data["groups"] if group["axes"] == ["dp"])
    assert (dp["layout"], dp["size"], dp["count"], dp["stock_copies"]) == ("160:8", 160, 64, 1)
    assert (dp["nodes"]["min"], dp["nodes"]["max"], dp["domains"]["max"]) == (160, 160, 20)
    assert data["mine"]["rank"] == 777
    assert data["mine"]["groups"][0] == list(range(777, 10_240, 1_280))
    world = next(group for group in data["groups"] if group["axes"] == ["world"])
    assert (world["created"], world["stock_copies"], world["count"]) == (False, 0, 1)


def test_what_to_mind_is_said() -> None:
    notes = plan(["dp=3,tp=8"], node_size=8).warnings
    assert notes == ()
    notes = plan(["tp=8,dp=3"], node_size=8).warnings
    assert any(
        "Axis tp leaves its node: a group of 8 ranks spans up to 3 nodes" in n for n in notes
    )
    (note,) = plan(["dp=4,tp=8", "fsdp=4,tp=8"], node_size=8).warnings
    assert "Axes dp, fsdp share one process group" in note
    notes = plan(["dp=10"], node_size=4).warnings
    assert any("The nodes have different sizes: from 2 to 4 ranks" in note for note in notes)


@pytest.mark.parametrize(
    ("views", "options", "said"),
    [
        ([], {}, "There is no view to plan"),
        (["dp=2,tp=4", "a=3"], {}, "has 3 ranks, but the world has 8"),
        (["dp=2"], {"rank": 2}, "rank=2 is outside the world: give one from 0 to 1"),
        (["dp=2"], {"rank": -1}, "rank=-1 is outside"),
        (["dp=2"], {"node_size": 0}, "0 ranks on each node"),
        (["dp=2"], {"places": [Places("node", torch.zeros(3))]}, "of 3 ranks are given"),
        (["dp=2"], {"world_size": 4}, "The nearest sizes that fit: dp=4"),
        ([{"dp": -1}], {}, "dp=-1"),
        ([{"dp": True}], {}, "dp=True"),
        ([{"dp": 2.0}], {}, "dp=2.0 in the view"),
        ([{"a=2,b": 4}], {}, "'a=2,b' cannot name an axis"),
        ([{1: 2}], {}, "1 cannot name an axis"),
        ([{"a\x1b[31m": 2}], {}, "cannot name an axis"),
        (["dp=2"], {"rank": True}, "rank=True is outside"),
        (["dp=2"], {"rank": 0.0}, "rank=0.0 is outside"),
        (["dp=2"], {"rank": "1"}, "rank='1' is outside"),
        (["dp=2"], {"node_size": 2.5}, "node_size=2.5: give an int above 0"),
        (["dp=2"], {"node_size": True}, "node_size=True: give an int above 0"),
        (["dp=2"], {"domain_size": 2.0}, "domain_size=2.0: give an int above 0"),
        (["dp=2"], {"world_size": 2.0}, "world_size=2.0: give an int above 0"),
        (["dp=2"], {"world_size": "2"}, "world_size='2': give an int above 0"),
        (["dp=2"], {"world_size": True}, "world_size=True: give an int above 0"),
        (["dp=2"], {"world_size": 0}, "A world of 0 ranks: give an int above 0"),
        (["dp=2"], {"world_size": 2**64}, "a plan can have at most 16,777,216"),
        (["dp=99999999999999999999,tp=99999"], {}, "a plan can have at most 16,777,216"),
        (["dp=16777217"], {}, "has 16,777,217 ranks: a plan can have at most 16,777,216"),
        (["dp=2"], {"backend": "nccl\x1b[31m"}, "cannot name a backend or a level"),
        (
            ["dp=2"],
            {"places": [Places("ra\x1bck", torch.zeros(2, dtype=torch.int64))]},
            "cannot name a backend or a level",
        ),
    ],
)
def test_what_cannot_be_planned_raises(views, options, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(views, **options)


@pytest.mark.parametrize("views", ["dp=2", {"dp": 2}, View({"dp": 2}), [7], [("dp", 2)]])
def test_what_is_no_list_of_views_raises(views) -> None:
    with pytest.raises(TypeError, match="view: give"):
        plan(views)


def test_every_whole_number_is_one() -> None:
    two = torch.tensor(2)
    planned = plan([{"a": two, "b": 2}], rank=two, world_size=torch.tensor(4), node_size=two)
    assert planned == plan(["a=2,b=2"], rank=2, node_size=2)
    assert planned.to_json() == plan(["a=2,b=2"], rank=2, node_size=2).to_json()


def test_nodes_may_be_larger_than_the_world() -> None:
    (group,) = plan(["dp=2"], node_size=10**30, domain_size=10**30).groups
    assert [crossing.max for crossing in group.crossings] == [1, 1]


def test_a_backend_is_written_as_torch_does() -> None:
    planned = plan(["a=2,b=4"], backend="NCCL", communicator_bytes={"Nccl": 7})
    assert (planned.backend, planned.mine.bytes) == ("nccl", 14)


def test_the_table_names_every_group_once() -> None:
    lines = str(plan(VIEWS, node_size=8, rank=777)).splitlines()
    titles = next(
        index for index, line in enumerate(lines) if line.split()[:2] == ["axes", "layout"]
    )
    rows = list(itertools.takewhile(bool, lines[titles + 1 :]))
    assert [row.split()[0] for row in rows] == [
        "pp",
        "dp",
        "tp",
        "loss",
        "replicate",
        "shard",
        "world",
    ]
    assert rows[-1].split()[:5] == ["world", "10240:1", "10,240", "1", "none"]
    assert any(line.startswith("Rank 777 requests 9 process groups: 6 created") for line in lines)
