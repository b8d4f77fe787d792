"""Groups that a program destroys while meshes have them."""

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
from meshverse._torch_compat.backends import HowCreated
from meshverse.groups.registry import GroupRegistry
from meshverse.universe.world_universes import WorldUniverses
from meshverse.world import World

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
    "isolated and back": lambda mesh: (mesh["tp"].flatten("tp", isolate="x"), mesh.get_group("tp")),
}


@pytest.mark.parametrize("use", _USES)
def test_a_shared_group_is_gone_for_all_axes_that_share_it(use: str) -> None:
    mesh = _mesh()
    view = _view(mesh)
    name = view.get_group("inner").group_name
    dist.destroy_process_group(view.get_group("inner"))
    with pytest.raises(RuntimeError) as error:
        _USES[use](mesh)
    assert str(error.value).startswith(
        "The process group of axis 'tp' or 'inner' with ranks [4, 5, 6, 7] was destroyed, by "
        "destroy_process_group(group). It was shared, so it is gone for all meshes and axes that "
        "requested it. "
        "Create the mesh again, on all its ranks: a new mesh has a new group."
    )
    assert name not in live_groups()
    assert mesh.get_group("dp") is view.get_group("outer")


def test_a_new_mesh_of_the_universe_has_a_new_group() -> None:
    mesh = _mesh()
    gone = mesh.get_group("tp")
    dist.destroy_process_group(gone)
    with groups_created(1):
        again = _mesh(universe=mesh.universe)
    assert again is not mesh
    assert again.get_group("tp").group_name != gone.group_name
    assert again.get_group("dp") is mesh.get_group("dp")
    assert again["tp"].get_group() is again.get_group("tp")
    with pytest.raises(RuntimeError, match="was destroyed"):
        mesh["tp"].get_group()
    mesh.universe.destroy()
    with pytest.raises(RuntimeError, match="universe of ranks 0 to 7 was destroyed"):
        again.get_group("tp")


@pytest.mark.parametrize("tag", [None, "apart"])
def test_flattening_again_makes_a_new_group(tag: str | None) -> None:
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    mesh = root["a", "b"]
    flattened = mesh.flatten("ab", isolate=tag)
    dist.destroy_process_group(flattened.get_group())
    with pytest.raises(RuntimeError, match="was destroyed"):
        flattened.get_group()
    again = mesh.flatten("ab", isolate=tag)
    assert again is not flattened
    assert dist.get_process_group_ranks(again.get_group()) == [1, 3, 5, 7]
    assert mesh.flatten("ab", isolate=tag) is again
    new_root = init_device_mesh(
        "cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"), universe=root.universe
    )
    assert new_root["a", "b"].flatten("ab", isolate=tag) is again
    if tag is None:
        assert root.get_group("ab") is again.get_group()
    else:
        with isolate(tag):
            assert root["a", "b"].flatten("ab") is again
    with pytest.raises(RuntimeError, match="was destroyed"):
        flattened.get_group()
    root.universe.destroy()
    assert mesh.flatten("ab", isolate=tag) is again  # a question that needs no group


def test_the_axis_is_named_when_a_new_mesh_has_a_new_group() -> None:
    mesh = _mesh(lazy=True)
    dist.destroy_process_group(mesh.get_group("tp"))
    again = _mesh(universe=mesh.universe)
    with pytest.raises(
        RuntimeError, match=r"group of axis 'tp' of DeviceMesh\(\(dp=2, tp=4\).* was d"
    ):
        mesh.get_group("tp")
    assert again.get_group("tp").size() == 4


def test_as_often_as_it_is_destroyed() -> None:
    mesh = _mesh()
    with groups_created(0):
        for _ in range(3):
            dist.destroy_process_group(mesh.get_group("tp"))
            mesh = _mesh(universe=mesh.universe)
            assert mesh.get_group("tp").size() == 4
            names = {group.name for group in mesh.universe.explain().groups}
            assert len(names) == 2  # those that are gone are not listed
        mesh.universe.destroy()


def test_flattened_meshes_of_destroyed_groups_go_with_their_last_reference() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    kept: list[weakref.ref[DeviceMesh]] = []
    for _ in range(3):
        flat = mesh["dp", "tp"].flatten("flat")
        assert mesh["dp", "tp"].flatten("flat") is flat
        kept.append(weakref.ref(flat))
        dist.destroy_process_group(flat.get_group())
    n_meshes = len(mesh.universe.meshes)
    again = mesh["dp", "tp"].flatten("flat")
    assert len(mesh.universe.meshes) == n_meshes
    del flat
    gc.collect()
    assert [each() for each in kept] == [None] * 3
    assert again.get_group().size() == 4


