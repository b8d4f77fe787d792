"""The meshes of a trainer, in one universe: built from degrees, then asked for by axis names.

Example:
    >>> mesh, moe_mesh = create_device_meshes(  # doctest: +SKIP
    ...     FSDP2Config(), ParallelismSizes(tp_size=2, cp_size=2, ep_size=4), world_size=16
    ... )
    >>> mesh.shape, moe_mesh.shape  # doctest: +SKIP
    ((1, 1, 4, 2, 2), (4, 4))
    >>> get_fsdp_dp_mesh(mesh) is get_submesh(mesh, "dp_shard_cp")  # doctest: +SKIP
    True
"""

from __future__ import annotations

from .meshes.by_strategy import create_device_meshes
from .meshes.create import (
    create_fsdp2_device_mesh,
    create_megatron_fsdp_device_mesh,
    create_moe_mesh,
)
from .meshes.degrees import ParallelismSizes
from .meshes.spec import MeshAxisName, MeshSpec, validate_mesh_spec
from .meshes.submesh import (
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
    register_flattened_axes,
    unflatten_compat,
)

__all__ = [
    "MeshAxisName",
    "MeshSpec",
    "ParallelismSizes",
    "create_device_meshes",
    "create_fsdp2_device_mesh",
    "create_megatron_fsdp_device_mesh",
    "create_moe_mesh",
    "get_flat_mesh",
    "get_fsdp_dp_mesh",
    "get_submesh",
    "register_flattened_axes",
    "unflatten_compat",
    "validate_mesh_spec",
]
