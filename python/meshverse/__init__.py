"""Meshverse: a drop-in `DeviceMesh` for PyTorch, whose meshes share process groups.

    from meshverse import init_device_mesh

This function creates meshes that torch's DTensor, FSDP2 and tensor parallelism accept as torch's
own. Within one universe, they share one process group per distinct list of ranks and options:
`mesh.universe.explain()` shows what was shared. Almost all operations on them cost the same at any
world size; `docs/limits.md` lists the others. Collectives are torch's, and no faster. Nothing was
measured on several GPUs.
"""

# ruff: noqa: F403, F405  # the names come from _public
from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

try:
    from . import _core
except ImportError as error:
    raise ImportError(
        "meshverse's compiled core is missing, perhaps because this is the source tree. Run "
        "`pip install .` at the top of the source tree, and import meshverse from another folder. "
        f"({error})"
    ) from error

__version__ = _core.__version__


def _is_command() -> bool:
    """Return whether this process is the command `meshverse` or `python -m meshverse`."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # as while Python looks for the module, and imports this package
        return ("-m", "meshverse") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return os.path.basename(program) == "meshverse"


# A command imports what it needs: `meshverse hang` needs no torch. Any other program gets all names
# now, as the import has effects, such as that `torch.load` accepts meshes.
if TYPE_CHECKING or not _is_command():
    from ._public import *

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
else:
    # Names that not every program uses: their modules are imported when they are first named. So
    # are the extras.
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

    def __getattr__(name: str) -> object:
        if name in _EXTRAS or name in _FORMER_FOLDERS:
            return importlib.import_module(f".{name}", __name__)
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # In a command, the other names come from here too.
        module = importlib.import_module(f".{_MODULES.get(name, '_public')}", __name__)
        globals()[name] = getattr(module, name)  # later uses find it without this function
        return globals()[name]

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
