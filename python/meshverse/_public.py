"""The public names that most programs use, and what their import does.

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
from .device_mesh import DeviceMesh as DeviceMesh
from .device_mesh import init_device_mesh as init_device_mesh
from .dropin import install as install
from .dropin import installed as installed
from .dropin import uninstall as uninstall
from .options.isolation_tags import isolate as isolate
from .saved_mesh import load_mesh as load_mesh
from .saved_mesh import save_mesh as save_mesh
from .universe.universe import Universe as Universe

if "MESHVERSE_WATCH" in _os.environ:
    from .hang.watch import watch_by_environment as _watch_by_environment

    _watch_by_environment()
