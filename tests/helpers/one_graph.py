"""Compiling one graph for all ranks: torch's switch for it, and what is in such a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.fx import GraphModule

__all__ = ["Traced", "compiled_on_one_rank", "constant_bytes", "needs_one_graph", "trace"]

# In 2.11 the switch is there, but the graph names the process groups of the rank that traced it.
needs_one_graph = pytest.mark.skipif(
    not hasattr(dist.tensor._collective_utils, "_dtensor_lib"),
    reason="torch compiles one graph for all ranks from 2.12 on",
)


def compiled_on_one_rank() -> AbstractContextManager[None]:
    """Compile for all ranks inside the block. 2.15 moved the switch."""
    has_moved = hasattr(torch.compiler.config, "compile_on_one_rank")
    config: Any = torch.compiler.config if has_moved else dist.config
    return config.patch(compile_on_one_rank=True)  # type: ignore[no-any-return]


class Traced(NamedTuple):
    """The compiled graphs of a program, and the result of its first call."""

    graph: GraphModule
    output: Any

    @property
    def text(self) -> str:
        """The graph as readable code, with the type of everything in it."""
        return self.graph.print_readable(print_output=False)


def trace(program: Callable[..., Any], *arguments: Any, dynamic: bool | None = None) -> Traced:
    """Compile a program for all ranks, and run it."""
    torch.compiler.reset()
    backend = AotEagerAndRecordGraphs()
    with compiled_on_one_rank():
        compiled = torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
        output = compiled(*arguments)
    return Traced(backend.fw_graphs[0], output)


def constant_bytes(graph: GraphModule) -> int:
    """Size of all tensors that a graph carries."""
    tensors = [value for value in vars(graph).values() if isinstance(value, Tensor)]
    tensors += [*graph.buffers(), *graph.parameters()]
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
