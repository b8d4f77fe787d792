"""Tools beside a job: what a program does not need to train, and nothing else imports.

- `planner`: the process groups of a job, computed without it.
- `doctor`: checks of a job's machines.
- `topology`: the node and switch of each rank; rank orders that fit a mesh.
- `pictures`: process groups as pictures.
- `commands`: the `meshverse` command line.
- `commit`: version and commit of this package.
- `environment`: versions and environment variables, for bug reports.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_FOLDERS = ("doctor", "pictures", "planner", "topology")  # `__init__.pyi` has them too


def __getattr__(name: str) -> ModuleType:
    """Import a subpackage when it is first named."""
    if name not in _FOLDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return [*_FOLDERS]
