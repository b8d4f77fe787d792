"""`universe.explain()` tells what c10d would tell, as text and as data."""

from __future__ import annotations

import html
import json
import re
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.forked import Forked
from helpers.observation import OURS, STOCK, Family
from helpers.worlds import fake_world, live_groups
from meshverse import DeviceMesh, Universe, init_device_mesh
from meshverse.explain.communicator_memory import COMMUNICATOR_BYTES, estimate_bytes
from meshverse.universe.world_universes import WorldUniverses
from meshverse.world import World
from trainer_views import Degrees, five_views


@pytest.fixture
def mesh(world) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2, 4), mesh_dim_names=("pp", "dp", "tp"))


def test_names_of_axes_do_not_control_or_fill_a_terminal(world) -> None:
    names = ("a\x1b[31m<b>", "y" * 300)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    report = mesh.universe.explain()
    for text in (str(report), report._repr_html_()):
        assert "\x1b" not in text
        assert "y" * 59 + "…" in text
    assert "<b>" not in report._repr_html_()
    assert [[*group["requests"]] for group in report.to_dict()["groups"]] == [[n] for n in names]


def test_data_says_what_c10d_has(mesh) -> None:
    mesh.flatten("world")
    report = mesh.universe.explain().to_dict()
    groups = {group["name"]: tuple(group["ranks"]) for group in report["groups"]}
    assert groups == live_groups()
    assert report["rank"] == dist.get_rank()
    assert (report["requested"], report["created"], report["reused"]) == (4, 3, 1)
    assert [group["layout"] for group in report["groups"]] == ["1:0", "2:4", "4:1", "8:1"]
    assert [group["created"] for group in report["groups"]] == [True, True, True, False]
    assert [group["how"] for group in report["groups"]] == [
        "created by its members",
        "created by its members",
        "created by its members",
        "the default group",
    ]


def test_data_is_plain(mesh) -> None:
    report = mesh.universe.explain().to_dict()
    assert json.loads(json.dumps(report))["groups"][1]["ranks"] == [1, 5]


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
    head, alike, titles, *rows, foot, _ = str(mesh.universe.explain()).splitlines()
    assert "of ranks 0 to 7, seen by rank 5" in head
    assert (
        "Requested 4 process groups: 3 created, 1 reused (torch would reuse 1 of them, too). "
        "Saved: 0"
    ) in head
    assert re.split("  +", titles.strip()) == [
        *("axes", "requested", "layout", "size", "ranks", "group"),
    ]
    assert alike == "All groups: backend fake, options timeout=1800s."
    by_members = "created by its members"
    assert [re.split("  +", row.strip()) for row in rows] == [
        ["pp", "1 time", "1:0", "1", "5", by_members],
        ["dp", "1 time", "2:4", "2", "1, 5", by_members],
        ["tp", "1 time", "4:1", "4", "4, 5, 6, 7", by_members],
        ["world", "1 time", "8:1", "8", "0, 1, 2, 3, 4, 5, 6, 7", "the default group"],
    ]
    assert foot.startswith("Reused: ")


def test_options_are_a_column_where_they_differ() -> None:
    with fake_world(8, 5):
        universe = Universe(8)
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), universe=universe)
        init_device_mesh("cpu", (8,), mesh_dim_names=("own",), universe=universe, isolate="own")
        _, alike, titles, *rows = str(universe.explain()).splitlines()
    assert alike == "All groups: backend fake."
    assert re.split("  +", titles.strip())[-2:] == ["options", "group"]
    options = [re.split("  +", row.strip())[-2] for row in rows]
    assert options[:2] == ["timeout=1800s"] * 2
    assert "own" in options[2]


def test_why_groups_of_the_same_ranks_are_not_shared_is_said_below() -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), isolate="a")
        universe = mesh.universe
        init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "b", "c"), universe=universe)
        universe.group([1, 5], name="long", timeout=timedelta(seconds=50))
        *_, said = str(universe.explain()).splitlines()
        assert said == (
            "Several groups have the ranks 1, 5, because options differ: dp (fake, timeout=1800s, "
            "tag='a'); dp (fake, timeout=1800s); long (fake, timeout=50s)."
        )
        assert said in html.unescape(universe.explain()._repr_html_())


def test_a_group_that_the_program_destroyed_is_said_to_be(mesh) -> None:
    universe = mesh.universe
    universe.group([1, 5], name="long", timeout=timedelta(seconds=50))
    assert "because options differ" in str(universe.explain())
    dist.destroy_process_group(mesh.get_group("dp"))
    explained = universe.explain()
    assert [group.destroyed for group in explained.groups if "dp" in group.requests] == [True]
    assert "created by its members, destroyed" in str(explained)
    assert "created by its members, destroyed" in html.unescape(explained.to_html())
    assert "because options differ" not in str(explained)
    init_device_mesh("cpu", (1, 2, 4), mesh_dim_names=("pp", "dp", "tp"), universe=universe)
    assert not any(group.destroyed for group in universe.explain().groups)


