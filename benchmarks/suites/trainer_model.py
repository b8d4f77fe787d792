"""Models as a trainer wraps them, and what their wrapping and their steps cost the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import STOCK
from suites.turns import Operation, take_turns
from worlds import fake_world

__all__ = ["play_large_model", "play_small_model"]

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


Player = tuple[str, int]
"""One process of a game: its side, and the ranks of its world."""

_Measured = tuple[list[Any], dict[str, list[float]]]
"""Placement of the parameters, the same for any right mesh; nanoseconds by operation."""


def play_small_model(rank: int, store: dist.Store, players: list[Player], rounds: int) -> _Measured:
    """Return a model of 16 blocks: wrapped, and trained for some steps; of all players in turn."""
    side, world_size = players[rank]
    with fake_world(world_size, _RANK):
        mesh = _make_mesh(side, world_size)
        _wrap(_small_model(), mesh)  # imports, and fills what torch caches for a mesh
        eager, compiled = _small_model(), _small_model()
        for block in compiled:
            block.compile(backend="aot_eager")
        wrap = Operation("wrap 16 blocks", lambda model: _wrap(model, mesh), _small_model)
        operations = [
            wrap,
            Operation("training step", _step_of(eager, mesh)),
            Operation("compiled training step", _step_of(compiled, mesh)),
            Operation("compiled call", _compiled_call(mesh), loops=50),
        ]
        times = take_turns(store, rank, len(players), operations, rounds)
        return _placed(eager), times


def play_large_model(rank: int, store: dist.Store, players: list[Player], rounds: int) -> _Measured:
    """Return a model of 80 layers, without memory for parameters, wrapped by all in turn."""
    side, world_size = players[rank]
    with fake_world(world_size, _RANK):
        mesh = _make_mesh(side, world_size)
        placed = _wrap(_large_model(2), mesh)
        make = partial(_large_model, _LAYERS)
        wrap = Operation(f"wrap {_LAYERS} layers", lambda model: _wrap(model, mesh), make)
        return _placed(placed), take_turns(store, rank, len(players), [wrap], rounds)


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


def _wrap(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    """Tensor parallelism and hybrid sharding, asked for block by block as trainers do."""
    for block in model:
        plan = {name: style() for name, style in block.PLAN.items()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp_replicate", "dp_shard"])
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    return model


def _placed(model: nn.Module) -> list[Any]:
    return [
        (name, str(p.placements), tuple(p.to_local().shape), p.device_mesh.mesh_dim_names)
        for name, p in model.named_parameters()
    ]


def _step_of(model: nn.Sequential, mesh: Any) -> Callable[[Any], Any]:
    _wrap(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, _WIDTH)

    def step(_: Any) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(None)  # FSDP2 sets itself up in the first one, and what is compiled is compiled
    step(None)
    return step


def _compiled_call(mesh: Any) -> Callable[[Any], Any]:
    def gather(local: torch.Tensor, mesh: Any) -> torch.Tensor:
        sharded = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False)
        return sharded.redistribute(placements=[Replicate()]).to_local()

    compiled = torch.compile(gather, backend="aot_eager", fullgraph=True)
    local = torch.ones(2, 2)
    assert compiled(local, mesh).shape == (2 * mesh["tp"].size(), 2)
    return lambda _: compiled(local, mesh)
