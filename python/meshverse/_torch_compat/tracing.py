"""Hooks that have torch.compile and torch's functions know our meshes; ways around modes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
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

# As it was before `hook_concatenate`.
stock_concatenate = StockDeviceMesh._concatenate

_STOCK_MODULE = "torch.distributed.device_mesh"


def let_compile_know(mesh_class: type[StockDeviceMesh], guard: Callable[[Any], list[Any]]) -> None:
    """Make torch.compile treat a subclass of the stock mesh as a mesh, with a guard of its own.

    From 2.12, meshes are opaque types, looked up along the MRO. The subclass gets an entry like
    stock's, under stock's name in op schemas, but with this guard. 2.11 asks whether a value is of
    the stock class itself, in one place; the import of Dynamo (0.8 s) is for 2.11 only.

    Args:
        mesh_class: our class.
        guard: gives the values of a mesh that must stay equal for a compiled graph to be used.
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
    # Registers operators that graphs from torch's cache call, without tracing them here. 4 ms.
    importlib.import_module("torch.distributed._ops.device_mesh")
    stock = known[StockDeviceMesh]
    reconstruct = stock.reconstruct_fn and find_in_graph(stock.reconstruct_fn)
    known[mesh_class] = dataclasses.replace(stock, guard_fn=guard, reconstruct_fn=reconstruct)


def hook_concatenate(
    mesh_class: type[StockDeviceMesh], ours: Callable[[Sequence[Any]], StockDeviceMesh]
) -> None:
    """Have `DeviceMesh._concatenate`, which FSDP2 calls by the stock name, use ours for our meshes.

    Args:
        mesh_class: our class.
        ours: concatenates meshes of which one or more are ours.
    """

    @functools.wraps(stock_concatenate)
    def concatenate(device_mesh_list: Any) -> StockDeviceMesh:
        # Stock takes what can be indexed, and fails with its own words for anything else.
        is_ours = isinstance(device_mesh_list, Sequence) and any(
            isinstance(mesh, mesh_class) for mesh in device_mesh_list
        )
        return (ours if is_ours else stock_concatenate)(device_mesh_list)

    StockDeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign]


def warn_as_stock(message: str, method: Callable[..., Any]) -> None:
    """Warn as if a method of the stock mesh did, always from the same line of torch's file.

    Python's default filter shows a warning once per line, and filters name a warning's module.

    Args:
        message: stock's own.
        method: of the stock mesh, which warns there.
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
    """Whether a method of the stock mesh is the one that torch defines there.

    While LocalTensor mode simulates ranks, it has others in their place. 2.11-2.15.
    """
    return method.__module__ == _STOCK_MODULE


def real_mesh(value: object) -> Any:
    """Return the mesh inside a stand-in of torch.compile (`FakeScriptObject`), or the value."""
    return getattr(value, "real_obj", value)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a shape without data, as all are under `FakeTensorMode`. 2.11-2.15."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def is_faking() -> bool:
    """Whether `FakeTensorMode` is active, so that new tensors have no data. 2.11-2.15."""
    return guards.detect_fake_mode() is not None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Make ordinary CPU tensors inside, whatever modes, transforms or default device are active.

    Neither fake, proxy, functional nor the user's own modes see what is done inside, and what is
    made inside `torch.func.grad` and the like is not wrapped for it. 2.11-2.15.
    """
    if _is_eager():  # to enter all of these takes 60 us where caches are cold
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
    # The dispatch keys of a tensor whose memory holds its values as they are. Lazy, wrapped,
    # sparse, quantized, meta and other tensors have other keys, or one more.
    with untraced():
        ordinary = torch.empty(0, device="cpu")
        with torch.inference_mode():
            of_inference = torch.empty(0, device="cpu")
    return frozenset(c_extension._dispatch_keys(t).raw_repr() for t in (ordinary, of_inference))


def lies_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read from this process's memory by their address.

    True for a dense CPU tensor, Parameter included, and for no subclass that could mean something
    else; false where values are still to be negated, or stand in another tensor.
    """
    is_exact = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_exact and _is_ordinary(tensor) and not lacks_memory(tensor)


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a dense CPU tensor's memory is too small for its values.

    It can be freed under a living tensor: FSDP does so, with `untyped_storage().resize_(0)`.
    """
    if not _is_ordinary(tensor) or tensor.numel() == 0:
        return False
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + reach + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() < needed


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return c_extension._dispatch_keys(tensor).raw_repr() in _ordinary_keys()
