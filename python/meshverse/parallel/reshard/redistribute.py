"""`redistribute`: one DTensor onto another mesh."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshverse._core import shard_shape

from .gathering import Gathering
from .reshard import Given, Reshard, default_timeout

__all__ = ["redistribute"]

_NO_GRADIENTS = (
    "redistribute to another mesh: gradients do not pass between meshes. Give dtensor.detach(), or "
    "call it under torch.no_grad()."
)


def redistribute(
    dtensor: DTensor | None,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    name: str = "redistribute",
    timeout: timedelta | None = None,
) -> DTensor:
    """A DTensor with the same values on any mesh. On its own mesh: DTensor's `redistribute`.

    All ranks of both meshes call it. For several tensors, or more than once, build a `Reshard`. A
    rank that is given something wrong says what; the other ranks raise a RuntimeError that says it.

    Args:
        dtensor: the tensor; None on ranks that are not in its mesh.
        mesh: to have it on.
        placements: one for each axis of the mesh: `Replicate` or `Shard`.
        name: of this move. Needed where ranks have several with different other ranks.
        timeout: how long to wait for other ranks.

    Returns:
        A DTensor without a gradient's history, unless it stays on its mesh.

    Raises:
        RuntimeError: the tensor needs a gradient, which does not pass between meshes; other ranks
            did not come, or cannot take part.
        TypeError: no DTensor, no mesh, or no placements that can be moved to.
        ValueError: another number of placements than axes, or a dimension that is not there.
    """
    if isinstance(dtensor, DTensor) and dtensor.device_mesh == mesh:
        return dtensor.redistribute(mesh, placements)
    meeting = Gathering("redistribute", name)
    made: list[DTensor] = []

    def given() -> Given:
        try:
            _check(dtensor, mesh, placements)
            shape, dtype = _shape_and_dtype(dtensor, meeting, timeout)
            made.append(_empty(mesh, placements, shape, dtype))
        except Exception as error:
            if dtensor is not None:  # ranks without the tensor wait for its shape
                meeting.note("shape", json.dumps(["", "", str(error)]))
            raise
        source = None if dtensor is None else {"tensor": dtensor.detach()}
        return source, {"tensor": made[0]}

    with Reshard._met(meeting, given, timeout) as move:
        move()
    return made[0]


def _check(dtensor: object, mesh: object, placements: Sequence[Placement]) -> None:
    if dtensor is not None and not isinstance(dtensor, DTensor):
        raise TypeError(
            f"redistribute({type(dtensor).__name__}, ...): give a DTensor, or None on ranks that "
            "are not in its mesh. distribute_tensor makes one of a tensor."
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"redistribute to {type(mesh).__name__}: give a DeviceMesh.")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"redistribute: {len(placements)} placements for a mesh of {mesh.ndim} axes. Give one "
            "for each."
        )
    for placement in placements:
        if type(placement) not in (Replicate, Shard):
            raise TypeError(f"redistribute to {placement}: give Replicate() or Shard(dim).")
    if dtensor is not None and dtensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(_NO_GRADIENTS)


def _shape_and_dtype(
    dtensor: DTensor | None, meeting: Gathering, timeout: timedelta | None
) -> tuple[torch.Size, torch.dtype]:
    """Those of the tensor, also on ranks that have none: they read what another one writes."""
    if dtensor is not None:
        dtype = str(dtensor.dtype).removeprefix("torch.")
        meeting.note("shape", json.dumps([list(dtensor.shape), dtype, ""]))
        return dtensor.shape, dtensor.dtype
    text = meeting.wait_for("shape", timeout or default_timeout(meeting.world))
    if text is None:
        raise RuntimeError(
            "redistribute(None, ...): no rank of the tensor's mesh came. All ranks of both meshes "
            "call it, those of its mesh with the tensor."
        )
    shape, dtype, why_not = json.loads(text)
    if why_not:
        raise RuntimeError(why_not)
    return torch.Size(shape), getattr(torch, dtype)


def _empty(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype
) -> DTensor:
    dims = [_dim(placement, shape) for placement in placements]
    coordinates = mesh.get_coordinate()
    local_shape: Sequence[int] = (0,)  # as torch's, on ranks that are not in the mesh
    if coordinates is not None:
        factors = [1] * mesh.ndim
        sizes = list(mesh.shape)
        local_shape = shard_shape(shape, dims, factors, False, sizes, list(coordinates))
    local = torch.empty(local_shape, dtype=dtype, device=_device(mesh))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _dim(placement: Placement, shape: torch.Size) -> int:
    if not isinstance(placement, Shard):
        return -1
    if not -len(shape) <= placement.dim < len(shape):
        raise ValueError(
            f"redistribute to {placement}: a tensor of shape {tuple(shape)} has no such dimension."
        )
    return placement.dim % len(shape)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
