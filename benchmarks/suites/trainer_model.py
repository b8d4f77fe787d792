"""Models as a trainer wraps them, and what their wrapping and their steps cost the host."""

from __future__ import annotations

import gc
import time
import timeit
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import STOCK
from worlds import fake_world

__all__ = ["measure_large_model", "measure_small_model"]

_RANK = 0
_BLOCKS, _WIDTH = 16, 64
_LAYERS = 80  # with these widths, a dense model of 70 billion parameters
_HIDDEN, _FEED_FORWARD, _KEY_VALUE = 8192, 28_672, 1024


class _SmallBlock(nn.Module):
    PLAN: ClassVar = {"up": ColwiseParallel, "down": RowwiseParallel}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _LargeBlock(nn.Module):
    """The parameters of one decoder layer; it is wrapped, never run."""

    PLAN: ClassVar = {
        **dict.fromkeys(("query", "key", "value", "gate", "up"), ColwiseParallel),
        **dict.fromkeys(("output", "down"), RowwiseParallel),
    }

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(_HIDDEN), nn.RMSNorm(_HIDDEN)
        self.query = nn.Linear(_HIDDEN, _HIDDEN, bias=False)
        self.key = nn.Linear(_HIDDEN, _KEY_VALUE, bias=False)
        self.value = nn.Linear(_HIDDEN, _KEY_VALUE, bias=False)
        self.output = nn.Linear(_HIDDEN, _HIDDEN, bias=False)
        self.gate = nn.Linear(_HIDDEN, _FEED_FORWARD, bias=False)
        self.up = nn.Linear(_HIDDEN, _FEED_FORWARD, bias=False)
        self.down = nn.Linear(_FEED_FORWARD, _HIDDEN, bias=False)


_Measured = tuple[list[Any], dict[str, float]]
"""Where the parameters lie, which is the same for any right mesh; nanoseconds by operation."""


def measure_small_model(_rank: int, _store: Any, side: str, world_size: int) -> _Measured:
    """A model of 16 blocks: wrapped, and trained for some steps."""
    with fake_world(world_size, _RANK):
        mesh = _make_mesh(side, world_size)
        _wrap(_small_model(), mesh)  # imports and fills what torch caches for a mesh
        gc.collect()
        model = _small_model()
        times = {"wrap 16 blocks": _fastest_ns(lambda: _wrap(_small_model(), mesh), runs=3)}
        _wrap(model, mesh)
        times["training step"] = _step_ns(model)
        compiled = _small_model()
        for block in compiled:
            block.compile(backend="aot_eager")
        _wrap(compiled, mesh)
        times["compiled training step"] = _step_ns(compiled)
        times["compiled call"] = _compiled_call_ns(mesh)
        return _placed(model), times


def measure_large_model(_rank: int, _store: Any, side: str, world_size: int) -> _Measured:
    """A model of 80 layers, without memory for its parameters: wrapped."""
    with fake_world(world_size, _RANK):
        mesh = _make_mesh(side, world_size)
        _wrap(_large_model(2), mesh)
        model = _large_model(_LAYERS)
        gc.collect()
        start = time.thread_time_ns()
        _wrap(model, mesh)
        return _placed(model), {f"wrap {_LAYERS} layers": float(time.thread_time_ns() - start)}


def _make_mesh(side: str, world_size: int) -> Any:
    if side == STOCK:
        from torch.distributed.device_mesh import init_device_mesh
    else:
        from meshverse import init_device_mesh
    axes = {"dp_replicate": world_size // 64, "dp_shard": 8, "tp": 8}
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _small_model() -> nn.Sequential:
    return nn.Sequential(*(_SmallBlock() for _ in range(_BLOCKS)))


def _large_model(layers: int) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(_LargeBlock() for _ in range(layers)))


def _wrap(model: nn.Sequential, mesh: Any) -> None:
    """Tensor parallelism and hybrid sharding, asked for block by block as trainers do."""
    for block in model:
        plan = {name: style() for name, style in block.PLAN.items()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp_replicate", "dp_shard"])
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])


def _placed(model: nn.Module) -> list[Any]:
    return [
        (name, str(p.placements), tuple(p.to_local().shape), p.device_mesh.mesh_dim_names)
        for name, p in model.named_parameters()
    ]


def _step_ns(model: nn.Module) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, _WIDTH)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # FSDP2 sets itself up in the first one, and what is compiled is compiled
    step()
    return _fastest_ns(step, runs=12)


def _fastest_ns(operation: Callable[[], Any], runs: int) -> float:
    return min(timeit.repeat(operation, timer=time.thread_time_ns, repeat=runs, number=1))


def _compiled_call_ns(mesh: Any) -> float:
    def gather(local: torch.Tensor, mesh: Any) -> torch.Tensor:
        sharded = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False)
        return sharded.redistribute(placements=[Replicate()]).to_local()

    compiled = torch.compile(gather, backend="aot_eager", fullgraph=True)
    local = torch.ones(2, 2)
    assert compiled(local, mesh).shape == (2 * mesh["tp"].size(), 2)
    timer = timeit.Timer(lambda: compiled(local, mesh), timer=time.thread_time_ns)
    return min(timer.repeat(20, 50)) / 50
