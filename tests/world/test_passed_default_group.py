"""`destroy_process_group(group)` with the group of an axis that is the default group."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist

from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh


def _end(mesh: DeviceMesh, how: str) -> None:
    given = {"axis": mesh.get_group("dp"), "of own": mesh.get_group("tp"), "world": None}
    dist.destroy_process_group(given[how])  # warned about


def _warned(how: str) -> tuple[DeviceMesh, list[warnings.WarningMessage]]:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _end(mesh, how)
    return mesh, warned


def test_the_line_that_ends_the_world_with_an_axis_is_warned_about() -> None:
    with fake_world(4):
        mesh, warned = _warned("axis")
        assert not dist.is_initialized()
        (warning,) = warned
        assert "the group of axis 'dp', which is the default group" in str(warning.message)
        assert "call mesh.universe.destroy()" in str(warning.message)
        assert warning.filename == __file__
        with open(__file__, encoding="utf-8") as file:
            assert "# warned about" in file.read().splitlines()[warning.lineno - 1]
        with pytest.raises(RuntimeError, match=r"gone \(there is none.*of axis 'dp', which is the"):
            mesh.get_group("tp")


@pytest.mark.parametrize("how", ["of own", "world"])
def test_other_ends_are_not_warned_about(how: str) -> None:
    with fake_world(4):
        mesh, warned = _warned(how)
        assert not warned
        assert dist.is_initialized() is (how == "of own")
        with pytest.raises(RuntimeError) as error:
            mesh.get_group("tp")
        assert "which is the default group" not in str(error.value)


def test_a_world_ends_also_where_warnings_are_errors() -> None:
    with fake_world(4), warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.unraisablehook", lambda _: None)
            _end(mesh, "axis")
        with pytest.raises(RuntimeError, match="Create the mesh again"):
            mesh.get_group("dp")
