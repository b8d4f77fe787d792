"""Compiling one graph for all ranks (`compile_on_one_rank`), and symbols in such graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.config as distributed_config

from .private_names import guards

# 2.15 moved the switch to torch.compiler.config; reading the old one warns.
_config: Any = distributed_config
if hasattr(torch.compiler.config, "compile_on_one_rank"):
    _config = torch.compiler.config

_LOCAL_TENSORS = "torch.distributed._local_tensor"


def compiles_one_graph() -> bool:
    """Whether torch compiles graphs for all ranks now. 2.11-2.15."""
    return bool(_config.compile_on_one_rank)


def is_one_graph_compiled() -> bool:
    """Whether torch is compiling a graph for all ranks, or searching a cache for one. 2.11-2.15."""
    return compiles_one_graph() and guards.TracingContext.try_get() is not None


def is_one_graph_traced() -> bool:
    """Whether torch is tracing a graph for all ranks, in which unknown numbers can be symbols.

    If so, torch puts no coordinate into the graph as a constant. It checks the same, except that
    2.11 does not check for symbols, and fails without them. 2.11-2.15.
    """
    if not _config.compile_on_one_rank:
        return False
    fake_mode = guards.detect_fake_mode()
    return fake_mode is not None and fake_mode.shape_env is not None


def coordinate_symbol(size: int) -> torch.SymInt | None:
    """Return a new symbol for a coordinate in `range(size)`, which is known only at run time.

    A fake kernel calls this. None if the fake mode has no symbols. The public `new_dynamic_size`
    does not serve: it raises if the user does not allow shapes that depend on data. 2.11-2.15.
    """
    shape_env: Any = torch.library.get_ctx()._shape_env
    if shape_env is None:
        return None
    from torch.fx.experimental import symbolic_shapes

    symbol: torch.SymInt = shape_env.create_unbacked_symint()
    symbolic_shapes._constrain_range_for_size(symbol, min=0, max=size - 1)
    if torch.compiler.is_dynamo_compiling() or is_dynamo_at_work():
        # Dynamo's graph has one node for an operation on DTensors. This symbol is created inside
        # such an operation, so that graph does not contain it. When the operation is later traced
        # in detail, it gets a new symbol.
        shape_env.ignorable_fresh_unbacked_symbols.append(symbol.node.expr)
    return symbol


def is_dynamo_at_work() -> bool:
    """Whether Dynamo is tracing, and runs this function to know its result. 2.11-2.15."""
    symbolic_convert: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    if symbolic_convert is None:
        return False
    try:
        return symbolic_convert.InstructionTranslator.current_tx() is not None
    except AttributeError:  # raised if Dynamo is not tracing
        return False


def on_simulated_ranks(value_of: Callable[[int], int]) -> int | torch.SymInt | None:
    """Return a number that depends on the rank, while LocalTensor mode simulates several ranks.

    None if this mode is off.

    Args:
        value_of: function from global rank to its number.
    """
    local_tensors: Any = sys.modules.get(_LOCAL_TENSORS)
    mode = None if local_tensors is None else local_tensors.enabled_local_tensor_mode()
    if mode is None:
        return None
    values = {rank: value_of(rank) for rank in mode.ranks}
    if len(set(values.values())) == 1:
        return values.popitem()[1]
    return torch.SymInt(local_tensors.LocalIntNode(values))  # type: ignore[no-untyped-call]


def register_with_inductor(operator: Any) -> None:
    """Let inductor call an operator that has no tensor arguments.

    For operators that it calls unchanged, inductor takes the device from the tensor arguments, and
    fails if there are none. The operator's fake kernel calls this, as it runs before inductor needs
    the device. Does nothing if inductor is not loaded. 2.11-2.15.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or operator in lowering.lowerings:
        return
    ir: Any = sys.modules["torch._inductor.ir"]

    class WithoutTensors(ir.FallbackKernel):  # type: ignore[misc]
        @staticmethod
        def find_device(*_: object) -> torch.device:
            return torch.device("cpu")

    def lower(*args: Any) -> Any:
        return WithoutTensors.create(operator, *args)

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def find_in_graph(reconstruct: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that finds a mesh of a graph among the graph's inputs, or derives it.

    It fixes two errors of torch's function. That does not check whether the mesh itself is an
    input: a root mesh becomes a constant, for which inductor's cache returns None to the next
    process. And its graph node calls an operator instead of an overload of it, which inductor
    rejects. 2.12-2.15.

    Args:
        reconstruct: torch's function, which derives a submesh in the graph and returns a proxy, or
            None.
    """

    @functools.wraps(reconstruct)
    def find_or_reconstruct(mesh: Any, get_tracked_proxy: Any, tracer: Any) -> Any:
        for tracked, proxy in tracer.opaque_tracker.items():
            if getattr(tracked, "real_obj", tracked) is mesh:
                return proxy
        proxy = reconstruct(mesh, get_tracked_proxy, tracer)
        if proxy is not None and isinstance(proxy.node.target, torch._ops.OpOverloadPacket):
            proxy.node.target = proxy.node.target.default
        return proxy

    return find_or_reconstruct
