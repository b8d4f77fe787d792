"""Submeshes of a trainer's mesh by the names of axes, flattened ones among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

from helpers.trainer_meshes import AXES, FLATTENED, nothing_created, ranks_by_axes
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh
from meshverse.parallel import (
    MeshAxisName,
    ParallelismSizes,
    create_fsdp2_device_mesh,
    create_moe_mesh,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
    register_flattened_axes,
    unflatten_compat,
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    sizes = ParallelismSizes(pp_size=2, dp_replicate_size=2, cp_size=2, tp_size=2)
    with fake_world(32, 21):
        yield create_fsdp2_device_mesh(sizes, world_size=32)[0]


@pytest.mark.parametrize(
    "names",
    [
        ("dp_replicate", "dp_shard_cp"),
        ("dp", "cp"),
        ("dp", "cp", "tp"),
        ("dp_cp", "tp"),
        ("pp", "dp_cp"),
        ("pp", "dp_replicate", "dp_shard_cp", "tp"),
        ("dp_shard_cp", "tp"),
        (MeshAxisName.DP_SHARD_CP, MeshAxisName.TP),
        ("dp_replicate", "dp_shard"),
        ("tp", "dp_cp"),
    ],
)
def test_submeshes_are_made_once_on_known_groups(mesh, names) -> None:
    with groups_created(0):
        submesh = get_submesh(mesh, names)
        assert get_submesh(mesh, list(names)) is submesh
    assert submesh.mesh_dim_names == tuple(map(str, names))
    assert all(type(name) is str for name in submesh.mesh_dim_names)
    assert submesh.universe is mesh.universe
    assert submesh._get_root_mesh() is mesh
    for name in names:
        assert submesh.get_group(name) is get_flat_mesh(mesh, name).get_group()
    parts = [FLATTENED.get(name, (name,)) for name in names]
    shape = tuple(get_flat_mesh(mesh, name).size() for name in names)
    if list(names) != ["tp", "dp_cp"]:  # in the order of the mesh: the ranks ascend
        expected = ranks_by_axes((2,) * 5, tuple(itertools.chain(*parts)), 21)
        assert submesh.mesh.tolist() == torch.tensor(expected).reshape(shape).tolist()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("data", r"'data'.*\('pp', 'dp_replicate'.*\('dp', 'dp_shard_cp', 'dp_cp'\)"),
        (("tp", "ep"), "'ep'"),
        (("dp", "dp_cp"), r"\('dp', 'dp_cp'\).*overlap"),
        (("dp_shard_cp", "dp_shard"), "overlap"),
        (("tp", "tp"), "each once"),
        ((), "one or more"),
        (("tp", "cp"), "order"),
    ],
)
def test_impossible_submeshes_are_key_errors_and_create_nothing(mesh, names, message) -> None:
    with nothing_created(mesh), pytest.raises(KeyError, match=message):
        get_submesh(mesh, names)


def test_one_name_is_the_flat_mesh(mesh) -> None:
    for name in (*AXES, *FLATTENED):
        assert get_submesh(mesh, name) is get_submesh(mesh, (name,)) is get_flat_mesh(mesh, name)


def test_flattened_axes_are_found_from_any_mesh_of_the_universe(mesh) -> None:
    part = mesh["dp_shard", "cp"]
    assert get_flat_mesh(part, "dp_cp") is get_flat_mesh(mesh, "dp_cp")
    assert get_flat_mesh(get_flat_mesh(mesh, "dp"), "dp") is get_flat_mesh(mesh, "dp")
    with pytest.raises(KeyError, match=r"'tp': the mesh has the axes \('dp_shard', 'cp'\)"):
        get_flat_mesh(part, "tp")


@pytest.mark.parametrize(
    ("replicas", "cp", "names", "shape"),
    [
        (1, 1, ("dp_shard",), (8,)),
        (2, 1, ("dp_replicate", "dp_shard"), (2, 4)),
        (1, 2, ("dp_shard_cp",), (8,)),
        (2, 2, ("dp_replicate", "dp_shard_cp"), (2, 4)),
        (1, 8, ("dp_shard_cp",), (8,)),
    ],
)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_the_mesh_for_fsdp(replicas, cp, names, shape, pp, tp) -> None:
    sizes = ParallelismSizes(pp_size=pp, dp_replicate_size=replicas, cp_size=cp, tp_size=tp)
    with fake_world(8 * pp * tp, 3):
        mesh, _ = create_fsdp2_device_mesh(sizes, world_size=8 * pp * tp)
        with groups_created(0):
            data = get_fsdp_dp_mesh(mesh, "dp_replicate", "dp_shard_cp")
            assert get_fsdp_dp_mesh(mesh) is data
        assert (data.mesh_dim_names, data.shape) == (names, shape)
        if cp == 1:
            assert data is mesh[names]


def test_resolution_does_not_depend_on_other_parallelisms() -> None:
    """The same request has the same ranks, relative to its own degrees, whatever else is on."""
    seen = set()
    for pp, tp in itertools.product((1, 2), repeat=2):
        sizes = ParallelismSizes(pp_size=pp, tp_size=tp, dp_replicate_size=2, cp_size=2)
        with fake_world(8 * pp * tp, 0):
            mesh, _ = create_fsdp2_device_mesh(sizes, world_size=8 * pp * tp)
            hybrid = get_submesh(mesh, ("dp_replicate", "dp_shard_cp"))
            seen.add(str((hybrid.mesh // tp).tolist()))
    assert seen == {"[[0, 1, 2, 3], [4, 5, 6, 7]]"}


def test_registering_and_unflattening(mesh) -> None:
    register_flattened_axes(mesh, {"stage": ("dp_replicate", "dp_shard", "cp", "tp")})
    assert get_flat_mesh(mesh, "stage").size() == 16
    split = unflatten_compat(mesh, "dp_shard", (1, 2), ("outer", "inner"))
    assert split.mesh_dim_names == ("pp", "dp_replicate", "outer", "inner", "cp", "tp")
    experts = unflatten_compat(mesh, "stage", (4, 4), ("ep_shard", "ep"))
    assert (experts.mesh_dim_names, experts.shape) == (("ep_shard", "ep"), (4, 4))
    with nothing_created(mesh):
        with pytest.raises(KeyError, match="'none'"):
            unflatten_compat(mesh, "none", (1, 2), ("a", "b"))
        with pytest.raises(ValueError, match="product"):
            unflatten_compat(mesh, "dp_shard", (3, 2), ("a", "b"))
        with pytest.raises(KeyError, match="nope"):
            register_flattened_axes(mesh, {"both": ("cp", "tp"), "x": ("nope", "tp")})
        with pytest.raises(KeyError, match="both"):
            get_flat_mesh(mesh, "both")
        with pytest.raises(ValueError, match="stage"):
            register_flattened_axes(mesh, {"stage": ("cp", "tp")})


def test_meshes_of_torch_are_refused_by_name() -> None:
    with fake_world(8):
        mesh: Any = torch_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard_cp", "tp"))
        for call in (
            lambda: get_fsdp_dp_mesh(mesh),
            lambda: create_moe_mesh(mesh, ep_size=2),
            lambda: register_flattened_axes(mesh, {"all": ("dp_shard_cp", "tp")}),
            lambda: unflatten_compat(mesh, "tp", (2, 1), ("a", "b")),
        ):
            with pytest.raises(TypeError, match=r"^mesh=.* of type torch.*must be a Meshverse"):
                call()
