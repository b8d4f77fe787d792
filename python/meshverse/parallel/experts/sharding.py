"""Sharding of experts over their own mesh with FSDP2, and gradient norms over several meshes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils import clip_grads_with_norm_
from torch.nn.utils import get_total_norm as torch_total_norm

from meshverse import DeviceMesh
from meshverse.parallel.meshes.create import create_moe_mesh, requested_ep_size
from meshverse.parallel.meshes.degrees import degree

EP_SHARD, EP = "ep_shard", "ep"


def choose_moe_mesh(
    device_mesh: DeviceMesh, moe_mesh: DeviceMesh | None, ep_size: int | None
) -> DeviceMesh | None:
    """Return the experts' mesh (ep_shard, ep), or None without expert parallelism.

    All ranks call this, because it may create the mesh.

    Args:
        device_mesh: the model's mesh, in whose universe the experts' mesh is.
        moe_mesh: the experts' mesh, or None to create it.
        ep_size: degree of expert parallelism; by default the one requested with `device_mesh`.

    Raises:
        ValueError: `ep_size` is not an int above 0, does not divide the ranks, or is not that of
            `moe_mesh`; or `moe_mesh` is not over one pipeline stage, or in another universe.
    """
    size = None if ep_size is None else degree(ep_size, "ep_size")
    if moe_mesh is None:
        size = requested_ep_size(device_mesh) if size is None else size
        if size == 1:
            return None
        moe_mesh = create_moe_mesh(device_mesh.universe.root or device_mesh, ep_size=size)
    _check_moe_mesh(moe_mesh, device_mesh)
    if size not in (None, moe_mesh[EP].size()):
        raise ValueError(
            f"ep_size={size}, but the experts' mesh has ep={moe_mesh[EP].size()}: {moe_mesh}. "
            "Give one of the two."
        )
    return moe_mesh


def _check_moe_mesh(moe_mesh: DeviceMesh, device_mesh: DeviceMesh) -> None:
    axes, names = moe_mesh.mesh_dim_names, device_mesh.mesh_dim_names or ()
    others = tuple(name for name in names if name != "pp")
    stage = device_mesh[others] if others and len(others) < len(names) else device_mesh
    if moe_mesh.universe is not device_mesh.universe:
        raise ValueError(
            f"{moe_mesh} is not in the universe of {device_mesh}, and must be, because FSDP2 "
            "combines only meshes of one root. Create both with create_device_meshes(), or the "
            "second one with universe=."
        )
    ranks, expected = (mesh.layout.collapse().sorted() for mesh in (moe_mesh, stage))
    if axes != (EP_SHARD, EP) or ranks != expected:
        raise ValueError(
            f"The experts' mesh {moe_mesh} has the axes {axes} over the layout {ranks}: it must "
            f"have {(EP_SHARD, EP)} over {expected}, one pipeline stage of {device_mesh}. Create "
            "both with create_device_meshes(), or this one with create_moe_mesh()."
        )


def shard_experts(
    model: nn.Module,
    names: Sequence[str],
    moe_mesh: DeviceMesh,
    *,
    replicas: int = 1,
    parts: int,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard the experts of a model over `ep_shard`, before FSDP2 shards the modules around them.

    With replicas, experts are sharded within a replica and replicated over replicas, like the other
    parameters; but if `replicas` does not divide ep_shard, they are sharded over all of ep_shard.
    Inputs keep their dtype, because routing weights may have a higher precision than hidden states.

    FSDP2 divides gradients of other parameters by the number of ranks with different tokens, or by
    the factor that a user sets. An expert's gradient is already the sum over the tokens of the
    ranks of `ep`, so its factor is set to that number: it has the same meaning for all parameters.

    Args:
        model: model whose experts are distributed over `ep`.
        names: names of the experts' modules.
        moe_mesh: the experts' mesh.
        replicas: number of replicas.
        parts: number of ranks with different tokens.
        precision: FSDP2's precision.
        offload: FSDP2's policy for the device that stores sharded parameters.
        reshard_after_forward: as in FSDP2.
    """
    mesh, holders = moe_mesh[EP_SHARD], moe_mesh[EP].size()
    shards, remainder = divmod(mesh.size(), replicas)
    if replicas > 1 and not remainder:
        mesh = mesh.unflatten(EP_SHARD, (replicas, shards), ("dp_replicate", EP_SHARD))
    shards = mesh.size(-1)

    def place(parameter: nn.Parameter) -> Shard | None:
        """Return None to shard by experts, if divisible; else the first divisible other dim."""
        if parameter.size(0) % (shards * holders) == 0:
            return None
        dims = (dim for dim in range(1, parameter.ndim) if parameter.size(dim) % shards == 0)
        return next((Shard(dim) for dim in dims), None)

    precision = replace(precision, cast_forward_inputs=False, output_dtype=None)
    first = model.get_submodule(names[0]).parameters()
    reduced = precision.reduce_dtype or precision.param_dtype or next(first).dtype
    factor = float(parts)
    if shards == 1 and reduced == torch.float64:
        factor **= 0.5  # in a group of one rank, torch divides twice, as for float16
    elif shards == 1 and reduced == torch.float16:
        precision = replace(precision, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {
        "mp_policy": precision,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": offload,
    }
    for name in names:
        experts: Any = model.get_submodule(name)
        fully_shard(experts, mesh=mesh, shard_placement_fn=place, **settings)
        experts.set_gradient_divide_factor(factor)
        # Not torch's fused product and sum, which only NCCL has.
        experts.set_force_sum_reduction_for_comms(shards > 1)


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the total norm of tensors on any meshes; each element counts once.

    Args:
        tensors: DTensors on any meshes with any placements, and plain tensors that are the same on
            all ranks.
        norm_type: the p of the p-norm, above 0; infinity is allowed.
        error_if_nonfinite: whether to raise a RuntimeError if the norm is infinite or nan.
        foreach: as in `torch.nn.utils.get_total_norm`.

    Returns:
        The norm as a plain tensor, the same on all ranks of the meshes.

    Raises:
        ValueError: `norm_type` is not above 0.
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
    """
    norm_type = float(norm_type)  # accepts "inf", as torch does
    if not norm_type > 0:
        raise ValueError(
            f"norm_type={norm_type} must be a number above 0: others have no value on a rank whose "
            "part of the gradients is empty, and such a rank alone would raise."
        )
    by_mesh = defaultdict[object, list[Tensor]](list)
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        key = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        by_mesh[key].append(tensor)
    norms = [_norm_on_one_mesh(some, norm_type, foreach) for some in by_mesh.values()]
    if not norms:
        return torch.tensor(0.0)
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of gradients is {total.item()}. Pass "
            "error_if_nonfinite=False to clip gradients by it nevertheless."
        )
    return total


def _norm_on_one_mesh(some: Sequence[Any], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of DTensors with one mesh and placements, or of plain tensors."""
    first = some[0]
    if norm_type == math.inf and isinstance(first, DTensor):
        return _largest(some)
    norm = torch_total_norm(some, norm_type, False, foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _largest(some: Sequence[DTensor]) -> Tensor:
    """Return the largest absolute value of DTensors with one mesh and placements; nan if any is.

    torch's norm raises on a rank whose local tensor is empty, and loses the nan of some ranks: the
    maximum over ranks is that of the others (gloo and NCCL). So nan is reduced as a value beside.
    """
    mesh, given = some[0].device_mesh, some[0].placements
    whole = tuple(Replicate() if each.is_partial() else each for each in given)
    if whole != given:
        some = [each.redistribute(placements=whole) for each in some]
    own = [each.to_local().detach().abs() for each in some]
    largest = torch.stack(
        [each.max() if each.numel() else each.new_zeros(()) for each in own]
    ).max()
    pair = torch.stack([largest.nan_to_num(0.0, math.inf), largest.isnan().to(largest.dtype)])
    over = [each if each.is_replicate() else Partial("max") for each in whole]
    largest, is_nan = DTensor.from_local(pair, mesh, over, run_check=False).full_tensor()
    norm: Tensor = largest.masked_fill(is_nan > 0, math.nan)
    return norm


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients like `torch.nn.utils.clip_grad_norm_`, on any meshes. All ranks call this.

    Args:
        parameters: parameters whose gradients are clipped in place.
        max_norm: largest total norm of the gradients after the call.
        norm_type: as in `get_total_norm`.
        error_if_nonfinite: as in `get_total_norm`.
        foreach: as in torch.

    Returns:
        The total norm before clipping, as a plain tensor.
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
    """Scale gradients on any meshes in place, if their norm `total` is above `max_norm`."""
    by_mesh = defaultdict[object, list[Tensor]](list)
    for each in parameters:
        by_mesh[each.grad.device_mesh if isinstance(each.grad, DTensor) else None].append(each)
    for some in by_mesh.values():
        clip_grads_with_norm_(some, max_norm, total, foreach)
