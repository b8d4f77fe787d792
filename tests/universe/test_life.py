"""A universe knows when its world is gone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from helpers.ports import held_port
from helpers.tiers import in_tiers
from helpers.worlds import fake_world, group_names, groups_created
from meshverse import DeviceMesh, Universe, init_device_mesh
from meshverse._core import RankMap
from meshverse.universe.world_universes import find_universe
from worlds import start_fake_world

_NAMES = ("dp", "cp", "tp")


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_NAMES)


_NEW_GROUPS: dict[str, Callable[[DeviceMesh], object]] = {
    "flatten": lambda mesh: mesh["dp", "cp"].flatten(),
    "unflatten": lambda mesh: mesh.unflatten("tp", (1, 2), ("a", "b")),
    "a further mesh": lambda mesh: init_device_mesh("cpu", (4, 2), universe=mesh.universe),
}


@pytest.mark.parametrize("ask", _NEW_GROUPS)
@pytest.mark.parametrize("alive", [True, False], ids=["groups alive", "groups gone"])
def test_a_stale_universe_makes_no_group(ask: str, alive: bool) -> None:
    start_fake_world(8, 5)
    mesh = _mesh()
    held = mesh.get_all_groups() if alive else []
    dist.destroy_process_group()
    with (
        fake_world(8, 5),
        groups_created(0),
        pytest.raises(
            RuntimeError, match=r"there is another one.*Create the mesh again after init"
        ),
    ):
        _NEW_GROUPS[ask](mesh)
    assert len(held) == (3 if alive else 0)


def test_a_stale_group_is_not_given_out_though_the_worlds_store_is_held() -> None:
    start_fake_world(8, 5)
    store, default_group = c10d._get_default_store(), dist.group.WORLD
    meshes = [_mesh(), init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))]
    names = [mesh.group_names for mesh in meshes]
    dist.destroy_process_group()
    with fake_world(8, 5):
        again = [_mesh(), init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))]
        assert [mesh.group_names for mesh in again] == names  # so c10d would find the new groups
        for mesh in meshes:
            assert not mesh.universe.process_groups
            for use in (
                lambda mesh=mesh: mesh.get_group("dp"),
                lambda mesh=mesh: mesh["dp"].get_group(),
            ):
                with pytest.raises(RuntimeError, match=r"there is another one.*Create the mesh"):
                    use()
    assert (store, default_group) != (None, None)


def test_without_a_default_group_nothing_is_made() -> None:
    start_fake_world(8, 5)
    mesh = _mesh()
    dist.destroy_process_group()
    for ask in ("flatten", "unflatten"):
        with pytest.raises(
            RuntimeError, match=r"there is none now.*Create the mesh again after init"
        ):
            _NEW_GROUPS[ask](mesh)


def test_a_stale_mesh_still_says_what_it_was() -> None:
    start_fake_world(8, 5)
    mesh = _mesh()
    dist.destroy_process_group()
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert mesh["tp"].mesh.tolist() == [4, 5]
    assert mesh.get_coordinate() == (1, 0, 1)
    assert mesh.universe.explain().created == 3
    assert repr(mesh["dp"]) == "DeviceMesh((dp=2), 'cpu', stride=(4,))"


def test_a_new_world_begins_anew() -> None:
    with fake_world(8, 5):
        old = _mesh()
        old_names = group_names()
    with fake_world(8, 5):
        new = _mesh()
        assert new.universe is not old.universe
        assert new != old  # whose groups are gone
        # The history of the groups is that of the world, so the names begin anew, on all ranks.
        assert group_names() == old_names
        assert new["dp"].get_group().rank() == 1


def test_names_do_not_depend_on_other_groups() -> None:
    with fake_world(8, 5):
        _mesh()
        expected = group_names()
    with fake_world(8, 5):
        dist.new_group([4, 5])
        DeviceMesh("cpu", [3, 5, 6])
        before = group_names()
        _mesh()
        assert group_names() - before == expected - before


def test_a_mesh_that_was_made_twice_in_a_universe_ends_with_it() -> None:
    with fake_world(8, 5):
        mesh = _mesh()
        shape, names = mesh.shape, mesh.mesh_dim_names
        again = init_device_mesh("cpu", shape, mesh_dim_names=names, universe=mesh.universe)
        assert again is not mesh
        mesh.universe.destroy()
        for each in (mesh, again):
            with pytest.raises(RuntimeError, match="universe of ranks 0 to 7 was destroyed"):
                each.get_group(0)


def test_a_group_made_again_has_another_name() -> None:
    with fake_world(8, 5):
        one, two = (DeviceMesh("cpu", [5, 7]).get_group().group_name for _ in range(2))
        assert one != two
        assert one.rpartition("-")[0] == two.rpartition("-")[0]


@pytest.mark.parametrize("end", in_tiers(["the universe", "the world", "neither"], ["neither"]))
def test_a_universe_is_kept_as_long_as_its_groups(end: str) -> None:
    with fake_world(8, 5):
        mesh = _mesh()
        mesh["dp", "cp"].flatten().unflatten(0, (2, 2), ("a", "b"))
        universe = weakref.ref(mesh.universe)
        if end == "the universe":
            mesh.universe.destroy()
        elif end == "the world":
            dist.destroy_process_group()
        del mesh
        gc.collect()
        assert (universe() is None) == (end != "neither")
        if end == "neither":  # a mesh that is loaded finds it by that, whatever was collected
            assert find_universe(RankMap.identity(8), serial=99) is universe()
    gc.collect()
    assert universe() is None


def test_an_ended_world_keeps_no_ranks_of_meshes_that_nobody_has() -> None:
    with fake_world(8 * 1_009, 5):  # ranks that no mesh of other tests has
        mesh = init_device_mesh("cpu", (8, 1_009))
        ranks = weakref.ref(mesh.universe.rank_map)
        del mesh
    gc.collect()
    assert ranks() is None


def test_a_universe_whose_end_fails_at_first_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: object) -> None:
        raise RuntimeError("the backend is stuck")

    with fake_world(8, 5):
        mesh = _mesh()
        with monkeypatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", fail)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="the backend is stuck"):
                    mesh.universe.destroy()
        assert not mesh.universe.groups.is_freed
        mesh.universe.destroy()
        assert mesh.universe.groups.is_freed
        assert Universe(8).n_ended_before == 1


def test_a_universe_that_made_no_group_is_collected(world) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))  # on the default group
    universe = weakref.ref(mesh.universe)
    del mesh
    gc.collect()
    assert universe() is None


class _DeviceOptions(FakeProcessGroup.Options):
    """With a device, as options of out-of-tree backends have."""

    device: Any = None


class _Device:
    """A handle, which knows for which mesh it is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mesh: Any = None


