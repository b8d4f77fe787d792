"""`DeviceMesh` and what builds one, by the names of `torch.distributed.device_mesh`."""

from __future__ import annotations

from .device_mesh import DeviceMesh
from .init_mesh import MeshPart, init_device_mesh
from .partition import init_mesh_partition

__all__ = ["DeviceMesh", "MeshPart", "init_device_mesh", "init_mesh_partition"]
