"""On real processes: a group that one mesh's user destroys is there again for the other mesh."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from helpers.crew import Crew
from helpers.observation import OURS, STOCK, Family
from meshverse import DeviceMesh, init_device_mesh
from meshverse.world.world import World

_WHOLE = torch.arange(24.0).reshape(6, 4)


def _mesh_and_view(family: Family) -> tuple[Any, Any]:
    world = family.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
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


def _use(which: str, use: str) -> list[Any]:
    mesh, view = _mesh_and_view(STOCK if which == "stock" else OURS)
    said = []
    for _ in range(2):  # what is made again may be destroyed again
        if said and which == "stock":
            break
        _destroy(view)
        said.append(_USES[use](mesh))
    return said


@pytest.mark.parametrize("use", _USES)
def test_the_other_mesh_works_on_as_in_torch(crew: Crew, use: str) -> None:
    stock, ours = (crew.run(_use, 4, which, use) for which in ("stock", "ours"))
    for theirs, mine in zip(stock, ours, strict=True):
        assert mine == theirs * 2


def _tensors_that_were_there() -> dict[str, Any]:
    """Tensors, a model and a compiled function from before the group was destroyed."""
    mesh, view = _mesh_and_view(OURS)
    tensor = distribute_tensor(_WHOLE, mesh["tp"], [Shard(0)])
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh["dp"])
    nn.init.constant_(model.weight, 0.5)
    first = _step(model)
    tp = mesh["tp"]
    compiled = torch.compile(lambda x: funcol.all_reduce(x, "sum", tp) + 1, backend="aot_eager")
    told = {"before": (tensor.full_tensor().equal(_WHOLE), compiled(torch.ones(2)).tolist())}
    _destroy(view)
    told["after"] = (tensor.full_tensor().equal(_WHOLE), compiled(torch.ones(2)).tolist())
    second = _step(model)
    mesh.get_group("dp")
    told["model"] = 0 < second < first and _step(model) < second
    return told


@pytest.mark.filterwarnings("ignore")
def test_what_was_there_before_works_on(crew: Crew) -> None:
    for told in crew.run(_tensors_that_were_there, 4):
        assert told == {"before": (True, [3.0, 3.0]), "after": (True, [3.0, 3.0]), "model": True}


def _one_does_not_come() -> tuple[str, float]:
    """Rank 0 alone uses a group that all its members destroyed."""
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",), timeout=timedelta(seconds=1.5))
    mesh = world.unflatten(0, (2, 2), ("dp", "tp"))
    view = world.unflatten(0, (2, 2), ("outer", "inner"))
    _destroy(view)
    start, error = time.monotonic(), "none"
    if dist.get_rank() == 0:
        try:
            mesh.get_group("tp")
        except RuntimeError as raised:
            error = str(raised)
    dist.barrier()
    took = time.monotonic() - start
    assert _sum_over(mesh) == 2  # all together, it can be made after all
    return error, took


def _sum_over(mesh: DeviceMesh) -> float:
    return funcol.all_reduce(torch.ones(1), "sum", mesh["tp"]).item()


def test_a_rank_that_uses_it_alone_is_told_who_did_not_come(crew: Crew) -> None:
    (error, took), *others = crew.run(_one_does_not_come, 4)
    assert "could not make the process group of axis 'tp' with ranks [0, 1]" in error
    assert took < 10
    assert {error for error, _ in others} == {"none"}


def _keys_left() -> tuple[list[bool], list[bool]]:
    """Whether meetings for a group, made three times, are in the store before and after the end."""
    mesh, view = _mesh_and_view(OURS)
    world = World.current()
    name = mesh.group_names[1]
    for _ in range(2):
        _destroy(view)
        assert _sum_over(mesh) == 2
        mesh.get_group("dp")
    prefix = f"meshverse/{world.size}/1/meet/{name}"
    keys = [f"{prefix}/{number}/{what}" for number in range(3) for what in ("came", "outcome")]
    dist.barrier()
    before = [world.store.check([key]) for key in keys]
    dist.barrier()
    mesh.universe.destroy()
    dist.barrier()
    return before, [world.store.check([key]) for key in keys]


def test_nothing_is_left_in_the_store(crew: Crew) -> None:
    assert crew.run(_keys_left, 4) == [([True] * 6, [False] * 6)] * 4
