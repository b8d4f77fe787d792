"""Meshverse: a drop-in `DeviceMesh` whose cost does not grow with the world size.

    from meshverse import init_device_mesh

This function builds meshes that torch's DTensor, FSDP2 and tensor parallelism accept as torch's
own. Operations on these meshes do no work proportional to the world size. Meshes share one process
group per distinct list of ranks and options; `mesh.universe.explain()` shows what was shared.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "Meshverse needs PyTorch 2.11 or newer: install it with `pip install torch`.", name="torch"
    ) from None

try:
    from . import _core
except ImportError as error:
    raise ImportError(
        "meshverse's compiled core is missing, perhaps because this is the source tree. Run "
        "`pip install .` at the top of the source tree, and import meshverse from another folder. "
        f"({error})"
    ) from error

from .agreement import RanksDifferError
from .connection import Connection, connect
from .device_mesh import DeviceMesh, MeshPart, init_device_mesh, init_mesh_partition
from .dropin import install, installed, uninstall
from .explain.explanation import Explanation
from .explain.group_explanation import GroupExplanation
from .options.isolation import isolate
from .saved_mesh import load_mesh, save_mesh
from .universe import Universe, revive
from .universe.find_group import FoundGroup, find_group

if TYPE_CHECKING:
    from . import hang as hang
    from . import parallel as parallel
    from . import tools as tools
    from .hang.watch import Hang, Watch, watch
    from .tools.topology import Topology

__version__ = _core.__version__

# The extras are imported when they are first named.
_FOLDERS = ("hang", "parallel", "tools")
_FORMER_FOLDERS = ("doctor", "pictures", "planner", "topology")
_MODULES = {
    "Hang": "hang.watch",
    "Topology": "tools.topology",
    "Watch": "hang.watch",
    "watch": "hang.watch",
}


def __getattr__(name: str) -> Any:
    if name in _FOLDERS or name in _FORMER_FOLDERS:
        return importlib.import_module(f".{name}", __name__)
    if name in _MODULES:
        found = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_FOLDERS]


__all__ = [
    "Connection",
    "DeviceMesh",
    "Explanation",
    "FoundGroup",
    "GroupExplanation",
    "Hang",
    "MeshPart",
    "RanksDifferError",
    "Topology",
    "Universe",
    "Watch",
    "__version__",
    "connect",
    "find_group",
    "init_device_mesh",
    "init_mesh_partition",
    "install",
    "installed",
    "isolate",
    "load_mesh",
    "revive",
    "save_mesh",
    "uninstall",
    "watch",
]

if "MESHVERSE_WATCH" in os.environ:
    from .hang.watch import watch_by_environment

    watch_by_environment()
