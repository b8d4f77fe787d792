"""Compiling one graph for all ranks (`compile_on_one_rank`): whether torch does it; symbols."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.config as distributed_config

from .private_names import guards

# 2.15 moved the switch to torch.compiler.config; what it left behind warns.
_config: Any = distributed_config
if hasattr(torch.compiler.config, "compile_on_one_rank"):
    _config = torch.compiler.config

_LOCAL_TENSORS = "torch.distributed._local_tensor"


def compiles_one_graph() -> bool:
    """Whether what is compiled now is for all ranks. 2.11-2.15."""
    return bool(_config.compile_on_one_rank)


def is_one_graph_compiled() -> bool:
    """Whether a graph for all ranks is being compiled, or looked for in a cache. 2.11-2.15."""
    return compiles_one_graph() and guards.TracingContext.try_get() is not None


def is_one_graph_traced() -> bool:
    """Whether a graph that all ranks shall run is being traced, with symbols for unknown numbers.

    Stock asks the same where it decides whether a coordinate is a number of the graph. 2.11-2.15;
    2.11 does not ask for symbols, and fails without them.
    """
    if not _config.compile_on_one_rank:
        return False
    fake_mode = guards.detect_fake_mode()
    return fake_mode is not None and fake_mode.shape_env is not None


def coordinate_symbol(size: int) -> torch.SymInt | None:
    """Return, for a fake kernel, a new symbol for a number of `range(size)` known at run time.

    None where the fake mode has no symbols. The public `new_dynamic_size` refuses where a user does
    not allow shapes that depend on data: a coordinate's range is known. 2.11-2.15.
    """
    shape_env: Any = torch.library.get_ctx()._shape_env
    if shape_env is None:
        return None
    from torch.fx.experimental import symbolic_shapes

    symbol: torch.SymInt = shape_env.create_unbacked_symint()
    symbolic_shapes._constrain_range_for_size(symbol, min=0, max=size - 1)
    if torch.compiler.is_dynamo_compiling() or _is_dynamo_at_work():
        # Dynamo keeps an operation on DTensors as one node. This symbol is made inside of one, so
        # Dynamo's graph does not contain it. When the operation is traced in detail later, a new
        # symbol is made.
        shape_env.ignorable_fresh_unbacked_symbols.append(symbol.node.expr)
    return symbol


def _is_dynamo_at_work() -> bool:
    symbolic_convert: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    if symbolic_convert is None:
        return False
    try:
        return symbolic_convert.InstructionTranslator.current_tx() is not None
    except AttributeError:  # raised outside of tracing
        return False


def on_simulated_ranks(value_of: Callable[[int], int]) -> int | torch.SymInt | None:
    """Return a number of each rank that LocalTensor mode simulates here; None outside the mode.

    Args:
        value_of: the number that a global rank has.
    """
    local_tensors: Any = sys.modules.get(_LOCAL_TENSORS)
    mode = None if local_tensors is None else local_tensors.enabled_local_tensor_mode()
    if mode is None:
        return None
    values = {rank: value_of(rank) for rank in mode.ranks}
    if len(set(values.values())) == 1:
        return values.popitem()[1]
    return torch.SymInt(local_tensors.LocalIntNode(values))  # type: ignore[no-untyped-call]


def let_inductor_call(operator: Any) -> None:
    """Have inductor, if it is at work, call an operator without tensors; for a fake kernel.

    For an operator that it calls unchanged, inductor takes the device from the tensor arguments,
    and fails if there are none. An operator's fake kernel always runs before that. 2.11-2.15.
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
    """Return the function by which torch gets a mesh that a graph uses from the graph's inputs.

    Stock's has two gaps, which this closes. It does not look whether the mesh itself is an input: a
    root mesh becomes a constant, and inductor's cache gives the next process None in its place. And
    it calls an operator by its name instead of an overload, which inductor refuses to compile.
    2.12-2.15.

    Args:
        reconstruct: stock's, which derives a submesh in the graph; gives a proxy, or None.
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
