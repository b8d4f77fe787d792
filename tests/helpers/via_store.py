"""The backend "via_store", written in C++: compiled once, and registered where it is wanted.

`python -m helpers.via_store FOLDER` compiles it before the tests: in one of them, the compiler
would be under the test's timeout.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["NAME", "build", "compiler", "load", "loaded", "register"]

NAME = "via_store"

_FOLDER = Path(__file__).parent.parent / "backends"
_SOURCE = _FOLDER / "store_backend.cpp"
_FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared")
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def compiler() -> str | None:
    """Return the C++ compiler of this machine, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build(folder: Path) -> Path:
    """Compile the backend into a folder, unless it is there already; some 25 seconds.

    Of several processes that call this at once, one compiles and the others wait for it.

    Returns:
        The compiled module, for `load`.

    Raises:
        RuntimeError: the compiler refused it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / _file_name()
    with (folder / f"{library.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, or the process ends
        if not library.exists():
            _compile(library)
    return library


def _file_name() -> str:
    """Return the module's name for these sources and flags, with this torch and this Python."""
    sources = [file.read_bytes() for file in sorted(_FOLDER.glob("*.[ch]pp"))]
    digest = hashlib.sha256(repr((sources, _FLAGS, _LIBRARIES)).encode()).hexdigest()[:16]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return f"store_backend-{torch.__version__}-{digest}{suffix}"


def _compile(library: Path) -> None:
    half_done = library.with_name(f"half-done-{library.name}")
    torch_folder = Path(torch.__file__).parent
    includes = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
    command = [
        str(compiler()),
        *(*_FLAGS, str(_SOURCE), "-o", str(half_done)),
        *(f"-isystem{place}" for place in (*includes, sysconfig.get_path("include"))),
        f"-L{torch_folder / 'lib'}",
        *(f"-l{name}" for name in _LIBRARIES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    half_done.replace(library)  # at once, so that what is there under this name is whole


def load(library: Path) -> ModuleType:
    """Return the compiled module; the same one every time."""
    if "store_backend" not in sys.modules:
        spec = importlib.util.spec_from_file_location("store_backend", library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["store_backend"] = module
    return sys.modules["store_backend"]


def loaded() -> ModuleType:
    """Return the compiled module, in a process that has loaded it."""
    return sys.modules["store_backend"]


def register(library: Path) -> list[Any]:
    """Make c10d know the backend, in this process.

    Returns:
        The options that groups were given since the last call; it grows.
    """
    module, given = load(library), []

    def create(common: Any, options: Any) -> Any:
        given.append(options)
        return module.create(common.store, common.group_rank, common.group_size)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    else:
        plugin = dist.Backend._plugins[NAME.upper()]
        dist.Backend._plugins[NAME.upper()] = plugin._replace(creator_fn=create)
    return given


if __name__ == "__main__" and compiler() is not None:
    build(Path(sys.argv[1]))
