"""Build the package into a folder for a torch that is there, with only a C++17 compiler.

For machines without a network or an environment of our own, such as one with a GPU and the torch of
its vendor: nothing is installed, and torch is not touched. torch ships pybind11's headers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

_TOP = Path(__file__).resolve().parent.parent
_NOT_PACKAGED = {"tests", "fuzz"}
_SOURCES = [
    path for path in (_TOP / "csrc").rglob("*.cpp") if path.parent.name not in _NOT_PACKAGED
]
_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden")


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    headers = _pybind11_headers()
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if headers is None or compiler is None:
        lacks = "a torch" if headers is None else "a C++17 compiler (c++, or what CXX names)"
        print(f"{sys.executable} lacks {lacks}: Meshverse cannot be built for it.", file=sys.stderr)
        return 1
    package = folder / "meshverse"
    # Python's own copy of the sources: a compiled core of another Python is left behind.
    shutil.copytree(
        _TOP / "python" / "meshverse",
        package,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    core = package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    if core.exists() and core.stat().st_mtime > _newest_source():
        return 0
    _compile(compiler, headers, folder / "objects", core)
    print(f"Built {core} with the headers in {headers}.")
    return 0


def _pybind11_headers() -> Path | None:
    """Return the folder of `pybind11/`: torch's own copy, whose import would take seconds."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    return Path(torch.origin).parent / "include"


def _newest_source() -> float:
    sources = [path for path in (_TOP / "csrc").rglob("*") if path.suffix in {".h", ".cpp"}]
    return max(path.stat().st_mtime for path in [*sources, Path(__file__)])


def _compile(compiler: str, headers: Path, objects: Path, core: Path) -> None:
    objects.mkdir(parents=True, exist_ok=True)
    places = (
        f"-I{_TOP / 'csrc'}",
        f"-isystem{headers}",
        f"-isystem{sysconfig.get_path('include')}",
    )
    # Python-only commits do not build the core again, so it names none.
    version = (f'-DMESHVERSE_VERSION="{_version()}"', '-DMESHVERSE_COMMIT="unknown"')

    def compile_one(source: Path) -> Path:
        made = objects / f"{source.parent.name}-{source.stem}.o"
        command = [compiler, *_FLAGS, *version, *places, "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as several:
        made = list(several.map(compile_one, _SOURCES))
    half_done = core.with_suffix(".new")
    subprocess.run([compiler, "-shared", *map(str, made), "-o", str(half_done)], check=True)
    half_done.replace(core)


def _version() -> str:
    text = (_TOP / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.+)"$', text, flags=re.MULTILINE)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
