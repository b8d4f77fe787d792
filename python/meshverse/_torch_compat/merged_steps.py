"""DTensor's collectives over several axes of a mesh at once, on the mesh of these axes flattened.

torch merges consecutive collectives of a redistribution into one over a flattened mesh, which it
finds by its layout alone. It does not check that rows that were sharded over one axis after the
other are sharded as over the flattened axis (uneven ones are not), nor the backend, the state and
the order of ranks of the flattened mesh's group. 2.11-2.15.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling

from .private_names import StockDeviceMesh
from .tracing import real_mesh

_MODULE = "torch.distributed.tensor._redistribute"


def check_merged_steps(
    mesh_class: type[StockDeviceMesh], is_right: Callable[[Any, tuple[int, ...], Any, bool], bool]
) -> None:
    """Let torch merge collectives over axes of our meshes only where the result is the same.

    Where it is not, the collectives over the single axes run, as without a flattened mesh. Does
    nothing while torch's module is not imported, or if it is checked already.

    Args:
        mesh_class: our class; on other meshes, torch merges as before.
        is_right: function of a mesh, indices of its axes, the mesh of these axes flattened, and
            whether the order of the ranks in its group matters. Returns whether a collective over
            the axes may run on the flattened mesh.
    """
    module: Any = sys.modules.get(_MODULE)
    merge = getattr(module, "_optimize_transform_infos", None)
    if merge is None or getattr(merge, "is_checked", False):
        return

    @functools.wraps(merge)
    def merge_checked(steps: list[Any], device_mesh: Any, *placements: Any) -> list[Any]:
        merged: list[Any] = merge(steps, device_mesh, *placements)
        if len(merged) == len(steps):
            return merged
        if is_dynamo_compiling():  # it cannot look into the mesh; single steps are always right
            return steps
        mesh = real_mesh(device_mesh)
        if not isinstance(mesh, mesh_class):
            return merged
        checked, first = [], 0
        for step in merged:
            axes = getattr(step, "original_mesh_dims", None)
            end = first + (1 if axes is None else len(axes))
            if axes is None or (
                is_right(mesh, axes, real_mesh(step.mesh), not _is_all_reduce(step))
                and _is_even(step, math.prod(map(mesh.size, axes)))
            ):
                checked.append(step)
            else:
                checked += steps[first:end]
            first = end
        return checked

    merge_checked.is_checked = True  # type: ignore[attr-defined]
    module._optimize_transform_infos = merge_checked


def _is_all_reduce(step: Any) -> bool:
    source, target = step.src_dst_placements
    return bool(source.is_partial() and target.is_replicate())


def _is_even(step: Any, n_shards: int) -> bool:
    """Return whether the rows of a gathered or scattered dimension are sharded evenly."""
    return all(
        step.logical_shape[placement.dim] % n_shards == 0
        for placement in step.src_dst_placements
        if placement.is_shard()
    )
