"""torch.compile's and torch's own view of our meshes, and shelter from its modes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .private_names import (
    MESHES_ARE_OPAQUE,
    StockDeviceMesh,
    fake_tensor,
    opaque_object,
    proxy_tensor,
    stock_module,
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
    known[mesh_class] = dataclasses.replace(known[StockDeviceMesh], guard_fn=guard)


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


def hook_from_group(
    ours: Callable[..., StockDeviceMesh], shall_be_ours: Callable[[], bool]
) -> None:
    """Have `DeviceMesh.from_group`, called by the stock name, use ours where meshes shall be ours.

    Stock's would write the groups' names into the mesh, past its universe.
    """
    stock = StockDeviceMesh.from_group

    @functools.wraps(stock)
    def from_group(*args: Any, **kwargs: Any) -> StockDeviceMesh:
        return (ours if shall_be_ours() else stock)(*args, **kwargs)

    StockDeviceMesh.from_group = staticmethod(from_group)  # type: ignore[method-assign]


def warn_as_stock(message: str, method: Callable[..., Any]) -> None:
    """Warn as if a method of the stock mesh did: of one place, whoever called it.

    Python's default filter shows a warning once a place, and filters name a warning's module.

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
    """The mesh inside one of torch.compile's stand-ins (`FakeScriptObject`), or the value."""
    return getattr(value, "real_obj", value)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a shape without data, as all are under `FakeTensorMode`. 2.11-2.15."""
    return isinstance(tensor, fake_tensor.FakeTensor)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Make real CPU tensors inside, whatever fake or proxy mode or default device is active."""
    with (
        fake_tensor.unset_fake_temporarily(),
        proxy_tensor.disable_proxy_modes_tracing(),
        torch.device("cpu"),
    ):
        yield
