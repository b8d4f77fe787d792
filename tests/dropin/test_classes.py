"""Which class torch's own names build: ours for what derives from ours, or for all meshes."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.device_mesh import init_device_mesh as stock_init_device_mesh

import meshverse
from helpers.observation import OURS, STOCK, assert_same, observe
from helpers.worlds import group_names
from meshverse import DeviceMesh
from trainer_views import Degrees, five_views

pytestmark = pytest.mark.usefixtures("uninstalled_afterwards", "world")  # rank 5 of 8

_NAMES = ("dp", "tp")


def _stock_mesh() -> StockDeviceMesh:
    return stock_init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)


def _our_mesh() -> DeviceMesh:
    return meshverse.init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)


def test_our_meshes_are_device_meshes() -> None:
    assert isinstance(_our_mesh(), dist.DeviceMesh)
    assert isinstance(_our_mesh()["tp"], StockDeviceMesh)


def test_stock_concatenates_ours_to_ours() -> None:
    mesh = _our_mesh()
    joined = StockDeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
    assert type(joined) is DeviceMesh
    assert joined == mesh
    assert joined.universe is mesh.universe
    assert joined.get_all_groups() == mesh.get_all_groups()
    assert_same(_stock_mesh(), joined)


def test_stock_joins_what_is_not_adjacent() -> None:
    mesh = _our_mesh().unflatten("tp", (2, 2), ("cp", "tp"))
    joined = StockDeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
    assert type(joined) is DeviceMesh
    assert joined.mesh.tolist() == [[0, 1], [4, 5]]


def test_stock_private_constructor_with_our_root_gives_ours() -> None:
    mesh = _our_mesh()
    derived = StockDeviceMesh(
        "cpu",
        _layout=mesh["tp"]._layout,
        _rank_map=mesh._rank_map,
        mesh_dim_names=("fsdp",),
        _root_mesh=mesh,
        _init_backend=False,
    )
    assert type(derived) is DeviceMesh
    assert derived.universe is mesh.universe
    assert derived.mesh.tolist() == [4, 5, 6, 7]


def test_without_install_stock_builds_stock() -> None:
    mesh = _stock_mesh()
    views = [mesh, mesh["tp"], mesh._flatten("world"), StockDeviceMesh("cpu", [4, 5])]
    assert {type(view) for view in views} == {StockDeviceMesh}
    assert type(StockDeviceMesh._concatenate([mesh["dp"], mesh["tp"]])) is StockDeviceMesh


def test_stock_meshes_work_as_ever() -> None:
    assert observe(_stock_mesh())["mesh"].value[-1] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dist.get_process_group_ranks(_stock_mesh()["dp"].get_group()) == [1, 5]
    assert len({name for name in group_names() if name.startswith("meshverse")}) == 0


def test_install_and_uninstall() -> None:
    meshverse.install()
    mesh = _stock_mesh()
    assert type(mesh) is DeviceMesh
    assert type(StockDeviceMesh("cpu", [[4, 5], [6, 7]])) is DeviceMesh
    assert type(dist.init_device_mesh("cpu", (8,))) is DeviceMesh
    assert type(StockDeviceMesh.from_group(dist.group.WORLD, "cpu")) is DeviceMesh
    meshverse.uninstall()
    assert type(_stock_mesh()) is StockDeviceMesh
    assert type(mesh["tp"]) is DeviceMesh
    assert mesh.get_group("tp").size() == 4


def test_installed_is_a_block() -> None:
    with meshverse.installed():
        assert type(_stock_mesh()) is DeviceMesh
        with meshverse.installed():
            pass
        assert type(_stock_mesh()) is DeviceMesh
    assert type(_stock_mesh()) is StockDeviceMesh


def test_installed_leaves_an_install_alone() -> None:
    meshverse.install()
    with meshverse.installed():
        pass
    assert type(_stock_mesh()) is DeviceMesh


def test_installed_ends_with_an_error() -> None:
    with pytest.raises(KeyError, match="pp"), meshverse.installed():
        _stock_mesh()["pp"]
    assert type(_stock_mesh()) is StockDeviceMesh


def test_a_subclass_of_stock_stays_what_it_is() -> None:
    class TheirMesh(StockDeviceMesh):
        pass

    meshverse.install()
    assert type(TheirMesh("cpu", [4, 5])) is TheirMesh


def test_a_program_that_never_heard_of_us() -> None:
    degrees = Degrees(pp=2, dp_shard=2, tp=2, ep=2)
    expected = five_views(OURS.init_device_mesh, degrees)
    with meshverse.installed():
        installed = five_views(STOCK.init_device_mesh, degrees)
    for name, mesh in expected.items():
        assert type(installed[name]) is DeviceMesh
        assert observe(installed[name]) == observe(mesh)
    report, expected_report = (views["world"].universe.explain() for views in (installed, expected))
    assert (report.requested, report.created) == (
        expected_report.requested,
        expected_report.created,
    )


def test_overrides_reach_a_mesh_built_by_stocks_name() -> None:
    with meshverse.installed():
        mesh = stock_init_device_mesh(
            "cpu", (2, 4), mesh_dim_names=_NAMES, backend_override={"tp": "cpu:fake"}
        )
    options = [group.options for group in mesh.universe.explain().groups]
    assert "cpu:fake" not in options[0]
    assert "cpu:fake" in options[1]


def test_signatures_stay_readable() -> None:
    for mesh_class in (StockDeviceMesh, DeviceMesh):
        shown = list(inspect.signature(mesh_class).parameters)
        assert shown == list(inspect.signature(mesh_class.__init__).parameters)[1:]
        assert shown[:3] == ["device_type", "mesh", "mesh_dim_names"]


def test_stock_and_ours_do_not_mix() -> None:
    stock, ours = _stock_mesh(), _our_mesh()
    with pytest.raises(RuntimeError, match=r"[Cc]annot concatenate"):
        StockDeviceMesh._concatenate([stock, ours])
