"""Meshes, models and graphs that go on in the next world, with real process groups."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshverse
from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.training import make_model, tensor_parallel
from meshverse import DeviceMesh, init_device_mesh, isolate
from meshverse.parallel import Reshard

_SECONDS = 30
_lives: Counter[str] = Counter()  # by folder, which is that of one test


def _sleep(folder: str, *, rank: int | None = None, seconds: float = _SECONDS) -> None:
    """End the default group and all others, and create it again, as a new job would."""
    dist.barrier()
    rank, size = dist.get_rank() if rank is None else rank, dist.get_world_size()
    dist.destroy_process_group()
    _lives[folder] += 1
    store = dist.FileStore(f"{folder}/life {_lives[folder]}", size)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


# --- training -------------------------------------------------------------------------------------


def _losses(mesh: DeviceMesh, kind: str, rest: Callable[[], object], n_rests: int) -> list[float]:
    """Train, with rests in between; return the losses."""
    model = make_model()
    for block in model:
        tensor_parallel(block, mesh["tp"])
    axes = mesh["replicate", "shard"] if "replicate" in mesh.mesh_dim_names else mesh["shard"]
    for block in model:
        fully_shard(block, mesh=axes)
    fully_shard(model, mesh=axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
    losses: list[float] = []
    for number in range(n_rests + 1):
        if number:
            rest()
        generator = torch.Generator().manual_seed(number)
        loss = step(torch.randn(8, 4, 12, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


_SHAPES = {
    "fsdp and tp": ((2, 2), ("shard", "tp")),
    "hsdp and tp": ((2, 2, 2), ("replicate", "shard", "tp")),
}


def _held() -> dict[str, int]:
    return {
        "groups": len(dist.distributed_c10d._world.pg_names),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def _trained(kind: str, shape: str, n_rests: int, folder: str) -> list[list[float]]:
    sizes, axes = _SHAPES[shape]
    held: list[dict[str, int]] = []

    def rest() -> None:
        _sleep(folder)
        assert meshverse.revive()
        held.append(_held())

    undisturbed = _losses(init_device_mesh("cpu", sizes, mesh_dim_names=axes), kind, str, n_rests)
    slept = _losses(init_device_mesh("cpu", sizes, mesh_dim_names=axes), kind, rest, n_rests)
    # gloo's threads and sockets end by themselves, so the fewest of the second half count.
    half = len(held) // 2
    for name, at_first in held[0].items():
        assert min(each[name] for each in held[half:]) <= at_first, (name, held)
    return [undisturbed, slept]


@pytest.mark.parametrize(
    ("kind", "shape", "n_rests"),
    in_tiers(
        [
            ("eager", "fsdp and tp", 2),
            ("eager", "hsdp and tp", 2),
            ("compiled", "fsdp and tp", 2),
            ("eager", "hsdp and tp", 20),
            ("compiled", "hsdp and tp", 20),
        ],
        [("eager", "fsdp and tp", 2)],
        [("eager", "hsdp and tp", 2), ("compiled", "fsdp and tp", 2)],
    ),
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_training_equals_an_undisturbed_run(crew: Crew, kind, shape, n_rests, tmp_path) -> None:
    n_ranks = 8 if "hsdp" in shape else 4
    for undisturbed, slept in crew.run(_trained, n_ranks, kind, shape, n_rests, str(tmp_path)):
        assert slept == undisturbed
        assert len(set(slept)) == n_rests + 1


def _pipeline(folder: str, n_rests: int) -> list[float]:
    """A pipeline's stage holds the group itself, and not its name."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(6, 6)
    stage = PipelineStage(
        layer, mesh.get_local_rank(), 2, torch.device("cpu"), group=mesh.get_group()
    )
    schedule = Schedule1F1B(
        stage, n_microbatches=2, loss_fn=lambda out, goal: (out - goal).square().mean()
    )
    losses = []
    for number in range(4):
        if number and n_rests:
            _sleep(folder)
            meshverse.revive()
        given = torch.Generator().manual_seed(number)
        batch, goal = (torch.randn(4, 6, generator=given) for _ in range(2))
        found: list[torch.Tensor] = []
        if mesh.get_local_rank() == 0:
            schedule.step(batch)
        else:
            schedule.step(target=goal, losses=found)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses += [loss.item() for loss in found]
    return losses


def _pipelines(folder: str) -> list[list[float]]:
    return [_pipeline(folder, 0), _pipeline(folder, 1)]


