"""Meshverse: a drop-in `DeviceMesh` whose cost does not grow with the world size.

    from meshverse import init_device_mesh

This function builds meshes that torch's DTensor, FSDP2 and tensor parallelism accept as torch's
own. Operations on these meshes do no work proportional to the world size. Meshes share one process
group per distinct list of ranks and options; `mesh.universe.explain()` shows what was shared.
"""

from __future__ import annotations

import importlib
from types import ModuleType

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
from .hang.watch import Hang, Watch, watch, watch_by_environment
from .options.isolation import isolate
from .report.explain import Explanation
from .report.group_explanation import GroupExplanation
from .saved_mesh import load_mesh, save_mesh
from .topology import Topology
from .universe import Universe, revive
from .universe.find_group import FoundGroup, find_group

__version__ = _core.__version__

watch_by_environment()


_LOADED_WHEN_NAMED = ("doctor", "parallel", "planner")


def __getattr__(name: str) -> ModuleType:
    if name in _LOADED_WHEN_NAMED:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_LOADED_WHEN_NAMED]


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