def test_a_group_of_one_axis_alone_is_gone_as_in_torch() -> None:
    stock = stock_init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    dist.destroy_process_group(stock["tp"].get_group())
    with pytest.raises(RuntimeError):
        stock.get_group("tp")
    mesh = _mesh()
    dist.destroy_process_group(mesh["tp"].get_group())
    for use in ("get_group", "functional", "DTensor", "warm_up"):
        with groups_created(0), pytest.raises(RuntimeError) as raised:
            _USES[use](mesh)
        assert str(raised.value) == (
            "The process group of axis 'tp' with ranks [4, 5, 6, 7] was destroyed, by "
            "destroy_process_group(group). Create the mesh again, on all its ranks: a new mesh has "
            "a new group. To free all groups of a universe, call mesh.universe.destroy() instead."
        )
    assert mesh.get_group("dp").size() == 2


def test_a_lazy_group_that_was_destroyed_is_gone_too() -> None:
    mesh = _mesh(lazy=True)
    dist.destroy_process_group(mesh.get_group("tp"))
    with pytest.raises(RuntimeError, match="was destroyed"):
        mesh.get_group("tp")
    with groups_created(0):
        again = _mesh(universe=mesh.universe)
    with groups_created(1):
        assert again.get_group("tp").size() == 4


@pytest.mark.parametrize("is_universe_destroyed", [False, True])
def test_a_group_that_universes_share_is_made_anew_for_new_ones(
    is_universe_destroyed: bool,
) -> None:
    meshverse.install(share="world")
    before = group_names()
    try:
        one, two = _mesh(), _mesh()
        dist.destroy_process_group(one.get_group("tp"))
        if is_universe_destroyed:
            one.universe.destroy()
        for _ in range(2):
            assert _mesh().get_group("tp").size() == 4
        with pytest.raises(RuntimeError, match="a new mesh has a new group"):
            two.get_group("tp")
        for universe in World.current().state(WorldUniverses).with_world_rank.alive():
            universe.destroy()
        assert group_names() == before
    finally:
        meshverse.uninstall()


def test_a_part_has_a_new_group_too() -> None:
    mesh = _mesh()
    dist.destroy_process_group(mesh.get_group("tp"))
    part = init_device_mesh("cpu", (4,), ranks=[4, 5, 6, 7], universe=mesh.universe)
    assert part.get_group().size() == 4


def test_a_given_group_is_not_made_again() -> None:
    given = dist.new_group([4, 5])
    mesh = DeviceMesh.from_group(given, "cpu", mesh_dim_names=("given",))
    dist.destroy_process_group(given)
    with pytest.raises(
        RuntimeError,
        match=r"axis 'given' with ranks \[4, 5\] was destroyed, .*pass ones that are not",
    ):
        mesh.get_group()


def test_a_group_that_all_ranks_make_is_not_made_anew_in_its_universe(monkeypatch) -> None:
    """The ranks whose groups are there would not come to make it."""
    monkeypatch.setattr(
        World, "how_created", lambda self, backend: HowCreated(False, "so says a test", False)
    )
    mesh = _mesh()
    dist.destroy_process_group(mesh.get_group("tp"))
    with groups_created(0):
        with pytest.raises(RuntimeError, match="a new mesh has a new group"):
            mesh.get_group("tp")
        with pytest.raises(RuntimeError, match="Create the mesh without universe=, on all ranks"):
            _mesh(universe=mesh.universe)
    assert _mesh().get_group("tp").size() == 4


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


def test_meshes_that_are_thrown_away_leave_nothing_in_the_registry() -> None:
    registry = World.current().state(GroupRegistry)
    init_device_mesh("cpu", (8,))
    gc.collect()
    before = [len(group.refs.alive()) for group in registry]
    for _ in range(50):
        init_device_mesh("cpu", (8,))
        given = dist.new_group([4, 5])
        DeviceMesh.from_group(given, "cpu", mesh_dim_names=("given",))
        dist.destroy_process_group(given)
    gc.collect()
    assert [len(group.refs.alive()) for group in registry] == before


def test_a_new_world_begins_anew() -> None:
    mesh = _mesh()
    view = _view(mesh)
    dist.destroy_process_group(view.get_group("inner"))
    dist.destroy_process_group()
    with fake_world(8, 5):
        assert _mesh().get_group("tp").size() == 4
        with pytest.raises(RuntimeError, match="is gone"):
            mesh.get_group("tp")
