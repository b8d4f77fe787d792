"""FSDP2 with tensor parallelism trains as one process does, and compiled collectives are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers.at_platforms import at
from helpers.platforms import World, world_at
from helpers.training import TOLERANCE, make_model, tensor_parallel, train, train_alone
from meshverse import init_device_mesh

_AXES = ("dp", "tp")


def _trained(wanted: World) -> dict[str, Any]:
    with world_at(wanted) as platform:
        alone, whole = train_alone(device=platform.device)
        world = init_device_mesh(platform.device, (4,), mesh_dim_names=("world",))
        mesh = world.unflatten("world", (2, 2), _AXES)
        model = make_model().to(platform.device)
        for block in model:
            tensor_parallel(block, mesh["tp"])
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        losses = train(model, mesh["dp"], device=platform.device)
        apart = {
            name: (weight.full_tensor() - whole[name]).abs().max().item()
            for name, weight in model.named_parameters()
        }
        return {"alone": alone, "losses": losses, "apart": apart}


@at("gloo", "nccl", "nccl bound", "nccl bound mixed", gloo_is_long=True)
def test_training_is_that_of_one_process(world: World, run: Callable[..., list[Any]]) -> None:
    for seen in run(_trained, 4, world):
        assert seen["losses"] == pytest.approx(seen["alone"], rel=TOLERANCE)
        assert max(seen["apart"].values()) < TOLERANCE


def _compiled(wanted: World) -> dict[str, Any]:
    with world_at(wanted) as platform, torch.inference_mode():
        mesh = init_device_mesh(platform.device, (2, 2), mesh_dim_names=_AXES)
        x = torch.arange(8.0, device=platform.device).reshape(2, 4) + mesh.get_local_rank("tp")
        rows = DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False)
        seen = {}
        for name, program in _PROGRAMS.items():
            given = rows if name == "dtensor" else x
            torch.compiler.reset()
            compiled = torch.compile(program, backend=platform.compiler, fullgraph=True)
            seen[name] = [call(given, mesh).tolist() for call in (compiled, program)]
        return seen


def _functional(x: Tensor, mesh: Any) -> Tensor:
    return funcol.all_reduce(x * 2, "sum", (mesh, 1)) + 1


def _gathered(rows: DTensor, mesh: Any) -> Tensor:
    return (rows * 2).redistribute(placements=[Replicate()]).to_local()


_PROGRAMS: dict[str, Callable[..., Tensor]] = {"functional": _functional, "dtensor": _gathered}


@pytest.mark.long
@at("gloo", "nccl", "nccl bound")
def test_compiled_collectives(world: World, run: Callable[..., list[Any]]) -> None:
    rows = torch.arange(8.0).reshape(2, 4)
    expected = {
        "functional": ((2 * rows + 1) * 2 + 1).tolist(),
        "dtensor": torch.cat([2 * rows, 2 * (rows + 1)]).tolist(),
    }
    for seen in run(_compiled, 4, world):
        for name, (compiled, eager) in seen.items():
            assert compiled == eager == expected[name], name