def test_a_universe_is_collected_whose_options_refer_to_a_mesh(world) -> None:
    options = _DeviceOptions()
    options.device = _Device()
    override = {"dp": ("fake", options)}
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), backend_override=override)
    options.device.mesh = mesh
    mesh.universe.destroy()
    universe = weakref.ref(mesh.universe)
    del mesh, options, override
    gc.collect()
    assert universe() is None


def test_the_first_universe_that_made_groups_is_found(world) -> None:
    borrowing = init_device_mesh("cpu", (8,))
    first, second = _mesh(), _mesh()
    found = [
        find_universe(RankMap.identity(8), mesh.universe.serial)
        for mesh in (borrowing, first, second)
    ]
    assert found == [borrowing.universe, first.universe, second.universe]
    assert find_universe(RankMap.identity(8), serial=99) is first.universe
    first.universe.destroy()
    assert find_universe(RankMap.identity(8), serial=99) is second.universe
    assert find_universe(RankMap.identity(4), serial=0) is None


def test_a_universe_made_beforehand(world) -> None:
    universe = Universe(RankMap.identity(8))
    with groups_created(3):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_NAMES, universe=universe)
    assert mesh.universe is universe
    assert (universe.size, universe.rank, universe.position) == (8, 5, 5)
    assert mesh._get_root_mesh() is mesh


def test_a_default_group_is_started_if_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(held_port()),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert not dist.is_initialized()
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        assert dist.get_world_size() == 1
        assert mesh.get_local_rank("tp") == 0
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()
