"""The public names of the core, and what their import does.

It registers meshes with pickle, `torch.load` and torch.compile, and starts the watch if the
environment says so.
"""

from __future__ import annotations

import os as _os

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "Meshverse needs PyTorch 2.11 or newer: install it with `pip install torch`.", name="torch"
    ) from None

from .agreement import RanksDifferError as RanksDifferError
from .connection import Connection as Connection
from .connection import connect as connect
from .device_mesh import DeviceMesh as DeviceMesh
from .device_mesh import MeshPart as MeshPart
from .device_mesh import init_device_mesh as init_device_mesh
from .device_mesh import init_mesh_partition as init_mesh_partition
from .dropin import install as install
from .dropin import installed as installed
from .dropin import uninstall as uninstall
from .explain.explanation import Explanation as Explanation
from .explain.group_explanation import GroupExplanation as GroupExplanation
from .options.isolation import isolate as isolate
from .saved_mesh import load_mesh as load_mesh
from .saved_mesh import save_mesh as save_mesh
from .universe import Universe as Universe
from .universe import revive as revive
from .universe.find_group import FoundGroup as FoundGroup
from .universe.find_group import find_group as find_group

if "MESHVERSE_WATCH" in _os.environ:
    from .hang.watch import watch_by_environment as _watch_by_environment

    _watch_by_environment()