def test_what_reused_means_is_said_where_a_group_was_reused() -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        assert "Reused: " not in str(mesh.universe.explain())
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"), universe=mesh.universe)
        reused, saved = str(mesh.universe.explain()).splitlines()[-2:]
        assert reused.startswith("Reused: ")
        assert saved.startswith("Saved: ")


def test_groups_of_the_same_ranks_that_are_no_second_ones_are_not_said() -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        mesh["dp", "tp"].flatten("all")
        mesh.unflatten("tp", (4, 1), ("a", "one"))
        assert "Several groups" not in str(mesh.universe.explain())


def test_a_table_fits_the_columns_of_the_terminal(mesh, monkeypatch) -> None:
    mesh.flatten("world")
    whole = str(mesh.universe.explain())
    assert sum(len(line) > 70 for line in whole.splitlines()) > 3
    monkeypatch.setenv("COLUMNS", "70")
    fitted = str(mesh.universe.explain())
    assert max(map(len, fitted.splitlines())) <= 70
    assert sorted(fitted.split()) == sorted(whole.split())
    monkeypatch.setenv("COLUMNS", "10")  # words stay whole
    assert sorted(str(mesh.universe.explain()).split()) == sorted(whole.split())


def test_a_prompt_shows_the_table_and_a_notebook_the_picture_too(mesh) -> None:
    report = mesh.universe.explain()
    assert repr(report) == str(report)
    html = mesh.universe._repr_html_()
    assert "Requested 3 process groups: 3 created" in html
    cells = re.findall(
        r"<t[hd]( scope=\"\w+\")? style=\"text-align:(\w+);padding[^\"]*\">(.*?)</t[hd]>", html
    )
    _, rows, _ = report._table()
    assert [text for _, _, text in cells] == [text for row in rows for text in row]
    assert cells[3] == (' scope="col"', "right", "size")
    assert cells[6] == (' scope="row"', "left", "pp")
    for shown in (report, mesh.universe, mesh, mesh["tp"]):
        html = shown._repr_html_()
        assert "<pre>" not in html
        assert "</svg>" in html


def test_an_empty_universe_shows_its_line() -> None:
    with fake_world(8, 5):
        assert "Requested 0 process groups" in Universe(8)._repr_html_()


def test_text_says_how_often_a_group_was_requested(mesh) -> None:
    mesh.unflatten("tp", (4, 1), ("a", "b")).unflatten("dp", (2,), ("tp",))
    rows = str(mesh.universe.explain()).splitlines()[3:-2]
    assert [re.split("  +", row.strip())[:2] for row in rows] == [
        ["pp, b", "2 times"],
        ["dp, tp", "2 times"],
        ["tp, a", "2 times"],
    ]


def test_backends_that_nobody_named_are_reported_by_their_names() -> None:
    status, out, err = Forked(["-c", _WITHOUT_A_BACKEND]).communicate()
    assert status == 0, err
    report = json.loads(out)
    assert "undefined" not in report["text"] + report["options"]
    assert "gloo" in report["backend"]
    assert report["saved_bytes"] > 0


_WITHOUT_A_BACKEND = """
import json
import re
from datetime import timedelta
from typing import Any
import sys
import torch.distributed as dist
from meshverse import init_device_mesh

dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"), isolate="own")
report = mesh.universe.explain()
from meshverse.explain.communicator_memory import COMMUNICATOR_BYTES, estimate_bytes
(group, *_) = report.groups
saved = estimate_bytes(group.backend, 2, dict.fromkeys(COMMUNICATOR_BYTES, 7))
options = next(iter(mesh.universe.groups)).request.options.in_words()  # as errors have it
print(
    json.dumps(
        {
            "text": str(report),
            "backend": group.backend,
            "saved_bytes": saved,
            "options": options,
        }
    )
)
"""


def test_text_stays_short_for_large_groups() -> None:
    with fake_world(4096, 17):
        mesh = init_device_mesh("cpu", (4, 1024), mesh_dim_names=("dp", "tp"))
        row = str(mesh.universe.explain()).splitlines()[-1]
    assert "1,024  0, 1, 2, 3, 4, 5, ... 1023  created by its members" in row
    assert len(row) < 200


def test_a_rank_outside_the_mesh_gets_a_report_that_says_so(world) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    report = mesh.universe.explain()
    assert (report.requested, report.created, report.reused) == (0, 0, 0)
    assert [(group.name, group.ranks) for group in report.groups] == [(None, ()), (None, ())]
    assert str(report).count("-  none   not on this rank") == 2


def test_a_trainers_universe() -> None:
    degrees = Degrees()
    with fake_world(degrees.world_size, 7_321):
        report = five_views(OURS.init_device_mesh, degrees)["world"].universe.explain()
        groups = {group.name: group.ranks for group in report.groups}
        assert groups == live_groups()
    assert (report.requested, report.created, report.reused) == (19, 6, 13)
    assert report.groups[0].how == "the default group"


