"""The text of compiled graphs: stock's, but for names of process groups and of our class."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch._dynamo.testing import AotEagerAndRecordGraphs, EagerAndRecordGraphs
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.compiling import COMPILES
from helpers.observation import Family
from helpers.sides import SIDES, side
from helpers.tiers import in_tiers
from helpers.worlds import in_worlds

pytestmark = COMPILES

_Program = Callable[[DTensor, StockDeviceMesh], Any]

_PROGRAMS: dict[str, _Program] = {
    "redistribute": lambda x, mesh: x.redistribute(placements=[Replicate()] * 2).sum(),
    "onto the mesh that is given": lambda x, mesh: (
        x.redistribute(mesh, [Replicate(), Shard(0)]).to_local() * mesh.size(1)
    ),
    "a slice": lambda x, mesh: (
        DTensor.from_local(x.to_local(), mesh["tp"], [Shard(0)], run_check=False) * 2
    ).full_tensor(),
    "a group": lambda x, mesh: funcol.all_reduce(x.to_local(), "sum", mesh.get_group("tp")),
    "a local rank": lambda x, mesh: x.to_local() + mesh.get_local_rank("tp"),
    "matmul": lambda x, mesh: (x @ x.t()).redistribute(placements=[Replicate()] * 2).to_local(),
}


def _input(family: Family) -> tuple[DTensor, StockDeviceMesh]:
    mesh = family.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    x = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Replicate()], run_check=False)
    return x, mesh


def _traced(program: _Program, x: DTensor, mesh: StockDeviceMesh) -> list[str]:
    graphs = []
    for backend in (EagerAndRecordGraphs(), AotEagerAndRecordGraphs()):
        torch.compiler.reset()
        torch.compile(program, backend=backend, fullgraph=True)(x, mesh)
        graphs += getattr(backend, "fw_graphs", None) or backend.graphs
    return [graph.print_readable(print_output=False) for graph in graphs]


def _nameless(text: str) -> str:
    """Without what differs: names of process groups, and our class where an input is annotated."""
    text = text.replace(
        "meshverse_device_mesh_DeviceMesh", "torch.distributed.device_mesh.DeviceMesh"
    )
    return re.sub(r"'(\d+|meshverse-[0-9a-f]+-\d+)'", "GROUP", text)


@in_worlds((8, 5))
@pytest.mark.parametrize("name", in_tiers(_PROGRAMS, ["a slice"]))
def test_compiled(world, name: str) -> None:
    seen = {}
    for which in SIDES:
        with side(which) as family:
            texts = _traced(_PROGRAMS[name], *_input(family))
        seen[which] = [_nameless(text) for text in texts]
    assert len(seen["stock"]) == 2
    assert seen["ours"] == seen["installed"] == seen["stock"]


@in_worlds((8, 5))
@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_made_by_make_fx(world, tracing_mode: str) -> None:
    seen = {}
    for which in SIDES:
        with side(which) as family:
            x, mesh = _input(family)
            traced = make_fx(lambda x: _PROGRAMS["matmul"](x, mesh), tracing_mode=tracing_mode)  # noqa: B023
            seen[which] = _nameless(traced(x).print_readable(print_output=False))
    assert seen["ours"] == seen["installed"] == seen["stock"]
