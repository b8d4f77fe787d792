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
from .device_mesh import DeviceMesh, init_device_mesh
from .dropin import install, installed, uninstall
from .options.isolation import isolate
from .saved_mesh import load_mesh, save_mesh
from .universe.universe import Universe

if TYPE_CHECKING:
    from . import hang as hang
    from . import parallel as parallel
    from . import tools as tools
    from .connection import Connection, connect
    from .device_mesh.init_mesh import MeshPart
    from .device_mesh.partition import init_mesh_partition
    from .explain.explanation import Explanation
    from .explain.group_explanation import GroupExplanation
    from .hang.watch import Hang, Watch, watch
    from .tools.topology import Topology
    from .universe.find_group import FoundGroup, find_group
    from .universe.revival import revive

__version__ = _core.__version__

# Names that not every program uses: their modules are imported when they are first named. So are
# the extras.
_MODULES = {
    "Connection": "connection",
    "Explanation": "explain.explanation",
    "FoundGroup": "universe.find_group",
    "GroupExplanation": "explain.group_explanation",
    "Hang": "hang.watch",
    "MeshPart": "device_mesh.init_mesh",
    "Topology": "tools.topology",
    "Watch": "hang.watch",
    "connect": "connection",
    "find_group": "universe.find_group",
    "init_mesh_partition": "device_mesh.partition",
    "revive": "universe.revival",
    "watch": "hang.watch",
}
_EXTRAS = ("hang", "parallel", "tools")
_FORMER_FOLDERS = ("doctor", "pictures", "planner", "topology")


def __getattr__(name: str) -> Any:
    if name in _EXTRAS or name in _FORMER_FOLDERS:
        return importlib.import_module(f".{name}", __name__)
    if name in _MODULES:
        found = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_EXTRAS]


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