# --- what was saved ------------------------------------------------------------------------------


def _groups_of_the_same_steps(family: Family) -> int:
    """How many groups c10d has more after a root mesh, two views and a flattened mesh."""
    before = len(live_groups())
    mesh = family.init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    view = mesh._unflatten(0, (2, 4), ("dp", "tp"))
    mesh._unflatten(0, (2, 4), ("a", "b"))
    view._flatten("all")
    view["tp"]._flatten("alias")
    return len(live_groups()) - before


def test_saved_are_the_groups_that_stock_makes_besides(world) -> None:
    stock = _groups_of_the_same_steps(STOCK)
    ours = _groups_of_the_same_steps(OURS)
    (universe,) = World.current().state(WorldUniverses).with_groups
    report = universe.explain()
    assert report.created == ours == 2
    assert report.created + report.saved == stock == 5
    assert report.requested == report.created + report.reused


def test_lazy_groups_that_are_never_used_are_saved(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), lazy=True)
    report = mesh.universe.explain()
    assert (report.created, report.planned, report.reused, report.saved) == (0, 2, 0, 2)
    assert "Requested 2 process groups: 0 created, 2 planned (lazy), 0 reused." in str(report)
    mesh.get_group("tp")
    report = mesh.universe.explain()
    assert (report.created, report.planned, report.reused, report.saved) == (1, 1, 0, 1)
    mesh.get_group("dp")
    assert "Requested 2 process groups: 2 created, 0 reused. Saved: 0" in str(
        mesh.universe.explain()
    )


def test_lazy_groups_of_another_universe_are_not_planned_by_this_one(world) -> None:
    eager = init_device_mesh("cpu", (2, 4), mesh_dim_names=("c", "d"))
    lazy = init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b"), lazy=True)
    OURS.DeviceMesh._concatenate([eager["c"], lazy["b"]])
    report = eager.universe.explain()
    assert (report.requested, report.created, report.planned, report.reused) == (2, 2, 0, 0)
    assert report.groups[2].how == "of axis 'b' of another mesh"


def test_memory_is_estimated_by_backend_and_can_be_given(world) -> None:
    mesh = init_device_mesh("cpu", (1, 8), mesh_dim_names=("one", "all"), isolate={"all": "own"})
    mesh.unflatten("all", (8,), ("view",), isolate="own")
    mesh.unflatten("one", (1,), ("alone",))
    assert mesh.universe.explain().saved == 2
    assert mesh.universe.explain().saved_bytes == 0  # the fake backend has no buffers
    assert mesh.universe.explain({"fake": 5 << 20}).saved_bytes == 5 << 20  # none for one rank
    assert "(about 5 MiB of device memory)" in str(mesh.universe.explain({"fake": 5 << 20}))


@pytest.mark.parametrize(
    ("backend", "size", "expected"),
    [
        ("nccl", 8, COMMUNICATOR_BYTES["nccl"]),
        ("nccl", 1, 0),
        ("cpu:gloo,cuda:nccl", 8, COMMUNICATOR_BYTES["nccl"]),
        ("gloo", 8, 0),
        ("ring", 8, None),
        ("cpu:gloo,cuda:ring", 8, None),
    ],
)
def test_estimates(backend: str, size: int, expected: int | None) -> None:
    assert estimate_bytes(backend, size, COMMUNICATOR_BYTES) == expected
    assert 100 << 20 < COMMUNICATOR_BYTES["nccl"] < 200 << 20


def test_json_is_the_data(mesh) -> None:
    report = mesh.universe.explain()
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert (data["saved"], data["saved_bytes"]) == (0, 0)
    assert data["groups"][0]["backend"] == "fake"


def test_groups_that_another_universe_made_again_are_counted_and_the_cure_is_named() -> None:
    with fake_world(16):
        mesh, _ = (init_device_mesh("cpu", (4, 4), mesh_dim_names=tuple(n)) for n in ("ab", "cd"))
        report = mesh.universe.explain()
        assert report.to_dict()["n_duplicates"] == 2
        *_, last = str(report).splitlines()
        assert last.startswith("2 of these process groups were also created by another universe")
        assert 'meshverse.install(share="world") before the first mesh' in last


@pytest.mark.parametrize("way", ["shared universe", "other tag", "other timeout", "destroyed"])
def test_groups_that_differ_or_are_shared_or_gone_exist_once(way: str) -> None:
    with fake_world(16):
        first = init_device_mesh("cpu", (4, 4), mesh_dim_names=("a", "b"))
        arguments: dict[str, dict[str, Any]] = {
            "shared universe": {"universe": first.universe},
            "other tag": {"isolate": "role"},
            "other timeout": {"timeout": timedelta(seconds=50)},
        }
        second = init_device_mesh("cpu", (4, 4), **arguments.get(way, {}))
        if way == "destroyed":
            second.universe.destroy()
        assert first.universe.explain().n_duplicates == 0
