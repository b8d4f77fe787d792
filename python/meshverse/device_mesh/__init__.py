"""`DeviceMesh` and what builds one, by the names of `torch.distributed.device_mesh`.

- `slicing`: submeshes, and meshes concatenated of several: on groups that are there.
- `reshaping`: flattened and unflattened meshes: on groups that may have to be made.
- `device_mesh`: the class itself: its construction, and what concerns a whole universe.
- `equal_roots`: a line in the log where two equal meshes are on different groups.
- `init_mesh`, `partition`: functions that build one mesh, or several over disjoint ranks.
"""

from __future__ import annotations

from .device_mesh import DeviceMesh
from .init_mesh import MeshPart, init_device_mesh
from .partition import init_mesh_partition

__all__ = ["DeviceMesh", "MeshPart", "init_device_mesh", "init_mesh_partition"]
