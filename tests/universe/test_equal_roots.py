"""Root meshes that are equal: where they are on the same groups, where not, and who says so."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as stock_init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"

_AXES = ("dp", "tp")


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)


_DERIVED = {
    "itself": lambda mesh: mesh,
    "slice": lambda mesh: mesh["tp"],
    "flattened": lambda mesh: mesh.flatten("all"),
    "split": lambda mesh: mesh.unflatten("tp", (2, 2), ("a", "b")),
    "isolated": lambda mesh: mesh["tp"].flatten("own", isolate="x"),
}


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("derive", _DERIVED)
def test_equal_meshes_are_on_the_same_groups_where_the_world_shares(derive: str) -> None:
    one, two = (_DERIVED[derive](_mesh()) for _ in range(2))
    assert one == two
    assert one.universe is not two.universe
    assert one.group_names == two.group_names
    assert one.get_all_groups() == two.get_all_groups()


def test_a_mesh_of_an_ended_universe_equals_none_that_lives() -> None:
    # Its groups are gone, so what torch remembers of it must not be found for another.
    old, other = _mesh(), _mesh()
    assert old["tp"] == other["tp"]
    slices = old["tp"], other["tp"]
    old.universe.destroy()
    new = _mesh()
    stock = stock_init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    for mesh in (other, new, stock):
        assert mesh != old
        assert old != mesh
        assert hash(mesh) == hash(old)
    assert slices[0] != slices[1] == new["tp"]
    assert old == old
    assert old["tp"] == slices[0]


def test_results_are_not_on_meshes_of_an_ended_universe() -> None:
    _clear_sharding_prop_cache()
    meshes = [_mesh() for _ in range(2)]
    assert _total(meshes[0]).device_mesh is meshes[0]["tp"]
    meshes[0].universe.destroy()
    total = _total(meshes[1])
    assert total.device_mesh is meshes[1]["tp"]
    assert total.full_tensor().tolist() == [2.0] * 3
    _clear_sharding_prop_cache()


def _total(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.ones(2, 3), mesh["tp"], [Shard(0)], run_check=False).sum(0)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "second time" in record.message]


@pytest.mark.parametrize("world", [(8, 0)], indirect=True)
class TestSaysSo:
    def test_once(self, caplog) -> None:
        _mesh()
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        assert not _said(caplog)
        for _ in range(2):
            _mesh()
        (said,) = _said(caplog)
        for part in (
            "DeviceMesh((dp=2, tp=4)",
            "DTensor's caches",
            "universe=first.universe",
            "share='world'",
            "isolate='some tag'",
        ):
            assert part in said

    def test_of_given_groups_too(self, caplog) -> None:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        # Held: a mesh that is collected is none to be taken for another.
        held = [
            DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=("given",)) for _ in range(2)
        ]
        assert held[0] == held[1]
        assert not _said(caplog)
        DeviceMesh.from_group(groups[1], "cpu", mesh_dim_names=("given",))
        assert _said(caplog)

    def test_not_where_a_cure_is_taken(self, caplog) -> None:
        mesh = _mesh()
        init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, universe=mesh.universe)
        init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, isolate="other")
        mesh.universe.destroy()
        _mesh()
        for _ in range(2):  # on the default group; on nothing
            init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
            DeviceMesh("cpu", [3, 4], mesh_dim_names=("others",))
        assert not _said(caplog)

    @pytest.mark.usefixtures("shared")
    def test_not_where_the_world_shares(self, caplog) -> None:
        for _ in range(2):
            _mesh()
        assert not _said(caplog)

    def test_in_each_world(self, caplog) -> None:
        for _ in range(2):
            _mesh()
        dist.destroy_process_group()
        with fake_world(8, 0):
            _mesh()
            assert len(_said(caplog)) == 1
            _mesh()
            assert len(_said(caplog)) == 2


def test_other_ranks_do_not_say_it(caplog) -> None:
    for _ in range(2):
        _mesh()
    assert not _said(caplog)


def test_thrown_away_roots_leave_no_rank_map() -> None:
    kept = []
    for seed in range(3):
        mesh = DeviceMesh("cpu", [*torch.arange(8).roll(seed + 1).tolist()])
        kept.append(weakref.ref(mesh.universe.rank_map))
        mesh.universe.destroy()
        del mesh
    gc.collect()
    assert [rank_map() for rank_map in kept] == [None] * 3
