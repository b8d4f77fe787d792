"""Lazy groups: named beforehand, made when first used, never made otherwise."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.worlds import group_names, groups_created
from meshverse import DeviceMesh, init_device_mesh, isolate

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"

_AXES = ("dp", "cp", "tp")


def _mesh(**extra) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_AXES, lazy=True, **extra)


def test_a_group_is_made_when_it_is_first_used() -> None:
    with groups_created(0):
        mesh = _mesh()
        tp = mesh["tp"]
    with groups_created(1):
        group = tp.get_group()
    assert dist.get_process_group_ranks(group) == [4, 5]
    with groups_created(0):
        assert mesh.get_group("tp") is group
    with groups_created(2):
        assert [g.size() for g in mesh.get_all_groups()] == [2, 2, 2]


def test_derived_groups_are_lazy_too() -> None:
    with groups_created(0):
        mesh = _mesh()
        flat = mesh["dp", "cp"].flatten("data")
        view = mesh.unflatten("dp", (1, 2), ("one", "two"))
        joined = DeviceMesh.concatenate([mesh["dp"], mesh["tp"]])
        with isolate("mine"):
            own = mesh["tp"]
        init_device_mesh("cpu", (8,), mesh_dim_names=("world",), universe=mesh.universe)
    with groups_created(3):
        flat.get_group()
        joined.get_group("tp")
        own.get_group()
    assert view.get_group("two") is mesh.get_group("dp")


def test_the_name_does_not_depend_on_when_it_is_used() -> None:
    eager = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_AXES)
    lazy = _mesh()
    lazy.get_group("tp"), lazy.get_group("dp")
    for axis in ("dp", "tp"):
        identity, _, number = lazy.get_group(axis).group_name.rpartition("-")
        assert identity == eager.get_group(axis).group_name.rpartition("-")[0]
        assert number == "1"


def test_a_collective_on_a_tensor_makes_its_group_only() -> None:
    mesh = _mesh()
    before = group_names()
    distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)]).full_tensor()
    new = group_names() - before
    assert new == {mesh.get_group("tp").group_name}


def test_explain_tells_what_was_made_and_when() -> None:
    mesh = _mesh()
    mesh.get_group("cp")
    report = mesh.universe.explain()
    assert [group.how for group in report.groups] == [
        "not created yet (lazy)",
        "created by its members at first use",
        "not created yet (lazy)",
    ]
    assert (report.requested, report.created, report.saved) == (3, 1, 2)


def test_an_axis_over_the_world_is_the_default_group_at_once() -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",), lazy=True)
    assert mesh.get_group() is dist.group.WORLD


def test_a_group_is_made_once_however_many_threads_use_it() -> None:
    mesh = _mesh()
    start, groups = threading.Barrier(8), []

    def use() -> None:
        start.wait(30)
        groups.append(mesh.get_group("tp"))

    threads = [threading.Thread(target=use) for _ in range(8)]
    with groups_created(1):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(groups) == 8
    assert len(set(map(id, groups))) == 1


def test_what_was_never_used_needs_no_freeing() -> None:
    before = group_names()
    mesh = _mesh()
    mesh.get_group("dp")
    mesh.universe.destroy()
    assert group_names() == before
    with groups_created(0), pytest.raises(RuntimeError, match="was destroyed"):
        mesh.get_group("tp")


def test_a_lazy_group_of_an_ended_world_is_not_made() -> None:
    mesh = _mesh()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"gone \(there is none now\)"):
        mesh.get_group("tp")
    with pytest.raises(RuntimeError, match=r"gone \(there is none now\)"):
        mesh._dim_group_names[2]


def test_ranks_outside_have_nothing_to_make() -> None:
    with groups_created(0):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), lazy=True)
        assert mesh.get_coordinate() is None
        assert mesh.universe.warm_up() == []


# --- warm_up -------------------------------------------------------------------------------------


def test_warm_up_makes_all_or_some() -> None:
    mesh = _mesh()
    with groups_created(1):
        (report,) = mesh.universe.warm_up(["tp"])
    assert (report.axes, report.size) == (("tp",), 2)
    assert report.seconds > 0
    with groups_created(2):
        reports = mesh.universe.warm_up()
    assert sorted(report.axes for report in reports) == [("cp",), ("dp",), ("tp",)]
    with groups_created(0):
        mesh.universe.warm_up()


def test_warm_up_uses_a_device_that_each_group_has_a_backend_for() -> None:
    if "only_meta" not in dist.Backend.backend_list:
        create = dist.Backend._plugins["FAKE"].creator_fn
        dist.Backend.register_backend("only_meta", create, extended_api=True, devices=["meta"])
    mesh = _mesh()
    of_meta = dict.fromkeys(_AXES, ("only_meta", None))
    init_device_mesh(
        *("meta", (2, 2, 2)),
        mesh_dim_names=_AXES,
        universe=mesh.universe,
        backend_override=of_meta,
        isolate="meta",
    )
    assert len(mesh.universe.warm_up()) == 6


def test_warm_up_goes_in_one_order_on_all_ranks() -> None:
    one, two = _mesh(), _mesh()
    two["cp", "tp"].flatten("ct"), two["dp", "cp"].flatten("dc")
    one["dp", "cp"].flatten("dc"), one["cp", "tp"].flatten("ct")
    orders = [[report.axes for report in mesh.universe.warm_up()] for mesh in (one, two)]
    assert orders[0] == orders[1]
    assert len(orders[0]) == 5


def test_warm_up_of_an_unknown_axis_makes_nothing() -> None:
    mesh = _mesh()
    with groups_created(0), pytest.raises(KeyError, match=r"'pp'\. Known axes: 'cp', 'dp', 'tp'"):
        mesh.universe.warm_up(["tp", "pp"])


def test_warm_up_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = pytest.importorskip("rich.progress", reason="the bar is drawn with rich")
    seen: list[str] = []
    monkeypatch.setattr(
        progress.Progress,
        "update",
        lambda self, bar, *, description, advance: seen.append(description),
    )
    assert len(_mesh().universe.warm_up(show_progress=True)) == 3
    assert sorted(seen) == ["warming up cp", "warming up dp", "warming up tp"]


def test_without_rich_no_bar_and_no_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    mesh = _mesh()
    with (
        groups_created(0),
        pytest.raises(ImportError, match=r"pip install 'meshverse\[progress\]'"),
    ):
        mesh.universe.warm_up(show_progress=True)


def test_warm_up_tells_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="meshverse"):
        _mesh().universe.warm_up()
    (record,) = caplog.records  # the first rank of a group tells of it
    assert "('cp',): 2 ranks" in record.getMessage()


@pytest.mark.parametrize("is_used", [False, True])
def test_the_next_name_does_not_depend_on_use_by_this_rank(is_used) -> None:
    """A member that used a group, and one that did not, name the group after it alike."""
    first = _mesh()
    number = int(first["tp"].group_names[0].rpartition("-")[2])
    if is_used:  # its backend does not wait for the other members
        first.get_group("tp")
    first.universe.destroy()
    assert _mesh().get_group("tp").group_name.endswith(f"-{number + 1}")
