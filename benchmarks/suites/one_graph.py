"""One graph for all ranks: what its coordinates weigh, and what they cost a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._inductor.utils import fresh_inductor_cache
from torch.distributed import device_mesh as stock
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshverse
from crews import in_crew
from harness import OURS, STOCK, Check, Outcome, Run
from worlds import fake_world

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "One graph for all ranks"
METHOD = (
    "one rank of a fake world, a fresh process for each side and size, time of one processor: "
    "a program that takes its shard of two replicated matrices, compiled with "
    "`compile_on_one_rank` by inductor, first with an empty cache; constants and text are of the "
    "graph that inductor is given; the floor is the same program where coordinates are numbers of "
    "the graph, which is then for one rank only"
)
SCALE = "ranks"
_FLOOR = "floor"
_SIZES = [64, 10_240, 102_400]
_STEPS = 300
_LIMIT_S = 300


def run(run: Run) -> Outcome:
    """Measure each side at each size."""
    outcome = Outcome()
    if not hasattr(dist.tensor._collective_utils, "_dtensor_lib"):
        outcome.notes.append("Skipped: torch compiles one graph for all ranks from 2.12 on.")
        return outcome
    sizes, repetitions = run.choose(_SIZES, [64, 1_024]), run.choose(5, 1)
    sides = (STOCK, OURS, _FLOOR)
    cases = [(n, size, side) for n in range(repetitions) for size in sizes for side in sides]
    seen: dict[int, list[float]] = {}
    for step, (_, size, side) in enumerate(cases):
        run.tell(step, len(cases), f"{size:,} ranks, {side}")
        [result] = in_crew(1, _measure, side, size, limit_s=_LIMIT_S)
        assert seen.setdefault(size, result.output) == result.output, "the sides' shards differ"
        for operation, (amount, unit) in result.amounts.items():
            measurement = outcome.of(operation, size)
            measurement.unit = unit
            measurement.figure = "steps" if operation == "step" else ""
            measurement.add(side, amount)
    outcome.checks = _checks(outcome, sizes)
    return outcome


class _Measured(NamedTuple):
    amounts: dict[str, tuple[float, str]]  # each with its unit
    output: list[float]


def _measure(_rank: int, _store: Any, side: str, size: int) -> _Measured:
    torch.set_num_threads(1)
    init = stock.init_device_mesh if side == STOCK else meshverse.init_device_mesh
    with fake_world(size, 777 % size), _config().patch(compile_on_one_rank=side != _FLOOR):
        mesh = init("cpu", (size // 8, 8), mesh_dim_names=("dp", "tp"))
        inputs = [_replicated(mesh, factor) for factor in (1.0, 2.0)]
        graphs = AotEagerAndRecordGraphs()
        torch.compile(_program, backend=graphs, fullgraph=True)(*inputs)
        graph = graphs.fw_graphs[0]
        torch.compiler.reset()
        compiled = torch.compile(_program, fullgraph=True)
        with fresh_inductor_cache():
            first = _timed(lambda: compiled(*inputs), 1)
            amounts = {
                "constants of the graph": (_constant_bytes(graph), "bytes"),
                "text of the graph": (len(graph.print_readable(print_output=False)), "bytes"),
                "compile": (first, "ns"),
                "step": (_timed(lambda: compiled(*inputs), _STEPS), "ns"),
            }
        if side != _FLOOR:
            amounts["one coordinate"] = (_timed(_coordinate(mesh), _STEPS), "ns")
        return _Measured(amounts, compiled(*inputs).flatten().tolist())


def _config() -> Any:
    # 2.15 moved the switch.
    has_moved = hasattr(torch.compiler.config, "compile_on_one_rank")
    return torch.compiler.config if has_moved else dist.config


def _replicated(mesh: stock.DeviceMesh, factor: float) -> DTensor:
    whole = torch.arange(64.0).reshape(4, 16) * factor
    return DTensor.from_local(whole, mesh, [Replicate()] * 2, run_check=False)


def _program(one: DTensor, other: DTensor) -> Tensor:
    mine = [x.redistribute(placements=[Replicate(), Shard(1)]).to_local() for x in (one, other)]
    return mine[0] * 2 + mine[1]


def _coordinate(mesh: stock.DeviceMesh) -> Callable[[], Any]:
    """Return a graph's call for one coordinate; stock's copies the constant, as its graph does."""
    if isinstance(mesh, meshverse.DeviceMesh):
        ours, size = torch.ops.meshverse.coordinate.default, mesh.universe.size
        return lambda: ours([8, 1], [size, 1], 0)
    from torch.distributed._ops import device_mesh as _  # noqa: F401  # registers it

    theirs = torch.ops.device_mesh._runtime_compute_coordinate_on_dim.default
    ranks = mesh._layout.remap_to_tensor(mesh._rank_map)
    return lambda: theirs(ranks.clone(), 1)


def _constant_bytes(graph: torch.fx.GraphModule) -> int:
    tensors = [value for value in vars(graph).values() if isinstance(value, Tensor)]
    tensors += [*graph.buffers()]
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


def _timed(call: Callable[[], Any], loops: int) -> float:
    """Nanoseconds of this thread's processor time; the least of some batches, if it is repeated."""
    times = []
    for _ in range(1 if loops == 1 else 5):
        start = time.thread_time_ns()
        for _ in range(loops):
            call()
        times.append((time.thread_time_ns() - start) / loops)
    return min(times)


def _checks(outcome: Outcome, sizes: list[int]) -> list[Check]:
    checks = []
    for size in sizes:
        held = outcome.of("constants of the graph", size).samples[OURS]
        checks.append(Check(f"bytes of constants, {size:,} ranks", max(held), 0, False, "bytes"))
        for operation in ("one coordinate", "step"):
            samples = outcome.of(operation, size).samples
            claim = f"{operation}, {size:,} ranks: of stock's"
            checks.append(Check.within(claim, 1, samples[STOCK], samples[OURS]))
    return checks
