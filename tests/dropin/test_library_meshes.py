"""Process groups of meshes that libraries make again and again: the table of docs/sharing.md."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import meshverse
from helpers.worlds import fake_world, group_names

_TIMES = 16
_RANKS = [4, 5, 6, 7]


def _grid(names: tuple[str, str] = ("dp", "tp")) -> device_mesh.DeviceMesh:
    return device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=names)


def _layers() -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(_TIMES)]


def _shards_with_a_mesh() -> None:
    mesh = device_mesh.init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    for layer in _layers():
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)


def _shards_without_a_mesh() -> None:
    for layer in _layers():
        fully_shard(layer, reshard_after_forward=2)


def _meshes_of_all_ranks() -> None:
    for _ in range(_TIMES):
        device_mesh.init_device_mesh("cpu", (8,))


def _equal_roots() -> None:
    for _ in range(_TIMES):
        _grid()


def _meshes_of_some_ranks() -> None:
    for _ in range(_TIMES):
        device_mesh.DeviceMesh("cpu", _RANKS)


def _copies() -> None:
    mesh = _grid()
    for _ in range(_TIMES):
        mesh["dp"], mesh["tp"], mesh["dp", "tp"]._flatten("all"), pickle.loads(pickle.dumps(mesh))


def _tensor_parallel() -> None:
    mesh = _grid()
    for layer in _layers():
        parallelize_module(layer, mesh["tp"], ColwiseParallel())


def _modules() -> None:
    mesh = _grid()
    for layer in _layers():
        distribute_module(layer, mesh)


def _data_parallel() -> None:
    mesh = _grid()
    for layer in _layers():
        nn.parallel.DistributedDataParallel(layer, device_mesh=mesh["dp"])


def _replicas() -> None:
    mesh = _grid()
    for layer in _layers():
        replicate(layer, device_mesh=mesh["dp"])


def _stages() -> None:
    mesh = _grid(("pp", "dp"))
    for layer in _layers():
        PipelineStage(layer, 0, 2, torch.device("cpu"), group=mesh.get_group("pp"))


def _state_dictionaries() -> None:
    mesh = _grid()
    for layer in _layers():
        fully_shard(layer, mesh=mesh["dp"])
        get_model_state_dict(layer)


def _meshes_of_a_group() -> None:
    group = dist.new_group(_RANKS)
    for _ in range(_TIMES):
        device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def _groups_without_a_mesh() -> None:
    for _ in range(_TIMES):
        dist.new_subgroups(4)


@contextlib.contextmanager
def _shared_world_wide() -> Iterator[None]:
    meshverse.install(share="world")
    try:
        yield
    finally:
        meshverse.uninstall()


def _n_created(
    program: Callable[[], object], around: Callable[[], contextlib.AbstractContextManager[object]]
) -> int:
    with fake_world(8, 5), around():
        before = group_names()
        program()
        return len(group_names() - before)


@pytest.mark.parametrize(
    ("program", "torchs", "ours", "world_wide"),
    [
        (_shards_with_a_mesh, 32, 2, 2),
        (_shards_without_a_mesh, 32, 2, 2),
        (_meshes_of_all_ranks, 0, 0, 0),
        (_equal_roots, 32, 32, 2),
        (_meshes_of_some_ranks, 16, 16, 1),
        (_copies, 2, 2, 2),
        (_tensor_parallel, 2, 2, 2),
        (_modules, 2, 2, 2),
        (_data_parallel, 2, 2, 2),
        (_replicas, 2, 2, 2),
        (_stages, 2, 2, 2),
        (_state_dictionaries, 2, 2, 2),
        (_meshes_of_a_group, 1, 1, 1),
        (_groups_without_a_mesh, 16, 16, 16),
    ],
)
def test_groups_of_meshes_that_libraries_make_again(program, torchs, ours, world_wide) -> None:
    assert _n_created(program, contextlib.nullcontext) == torchs
    assert _n_created(program, meshverse.installed) == ours
    assert _n_created(program, _shared_world_wide) == world_wide
