"""A mesh as a user sees it, in a form that compares; stock's and ours must look the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import device_mesh as stock_module
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

import meshverse
from helpers.versions import HAS_CANONICAL_LAYOUTS


class Family(NamedTuple):
    """One of the two implementations."""

    DeviceMesh: type[StockDeviceMesh]
    init_device_mesh: Callable[..., StockDeviceMesh]


STOCK = Family(StockDeviceMesh, stock_module.init_device_mesh)
OURS = Family(meshverse.DeviceMesh, meshverse.init_device_mesh)

_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of an action: a value or the type of the exception; the kinds of warnings."""

    value: Any
    error: type[Exception] | None
    warned: frozenset[type[Warning]]


def attempt(action: Callable[[], Any]) -> Outcome:
    """Run an action and keep whatever comes of it."""
    value, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = action()
        except _ERRORS as raised:
            error = type(raised)
    return Outcome(value, error, frozenset(warning.category for warning in caught))


def _without_tags(text: str) -> str:
    """Return a mesh's representation without what stock's lacks."""
    if not HAS_CANONICAL_LAYOUTS:
        return text.partition(", stride")[0]
    head, isolate, _ = text.partition(", isolate=")
    return f"{head})" if isolate else text


def observe(mesh: StockDeviceMesh) -> dict[str, Any]:
    """Everything public about a mesh, as plain data."""
    axes = [*range(mesh.ndim), *(mesh.mesh_dim_names or ())]
    return {
        "device_type": mesh.device_type,
        "shape": mesh.shape,
        "ndim": mesh.ndim,
        "size": mesh.size(),
        "sizes": [mesh.size(index) for index in range(mesh.ndim)],
        "names": mesh.mesh_dim_names,
        "mesh": attempt(lambda: _tensor(mesh)),
        "coordinate": mesh.get_coordinate(),
        "is member": mesh._is_current_rank_part_of_mesh(),
        "rank": mesh.get_rank(),
        "local ranks": [attempt(lambda axis=axis: mesh.get_local_rank(axis)) for axis in axes],
        "only local rank": attempt(mesh.get_local_rank),
        "groups": [attempt(lambda axis=axis: _ranks(mesh.get_group(axis))) for axis in axes],
        "only group": attempt(lambda: _ranks(mesh.get_group())),
        "all groups": attempt(lambda: [_ranks(group) for group in mesh.get_all_groups()]),
        "repr": _without_tags(repr(mesh)),
    }


def _tensor(mesh: StockDeviceMesh) -> tuple[Any, ...]:
    tensor = mesh.mesh
    return tensor.dtype, str(tensor.device), tuple(tensor.shape), tensor.tolist()


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def assert_same(stock: StockDeviceMesh, ours: StockDeviceMesh) -> None:
    """Check that two meshes look the same, and that each is what it should be."""
    assert type(stock) is STOCK.DeviceMesh
    assert type(ours) is OURS.DeviceMesh
    assert observe(ours) == observe(stock)


def assert_same_outcome(stock: Outcome, ours: Outcome) -> None:
    """Check that two actions raised the same, or gave meshes that look the same and warned so."""
    assert ours.error == stock.error
    if stock.error is None:
        assert ours.warned == stock.warned
        assert_same(stock.value, ours.value)
