"""Which meshes each strategy builds, and which degrees it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan

import pytest
import torch

from helpers.trainer_meshes import nothing_created
from meshverse import DeviceMesh, init_device_mesh
from meshverse.parallel import (
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    ParallelismSizes,
    create_device_meshes,
    create_fsdp2_device_mesh,
    create_megatron_fsdp_device_mesh,
    create_moe_mesh,
    get_flat_mesh,
)


@pytest.mark.parametrize(("cp", "flattened"), [(1, ()), (2, ("dp_cp",))])
def test_megatron_fsdp(world, cp, flattened) -> None:
    sizes = ParallelismSizes(tp_size=2, cp_size=cp)
    mesh, moe_mesh = create_device_meshes(MegatronFSDPConfig(), sizes, world_size=8)
    assert mesh is not None
    assert moe_mesh is None
    assert (mesh.mesh_dim_names, mesh.shape) == (("dp", "cp", "tp"), (4 // cp, cp, 2))
    for name in flattened:
        assert get_flat_mesh(mesh, name).shape == (4,)
    if not flattened:
        with pytest.raises(KeyError, match="dp_cp"):
            get_flat_mesh(mesh, "dp_cp")
    assert create_megatron_fsdp_device_mesh(sizes, world_size=8) == mesh


def test_ddp_has_no_meshes(world) -> None:
    with nothing_created():
        assert create_device_meshes(DDPConfig(), ParallelismSizes(), world_size=8) == (None, None)


@dataclass
class _Unknown:
    """A config of no strategy."""


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (
            MegatronFSDPConfig(),
            {"dp_replicate_size": 2, "pp_size": 2},
            "Megatron-FSDP .* dp_replicate_size=2",
        ),
        (DDPConfig(), {"dp_replicate_size": 2}, "DDP does not support dp_replicate_size=2"),
        (_Unknown(), {"tp_size": 2}, "Unknown strategy config _Unknown.*FSDP2Config"),
        (MegatronFSDPConfig(), {"pp_size": 2, "ep_size": 2}, "not support pp_size=2"),
        (MegatronFSDPConfig(), {"ep_size": 4}, "not support ep_size=4"),
        (DDPConfig(), dict.fromkeys(("tp_size", "pp_size"), 2), "DDP .* tp_size=2"),
        (DDPConfig(), dict.fromkeys(("pp_size", "cp_size"), 2), "DDP .* pp_size=2"),
        (DDPConfig(), dict.fromkeys(("cp_size", "ep_size"), 2), "DDP .* cp_size=2"),
        (DDPConfig(), {"ep_size": 2}, "DDP does not support ep_size=2"),
        (FSDP2Config(), {"tp_size": 3}, r"^tp_size=3 \* cp_size=1 \* pp_size=1 = 3, .* 8 r"),
        (FSDP2Config(), {"tp_size": 16}, r"tp_size=16 .* 8 ranks"),
        (FSDP2Config(), {"dp_size": 2, "tp_size": 2}, r"dp_size=2 \* tp_size=2.* = 4.* 8 ranks"),
        (FSDP2Config(), {"dp_size": 16}, r"dp_size=16 .* = 16, but there are 8 ranks"),
        (MegatronFSDPConfig(), {"dp_size": 2}, r"dp_size=2 .* = 2, but there are 8 ranks"),
        (FSDP2Config(), {"dp_replicate_size": 3}, "dp_size=8 .*dp_replicate_size=3"),
        (FSDP2Config(), {"dp_replicate_size": 8}, "dp_size=8 .*dp_replicate_size=8, and larger"),
        (FSDP2Config(), {"dp_replicate_size": 16}, "dp_size=8 .*dp_replicate_size=16"),
        (
            FSDP2Config(),
            {"ep_size": 3},
            "ep_size=3 must .* divides the 8 ranks of a pipeline stage",
        ),
        (
            FSDP2Config(),
            {"pp_size": 2, "ep_size": 8},
            "ep_size=8 must .* 4 ranks of a pipeline stage",
        ),
    ],
)
def test_refusals_name_the_numbers_and_create_nothing(world, config, sizes, message) -> None:
    with nothing_created(), pytest.raises(ValueError, match=message):
        create_device_meshes(config, ParallelismSizes(**sizes), world_size=8)


@pytest.mark.parametrize("config", [FSDP2Config(), MegatronFSDPConfig()])
@pytest.mark.parametrize("world_size", [4, 16])
def test_another_world_size_than_the_worlds(world, config, world_size) -> None:
    message = f"world_size={world_size}, but the world has 8 ranks"
    with nothing_created(), pytest.raises(ValueError, match=message):
        create_device_meshes(config, ParallelismSizes(), world_size=world_size)


@pytest.mark.parametrize("config", [FSDP2Config(), MegatronFSDPConfig(), DDPConfig()])
@pytest.mark.parametrize("world_size", ["8", 8.0, True, -1, 0])
def test_no_number_of_ranks(world, config, world_size) -> None:
    message = rf"world_size={world_size!r} of type \w+ must be an int above 0"
    with nothing_created(), pytest.raises(ValueError, match=message):
        create_device_meshes(config, ParallelismSizes(), world_size=world_size)


@pytest.mark.parametrize(
    ("sizes", "changed", "message"),
    [
        ({"dp_size": 4}, {}, "dp_size=4 = 4, but there are 8 ranks"),
        ({}, {"world_size": 4}, "world_size=4, but the world has 8 ranks"),
        ({}, {"ranks": [0, 1]}, r"ranks=\[0, 1\]: DDP has no mesh"),
        ({}, {"timeout_minutes": 5}, r"timeout_minutes=5: DDP has no mesh"),
    ],
)
def test_ddp_refuses_other_ranks_than_all(world, sizes, changed, message) -> None:
    with nothing_created(), pytest.raises(ValueError, match=message):
        create_device_meshes(DDPConfig(), ParallelismSizes(**sizes), **changed)


@pytest.mark.parametrize("create", [create_fsdp2_device_mesh, create_megatron_fsdp_device_mesh])
def test_an_unknown_keyword_is_an_error(world, create) -> None:
    with nothing_created(), pytest.raises(TypeError, match="'rank'"):
        create(ParallelismSizes(dp_size=2), rank=[0, 1])


@pytest.mark.parametrize("ep_size", ["2", True, 0, -2, 2.0, None])
def test_no_degree_of_experts(world, ep_size) -> None:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=8)
    with nothing_created(mesh), pytest.raises(ValueError, match=f"ep_size={ep_size!r} must be"):
        create_moe_mesh(mesh, ep_size=ep_size)


def test_meshes_of_torch_have_no_flattened_axes_to_find(world) -> None:
    stock = torch.distributed.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    assert get_flat_mesh(stock, "tp").size() == 2
    with pytest.raises(TypeError, match=r"no axis 'dp_cp'.*torch's own.*meshverse\.install"):
        get_flat_mesh(stock, "dp_cp")


def test_moe_mesh_of_a_part_or_by_a_bad_degree(world) -> None:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2), world_size=8)
    with nothing_created(mesh):
        with pytest.raises(ValueError, match=r"ep_size=3 must .* divides the 4 ranks"):
            create_moe_mesh(mesh, ep_size=3)
        with pytest.raises(ValueError, match="mesh has 4 of the 8 ranks of its universe"):
            create_moe_mesh(mesh["dp_shard"], ep_size=2)


@pytest.mark.parametrize("config", [FSDP2Config(), MegatronFSDPConfig()])
def test_without_a_process_group_a_world_size_is_needed(config) -> None:
    with pytest.raises(ValueError, match="world_size=None, and there is no process group"):
        create_device_meshes(config, ParallelismSizes())


def test_the_stages_of_an_experts_mesh_are_the_meshs(world) -> None:
    whole = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    mesh = whole.unflatten("world", (4, 2), ("dp", "pp"))
    turned = DeviceMesh.concatenate([mesh["pp"], mesh["dp"]])
    for each in (mesh, turned):
        message = "pp must be its first axis, and each stage must have consecutive ranks"
        with nothing_created(each), pytest.raises(ValueError, match=message):
            create_moe_mesh(each, ep_size=2)


@pytest.mark.parametrize("create", [create_fsdp2_device_mesh, create_megatron_fsdp_device_mesh])
@pytest.mark.parametrize("wrong", [0, -1, nan, inf, True, "5"])
def test_no_timeout(world, create, wrong) -> None:
    message = f"timeout_minutes={wrong!r} must be a number above 0"
    with nothing_created(), pytest.raises(ValueError, match=message):
        create(ParallelismSizes(), timeout_minutes=wrong)


def test_no_universe(world) -> None:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
    with (
        nothing_created(mesh),
        pytest.raises(TypeError, match=r"of type DeviceMesh must be a Univ"),
    ):
        create_fsdp2_device_mesh(ParallelismSizes(tp_size=2), universe=mesh)


@pytest.mark.parametrize("config", [FSDP2Config(), MegatronFSDPConfig(), DDPConfig()])
def test_degrees_are_no_dict(world, config) -> None:
    with (
        nothing_created(),
        pytest.raises(TypeError, match=r"parallelism=\{\} of type dict must be"),
    ):
        create_device_meshes(config, {})
