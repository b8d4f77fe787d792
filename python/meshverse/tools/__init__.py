"""Tools beside a job: what a program does not need to train, and nothing else imports.

- `planner`: the process groups of a job, computed without it.
- `doctor`: checks of a job's machines.
- `topology`: the node and switch of each rank; rank orders that fit a mesh.
- `pictures`: process groups as pictures.
- `commands`: the `meshverse` command line.
- `environment`: versions and environment variables, for bug reports.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_FOLDERS = ("commands", "doctor", "environment", "pictures", "planner", "topology")


def __getattr__(name: str) -> ModuleType:
    if name in _FOLDERS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(_FOLDERS)
