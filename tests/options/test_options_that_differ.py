"""Options that differ only in what is easily missed have groups of their own, or are refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from helpers.fake_options import fake_options, raises
from helpers.worlds import groups_created
from meshverse import DeviceMesh, Universe, init_device_mesh, init_mesh_partition, isolate

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"


class _OnDevice(FakeProcessGroup.Options):
    """Options with a handle, as of a network device."""


def _on(device: object) -> Any:
    options = _OnDevice()
    options.device = device
    return options


def test_groups_on_different_handles_are_separate() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    first, second = object(), object()

    def group(device: object) -> Any:
        view = mesh.unflatten("tp", (4,), ("view",), backend_override={"view": _on(device)})
        return view.get_group("view")

    assert group(first) is group(first)
    assert group(second) is group(second)
    assert group(second) is not group(first)
    assert len({group(one).group_name for one in (first, second)}) == 2


class _Loud(FakeProcessGroup.Options):
    def __init__(self) -> None:
        super().__init__()
        self.error_on_collective = True
        self._timeout = timedelta(seconds=77)


def test_fields_that_a_python_constructor_sets_are_no_defaults() -> None:
    mesh = init_device_mesh(
        "cpu", (8,), mesh_dim_names=("world",), backend_override={"world": _Loud()}
    )
    assert mesh.get_group() is not dist.group.WORLD
    assert raises(mesh.get_group())
    assert "error_on_collective" in mesh.universe.explain().groups[0].options
    assert "timeout=77s" in mesh.universe.explain().groups[0].options
    plain = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), universe=mesh.universe)
    view = plain.unflatten("tp", (4,), ("view",), backend_override={"view": _Loud()})
    assert raises(view.get_group("view"))
    assert not raises(plain.get_group("tp"))


@pytest.mark.parametrize("options", [5, "gloo", timedelta(seconds=50), FakeProcessGroup.Options])
def test_a_pair_without_options_is_refused_before_any_group_is_created(options: Any) -> None:
    parts = {
        "mine": {"mesh_shape": (6,), "mesh_dim_names": ("x",)},
        "other": {
            "mesh_shape": (2,),
            "mesh_dim_names": ("x",),
            "backend_override": {"x": ("fake", options)},
        },
    }
    for _ in range(2):
        with groups_created(0), pytest.raises(TypeError, match="options must be an object"):
            init_mesh_partition("cpu", parts)


def test_a_group_of_another_universe_keeps_its_options_under_a_tag() -> None:
    one = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=("x", "cp"), backend_override={"cp": fake_options(seconds=77)}
    )
    joined = DeviceMesh.concatenate([one["dp"], other["cp"]])
    with isolate("t"):
        for mesh in (joined["cp"], other["cp"]):
            assert raises(mesh.get_group())
            (ref,) = [r for r in mesh.universe.groups if r.name == mesh.get_group().group_name]
            assert ref.request.options.timeout == timedelta(seconds=77)
            assert ref.request.options.tag == "t"


def test_no_tag_is_taken_for_the_order_of_the_mesh() -> None:
    with pytest.raises(ValueError, match="and is not 'in the order of the mesh'"):
        init_device_mesh("cpu", (8,), isolate="in the order of the mesh")


def test_two_timeouts_of_one_group_are_refused() -> None:
    universe, options = Universe(8), fake_options(raises=False, seconds=77)
    for _ in range(2):
        with groups_created(0), pytest.raises(ValueError, match=r"0:00:33 and .*0:01:17: pass one"):
            universe.group([4, 5], options=options, timeout=timedelta(seconds=33))
    group = universe.group([4, 5], options=options, timeout=timedelta(seconds=77))
    assert universe.group([4, 5], options=options) is group


def test_a_mesh_is_no_universe() -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    with pytest.raises(TypeError, match=r"give the universe of a mesh, mesh\.universe"):
        DeviceMesh("cpu", list(range(8)), universe=mesh)  # type: ignore[arg-type]


# --- flattened meshes of several root meshes ----------------------------------------------------


def test_a_flattened_mesh_has_the_device_type_of_its_own_root() -> None:
    one = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("meta", (2, 4), mesh_dim_names=("dp", "tp"), universe=one.universe)
    flat = one.flatten("all")
    for _ in range(2):
        with groups_created(0):
            others = other.flatten("all")
        assert others.device_type == "meta"
        assert others is other.flatten("all")
        assert others.get_group() is flat.get_group()
        assert one.flatten("all") is flat
        assert one._get_root_mesh()._flatten_mapping["all"] is flat


def test_a_flattened_mesh_in_another_order_is_refused() -> None:
    ranks = list(range(8))[::-1]
    one = init_device_mesh(
        *("cpu", (2, 4)), mesh_dim_names=("dp", "tp"), ranks=ranks, preserve_rank_order=False
    )
    other = init_device_mesh(
        *("cpu", (2, 4)),
        mesh_dim_names=("dp", "tp"),
        ranks=ranks,
        universe=one.universe,
        preserve_rank_order=True,
    )
    one.flatten("all")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"all already exists .*preserve_rank_order=False"):
            other.flatten("all")
    mine = other.flatten("mine")
    assert dist.get_process_group_ranks(mine.get_group()) == ranks
