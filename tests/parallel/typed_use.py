"""Programs as the documentation writes them, for mypy to check; nothing runs this."""

from __future__ import annotations

from torch import nn
from typing_extensions import assert_type

from meshverse import DeviceMesh
from meshverse.parallel import (
    DDPConfig,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    ParallelismSizes,
    create_device_meshes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
)


def train_with_fsdp2(model: nn.Linear) -> nn.Linear:
    """The root mesh is always there; that of the experts is where it was asked for."""
    config = FSDP2Config()
    mesh, moe_mesh = create_device_meshes(config, ParallelismSizes(tp_size=2))
    assert_type(mesh, DeviceMesh)
    assert_type(moe_mesh, DeviceMesh | None)
    assert_type(get_flat_mesh(mesh, "dp_cp").size(), int)
    manager = FSDP2Manager(config, mesh, moe_mesh)
    return manager.maybe_compile(manager.parallelize(model))


def train_without_a_manager(model: nn.Linear) -> nn.Linear:
    """Meshes without a config."""
    mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(ep_size=2), world_size=4)
    return fsdp2_strategy_parallelize(model, mesh, moe_mesh=moe_mesh)


def train_with_megatron_fsdp(model: nn.Module) -> nn.Module:
    """The mesh is always there."""
    config = MegatronFSDPConfig(zero_dp_strategy=3)
    mesh, moe_mesh = create_device_meshes(config, ParallelismSizes(cp_size=2))
    assert_type(mesh, DeviceMesh)
    assert_type(moe_mesh, None)
    model, _ = MegatronFSDPManager(config, mesh).parallelize(model)
    return model


def train_with_ddp() -> None:
    """There are no meshes."""
    assert_type(create_device_meshes(DDPConfig(), ParallelismSizes()), tuple[None, None])
