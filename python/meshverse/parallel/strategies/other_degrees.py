"""Degrees that a strategy cannot apply by itself: refused, or said what is left to do.

Example:
    >>> refuse_pipeline(model, mesh)  # doctest: +SKIP
    ValueError: pp=2: Llama would be whole on each of the 2 stages. ...
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshverse import DeviceMesh as OurDeviceMesh
from meshverse.parallel.meshes.create import asked_ep_size

__all__ = [
    "refuse_experts",
    "refuse_pipeline",
    "refuse_replicas",
    "refuse_uncovered",
    "tell_of_context",
]

_logger = logging.getLogger(__name__)
_PP, _CP, _DP_REPLICATE = "pp", "cp", "dp_replicate"


def refuse_pipeline(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a mesh of several pipeline stages: nothing here splits a model into stages.

    Raises:
        ValueError: the mesh has an axis pp of more than one stage.
    """
    axes = mesh.mesh_dim_names or ()
    if _size_of(mesh, _PP) > 1:
        others = ", ".join(f'"{axis}"' for axis in axes if axis != _PP)
        raise ValueError(
            f"pp={_size_of(mesh, _PP)}: {type(model).__name__} would be whole on each of the "
            f"{_size_of(mesh, _PP)} stages. Split it into stages first, for instance with "
            "torch.distributed.pipelining, and parallelize this rank's stage on the mesh of its "
            f"stage: device_mesh[{others}]."
        )


def refuse_replicas(mesh: DeviceMesh) -> None:
    """Refuse a mesh with replicas, for a strategy that shards over all ranks with own tokens.

    Raises:
        ValueError: the mesh has an axis dp_replicate of more than one.
    """
    if _size_of(mesh, _DP_REPLICATE) > 1:
        raise ValueError(
            f"{_DP_REPLICATE}={_size_of(mesh, _DP_REPLICATE)}: Megatron-FSDP has no replicas of "
            "shards. Make the mesh with create_megatron_fsdp_device_mesh, or use FSDP2."
        )


def refuse_experts(mesh: OurDeviceMesh) -> None:
    """Refuse a mesh made for expert parallelism, for a strategy that hands out no experts.

    Raises:
        ValueError: it was asked for when the mesh was made.
    """
    if asked_ep_size(mesh) > 1:
        raise ValueError(
            f"The mesh was made for ep_size={asked_ep_size(mesh)}: Megatron-FSDP hands out no "
            "experts. Make the mesh with create_megatron_fsdp_device_mesh, or use FSDP2."
        )


def refuse_uncovered(mesh: DeviceMesh, used: Sequence[DeviceMesh]) -> None:
    """Refuse a mesh with ranks along which nothing is split or kept equal.

    Args:
        mesh: which a strategy is given.
        used: the meshes of it, without ranks in common, that the strategy splits the model over.

    Raises:
        ValueError: the mesh has more ranks than those of `used` together.
    """
    count = math.prod(each.size() for each in used)
    if count != mesh.size():
        axes = ", ".join(f"{each.mesh_dim_names} of {each.size()}" for each in used)
        raise ValueError(
            f"{mesh} has {mesh.size()} ranks, and the strategy splits the model over {count} of "
            f"them: {axes} ranks. The others would train copies of their own. Name the axes that "
            "cover the mesh, or give the part of it that this model is on."
        )


def tell_of_context(mesh: DeviceMesh) -> None:
    """Say what context parallelism leaves to the training loop: to split the sequences."""
    if _size_of(mesh, _CP) > 1:
        _logger.warning(
            "cp=%d: parameters are sharded over cp, and its ranks count as data-parallel ones. "
            "Sequences are not split here: run forward and backward within "
            "meshverse.parallel.context_parallel(mesh, buffers=..., buffer_seq_dims=...), or give "
            "each of these ranks sequences of its own.",
            _size_of(mesh, _CP),
        )


def _size_of(mesh: DeviceMesh, axis: str) -> int:
    axes = mesh.mesh_dim_names or ()
    return mesh.size(axes.index(axis)) if axis in axes else 1
