"""Hooks for our meshes in torch.compile and torch's functions; creating tensors despite modes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .one_graph import find_in_graph
from .private_names import (
    MESHES_ARE_OPAQUE,
    StockDeviceMesh,
    c_extension,
    fake_tensor,
    functorch,
    guards,
    opaque_object,
    python_dispatch,
    stock_module,
    torch_ops,
)

# The method of torch's class before `hook_concatenate` replaces it.
stock_concatenate = StockDeviceMesh._concatenate

_STOCK_MODULE = "torch.distributed.device_mesh"


def has_compiled() -> bool:
    """Return whether torch.compile has compiled any function of this process."""
    if "torch._dynamo.utils" not in sys.modules:  # whose import takes a second
        return False
    from torch._dynamo.utils import counters

    return counters["frames"]["total"] > 0 or counters["stats"]["unique_graphs"] > 0


def register_with_dynamo(
    mesh_class: type[StockDeviceMesh], guard: Callable[[Any], list[Any]]
) -> None:
    """Make torch.compile treat a subclass of the stock mesh as a mesh, with its own guard.

    From 2.12 on, meshes are opaque types, which torch looks up along the MRO. The subclass gets a
    copy of torch's entry, with torch's name in operator schemas, but with this guard. 2.11 checks
    in one function whether a value is of the stock class itself; replacing that function imports
    Dynamo, which takes 0.8 s.

    Args:
        mesh_class: our class.
        guard: function that returns the values of a mesh that must stay equal for a compiled graph
            to be reused.
    """
    if not MESHES_ARE_OPAQUE:
        from torch._dynamo.variables.distributed import (  # type: ignore[attr-defined]
            DeviceMeshVariable,
        )

        DeviceMeshVariable.is_device_mesh = staticmethod(
            lambda value: isinstance(value, StockDeviceMesh)
        )
        return
    stock_module._register_distributed_opaque_types()  # type: ignore[no-untyped-call]
    known = opaque_object._OPAQUE_TYPES
    # This registers operators that graphs from torch's cache call. Tracing would register them too,
    # but graphs from a cache are not traced in this process. Takes 4 ms.
    importlib.import_module("torch.distributed._ops.device_mesh")
    stock = known[StockDeviceMesh]
    reconstruct = stock.reconstruct_fn and find_in_graph(stock.reconstruct_fn)
    known[mesh_class] = dataclasses.replace(stock, guard_fn=guard, reconstruct_fn=reconstruct)


def hook_concatenate(
    mesh_class: type[StockDeviceMesh], ours: Callable[[Sequence[Any]], StockDeviceMesh]
) -> None:
    """Make `_concatenate` of torch's class, which FSDP2 calls, use our function for our meshes.

    Args:
        mesh_class: our class.
        ours: function that concatenates meshes of which at least one is ours.
    """

    @functools.wraps(stock_concatenate)
    def concatenate(device_mesh_list: Any) -> StockDeviceMesh:
        # For an argument that is not a sequence, torch's function raises its own error.
        is_ours = isinstance(device_mesh_list, Sequence) and any(
            isinstance(mesh, mesh_class) for mesh in device_mesh_list
        )
        return (ours if is_ours else stock_concatenate)(device_mesh_list)

    StockDeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign]


def not_traced(check: Callable[[str], None]) -> Callable[[str], None]:
    """Let Dynamo call a function of a constant while it traces, instead of tracing it.

    As the public `assume_constant_result`, which imports Dynamo (0.8 s). 2.11-2.15.
    """
    check._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return check


def let_graphs_read(kind: type[list[Any]], plain: Callable[[Any], list[Any]]) -> None:
    """Let Dynamo read a list of a subclass, in an object that did not exist before the graph.

    Dynamo rejects such a list. 2.11-2.15.

    Args:
        kind: subclass of `list`.
        plain: function from such a list to the plain list that the graph shall see.
    """
    from torch._dynamo.variables.builder import SourcelessBuilder

    handlers: Any = SourcelessBuilder._type_handlers  # type: ignore[attr-defined]
    handlers.setdefault(kind, lambda tx, value: handlers[list](tx, plain(value)))


def warn_as_stock(message: str, method: Callable[..., Any]) -> None:
    """Issue a warning as if a method of the stock mesh issued it.

    The warning has the module and a line of torch's file, as Python's default filter shows a
    warning once per line, and users' filters can name a module.

    Args:
        message: torch's message.
        method: method of the stock mesh that issues this warning.
    """
    warnings.warn_explicit(
        message,
        UserWarning,
        filename=method.__code__.co_filename,
        lineno=method.__code__.co_firstlineno,
        module=_STOCK_MODULE,
        registry=method.__globals__.setdefault("__warningregistry__", {}),
    )


def is_stocks_own(method: Callable[..., Any]) -> bool:
    """Whether a method of the stock mesh is the one that torch's class defines.

    While LocalTensor mode simulates ranks, it replaces such methods. 2.11-2.15.
    """
    return method.__module__ == _STOCK_MODULE


def real_mesh(value: object) -> Any:
    """Return the mesh inside torch.compile's `FakeScriptObject`, or the value itself."""
    return getattr(value, "real_obj", value)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a shape but no data, as under `FakeTensorMode`. 2.11-2.15."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def is_faking() -> bool:
    """Whether `FakeTensorMode` is active, so that new tensors have no data. 2.11-2.15."""
    return guards.detect_fake_mode() is not None


@contextlib.contextmanager
def outside_torch_modes() -> Iterator[None]:
    """Create ordinary CPU tensors inside the block, whatever modes or transforms are active.

    Fake, proxy, functional and users' modes do not see operations of the block; the default device
    does not apply; and transforms such as `torch.func.grad` do not wrap its tensors. 2.11-2.15.
    """
    if _is_eager():  # entering these contexts takes 60 us with cold caches
        yield
        return
    with (
        python_dispatch._disable_current_modes(),
        functorch.temporarily_clear_interpreter_stack(),
        c_extension.DisableTorchFunction(),  # modes, among which is the default device
        torch.inference_mode(False),
    ):
        yield


def _is_eager() -> bool:
    return not (
        c_extension._len_torch_function_stack()  # modes, among which is the default device
        or c_extension._len_torch_dispatch_stack()
        or torch_ops._len_torch_dispatch_stack_pre_dispatch()
        or c_extension._functorch.peek_interpreter_stack()
        or torch.is_inference_mode_enabled()
    )


@functools.cache
def _ordinary_keys() -> frozenset[int]:
    # The dispatch keys of a tensor whose memory contains its values. Lazy, wrapped, sparse,
    # quantized, meta and other tensors have other or additional keys.
    with outside_torch_modes():
        ordinary = torch.empty(0, device="cpu")
        with torch.inference_mode():
            of_inference = torch.empty(0, device="cpu")
    return frozenset(c_extension._dispatch_keys(t).raw_repr() for t in (ordinary, of_inference))


def lies_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read from the CPU memory at its address.

    True for a dense CPU tensor or Parameter. False for subclasses, which may mean other values; and
    if the values are still to be negated or conjugated, or are in another tensor.
    """
    is_exact = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_exact and _is_ordinary(tensor) and not lacks_memory(tensor)


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a dense CPU tensor's memory is too small for its values.

    A program can free the memory of a tensor that it keeps, as FSDP does with
    `untyped_storage().resize_(0)`.
    """
    if not _is_ordinary(tensor) or tensor.numel() == 0:
        return False
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + reach + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() < needed


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return c_extension._dispatch_keys(tensor).raw_repr() in _ordinary_keys()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this one is a view of; None if it is not a view."""
    return tensor._base