def test_a_pipeline_goes_on(crew: Crew, tmp_path: Path) -> None:
    first, last = crew.run(_pipelines, 2, str(tmp_path))
    assert first == [[], []]
    assert last[0] == last[1]
    assert len(set(last[0])) == 8


def _moved(folder: str) -> bool:
    trainer = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    engine = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("copies", "tp"), universe=trainer.universe
    )
    source = {"w": distribute_tensor(torch.arange(24.0).view(8, 3), trainer, [Shard(0)])}
    target = {"w": DTensor.from_local(torch.zeros(4, 3), engine["tp"], [Shard(0)])}
    move = Reshard(source, target)
    move()
    for number in range(2):
        _sleep(folder)
        meshverse.revive()
        source["w"].to_local().fill_(number)
        move()
        assert bool((target["w"].to_local() == number).all())
    move.close()
    return True


def test_a_reshard_goes_on(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_moved, 4, str(tmp_path)) == [True] * 4


def _saved(folder: str) -> list[float]:
    import torch.distributed.checkpoint as dcp

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)])}
    _sleep(folder)
    meshverse.revive()
    dcp.save(state, checkpoint_id=f"{folder}/saved")
    state["w"].to_local().zero_()
    _sleep(folder)
    meshverse.revive()
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    return state["w"].full_tensor().tolist()


def test_checkpoints_go_on(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_saved, 4, str(tmp_path)) == [list(range(8))] * 4


# --- meshes and groups ----------------------------------------------------------------------------


def _meshes(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, view = mesh["tp"], mesh.unflatten("dp", (2, 1), ("a", "b"))
    flat = mesh.flatten("all", isolate="own")
    pair = mesh.universe.group([1, 2], name="pair")
    with isolate("x"):
        tagged = mesh["dp"]
    part = init_device_mesh(
        "cpu", (2,), ranks=[0, 1], universe=mesh.universe, mesh_dim_names=("half",)
    )
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lazy = init_device_mesh("cpu", (2, 2), mesh_dim_names=("p", "q"), lazy=True)
    lazy.get_group("p")
    before = {each: hash(each) for each in (mesh, tp, view, flat, tagged, other)}
    names = [each.group_names for each in before]
    created = mesh.universe.explain().created
    holder, box = {"nested": ({"tp": tp.get_group()},)}, [mesh.get_group("dp")]
    group = weakref.ref(tp.get_group())
    if dist.get_rank() in (1, 2):
        assert pair.size() == 2
    del pair
    _sleep(folder)
    for use in (mesh.get_group, lambda axis: lazy.get_group("q")):
        with pytest.raises(RuntimeError, match="gone"):
            use("tp")
    revived = meshverse.revive()
    assert set(revived) >= {mesh.universe, other.universe, lazy.universe}
    assert {each: hash(each) for each in before} == before
    assert [each.group_names for each in before] == names
    assert mesh["tp"] is tp
    assert type(tp._dim_group_names) is list
    assert holder["nested"][0]["tp"] is tp.get_group()
    assert box[0] is mesh.get_group("dp") is not group
    assert group() is None
    assert mesh.universe.explain().created == created
    assert mesh.universe.groups.find(lazy.group_names[1]) is None
    assert lazy.universe.groups.planned(lazy.group_names[1]) is not None
    fresh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert fresh == mesh
    assert not set(fresh.group_names) & set(mesh.group_names)
    return {
        "reached": [
            reached_by(mesh.get_group("dp")),
            reached_by(tp.get_group()),
            reached_by(view.get_group("a")),
            reached_by(flat.get_group()),
            reached_by(tagged.get_group()),
            reached_by(other.get_group("tp")),
            reached_by(lazy.get_group("q")),
            reached_by(fresh.get_group("dp")),
        ],
        "pair": mesh.universe.group([1, 2], name="pair"),
        "part": reached_by(part.get_group()) if dist.get_rank() < 2 else None,
        "coordinate": (mesh.get_coordinate(), "_coordinate_on_dim" in vars(mesh)),
    } | {"pair": None}


def test_meshes_and_their_groups_are_the_same_again(crew: Crew, tmp_path: Path) -> None:
    for rank, seen in enumerate(crew.run(_meshes, 4, str(tmp_path))):
        dp = [1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1]
        tp = [1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]
        assert seen["reached"] == [dp, tp, dp, [1] * 4, dp, tp, tp, dp]
        assert seen["part"] == ([1, 1, 0, 0] if rank < 2 else None)
        assert seen["coordinate"] == ((rank // 2, rank % 2), True)
