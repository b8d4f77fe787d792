"""What a mesh costs a training job: wrapping a model, a training step, a compiled call.

A model of 16 blocks with tensor parallelism (8 ranks) and hybrid sharding (8 ranks, replicated over
the rest of the world), on one rank with a backend that does nothing: what is timed is the work of
the host. Only the number of replicas grows with the world, so the model's own work does not.
"""

from __future__ import annotations

import gc
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from harness import Bound, Comparison, Result, Side
from trainer_views import InitDeviceMesh
from worlds import fake_world, in_fresh_process

__all__ = ["TITLE", "comparisons", "results"]

TITLE = "Wrapping and training 16 blocks with TP 8 x HSDP"

_SMALL, _MIDDLE, _LARGE = 64, 10_240, 102_400
_WIDTH, _BLOCKS, _RANK = 64, 16, 0
# Two measurements of the very same call differ by some percent on a shared machine.
_NOT_SLOWER = 1.05


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _make_mesh(init: InitDeviceMesh, world_size: int) -> Any:
    axes = {"dp_replicate": world_size // 64, "dp_shard": 8, "tp": 8}
    return init("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _wrap_model(mesh: Any) -> nn.Module:
    model = nn.Sequential(*(_Block() for _ in range(_BLOCKS)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp_replicate", "dp_shard"])
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    return model


def _placed(model: nn.Module) -> list[Any]:
    """Where the parameters of a wrapped model lie, which is the same for any right mesh."""
    return [
        (name, str(p.placements), tuple(p.to_local().shape), p.device_mesh.mesh_dim_names)
        for name, p in model.named_parameters()
    ]


def _measure(side: str, world_size: int) -> tuple[list[Any], dict[str, float]]:
    """Where one side puts the parameters, and nanoseconds of each operation on this thread."""
    if side == "stock":
        from torch.distributed.device_mesh import init_device_mesh
    else:
        from meshverse import init_device_mesh
    torch.set_num_threads(1)
    with fake_world(world_size, _RANK):
        mesh = _make_mesh(init_device_mesh, world_size)
        _wrap_model(mesh)  # imports and fills what torch caches for a mesh
        gc.collect()
        wrap_ns = _fastest_ns(lambda: _wrap_model(mesh), runs=3)
        model = _wrap_model(mesh)
        step = _training_step(model)
        step()  # FSDP2 sets itself up in the first one
        return _placed(model), {
            "wrap": wrap_ns,
            "training step": _fastest_ns(step, runs=5),
            "compiled call": _compiled_call_ns(mesh),
        }


def _fastest_ns(operation: Callable[[], Any], runs: int) -> float:
    return min(timeit.repeat(operation, timer=time.thread_time_ns, repeat=runs, number=1))


def _training_step(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, _WIDTH)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _compiled_call_ns(mesh: Any) -> float:
    def gather(local: torch.Tensor, mesh: Any) -> torch.Tensor:
        sharded = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False)
        return sharded.redistribute(placements=[Replicate()]).to_local()

    compiled = torch.compile(gather, backend="aot_eager", fullgraph=True)
    local = torch.ones(2, 2)
    assert compiled(local, mesh).shape == (2 * mesh["tp"].size(), 2)
    timer = timeit.Timer(lambda: compiled(local, mesh), timer=time.thread_time_ns)
    return min(timer.repeat(20, 50)) / 50


def comparisons() -> list[Comparison]:
    """What is compared, and what is to be reached."""
    small, middle = (("stock", size) for size in (_SMALL, _MIDDLE))
    ours, ours_middle, ours_large = (("Meshverse", n) for n in (_SMALL, _MIDDLE, _LARGE))
    not_slower = Bound(at_most=_NOT_SLOWER)
    return [
        _comparison("wrap", small, ours, not_slower),
        _comparison("wrap", middle, ours_middle, Bound(at_least=2.5)),
        _comparison("wrap", ours, ours_large, Bound(at_most=1.15)),
        _comparison("training step", small, ours, not_slower),
        _comparison("training step", middle, ours_middle, not_slower),
        _comparison("training step", ours, ours_large, Bound(at_most=1.15)),
        _comparison("compiled call", small, ours, not_slower),
        _comparison("compiled call", middle, ours_middle, not_slower),
    ]


_Subject = tuple[str, int]
"""A side and the size of its world."""


def _comparison(title: str, baseline: _Subject, subject: _Subject, bound: Bound) -> Comparison:
    sides = (
        Side(f"{side}, {size:,} ranks", partial(_measure, side, size), size, _RANK)
        for side, size in (baseline, subject)
    )
    return Comparison(title, *sides, bound)


def results(repetitions: int) -> list[Result]:
    """Measure every side in a fresh process each time, in turn.

    torch caches plans by the value of a mesh, so that meshes of both sides, which are equal, would
    meet in one process.
    """
    measured = [Result(comparison) for comparison in comparisons()]
    sides = {
        side.label: side
        for result in measured
        for side in (result.comparison.baseline, result.comparison.subject)
    }
    for repetition in range(repetitions):
        order = list(sides.values())[:: 1 if repetition % 2 == 0 else -1]
        seen = {
            side.label: in_fresh_process(_measure, *side.set_up.args, limit_s=120)  # type: ignore[attr-defined]
            for side in order
        }
        placements = [placed for placed, _ in seen.values()]
        assert placements.count(placements[0]) == len(placements), "the models are wrapped unlike"
        for result in measured:
            title = result.comparison.title
            result.baseline_ns.append(seen[result.comparison.baseline.label][1][title])
            result.subject_ns.append(seen[result.comparison.subject.label][1][title])
    return measured
