"""`DeviceMesh` and the functions that create meshes, as in `torch.distributed.device_mesh`.

- `device_mesh`: the class. The subpackage `layouts` computes descriptions of meshes and
  of those derived from them; the mesh's universe keeps its process groups and the derived meshes.
- `init_mesh`, `partition`: functions that create one mesh, or several over disjoint ranks.
- `group_names`: the lists in which torch finds the names of a mesh's process groups.
- `fsdp2_meshes`: meshes that FSDP2 makes from ours.
- `mesh_warnings`: warnings about a program's meshes, each logged once.
"""

from __future__ import annotations

from .device_mesh import DeviceMesh
from .init_mesh import MeshPart, init_device_mesh

__all__ = ["DeviceMesh", "MeshPart", "init_device_mesh"]
