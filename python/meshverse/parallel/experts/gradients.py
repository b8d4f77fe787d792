"""Norms of gradients that are on different meshes, and clipping by them.

Under FSDP2 with tensor or expert parallelism, parameters are on several meshes, and torch cannot
add up their norms.

Example:
    >>> total = clip_grad_norm_(model.parameters(), 1.0)  # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import clip_grads_with_norm_
from torch.nn.utils import get_total_norm as norm_on_one_mesh

__all__ = ["clip_grad_norm_", "get_total_norm", "scale_gradients"]


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all elements of tensors, each counted once, whatever meshes they are on.

    Args:
        tensors: DTensors, of any meshes and placements, and tensors that are the same on all ranks.
        norm_type: of the p-norm; infinity is allowed.
        error_if_nonfinite: whether a norm that is no finite number is an error.
        foreach: as in torch.

    Returns:
        A plain tensor, the same on all ranks of the meshes.

    Raises:
        RuntimeError: the norm is not finite, and that is an error.
    """
    norm_type = float(norm_type)  # torch takes "inf" too
    by_mesh: dict[object, list[Tensor]] = {}
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        key = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        by_mesh.setdefault(key, []).append(tensor)
    norms = []
    for some in by_mesh.values():
        if norm_type == math.inf and isinstance(some[0], DTensor) and _is_split(some[0]):
            norms.append(_largest(some))
            continue
        norm = norm_on_one_mesh(some, norm_type, False, foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of gradients is {total.item()}. Pass "
            "error_if_nonfinite=False to scale by it all the same."
        )
    return total


def _is_split(tensor: DTensor) -> bool:
    return all(each.is_shard() or each.is_replicate() for each in tensor.placements)


def _largest(some: Sequence[Any]) -> Tensor:
    """The largest size of an element of DTensors of one mesh and placements.

    Some ranks may have no rows of a tensor; torch's norm raises there.
    """
    mesh, placements = some[0].device_mesh, some[0].placements
    locals_ = [each.to_local().detach().abs() for each in some]
    largest = [each.max() if each.numel() else each.new_zeros(()) for each in locals_]
    over_ranks = [Partial("max") if placement.is_shard() else placement for placement in placements]
    value = torch.stack(largest).max()
    return DTensor.from_local(value, mesh, over_ranks, run_check=False).full_tensor()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, of parameters on any meshes. All ranks call this.

    Args:
        parameters: whose gradients are scaled in place.
        max_norm: of all gradients together.
        norm_type: as for `get_total_norm`.
        error_if_nonfinite: as for `get_total_norm`.
        foreach: as in torch.

    Returns:
        The norm before, a plain tensor.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    having = [each for each in listed if each.grad is not None]
    gradients = [each.grad for each in having if each.grad is not None]
    total = get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    scale_gradients(having, max_norm, total, foreach)
    return total


def scale_gradients(
    parameters: Iterable[Tensor], max_norm: float, total: Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients in place, of parameters on any meshes, if their total norm is too large.

    Args:
        parameters: whose gradients are scaled.
        max_norm: of all gradients together.
        total: their norm.
        foreach: as in torch.
    """
    by_mesh: dict[object, list[Tensor]] = {}
    for each in parameters:
        key = each.grad.device_mesh if isinstance(each.grad, DTensor) else None
        by_mesh.setdefault(key, []).append(each)
    for some in by_mesh.values():
        clip_grads_with_norm_(some, max_norm, total, foreach)
