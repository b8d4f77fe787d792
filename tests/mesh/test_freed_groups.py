"""Groups that a program destroys while meshes have them: who has them again, who is told why."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh as stock_init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshverse
from helpers.worlds import fake_world, group_names, groups_created, live_groups
from meshverse import DeviceMesh, init_device_mesh, isolate
from meshverse.world.world import World

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"

_AXES = ("dp", "tp")


def _mesh(**extra) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, **extra)


def _view(mesh: DeviceMesh) -> DeviceMesh:
    """The same axes under other names, which share their groups with the mesh."""
    return mesh.flatten("all").unflatten(0, (2, 4), ("outer", "inner"))


def _reduced(mesh: DeviceMesh) -> DTensor:
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()] * mesh.ndim, run_check=False)
    return tensor.redistribute(placements=[Replicate()] * mesh.ndim)


_USES: dict[str, Callable[[DeviceMesh], object]] = {
    "get_group": lambda mesh: mesh.get_group("tp"),
    "by index": lambda mesh: mesh.get_group(1),
    "of a slice": lambda mesh: mesh["tp"].get_group(),
    "all groups": lambda mesh: mesh.get_all_groups(),
    "functional": lambda mesh: funcol.all_reduce(torch.ones(2), "sum", (mesh, 1)).sum(),
    "functional on a slice": lambda mesh: funcol.all_reduce(torch.ones(2), "sum", mesh["tp"]).sum(),
    "DTensor": lambda mesh: _reduced(mesh["tp"]),
    "warm_up": lambda mesh: mesh.universe.warm_up(),
    "flattened": lambda mesh: mesh["tp"].flatten("alias").get_group(),
    "isolated and back": lambda mesh: (mesh["tp"].flatten("tp", isolate="x"), mesh.get_group("tp")),
}


@pytest.mark.parametrize("use", _USES)
def test_a_group_that_another_mesh_shares_is_there_again(use: str) -> None:
    mesh = _mesh()
    view = _view(mesh)
    gone = view.get_group("inner")
    dist.destroy_process_group(gone)
    assert gone.group_name not in live_groups()
    with groups_created(2 if "isolated" in use else 1):
        _USES[use](mesh)
    again = mesh.get_group("tp")
    assert again is not gone
    # Under its name, so that everybody who knows it has it.
    assert again.group_name == gone.group_name
    assert view.get_group("inner") is mesh["tp"].get_group() is again
    assert dist.get_process_group_ranks(again) == [4, 5, 6, 7]
    (told,) = [g for g in mesh.universe.explain().groups if g.name == again.group_name]
    assert told.how == "made again by its members: it was destroyed"


def test_as_often_as_it_is_destroyed() -> None:
    mesh = _mesh()
    view = _view(mesh)
    for _ in range(3):
        with groups_created(0):
            dist.destroy_process_group(view.get_group("outer"))
            assert mesh.get_group("dp").size() == 2


def test_axes_may_be_ended_one_by_one_as_in_torch() -> None:
    for make in (stock_init_device_mesh, init_device_mesh):
        before = group_names()
        mesh = make("cpu", (1, 8, 1), mesh_dim_names=("pp", "dp", "cp"))
        for axis in ("pp", "cp"):  # one group here
            dist.destroy_process_group(mesh.get_group(axis))
        assert group_names() == before


def test_a_group_of_one_axis_alone_is_gone_as_in_torch() -> None:
    stock = stock_init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    dist.destroy_process_group(stock["tp"].get_group())
    with pytest.raises(RuntimeError):
        stock.get_group("tp")
    mesh = _mesh()
    dist.destroy_process_group(mesh["tp"].get_group())
    for use in ("get_group", "functional", "DTensor", "warm_up"):
        with groups_created(0), pytest.raises(RuntimeError) as told:
            _USES[use](mesh)
        assert str(told.value) == (
            "The process group of axis 'tp' with ranks [4, 5, 6, 7] was destroyed, by "
            "destroy_process_group(group). Make the mesh again with universe=mesh.universe, on all "
            "its ranks: groups that are gone are made again, for this mesh too."
        )
    assert mesh.get_group("dp").size() == 2


def test_making_the_mesh_again_makes_the_group_again_for_both() -> None:
    mesh = _mesh()
    dist.destroy_process_group(mesh.get_group("tp"))
    with groups_created(1):
        again = _mesh(universe=mesh.universe)
    assert again.get_group("tp") is mesh.get_group("tp")
    assert again.get_group("dp") is mesh.get_group("dp")
    mesh.universe.destroy()


def test_a_lazy_group_is_made_again_when_it_is_used() -> None:
    mesh = _mesh(lazy=True)
    view = _view(mesh)
    dist.destroy_process_group(view.get_group("inner"))
    with groups_created(0):
        _mesh(universe=mesh.universe)
    with groups_created(1):
        assert mesh.get_group("tp") is view.get_group("inner")


def test_a_group_that_two_universes_share_is_there_for_the_other() -> None:
    meshverse.install(share="world")
    try:
        one, two = _mesh(), _mesh()
        dist.destroy_process_group(one.get_group("tp"))
        with groups_created(1):
            assert two.get_group("tp") is one.get_group("tp")
        one.universe.destroy()
        assert two.get_group("tp").size() == 4
        before = group_names()
        two.universe.destroy()
        assert len(before - group_names()) == 2
    finally:
        meshverse.uninstall()


def test_a_given_group_is_not_made_again() -> None:
    given = dist.new_group([4, 5])
    mesh = DeviceMesh.from_group(given, "cpu", mesh_dim_names=("given",))
    dist.destroy_process_group(given)
    with pytest.raises(
        RuntimeError, match=r"axis 'given' with ranks \[4, 5\] was destroyed, .*on groups that are"
    ):
        mesh.get_group()


def test_a_group_that_all_ranks_make_is_not_made_again(monkeypatch) -> None:
    monkeypatch.setattr(World, "members_only_hazard", lambda self, backend: "so says a test")
    mesh = _mesh()
    view = _view(mesh)
    dist.destroy_process_group(view.get_group("inner"))
    with groups_created(0), pytest.raises(RuntimeError, match="for the new mesh only"):
        mesh.get_group("tp")
    again = _mesh(universe=mesh.universe)
    assert again.get_group("tp").size() == 4


def test_an_isolated_group_is_another_one() -> None:
    mesh = _mesh()
    with isolate("x"):
        own = mesh["tp"]
    dist.destroy_process_group(own.get_group())
    with groups_created(0):
        assert mesh.get_group("tp").size() == 4


def test_a_group_that_was_destroyed_is_let_go() -> None:
    mesh = _mesh()
    group = weakref.ref(mesh.get_group("tp"))
    dist.destroy_process_group(mesh.get_group("tp"))
    gc.collect()
    assert group() is None
    assert len(mesh.universe.process_groups) == 1


def test_a_new_world_begins_anew() -> None:
    mesh = _mesh()
    view = _view(mesh)
    dist.destroy_process_group(view.get_group("inner"))
    dist.destroy_process_group()
    with fake_world(8, 5):
        assert _mesh().get_group("tp").size() == 4
        with pytest.raises(RuntimeError, match="is gone"):
            mesh.get_group("tp")


@pytest.mark.parametrize("world", [(8, 0)], indirect=True)
def test_the_log_says_so_once(caplog) -> None:
    mesh = _mesh()
    view = _view(mesh)
    for _ in range(2):
        dist.destroy_process_group(view.get_group("inner"))
        mesh.get_group("tp")
    (said,) = [record.message for record in caplog.records if "made again" in record.message]
    assert said.startswith(
        "The process group of axis 'tp' or 'inner' with ranks [0, 1, 2, 3] was destroyed by "
        "destroy_process_group(), and made again"
    )
