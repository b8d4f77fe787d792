"""Degrees that a strategy cannot apply by itself: refused, or said what is left to do.

Example:
    >>> mesh_of_stage(model, mesh)  # doctest: +SKIP
    ValueError: pp=2: Llama would be whole on each of the 2 stages. ...
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from torch import nn

from meshverse import DeviceMesh
from meshverse.parallel.meshes.create import asked_ep_size
from meshverse.parallel.models.stages import stage_of

__all__ = [
    "mesh_of_stage",
    "refuse_experts",
    "refuse_pipeline",
    "refuse_replicas",
    "refuse_split_sequences",
    "refuse_uncovered",
    "tell_of_context",
]

_logger = logging.getLogger(__name__)
_PP, _CP, _DP_REPLICATE = "pp", "cp", "dp_replicate"


def mesh_of_stage(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of this rank's pipeline stage, which the model must be one of.

    Raises:
        ValueError: the mesh has an axis pp of more than one stage, and the model is whole, or a
            stage of another rank.
    """
    size = _size_of(mesh, _PP)
    if size == 1:
        return mesh
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != _PP)
    others = ", ".join(f'"{axis}"' for axis in axes)
    name, own = type(model).__name__, stage_of(model)
    if own is None:
        raise ValueError(
            f"pp={size}: {name} would be whole on each of the {size} stages. Split it into stages "
            'first, with meshverse.parallel.pipeline_stages(model, device_mesh["pp"]), and '
            "parallelize each of these. A stage that was made in another way is parallelized on "
            f"the mesh of its stage: device_mesh[{others}]."
        )
    if own.count % size or own.index % size != mesh.get_local_rank(_PP):
        raise ValueError(
            f"{name} is stage {own.index} of {own.count}, and this rank is number "
            f"{mesh.get_local_rank(_PP)} of pp={size}. Give the stages that pipeline_stages made "
            "on this rank with this mesh."
        )
    return mesh[axes]


def refuse_pipeline(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a mesh of several pipeline stages, for a strategy that trains no stages.

    Raises:
        ValueError: the mesh has an axis pp of more than one stage.
    """
    if (size := _size_of(mesh, _PP)) > 1:
        raise ValueError(
            f"pp={size}: {type(model).__name__} would be whole on each of the {size} stages. "
            "Megatron-FSDP has no pipeline stages. Make the mesh with "
            "create_megatron_fsdp_device_mesh, or use FSDP2."
        )


def refuse_split_sequences(model: nn.Module, *, sequence_parallel: bool) -> None:
    """Refuse sequence parallelism for one of several pipeline stages, which pass on whole states.

    Raises:
        ValueError: it is asked for.
    """
    own = stage_of(model)
    if sequence_parallel and own is not None and own.count > 1:
        raise ValueError(
            f"sequence_parallel=True for stage {own.index} of {own.count} of "
            f"{type(model).__name__}: stages pass on whole hidden states. Use "
            "sequence_parallel=False."
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


def refuse_experts(mesh: DeviceMesh) -> None:
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
