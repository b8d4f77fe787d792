"""On real processes: a group that one mesh's user destroys is gone for the meshes that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from helpers.crew import Crew
from meshverse import init_device_mesh
from meshverse.world import World

_WHOLE = torch.arange(24.0).reshape(6, 4)


def _mesh_and_view() -> tuple[Any, Any]:
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, (2, 2), ("dp", "tp"))
    return mesh, world._unflatten(0, (2, 2), ("outer", "inner"))


def _destroy(view: Any) -> None:
    groups = [view.get_group(axis) for axis in ("outer", "inner")]
    dist.barrier()  # no rank ends a group while others still make it
    for group in groups:
        dist.destroy_process_group(group)


def _train(mesh: Any, steps: int = 2) -> list[float]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    return [_step(model) for _ in range(steps)]


def _step(model: nn.Module) -> float:
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None
    return loss.item()


_USES: dict[str, Callable[[Any], Any]] = {
    "group": lambda mesh: dist.get_process_group_ranks(mesh.get_group("tp")),
    "functional": lambda mesh: funcol.all_reduce(torch.ones(2), "sum", (mesh, 1)).tolist(),
    "DTensor": lambda mesh: (
        distribute_tensor(_WHOLE, mesh, [Shard(0), Shard(1)])
        .redistribute(placements=[Replicate()] * 2)
        .to_local()
        .tolist()
    ),
    "FSDP2": _train,
}


def _use(use: str) -> str:
    mesh, view = _mesh_and_view()
    _destroy(view)
    with pytest.raises(RuntimeError) as error:
        _USES[use](mesh)
    again, _ = _mesh_and_view()
    _USES[use](again)
    return str(error.value)


@pytest.mark.parametrize("use", _USES)
def test_use_of_a_shared_group_that_is_gone_raises_and_a_new_mesh_works(
    crew: Crew, use: str
) -> None:
    for error in crew.run(_use, 4, use):
        assert (
            "was destroyed, by destroy_process_group(group). It was shared, so it is gone for all"
            in error
        )
        assert "a new mesh has a new group" in error


def _again_in_the_universe() -> tuple[list[str], int]:
    """Groups are destroyed and made anew, each time by a new mesh of one universe."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = []
    for _ in range(3):
        dist.barrier()
        dist.destroy_process_group(mesh.get_group("tp"))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), universe=mesh.universe)
        names.append(mesh.group_names[1])
        assert funcol.all_reduce(torch.ones(1), "sum", mesh["tp"]).item() == 2
    dist.barrier()
    keys = World.current().store.num_keys()
    dist.barrier()
    mesh.universe.destroy()
    dist.barrier()
    return names, keys - World.current().store.num_keys()


def test_a_new_mesh_of_the_universe_has_a_new_group_each_time(crew: Crew) -> None:
    for names, removed in crew.run(_again_in_the_universe, 4):
        assert len(set(names)) == 3
        assert removed > 0
