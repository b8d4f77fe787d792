"""Degrees that a strategy cannot apply by itself: refused, or said what is left to do.

Example:
    >>> mesh_of_stage(model, mesh)  # doctest: +SKIP
    ValueError: pp=2: Llama would be whole on each of the 2 stages. ...
"""

from __future__ import annotations

import logging

from torch import nn

from meshverse import DeviceMesh
from meshverse.parallel.models.stages import stage_of

__all__ = ["mesh_of_stage", "tell_of_context"]

_logger = logging.getLogger(__name__)
_PP, _CP = "pp", "cp"


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


def tell_of_context(mesh: DeviceMesh) -> None:
    """Say what context parallelism leaves to the training loop: to split the sequences."""
    if _size_of(mesh, _CP) > 1:
        _logger.warning(
            "cp=%d: parameters are sharded over cp, and its ranks count as data-parallel ones. "
            "Sequences are not split here: run forward and backward within "
            "torch.distributed.tensor.experimental.context_parallel(mesh['cp'], buffers=...), or "
            "give each of these ranks sequences of its own.",
            _size_of(mesh, _CP),
        )


def _size_of(mesh: DeviceMesh, axis: str) -> int:
    axes = mesh.mesh_dim_names or ()
    return mesh.size(axes.index(axis)) if axis in axes else 1
