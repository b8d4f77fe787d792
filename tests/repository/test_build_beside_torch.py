"""The build for a machine with a GPU: it has the files of the wheel, and gives a package."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import via_store
from helpers.forked import SECONDS

_TOP = Path(__file__).parents[2]
_TOOL = _TOP / "tools" / "build_beside_torch.py"


def test_it_compiles_the_files_of_the_wheel() -> None:
    compiled = {
        path.relative_to(_TOP).as_posix() for path in runpy.run_path(str(_TOOL))["_SOURCES"]
    }
    listed = set(re.findall(r"csrc/\S+\.cpp", (_TOP / "CMakeLists.txt").read_text()))
    assert compiled == {path for path in listed if not path.startswith(("csrc/tests", "csrc/fuzz"))}


@pytest.mark.sweep  # it compiles everything, as CI has just done for the wheel
@pytest.mark.skipif(via_store.compiler() is None, reason="there is no C++ compiler")
def test_what_it_builds_can_be_imported(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(_TOOL), str(tmp_path)], check=True)
    program = "import meshverse, meshverse._core as core; print(core.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
