"""`DeviceMesh` and what builds one, by the names of `torch.distributed.device_mesh`.

- `device_mesh`: the class. What a mesh is and what derives from it is arithmetic in `layouts`; its
  groups and the meshes derived from it are its universe's.
- `init_mesh`, `partition`: functions that build one mesh, or several over disjoint ranks.
- `group_names`: lists of names of groups, by which torch uses them.
- `drawing`: a mesh as a picture.
- `logged_once`: warnings about a program's meshes, logged once.
"""

from __future__ import annotations

from .device_mesh import DeviceMesh
from .init_mesh import MeshPart, init_device_mesh
from .partition import init_mesh_partition

__all__ = ["DeviceMesh", "MeshPart", "init_device_mesh", "init_mesh_partition"]
